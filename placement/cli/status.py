"""`placement status WORKER ...`: print once what workers hold; `--json` for scripts."""

from __future__ import annotations

import argparse
import concurrent.futures
import json

from placement.cli.workers import SORTINGS, add_places, look, places_of, plain_report, trouble_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_places(parser)
    parser.add_argument("--json", action="store_true", help="print the complete views of the workers as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print the status. Returns 1 when a worker does not answer or has a problem, so that scripts need not parse the output.

    Raises:
        PlacementError: no worker is named.
    """
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        views = sorted(look(places_of(arguments), pool), key=SORTINGS[arguments.sort].key)
    print(json.dumps(views, indent=1) if arguments.json else plain_report(views))
    return int(any(trouble_of(view) for view in views))
