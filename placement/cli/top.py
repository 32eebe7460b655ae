"""`placement top WORKER ...`: a live view of a run's workers. Without a terminal it prints the output of `placement status`."""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import os
import select
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from placement.cli.workers import (
    HANDLE_COLUMNS,
    NUMBERS,
    SORTINGS,
    WORKER_COLUMNS,
    View,
    add_places,
    handle_rows,
    look,
    places_of,
    plain_report,
    trouble_of,
    worker_row,
)
from placement.core.errors import PlacementError

if TYPE_CHECKING:
    from rich.table import Table

_STYLES = {"CPU_OFFLOADED": "dim", "GPU_RESIDENT": "blue", "SYNCING": "cyan", "TRAINING": "yellow"}
_LONG = ("handles on the device", "trouble", "remarks")
"""Columns that are cut first where the terminal is narrow."""
_HELP = "q quit   ↑ ↓ choose   enter show one worker's handles   s sort"
_KEYS = {b"\x1b[A": "up", b"\x1bOA": "up", b"k": "up", b"\x1b[B": "down", b"\x1bOB": "down", b"j": "down", b"\r": "enter", b"\n": "enter"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_places(parser)
    parser.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="time between two updates (default: %(default)s)")


def run(arguments: argparse.Namespace) -> int:
    """Show the workers until `q` is pressed.

    Raises:
        PlacementError: no worker is named, or `rich` is not installed.
    """
    if not arguments.interval > 0:
        raise PlacementError(f"--interval {arguments.interval} must be more than 0 seconds")
    places = places_of(arguments)
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        if not (sys.stdin.isatty() and sys.stdout.isatty()):
            print(plain_report(sorted(look(places, pool), key=SORTINGS[arguments.sort].key)))
            return 0
        try:
            import rich  # noqa: F401 (only checks whether it is installed)
        except ImportError as error:
            raise PlacementError("placement top needs rich: pip install rich, or use placement status") from error
        return _live(places, Screen(arguments.sort), arguments.interval, pool)


class Screen:
    """The state of the display: the order of workers, the selected worker, and the worker shown in detail."""

    def __init__(self, sorting: str) -> None:
        self.sorting = sorting
        self.chosen = 0
        self.detail: str | None = None
        self.views: list[View] = []

    def take(self, views: Sequence[View]) -> None:
        """Take new data. The selected worker stays selected."""
        name = self.views[self.chosen]["name"] if self.views else None
        self.views = sorted(views, key=SORTINGS[self.sorting].key)
        names = [view["name"] for view in self.views]
        self.chosen = names.index(name) if name in names else min(self.chosen, max(len(names) - 1, 0))

    def press(self, key: str) -> bool:
        """Handle one key. Returns False for quit."""
        if key == "q" and self.detail is None:
            return False
        if key in ("q", "enter", "escape"):
            self.detail = self.views[self.chosen]["name"] if key == "enter" and self.detail is None and self.views else None
        elif key == "up":
            self.chosen = max(self.chosen - 1, 0)
        elif key == "down":
            self.chosen = min(self.chosen + 1, max(len(self.views) - 1, 0))
        elif key == "s":
            order = list(SORTINGS)
            self.sorting = order[(order.index(self.sorting) + 1) % len(order)]
            self.take(self.views)
        return True

    def render(self, height: int) -> Any:
        """The screen for rich, with at most `height` lines. The selected worker is among the shown ones."""
        from rich.console import Group
        from rich.text import Text

        shown = next((view for view in self.views if view["name"] == self.detail), None)
        bad = sum(bool(trouble_of(view)) for view in self.views)
        count = f"{len(self.views)} worker{'s' * (len(self.views) != 1)}"
        head = Text(f"placement top   {count}, {bad} with trouble   by {SORTINGS[self.sorting].title}", style="bold")
        if shown is not None and "snapshot" in shown:
            return Group(head, self._workers([shown], None), self._handles(shown), Text(_HELP, style="dim"))
        room = max(height - 6, 1)
        first = min(max(self.chosen - room // 2, 0), max(len(self.views) - room, 0))
        part = self.views[first : first + room]
        return Group(head, self._workers(part, self.chosen - first), Text(_HELP, style="dim"))

    def _workers(self, views: Sequence[View], chosen: int | None) -> Table:
        table = _table(WORKER_COLUMNS)
        for index, view in enumerate(views):
            style = "reverse" if index == chosen else "red" if trouble_of(view) else None
            table.add_row(*map(_text, worker_row(view)), style=style)
        return table

    def _handles(self, view: View) -> Table:
        table = _table(HANDLE_COLUMNS)
        for row in handle_rows(view):
            table.add_row(*map(_text, row), style=_STYLES[row[1]])
        return table


def _table(columns: Sequence[str]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, expand=True, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(_text(column), justify="right" if column in NUMBERS else "left", no_wrap=column not in _LONG)
    return table


def _text(cell: str) -> Any:
    from rich.text import Text

    return Text(cell, no_wrap=True, overflow="ellipsis")  # not markup, because names come from users


def _live(places: Sequence[str], screen: Screen, interval: float, pool: concurrent.futures.Executor) -> int:
    from rich.console import Console
    from rich.live import Live

    console = Console()
    screen.take(look(places, pool))  # before the screen is taken over, so that a wrong place is shown as a plain error
    with _keys() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
        due = time.monotonic() + interval
        while True:
            live.update(screen.render(console.height), refresh=True)
            for key in keys(max(due - time.monotonic(), 0.0)):
                if not screen.press(key):
                    return 0
            if time.monotonic() >= due:
                due = time.monotonic() + interval
                with contextlib.suppress(PlacementError):  # a file is being replaced: keep the last data
                    screen.take(look(places, pool))


@contextlib.contextmanager
def _keys() -> Iterator[Any]:
    """Yields a function that waits up to the given seconds and returns the pressed keys, without waiting for a line."""
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def pressed(seconds: float) -> list[str]:
        if not select.select([descriptor], [], [], seconds)[0]:
            return []
        return [decode(os.read(descriptor, 16))]

    try:
        tty.setcbreak(descriptor)
        yield pressed
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def decode(sent: bytes) -> str:
    """The name of the key for the bytes that the terminal sent; of several keys, the first."""
    for sequence, key in _KEYS.items():
        if sent.startswith(sequence):
            return key
    return "escape" if sent[:1] == b"\x1b" else sent[:1].decode("ascii", "ignore")
