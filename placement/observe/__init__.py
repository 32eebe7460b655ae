"""Show a manager to the outside: metrics, health, state, trace and status page.

Importing this package imports neither `prometheus_client` nor a server. The modules
`placement.observe.collector` and `placement.observe.server` import them, and `Manager.serve()`
imports those modules on its first call.
"""
