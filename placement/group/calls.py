"""Limit the wait for calls that may block for ever.

torch's store client sends a request and waits for the answer without a limit. A store whose process is stopped, or whose machine is
gone, would hold its callers for ever, whatever timeout the store was given.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

_T = TypeVar("_T")
_SLICES = 10


class _Job:
    """A call, and its result or error."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self.is_done = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.result = self._call()
        except BaseException as error:
            self.error = error
        self.is_done.set()


class BoundedCalls:
    """Makes calls one after the other on a thread of its own, and waits a limited time for each.

    Args:
        seconds: the limit for each call. A process that was stopped meanwhile waits a part of it again, since the other side was not late.
    """

    def __init__(self, name: str, seconds: float) -> None:
        self.seconds = seconds
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._late: _Job | None = None
        # A daemon thread, because a call that never returns must not keep the interpreter from exiting.
        threading.Thread(target=_work, args=(self._jobs,), name=name, daemon=True).start()
        weakref.finalize(self, self._jobs.put, None)

    def __call__(self, call: Callable[[], _T]) -> _T:
        """Make a call. Returns what it returns and raises what it raises.

        Raises:
            TimeoutError: the call has not returned in time, or an earlier call still has not.
        """
        if self._late is not None and not self._late.is_done.is_set():
            raise TimeoutError("an earlier call is still waiting for its answer")
        job = _Job(call)
        self._jobs.put(job)
        for _ in range(_SLICES):
            if job.is_done.wait(self.seconds / _SLICES):
                break
        else:
            self._late = job
            raise TimeoutError(f"no answer within {self.seconds:g} s")
        if job.error is not None:
            raise job.error
        result: _T = job.result
        return result


def _work(jobs: queue.SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job.run()
        del job  # the finished job must not live on until the next one comes
