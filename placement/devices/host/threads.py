"""The threads that prepare host memory in the background, piece by piece, for `slab`. They exist
only while there is work."""

from __future__ import annotations

import atexit
import collections
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Any

from placement.core.interrupts import BackgroundThread

_MOST_THREADS = 8
# how many seconds interpreter exit waits for a thread that is inside the kernel or the driver
_EXIT_SECONDS = 10.0
Reservation = Any  # one of `slab`, whose module is above this one


class _Pool:
    """The threads of this process. An idle process and a forked child have none."""

    def __init__(self) -> None:
        self.stopping = threading.Event()
        self.forget()

    def forget(self) -> None:
        self._lock = threading.Lock()
        self._queue: collections.deque[tuple[weakref.ref[Reservation], Iterator[int]]] = (
            collections.deque()
        )
        self._threads: set[threading.Thread] = set()

    def submit(self, reservation: Reservation, pieces: int) -> None:
        most = min(_MOST_THREADS, len(os.sched_getaffinity(0)), pieces)
        with self._lock:
            self._queue.append((weakref.ref(reservation), iter(range(pieces))))
            # without those that could not be started
            self._threads = {thread for thread in self._threads if thread.is_alive()}
            missing = most - len(self._threads)
            added = [BackgroundThread("placement-host", self._work) for _ in range(missing)]
            self._threads.update(added)
            # they wait for the lock: a thread's stack cannot be mapped while another thread touches
            # memory
            for thread in added:
                thread.start()

    def hurry(self, reservation: Reservation) -> None:
        """Put a reservation first in the queue, because a copy waits for it."""
        with self._lock:
            for entry in [*self._queue]:
                if entry[0]() is reservation:
                    self._queue.remove(entry)
                    self._queue.appendleft(entry)

    def _next(self) -> tuple[Reservation, int] | None:
        with self._lock:
            while self._queue and not self.stopping.is_set():
                ref, remaining = self._queue[0]
                index = next(remaining, None)
                reservation = None if index is None else ref()
                if reservation is not None and index is not None and reservation.is_wanted:
                    return reservation, index
                self._queue.popleft()
            self._threads.discard(threading.current_thread())
            return None

    def _work(self) -> None:
        while (job := self._next()) is not None:
            count_down = job[0].countdown()
            job[0].prepare(job[1])
            del job  # if the slab is dead, its memory is freed now
            count_down()

    def stop(self) -> None:
        """Stop at interpreter exit: a thread that returned from the kernel later would crash the
        process."""
        self.stopping.set()
        for thread in filter(threading.Thread.is_alive, [*self._threads]):
            thread.join(_EXIT_SECONDS)


POOL = _Pool()
atexit.register(POOL.stop)
os.register_at_fork(after_in_child=POOL.forget)
