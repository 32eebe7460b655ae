"""`placement discover FOLDER`: serve the workers of a discovery folder, as a list for Prometheus and as a page for people."""

from __future__ import annotations

import argparse
import functools
import signal
import threading
from pathlib import Path

from placement.cli import port
from placement.core.errors import PlacementError
from placement.observe.discovery import reap, targets_in
from placement.observe.fleet import DiscoveryServer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", help="the folder in which the workers announce themselves (PLACEMENT_DISCOVERY)")
    parser.add_argument("--port", type=port, default=9400, help="the port to serve on; 0 takes a free one (default: %(default)s)")
    parser.add_argument("--address", default="127.0.0.1", help="any but loopback is reachable from outside (default: %(default)s)")


def run(arguments: argparse.Namespace) -> int:
    """Serve until interrupted.

    Raises:
        PlacementError: the folder does not exist, or the port is taken.
    """
    folder = Path(arguments.folder)
    if not folder.is_dir():
        raise PlacementError(f"{str(folder)!r} is not a folder; workers create it when they announce themselves")
    with DiscoveryServer(functools.partial(targets_in, folder), port=arguments.port, address=arguments.address) as server:
        server.do_regularly(functools.partial(reap, folder))
        count = len(targets_in(folder))
        print(f"{count} worker{'s' * (count != 1)}; for Prometheus: {server.url}/targets; status page: {server.url}/", flush=True)
        ended = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: ended.set())
        try:
            ended.wait()
        except KeyboardInterrupt:
            return 130
    return 0
