"""Prepare host memory in the background: a few threads touch it piece by piece, and the last one registers it with the driver.

A slab is registered in one call, because the driver refuses a copy across two registrations ("invalid argument"), and anybody may copy any
part of a slab. The other calls of the driver wait for a registration, about 1 s for 16 GB (H100), once.

A slab can be used at once, because touching does not change written bytes. Only placement's own copies wait, in `wait_until_ready`, until
the memory is registered: faster than a copy from untouched pageable memory, which pays for page faults on one thread.
"""

from __future__ import annotations

import atexit
import collections
import functools
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterator

from placement.core import interrupts
from placement.core.weak_set import WeakIdSet
from placement.devices.background import BackgroundThread

PIECE_BYTES = 128 << 20  # the unit of work of a thread
_MOST_THREADS = 8
_EXIT_SECONDS = 10.0  # how many seconds interpreter exit waits for a thread that is inside the kernel or the driver
_LOOK_SECONDS = 0.1  # how often a waiting thread looks for a noted interrupt

Register = Callable[[int, int], str | None]  # (address, bytes) -> None, or the reason why the registration failed
Touch = Callable[[int, int, Callable[[int], bool]], str | None]
"""(address, bytes, progress) -> None, or the reason for a failure. Calls progress(bytes) after each step; stops when it returns False."""

_alive: WeakIdSet[Reservation] = WeakIdSet()


class Reservation:
    """The memory behind a slab, and the progress of its preparation. The slab holds it, and so does a thread while it works on a piece. The
    memory is freed when the last of them lets go. When the slab dies, no further piece is begun. Its bytes count as taken from now on, in
    every check of available memory."""

    def __init__(self, slab: object, nbytes: int) -> None:
        self._dead: list[object] = []
        self._slab = weakref.ref(slab, self._dead.append)  # asking the reference could make a thread of the pool the slab's last user
        self.ready = threading.Event()  # set once it is registered or refused
        self.undo: list[Callable[[], None]] = []  # functions to call before unmapping
        self.untouched = [nbytes]  # bytes that are promised but not yet allocated, for each piece. Each entry has one writer.
        self.pinned: bool | None = None  # whether it is registered; None while that is undecided
        self.reason: str | None = None  # why it is not
        self._address = self._nbytes = 0
        self._let_go = itertools.count(1)
        _alive.add(self)

    def begin(self, address: int, nbytes: int, touch: Touch | None, register: Register, unregister: Callable[[int], None] | None) -> None:
        """Hand the memory over to the threads.
        `touch`: allocates memory; None if it is allocated already.
        `unregister`: undoes `register`; called for a successful registration, and for one that raised."""
        self._touch, self._register, self._unregister = touch, register, unregister
        self.ready.clear()
        self.pinned = self.reason = None
        self._address, self._nbytes = address, nbytes
        pieces = range(0, self._nbytes, PIECE_BYTES)
        self.untouched = [min(PIECE_BYTES, self._nbytes - start) if touch else 0 for start in pieces]
        # A step of a counter is one step for all threads, so exactly one thread sees the last number.
        self._touched, self._let_go = itertools.count(1), itertools.count(1)
        _pool.submit(self, len(pieces))

    def unpin(self) -> None:
        """Undo the registration. Call it when `ready` is set; `begin` may be called again afterwards."""
        self.pinned = self.reason = None
        while self.undo:
            self.undo[-1]()
            self.undo.pop()

    def wait(self) -> None:
        """Wait until it is registered or refused."""
        while not self.ready.wait(_LOOK_SECONDS):
            interrupts.check()

    def countdown(self) -> Callable[[], None]:
        """A function for a thread to call when it no longer holds this object. The last call sets `ready`: the slab can die at once."""
        return functools.partial(_count_down, self._let_go, len(self.untouched), self.ready)

    @property
    def is_wanted(self) -> bool:
        return not self._dead and not _pool.stopping.is_set()

    def meets(self, address: int, nbytes: int) -> bool:
        return self._address < address + nbytes and address < self._address + self._nbytes

    def prepare(self, index: int) -> None:
        """Touch one piece. After the last one, register the whole."""
        start = index * PIECE_BYTES

        def progress(done: int) -> bool:
            self.untouched[index] -= done
            return self.is_wanted

        try:
            if self._touch:
                self.reason = self._touch(self._address + start, min(PIECE_BYTES, self._nbytes - start), progress) or self.reason
        except Exception as exc:  # the reason is stored, because nobody could catch an exception of this thread
            self.reason = f"{type(exc).__name__}: {exc}"
        if next(self._touched) == len(self.untouched) and self.is_wanted:
            self._pin()

    def _pin(self) -> None:
        if self.reason is None:
            undo = functools.partial(self._unregister or (lambda _: None), self._address)
            self.undo.append(undo)  # first, because a registration that raises may still have happened
            try:
                self.reason = self._register(self._address, self._nbytes)
                if self.reason is not None:
                    self.undo.remove(undo)
            except Exception as exc:
                self.reason = f"{type(exc).__name__}: {exc}"
        self.pinned = self.reason is None


def _count_down(count: Iterator[int], last: int, ready: threading.Event) -> None:
    if next(count) == last and not _pool.stopping.is_set():
        ready.set()


class _Pool:
    """The worker threads. They exist only while there is work; an idle process and a forked child have none."""

    def __init__(self) -> None:
        self.stopping = threading.Event()
        self.forget()

    def forget(self) -> None:
        self._lock = threading.Lock()
        self._queue: collections.deque[tuple[weakref.ref[Reservation], Iterator[int]]] = collections.deque()
        self._threads: set[threading.Thread] = set()

    def submit(self, reservation: Reservation, pieces: int) -> None:
        most = min(_MOST_THREADS, len(os.sched_getaffinity(0)), pieces)
        with self._lock:
            self._queue.append((weakref.ref(reservation), iter(range(pieces))))
            self._threads = {thread for thread in self._threads if thread.is_alive()}  # without those that could not be started
            fresh = [BackgroundThread("placement-host", self._work) for _ in range(most - len(self._threads))]
            self._threads.update(fresh)
            for thread in fresh:  # they wait for the lock: a thread's stack cannot be mapped while another thread touches memory
                thread.start()

    def hurry(self, reservation: Reservation) -> None:
        """Put a reservation first in the queue, because somebody waits for it."""
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
        """Stop at interpreter exit: a thread that returned from the kernel later would crash the process."""
        self.stopping.set()
        for thread in filter(threading.Thread.is_alive, [*self._threads]):
            thread.join(_EXIT_SECONDS)


_pool = _Pool()
atexit.register(_pool.stop)


def _forget_parent() -> None:
    _pool.forget()
    _alive.clear()


os.register_at_fork(after_in_child=_forget_parent)


def promised_bytes() -> int:
    """Bytes that living slabs of this process will still allocate."""
    return sum(sum(reservation.untouched) for reservation in _alive)


def wait_until_ready(address: int, nbytes: int) -> None:
    """Wait until the slab of `[address, address + nbytes)` is registered or refused. It moves to the front of the queue."""
    for reservation in [] if _pool.stopping.is_set() else _alive:  # at interpreter exit no thread works any more
        if not reservation.ready.is_set() and reservation.meets(address, nbytes):
            _pool.hurry(reservation)
            reservation.wait()
