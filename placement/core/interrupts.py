"""Interruptions of a phase transition: Ctrl-C, a collection of garbage, another thread.

Ctrl-C is deferred: it is noted when it comes, and raised where the transition waits (`looks` and
`BoundedCalls` are such waits), or at its end. So code of a transition that does not wait cannot be
cut short by it, and may hold locks. A second Ctrl-C is raised at once. Only the main thread
receives signals, and only a handler that Python installed (such as its own, which raises
KeyboardInterrupt) is deferred.

Objects that a collection drops on a `BackgroundThread` begin no phase transition there.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` wraps its functions to return enums, which takes four times as long
import functools
import math
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from types import FrameType, TracebackType
from typing import Any, TypeVar

_SIGINT: int = _signal.SIGINT
_POSTPONED_SECONDS = 0.01  # a callback has returned by then, or postpones it once more
_NOTHING = nullcontext()
_T = TypeVar("_T")


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
            self.end()  # the block's own end may be cut short by what is raised here
            self.deliver()
        self._has_come = True

    def deliver(self) -> None:
        """Call the handler that was in place before, if an interrupt was noted and not delivered
        yet."""
        if self._is_noted and threading.get_ident() == self._thread:
            self._is_noted = False
            self._before(_SIGINT, None)

    def __enter__(self) -> None:
        global _current  # noqa: PLW0603 (a process has one handler of SIGINT)
        _signal.signal(_SIGINT, self)  # raises what came before it
        _current = self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()
        self.deliver()

    def end(self) -> None:
        """Stop deferring, and put the handler back that was in place before."""
        global _current  # noqa: PLW0603 (see above)
        _current = None
        # else the block has installed another handler, which stays
        if _signal.getsignal(_SIGINT) is self:
            _signal.signal(_SIGINT, self._before)


class _Postponement(_Deferral):
    """Raises nothing inside its block. An interrupt that has come is sent anew a moment later."""

    __slots__ = ()

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        self._is_noted = True

    def deliver(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.end()
        if self._is_noted:
            again = _signal.pthread_kill, (self._thread, _SIGINT)
            threading.Timer(_POSTPONED_SECONDS, *again).start()


_current: _Deferral | None = None


def _end_in_child() -> None:
    """A forked child is in no phase transition of its parent, and may never come to the end of the
    block."""
    if _current is not None:
        _current.end()


os.register_at_fork(after_in_child=_end_in_child)


def postponed() -> AbstractContextManager[None]:
    """As `deferred`, in the callback of a weak reference, whose errors are lost."""
    return deferred(_Postponement)


def deferred(kind: type[_Deferral] = _Deferral) -> AbstractContextManager[None]:
    """Defer SIGINT inside the block. Nested blocks and other threads than the main one change
    nothing. Costs two microseconds."""
    if _current is not None or threading.current_thread() is not threading.main_thread():
        return _NOTHING
    before = _signal.getsignal(_SIGINT)
    # not callable: SIG_DFL, SIG_IGN, or not installed by Python
    return kind(before) if callable(before) else _NOTHING


def check() -> None:
    """Raise a noted interrupt. Called after, or in the middle of, every wait of a transition
    (device, vote, lock, turn)."""
    if _current is not None:
        _current.deliver()


# --- waits


def looks(seconds: float, first_pause: float, longest_pause: float) -> Iterator[None]:
    """Let the caller check a condition again and again, with growing pauses, at which a noted
    interrupt is raised.

    The caller leaves the loop once the condition holds. The loop ends after `seconds`, with a last
    check at the end.
    """
    deadline = time.monotonic() + seconds
    pause = first_pause
    while True:
        yield
        seconds_left = deadline - time.monotonic()
        if seconds_left <= 0:
            return
        time.sleep(min(pause, seconds_left))
        check()
        pause = min(1.5 * pause, longest_pause)


_LEAST_SLICES = 60
_LONGEST_SLICE_SECONDS = 0.5


_Calls = queue.SimpleQueue["tuple[Callable[[], Any], Future[Any]] | None"]
"""Calls with the place for their answer; None: no more come."""


class BoundedCalls:
    """Makes calls one after the other on a thread of its own, and waits a limited time for each.

    torch's store client waits for its answer without a limit; the timeout of the store does not
    count. A server that drips bytes outlasts a limit on each read. A server whose process is
    stopped, or whose machine is gone, would hold its callers for ever.

    Args:
        seconds: the limit for each call. A process that was stopped meanwhile waits a part of it
            again, since the other side was not late.
    """

    def __init__(self, name: str, seconds: float) -> None:
        self._seconds = max(seconds, 0.0)
        self._calls: _Calls = queue.SimpleQueue()
        self._late: Future[Any] | None = None
        # A daemon thread, because a call that never returns must not keep the interpreter from
        # exiting.
        BackgroundThread(name, functools.partial(_answer_all, self._calls)).start()
        weakref.finalize(self, self._calls.put, None)

    def __call__(self, call: Callable[[], _T]) -> _T:
        """Make a call. Its result is returned, its error raised. Raises TimeoutError: the call has
        not returned in time, or an earlier call still has not."""
        if self._late is not None and not self._late.done():
            raise TimeoutError("an earlier call is still waiting for its answer")
        answer: Future[_T] = Future()
        self._calls.put((call, answer))
        slices = max(_LEAST_SLICES, math.ceil(self._seconds / _LONGEST_SLICE_SECONDS))
        try:
            for _ in range(slices):
                try:
                    return answer.result(self._seconds / slices)
                except TimeoutError:
                    if answer.done():  # just now, or the error is the call's own
                        return answer.result()
                    check()
            self._late = answer
        finally:
            # an error's traceback has this frame: a cycle would keep the callers' tensors until it
            # is collected
            del answer
        raise TimeoutError(f"no answer within {self._seconds:g} s")


def _answer_all(calls: _Calls) -> None:
    """Make these calls until the queue gives None."""
    while (job := calls.get()) is not None:
        call, answer = job
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)
        del job, call, answer  # a finished call must not live on until the next one comes


# --- threads


class BackgroundThread(threading.Thread):
    """A daemon thread that phase transitions may wait for. Objects that a garbage collection drops
    on it must not begin one there."""

    is_awaited = True  # whether phase transitions may wait for it now

    def __init__(self, name: str, target: Callable[[], object]) -> None:
        super().__init__(name=name, target=target, daemon=True)


def is_background() -> bool:
    """Whether phase transitions may wait for the calling thread."""
    return getattr(threading.current_thread(), "is_awaited", False)
