"""Defer Ctrl-C during a phase transition: it is noted when it comes, and raised where the transition waits, or at its end.

So code of a transition that does not wait cannot be cut short by it, and may hold locks. A second Ctrl-C is raised at once. Only the main
thread receives signals, and only a handler that Python installed (such as its own, which raises KeyboardInterrupt) is deferred.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` wraps its functions to return enums, which takes four times as long
import os
import threading
from contextlib import AbstractContextManager, nullcontext
from types import FrameType, TracebackType
from typing import Any

_SIGINT: int = _signal.SIGINT
_NOTHING = nullcontext()


class _Deferral:
    """The handler of SIGINT inside one block, and the block's context manager."""

    __slots__ = ("_before", "_has_come", "_is_noted", "_thread")

    def __init__(self, before: Any) -> None:
        self._before = before
        self._thread = threading.get_ident()
        self._is_noted = False
        self._has_come = False

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        self._is_noted = True
        if self._has_come:
            self.deliver()
        self._has_come = True

    def deliver(self) -> None:
        """Call the handler that was in place before, if an interrupt was noted and not delivered yet."""
        if self._is_noted and threading.get_ident() == self._thread:
            self._is_noted = False
            self._before(_SIGINT, None)

    def __enter__(self) -> None:
        global _current  # noqa: PLW0603 (a process has one handler of SIGINT)
        _signal.signal(_SIGINT, self)  # raises what came before it
        _current = self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.end()
        self.deliver()

    def end(self) -> None:
        """Stop deferring, and put the handler back that was in place before."""
        global _current  # noqa: PLW0603 (see above)
        _current = None
        if _signal.getsignal(_SIGINT) is self:  # else somebody has installed another one in the block, which stays
            _signal.signal(_SIGINT, self._before)


_current: _Deferral | None = None


def _end_in_child() -> None:
    """A forked child is in no phase transition of its parent, and may never come to the end of the block."""
    if _current is not None:
        _current.end()


os.register_at_fork(after_in_child=_end_in_child)


def deferred() -> AbstractContextManager[None]:
    """Defer SIGINT inside the block. Nested blocks and other threads than the main one change nothing. Costs two microseconds."""
    if _current is not None or threading.current_thread() is not threading.main_thread():
        return _NOTHING
    before = _signal.getsignal(_SIGINT)
    return _Deferral(before) if callable(before) else _NOTHING  # not callable: SIG_DFL, SIG_IGN, or not installed by Python


def check() -> None:
    """Raise a noted interrupt. Called after, or in the middle of, every wait of a transition (device, vote, lock, lease, disk)."""
    if _current is not None:
        _current.deliver()
