"""Grafana dashboards, recording rules and alerts for the metrics of `placement.observe.collector`, as files.

`files/` holds the shipped files: two dashboards in JSON, made by `tools/dashboards`, and one file of rules, written by hand. `export`
writes them together with a configuration.
"""
