"""Grafana pages, recording rules and alerts over the metrics of `placement.observe.collector`, as files.

`files/` holds what is shipped: two pages of JSON and a file of rules. `export` writes them with a configuration around them, and
needs nothing installed. The JSON is made by `build`, which needs grafana-foundation-sdk (the extra "dashboards"); rules are
written by hand.
"""
