"""`placement dashboards export DIR`: write Grafana dashboards, Prometheus rules and a configuration for both."""

from __future__ import annotations

import argparse
from pathlib import Path

from placement.observe.dashboards import DISCOVERY, Deployment, export


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    summary = "write a Grafana provisioning tree, rules and an example prometheus.yml"
    into = commands.add_parser("export", help=summary, description=summary)
    into.add_argument("directory", metavar="DIR", type=Path, help="the directory to write to; created if missing")
    into.add_argument("--prometheus-url", default=Deployment.prometheus_url, metavar="URL", help="Prometheus for Grafana (%(default)s)")
    into.add_argument(
        "--discovery",
        default=Deployment.discovery,
        metavar="PLACE",
        help="the workers' discovery folder, or the URL of a list of targets (default: DIR/prometheus/discovery)",
    )
    into.add_argument("--scrape-interval", default=Deployment.scrape_interval, metavar="TIME", help="like 15s or 1m (%(default)s)")
    into.add_argument("--grafana-path", metavar="PATH", help="the folder of dashboards as Grafana sees it, if it runs in a container")
    into.add_argument("--force", action="store_true", help="replace existing files that differ")


def run(arguments: argparse.Namespace) -> int:
    deployment = Deployment(
        prometheus_url=arguments.prometheus_url,
        discovery=arguments.discovery,
        scrape_interval=arguments.scrape_interval,
        grafana_path=arguments.grafana_path,
    )
    for path in export(arguments.directory, deployment, overwrite=arguments.force):
        print(path)
    print(_next_steps(arguments.directory.absolute(), deployment))
    return 0


def _next_steps(root: Path, deployment: Deployment) -> str:
    workers = ""
    if deployment.discovery == DISCOVERY:
        workers = f'\n  workers:     manager.serve(discovery="{root}/prometheus/{DISCOVERY}")'
    return f"""
Next:{workers}
  Prometheus:  prometheus --config.file={root}/prometheus/prometheus.yml
  Grafana:     GF_PATHS_PROVISIONING={root}/grafana/provisioning, then open /d/placement-fleet"""
