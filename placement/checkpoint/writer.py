"""The threads that write `async_save`, one after the other."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from placement.core import interrupts
from placement.core.errors import CheckpointError
from placement.core.interrupts import BackgroundThread
from placement.core.journal import logger

_T = TypeVar("_T")
_CHECK_SECONDS = 0.05  # the time between two checks of a wait for an interrupt


class _Job(BackgroundThread):
    """One call. It waits for its turn, and passes the turn on before its future is done, because
    callbacks of the future may wait for later jobs."""

    def __init__(self, call: Callable[[], Any], turn: threading.Event) -> None:
        super().__init__("placement-checkpoint", self._take_turn)
        self.daemon = False  # queued jobs are done before the process exits
        self._call = call
        self._turn = turn
        self.end = threading.Event()
        self.future: Future[Any] = Future()
        # No rank can cancel alone, because the others would wait for it.
        self.future.set_running_or_notify_cancel()

    def _take_turn(self) -> None:
        self._turn.wait()
        try:
            try:
                result = self._call()
            finally:
                del self._call  # callbacks may last longer than the values are needed
                self.is_awaited = False
                self.end.set()
        except BaseException as error:
            # the caller may never ask for the result
            logger.error("a checkpoint was not written: %s", str(error))
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


class Writer:
    """Runs calls in the order of `submit`, each on a thread of its own. Phase transitions wait for
    the calls, and never for the callbacks of their futures."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last_end = threading.Event()
        self._last_end.set()

    def submit(self, call: Callable[[], _T]) -> Future[_T]:
        """Run a call after all earlier ones. The future cannot be cancelled. Raises
        CheckpointError: the process is exiting."""
        if not threading.main_thread().is_alive():
            raise CheckpointError(
                "the process is exiting, so no other thread can write: use save()"
            )
        with self._lock:
            job = _Job(call, self._last_end)
            job.start()
            self._last_end = job.end
        return job.future

    def wait(self) -> None:
        """Wait until every call so far has ended."""
        while not self._last_end.wait(_CHECK_SECONDS):
            interrupts.check()


@functools.cache
def writer(_pid: int) -> Writer:
    """The writer of a process. There is only one, so that every rank writes in the order of its
    calls. A forked child has its own."""
    return Writer()
