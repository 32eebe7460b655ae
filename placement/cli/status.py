"""`placement status WORKER ...`: print what workers hold, once or again and again (`--watch`); `--json` for scripts."""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import shutil
import sys
import time
from collections.abc import Sequence

from placement.cli.workers import SORTINGS, View, add_places, look, places_of, plain_report, trouble_of
from placement.core.errors import PlacementError

_CLEAR = "\x1b[H\x1b[2J"
"""The sequence that empties a terminal and goes to its first line."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_places(parser)
    parser.add_argument("--watch", type=float, nargs="?", const=1.0, metavar="SECONDS", help="print it again and again, until Ctrl-C")
    parser.add_argument("--json", action="store_true", help="print the complete views of the workers as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print the status. Returns 1 when a worker does not answer or has a problem, so that scripts need not parse the output.

    Raises:
        PlacementError: no worker is named, or the time between two looks is not positive.
    """
    if arguments.watch is not None and not arguments.watch > 0:
        raise PlacementError(f"--watch {arguments.watch} must be more than 0 seconds")
    places = places_of(arguments)
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        views = sorted(look(places, pool), key=SORTINGS[arguments.sort].key)
        while arguments.watch is not None:
            print(f"{_CLEAR}{_screen(views)}", end="", flush=True)
            time.sleep(arguments.watch)
            views = sorted(look(places, pool), key=SORTINGS[arguments.sort].key)
    print(json.dumps(views, indent=1) if arguments.json else plain_report(views))
    return int(any(trouble_of(view) for view in views))


def _screen(views: Sequence[View]) -> str:
    """The report as far as the terminal has room for it."""
    size = shutil.get_terminal_size()
    lines = plain_report(views).splitlines()
    return "\n".join(line[: size.columns] for line in lines[: size.lines]) if sys.stdout.isatty() else "\n".join([*lines, ""])
