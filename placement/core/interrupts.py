"""Defer Ctrl-C during a phase transition: it is noted when it comes, and raised where the transition waits, or at its end.

So code of a transition that does not wait cannot be cut short by it, and may hold locks. A second Ctrl-C is raised at once. Only the main
thread receives signals, and only a handler that Python installed (such as its own, which raises KeyboardInterrupt) is deferred.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class _Deferral:
    """The handler of SIGINT while a transition is under way."""

    def __init__(self, handler: Callable[[int, FrameType | None], Any]) -> None:
        self._handler = handler
        self._is_noted = False
        self._has_come = False

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        self._is_noted = True
        if self._has_come:
            self.deliver()
        self._has_come = True

    def deliver(self) -> None:
        """Call the handler that was in place before, if an interrupt was noted and not delivered yet."""
        if self._is_noted:
            self._is_noted = False
            self._handler(signal.SIGINT, None)


_current: _Deferral | None = None


@contextmanager
def deferred() -> Iterator[None]:
    """Defer SIGINT inside the block. Nested blocks and other threads than the main one change nothing."""
    global _current  # noqa: PLW0603 (a process has one handler of SIGINT)
    if _current is not None or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    if not callable(before):  # SIG_DFL, SIG_IGN, or a handler that Python did not install
        yield
        return
    _current = deferral = _Deferral(before)
    signal.signal(signal.SIGINT, deferral)
    try:
        yield
    finally:
        _current = None
        signal.signal(signal.SIGINT, before)
        deferral.deliver()


def check() -> None:
    """Raise a noted interrupt. Called after, or in the middle of, every wait of a transition (device, vote, lock, lease, disk)."""
    if _current is not None and threading.current_thread() is threading.main_thread():
        _current.deliver()
