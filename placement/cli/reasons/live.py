"""`placement explain --live URL`: why each handle of a running worker is where it is, in the words of its policy."""

from __future__ import annotations

import argparse
import json
from typing import Any

from placement.cli.status import plain_table
from placement.core.errors import PlacementError
from placement.core.summary import readable
from placement.observe.fleet import ask, find_targets

COLUMNS = ("handle", "state", "on device", "why")


def add_argument(parser: argparse.ArgumentParser) -> None:
    text = "a running worker's URL (or one that ends in /targets, or a discovery folder): why each handle is where it is now"
    parser.add_argument("--live", metavar="URL", help=text)


def run(place: str) -> int:
    """Print a table for each worker at a place. Returns 0.

    Raises:
        PlacementError: nobody answers there, or the answer is not a worker's state.
    """
    tables = []
    for target in find_targets([place]):
        page = ask(f"{target.url}/state")
        try:
            tables.append(_table(target.name, json.loads(page)))
        except (ValueError, KeyError, TypeError) as error:
            raise PlacementError(f"{target.url}/state is not the state of a worker: {error!r}") from error
    print("\n\n".join(tables))
    return 0


def _table(worker: str, snapshot: dict[str, Any]) -> str:
    phases = " > ".join(snapshot["phases"]) or "idle"
    held = sum(handle["resident_bytes"] for handle in snapshot["handles"])
    head = f"{worker}: policy {snapshot['policy']}, in {phases}, {readable(held)} of {readable(snapshot['budget_bytes'])} on the device"
    rows = [(h["name"], h["state"], readable(h["resident_bytes"]), _why(h)) for h in snapshot["handles"]]
    return f"{head}\n{plain_table(COLUMNS, rows)}"


def _why(handle: dict[str, Any]) -> str:
    marks = ["kept by phase.keep()"] if handle["kept"] else []
    if handle["broken"]:
        marks.append(f"broken: {handle['broken']}")
    return "; ".join([handle.get("reason") or "the policy does not say", *marks])
