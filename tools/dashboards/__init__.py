"""Make the Grafana dashboards that ship in `placement/observe/dashboards/files`: `python -m
tools.dashboards.build`."""
