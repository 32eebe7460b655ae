"""What a manager shows to the outside: metrics, health, state.

Importing this package imports neither `prometheus_client` nor a server; `placement.observe.collector` and
`placement.observe.server` do, and `Manager.serve()` imports them on its first call.
"""
