"""`placement trace URL ... -o trace.json`: write the journals of running workers as one Chrome trace."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from placement.core.errors import PlacementError
from placement.observe.discovery import Target
from placement.observe.fleet import ask, find_targets


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("workers", nargs="+", metavar="WORKER", help="a worker's URL, a discovery URL, or a folder of discovery files")
    parser.add_argument("-o", "--output", default="placement-trace.json", help="the file to write (default: %(default)s)")
    parser.add_argument("--seconds", type=_seconds, help="write only the last SECONDS")


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return seconds


def run(arguments: argparse.Namespace) -> int:
    """Write the trace, and print how many events it has.

    Raises:
        PlacementError: a worker does not answer, or the file cannot be written.
    """
    workers = find_targets(arguments.workers)
    query = "" if arguments.seconds is None else f"?seconds={arguments.seconds}"
    target = Path(arguments.output)
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        count = _write(partial, workers, query)
        partial.replace(target)
    except OSError as error:
        raise PlacementError(f"cannot write {target}: {error.strerror}") from error
    finally:
        partial.unlink(missing_ok=True)
    print(f"{target}: {count:,} events of {len(workers)} worker{'s' * (len(workers) != 1)}; open it in https://ui.perfetto.dev")
    return 0


def _write(path: Path, workers: Sequence[Target], query: str) -> int:
    """Write the events of one worker after the other, so that only one worker's are in memory. Returns their number."""
    count = 0
    with path.open("w") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        for number, worker in enumerate(workers):
            for event in _events(worker, query):
                event["pid"] = number + 1  # processes of two nodes may have the same id
                if event.get("name") == "process_name":
                    event["args"]["name"] = worker.name
                file.write(",\n" * bool(count) + json.dumps(event, separators=(",", ":")))
                count += 1
        file.write("\n]}\n")
    return count


def _events(worker: Target, query: str) -> list[dict[str, Any]]:
    try:
        found = json.loads(ask(f"{worker.url}/trace{query}", timeout_seconds=60))
        events: list[dict[str, Any]] = found["traceEvents"]
    except (ValueError, TypeError, KeyError) as error:
        raise PlacementError(f"{worker.url}/trace did not return a trace; check that this is a placement worker") from error
    return events
