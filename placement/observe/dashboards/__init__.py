"""Grafana dashboards, recording rules and alerts for the metrics of `placement.observe.collector`, as files.

`files/` holds the shipped files: two dashboards in JSON and one file of rules. `export` writes them together with a configuration, and
needs no extra package. `build` makes the JSON and needs grafana-foundation-sdk (the extra "dashboards"). The rules are written by
hand.
"""
