"""Prepare host memory in the background: a few threads touch it piece by piece and register it with the driver.

A slab can be used at once, because touching does not change written bytes. Only copies by the driver wait, in `wait_until_ready`,
until the memory is registered. That is faster than a copy from untouched pageable memory, which pays for page faults on one thread. It
also avoids two cases that the driver forbids or does not document: a copy that spans a registered and an unregistered part, and a
registration of bytes that a copy is staging at that moment.
"""

from __future__ import annotations

import atexit
import collections
import functools
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence

from placement.core import interrupts
from placement.core.weak_set import WeakIdSet
from placement.devices.background import BackgroundThread

PIECE_BYTES = 128 << 20
"""The unit of work of a thread. Pieces and spans end at absolute addresses that are multiples of their size."""
SPAN_BYTES = 1 << 30
"""The longest single registration, because a longer one blocks all other driver calls. No copy may cross two registrations."""
_MOST_THREADS = 8
_EXIT_SECONDS = 10.0
"""How many seconds interpreter exit waits for a thread that is inside the kernel or the driver."""
_LOOK_SECONDS = 0.1
"""How often a waiting thread looks for a noted interrupt."""

Register = Callable[[int, int], str | None]
"""(address, bytes) -> None, or the reason why the registration failed."""
Touch = Callable[[int, int, Callable[[int], bool]], str | None]
"""(address, bytes, progress) -> None, or the reason for a failure. Calls progress(bytes) after each step; stops when it returns False."""

_alive: WeakIdSet[Reservation] = WeakIdSet()


def cut_at(multiple: int, address: int, nbytes: int) -> list[tuple[int, int]]:
    """Split a run at every address that is a multiple. Returns (address, bytes) of the parts."""
    first = address // multiple + 1
    borders = [address, *range(first * multiple, address + nbytes, multiple), address + nbytes]
    return [(start, end - start) for start, end in itertools.pairwise(borders)]


class _Span:
    """The memory that is registered in one call."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.address = address
        self.nbytes = nbytes
        self.pieces = cut_at(PIECE_BYTES, address, nbytes)
        self.arrived = itertools.count(1)
        """Counts finished pieces. A step of the counter is one step for all threads, so exactly one thread sees the last number."""
        self.reason: str | None = None
        self.pinned: bool | None = None
        """Whether the span is pinned; None while undecided."""

    def meets(self, address: int, nbytes: int) -> bool:
        return self.address < address + nbytes and address < self.address + self.nbytes


class Reservation:
    """The memory behind a slab, and the progress of its preparation.

    The slab holds it, and so does a thread while it works on a piece. The memory is freed when the last of them lets go.

    Args:
        slab: when it dies, no further piece is begun.
        nbytes: bytes that count as taken from now on, in every check of available memory.

    Attributes:
        ready: set once every part is registered or refused.
        undo: functions to call before unmapping.
    """

    def __init__(self, slab: object, nbytes: int) -> None:
        self._dead: list[object] = []
        self._slab = weakref.ref(slab, self._dead.append)  # asking the reference could make a thread of the pool the slab's last user
        self.ready = threading.Event()
        self.undo: list[Callable[[], None]] = []
        self.untouched = [nbytes]
        """Bytes that are promised but not yet allocated, for each piece. Each entry has one writer."""
        self.spans: Sequence[_Span] = ()
        self._pieces: list[tuple[_Span, int, int]] = []
        self._let_go = itertools.count(1)
        _alive.add(self)

    def begin(self, address: int, touch: Touch | None, register: Register, unregister: Callable[[int], None] | None) -> None:
        """Hand the memory over to the threads.

        Args:
            touch: allocates memory; None if it is allocated already.
            unregister: undoes `register`; called for every successful registration, and for one that raised.
        """
        self._touch, self._register, self._unregister = touch, register, unregister
        self.ready.clear()
        self._let_go = itertools.count(1)
        self.spans = [_Span(*part) for part in cut_at(SPAN_BYTES, address, sum(self.untouched))]
        self._pieces = [(span, *piece) for span in self.spans for piece in span.pieces]
        self.untouched = [nbytes if touch else 0 for _, _, nbytes in self._pieces]
        _pool.submit(self, len(self._pieces))

    def unpin(self) -> None:
        """Undo every registration. Call it when `ready` is set; `begin` may be called again afterwards."""
        self.spans = ()
        while self.undo:
            self.undo[-1]()
            self.undo.pop()

    def wait(self) -> None:
        """Wait until every part is registered or refused."""
        while not self.ready.wait(_LOOK_SECONDS):
            interrupts.check()

    def countdown(self) -> Callable[[], None]:
        """A function for a thread to call when it no longer holds this object. The last call sets `ready`, so a slab that dies after
        that frees its memory at once."""
        return functools.partial(_count_down, self._let_go, len(self._pieces), self.ready)

    @property
    def is_wanted(self) -> bool:
        return not self._dead and not _pool.stopping.is_set()

    @property
    def reason(self) -> str | None:
        """The reason why a part is not registered; the first in address order."""
        return next((span.reason for span in self.spans if span.pinned is False), None)

    def bytes_where(self, pinned: bool) -> int:
        return sum(span.nbytes for span in self.spans if span.pinned is pinned)

    def prepare(self, index: int) -> None:
        """Touch one piece. With the last piece of a span, also register the span."""
        span, address, nbytes = self._pieces[index]

        def progress(done: int) -> bool:
            self.untouched[index] -= done
            return self.is_wanted

        try:
            reason = self._touch(address, nbytes, progress) if self._touch else None
        except Exception as exc:  # the reason is stored, because nobody could catch an exception of this thread
            reason = f"{type(exc).__name__}: {exc}"
        span.reason = reason or span.reason
        if next(span.arrived) == len(span.pieces) and self.is_wanted:
            self._pin(span)

    def _pin(self, span: _Span) -> None:
        if span.reason is None:
            undo = functools.partial(self._unregister or _nothing, span.address)
            self.undo.append(undo)  # first, because a registration that raises may still have happened
            try:
                span.reason = self._register(span.address, span.nbytes)
                if span.reason is not None:
                    self.undo.remove(undo)
            except Exception as exc:
                span.reason = f"{type(exc).__name__}: {exc}"
        span.pinned = span.reason is None


def _count_down(count: Iterator[int], last: int, ready: threading.Event) -> None:
    if next(count) == last and not _pool.stopping.is_set():
        ready.set()


def _nothing(address: int) -> None:
    """Stands in for a missing `unregister`."""


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
        for thread in [*self._threads]:
            if thread.is_alive():
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
    """Wait until every part of `[address, address + nbytes)` is registered or refused. Its slab moves to the front of the queue."""
    for reservation in [] if _pool.stopping.is_set() else _alive:  # at interpreter exit no thread works any more
        if not reservation.ready.is_set() and any(span.meets(address, nbytes) for span in reservation.spans):
            _pool.hurry(reservation)
            reservation.wait()
