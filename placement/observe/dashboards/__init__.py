"""Grafana dashboards, recording rules and alerts for the metrics of `placement.observe.collector`, as files.

`files/` holds the shipped files: two dashboards in JSON, made by `tools/dashboards`, and one file of rules, written by hand. `export`
writes them together with a configuration.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from placement.core.errors import PlacementError

FILES = Path(__file__).parent / "files"
DISCOVERY = "discovery"
"""The example's default discovery folder, beside prometheus.yml."""

_INTERVAL = re.compile(r"[1-9][0-9]*(ms|s|m)")
_URL = re.compile(r"https?://[^\s/]+(/\S*)?")


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """The facts about a deployment that the files depend on.

    Raises:
        PlacementError: a field is wrong; raised on construction, and names the field.
    """

    prometheus_url: str = "http://localhost:9090"
    """The URL at which Grafana reaches Prometheus."""
    discovery: str = DISCOVERY
    """The discovery folder (`Settings.discovery`) as Prometheus sees it, or the URL of a list of targets. A relative path is relative to
    prometheus.yml."""
    scrape_interval: str = "15s"
    """The interval between scrapes, and Grafana's smallest step. Grafana computes rates over four times as long."""
    grafana_path: str | None = None
    """The directory of the dashboards as Grafana sees it, if it runs in a container; None: the directory where they are written."""

    def __post_init__(self) -> None:
        if not _URL.fullmatch(self.prometheus_url):
            raise PlacementError(f"prometheus_url is {self.prometheus_url!r}; it must be a URL like http://localhost:9090")
        if not _INTERVAL.fullmatch(self.scrape_interval):
            raise PlacementError(f"scrape_interval is {self.scrape_interval!r}; it must be a number and a unit, like 15s, 500ms or 1m")
        if self._is_url and not _URL.fullmatch(self.discovery):
            raise PlacementError(f"discovery is {self.discovery!r}, which is not a valid URL; write one like http://host:9400/targets")
        if not self.discovery or "*" in self.discovery:
            raise PlacementError(f"discovery is {self.discovery!r}; it must be the workers' folder or URL for Prometheus, without *")
        if self.grafana_path is not None and not PurePosixPath(self.grafana_path).is_absolute():
            raise PlacementError(f"grafana_path is {self.grafana_path!r}; it must be an absolute path")

    @property
    def _is_url(self) -> bool:
        return self.discovery.startswith(("http:", "https:"))

    @property
    def found_by(self) -> tuple[str, str]:
        """The Prometheus key for the way to find workers, and the rest of that section."""
        if self._is_url:
            return "http_sd_configs", f"- url: {json.dumps(self.discovery)}\n        refresh_interval: 15s"
        glob = json.dumps(f"{self.discovery.rstrip('/')}/*.json")  # Prometheus accepts a star only in the last part of a path
        # The kernel tells Prometheus of changed files, but not of changes that another machine makes in a shared folder.
        return "file_sd_configs", f"- files: [{glob}]\n        refresh_interval: 15s"


def export(directory: str | os.PathLike[str], deployment: Deployment | None = None, *, overwrite: bool = False) -> list[Path]:
    """Write the files. Files that exist with the same content are not touched.

    Args:
        directory: the directory; created if missing.
        overwrite: whether to replace existing files that differ.

    Returns:
        The paths of all files, written or not.

    Raises:
        PlacementError: the directory cannot be written, or an existing file differs without `overwrite`. Then nothing is written.
    """
    root = Path(directory).absolute()
    wanted = {root / name: text for name, text in _texts(root, deployment or Deployment()).items()}
    try:
        changed = [path for path, text in wanted.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
        theirs = [path for path in changed if path.exists()]
        if theirs and not overwrite:
            names = ", ".join(map(str, theirs))
            raise PlacementError(f"{names} would change; nothing was written. Overwrite with --force, or choose another directory")
        for path in changed:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(f"{path.name}.{os.getpid()}.partial")  # Grafana and Prometheus read *.json and *.yml at any moment
            partial.write_text(wanted[path], encoding="utf-8")
            partial.replace(path)
    except (OSError, UnicodeDecodeError) as error:
        raise PlacementError(f"cannot write dashboards to {root}: {error}") from error
    return list(wanted)


def _texts(root: Path, deployment: Deployment) -> dict[str, str]:
    """The text of every file, by its path below the root."""
    pages = "grafana/dashboards"
    shipped = {f"{pages}/{path.name}": path.read_text(encoding="utf-8") for path in sorted(FILES.glob("*.json"))}
    kind, found = deployment.found_by
    return {
        "grafana/provisioning/datasources/placement.yml": _DATASOURCE.format(
            url=json.dumps(deployment.prometheus_url), interval=deployment.scrape_interval
        ),
        "grafana/provisioning/dashboards/placement.yml": _PROVIDER.format(path=json.dumps(deployment.grafana_path or str(root / pages))),
        **shipped,
        "prometheus/prometheus.yml": _PROMETHEUS.format(interval=deployment.scrape_interval, kind=kind, found=found),
        "prometheus/rules/placement.yml": (FILES / "placement.rules.yml").read_text(encoding="utf-8"),
    }


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
    {kind}:
      {found}
"""
