"""Rebuild the dashboards in `files/`: `python -m tools.dashboards.build`. Needs
grafana-foundation-sdk."""

from __future__ import annotations

import json
from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from placement.observe.dashboards import FILES
from tools.dashboards import fleet, worker


def pages() -> dict[str, str]:
    """The JSON text of each dashboard, by file name."""
    made = {"placement-fleet.json": fleet.page(), "placement-worker.json": worker.page()}
    return {
        name: json.dumps(page, cls=JSONEncoder, sort_keys=True, indent=1) + "\n"
        for name, page in made.items()
    }


def write(directory: Path = FILES) -> None:
    """Write the dashboards into an existing directory."""
    for name, text in pages().items():
        (directory / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write()
