"""Grafana dashboards, recording rules and alerts for the metrics of `placement.observe.collector`,
as files.

`files/` holds the shipped files: two dashboards in JSON, made by `tools/dashboards`, and one file
of rules, written by hand. `export` writes them together with a configuration.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path, PurePosixPath

from placement.core.errors import PlacementError
from placement.observe.trace import replacing

FILES = Path(__file__).parent / "files"
DISCOVERY = "discovery"  # the example's default discovery folder, beside prometheus.yml
_PAGES = "grafana/dashboards"

_INTERVAL = re.compile(r"[1-9][0-9]*(ms|s|m)")
_URL = re.compile(r"https?://[^\s/]+(/\S*)?")


def export(
    directory: str | os.PathLike[str],
    *,
    prometheus_url: str = "http://localhost:9090",
    discovery: str = DISCOVERY,
    scrape_interval: str = "15s",
    grafana_path: str | None = None,
    overwrite: bool = False,
) -> list[Path]:
    """Write the files. Files that exist with the same content are not touched.

    Args:
        directory: the directory; created if missing.
        prometheus_url: the URL at which Grafana reaches Prometheus.
        discovery: the discovery folder (`Settings.discovery`) as Prometheus sees it, or the URL of
            a list of targets. A relative path is relative to prometheus.yml.
        scrape_interval: the interval between scrapes, and Grafana's smallest step. Grafana computes
            rates over four times as long.
        grafana_path: the directory of the dashboards as Grafana sees it, if it runs in a container;
            None: the one where they are written.
        overwrite: whether to replace existing files that differ.

    Returns:
        The paths of all files, written or not.

    Raises:
        PlacementError: an argument is wrong, the directory cannot be written, or an existing file
            differs without `overwrite`. Then nothing is written.
    """
    if not _URL.fullmatch(prometheus_url):
        raise PlacementError(
            f"prometheus_url is {prometheus_url!r}; it must be a URL like http://localhost:9090"
        )
    if not _INTERVAL.fullmatch(scrape_interval):
        raise PlacementError(
            f"scrape_interval is {scrape_interval!r}; it must be a number and a unit, like 15s, "
            "500ms or 1m"
        )
    if grafana_path is not None and not PurePosixPath(grafana_path).is_absolute():
        raise PlacementError(f"grafana_path is {grafana_path!r}; it must be an absolute path")
    root = Path(directory).absolute()
    pages = grafana_path or str(root / _PAGES)
    key, section = _discovery_section(discovery)
    texts = {
        "grafana/provisioning/datasources/placement.yml": _DATASOURCE.format(
            url=json.dumps(prometheus_url), interval=scrape_interval
        ),
        "grafana/provisioning/dashboards/placement.yml": _PROVIDER.format(path=json.dumps(pages)),
    }
    for path in sorted(FILES.glob("*.json")):
        texts[f"{_PAGES}/{path.name}"] = _text(path)
    texts["prometheus/prometheus.yml"] = _PROMETHEUS.format(
        interval=scrape_interval, key=key, section=section
    )
    texts["prometheus/rules/placement.yml"] = _text(FILES / "placement.rules.yml")
    files = {root / name: text for name, text in texts.items()}
    try:
        changed = []
        for path, text in files.items():
            if not path.is_file() or _text(path) != text:
                changed.append(path)
        existing = [path for path in changed if path.exists()]
        if existing and not overwrite:
            names = ", ".join(map(str, existing))
            raise PlacementError(
                f"{names} would change; nothing was written. Overwrite with --force, or choose "
                "another directory"
            )
        for path in changed:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Grafana and Prometheus read *.json and *.yml at any moment
            with replacing(path) as file:
                file.write(files[path].encode())
    except (OSError, UnicodeDecodeError) as error:
        raise PlacementError(f"cannot write dashboards to {root}: {error}") from error
    return list(files)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _discovery_section(discovery: str) -> tuple[str, str]:
    """The Prometheus key for the way to find workers, and the rest of that section."""
    if discovery.startswith(("http:", "https:")):
        if not _URL.fullmatch(discovery):
            raise PlacementError(
                f"discovery is {discovery!r}, which is not a valid URL; write one like "
                "http://host:9400/targets"
            )
        return "http_sd_configs", f"- url: {json.dumps(discovery)}\n        refresh_interval: 15s"
    if not discovery or "*" in discovery:
        raise PlacementError(
            f"discovery is {discovery!r}; it must be the workers' folder or URL for Prometheus, "
            "without *"
        )
    # Prometheus accepts a star only in the last part of a path
    glob = json.dumps(f"{discovery.rstrip('/')}/*.json")
    # The kernel tells Prometheus of changed files, but not of changes that another machine makes in
    # a shared folder.
    return "file_sd_configs", f"- files: [{glob}]\n        refresh_interval: 15s"


# Strings are quoted as JSON, which YAML can read.
_DATASOURCE = """\
apiVersion: 1
datasources:
  - name: Placement
    uid: placement-prometheus
    type: prometheus
    access: proxy
    url: {url}
    jsonData:
      httpMethod: POST
      timeInterval: {interval}
"""
_PROVIDER = """\
apiVersion: 1
providers:
  - name: placement
    folder: Placement
    type: file
    updateIntervalSeconds: 30
    allowUiUpdates: false
    options:
      path: {path}
"""
_PROMETHEUS = """\
# An example that works as it is; in a Prometheus that you have already, add the job and the rules.
global:
  scrape_interval: {interval}
  evaluation_interval: {interval}
rule_files:
  - rules/placement.yml
scrape_configs:
  # Each target brings its labels: instance, run, node, rank, gpu_uuid.
  - job_name: placement
    {key}:
      {section}
"""
