"""Makes host memory ready in the background: touched piece by piece and registered, by a few threads for the whole process.

A slab can be used from the first moment: touching leaves written bytes alone. Only copies by the driver wait, in
`wait_until_ready`, until its registration is over. That is faster than copying from pageable memory that nobody has touched
(one thread's page faults), and it keeps out what the driver does not allow or does not document: a copy that spans a
registered and an unregistered part, and a registration of bytes that a copy is staging just then.
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

from placement.core.weak_set import WeakIdSet

PIECE_BYTES = 128 << 20
"""What a thread takes on at a time. Pieces and spans end at multiples of their size, as absolute addresses."""
SPAN_BYTES = 1 << 30
"""Longest single registration: a longer one keeps everybody else out of the driver. A copy must not cross two of them."""
_MOST_THREADS = 8
_EXIT_SECONDS = 10.0
"""How long interpreter exit waits for a thread that is inside the kernel or the driver."""

Register = Callable[[int, int], str | None]
"""(address, bytes) -> None, or the reason why it could not."""
Touch = Callable[[int, int, Callable[[int], bool]], str | None]
"""(address, bytes, progress) -> None, or the reason why not. Calls progress(bytes) after each step, and stops when that is False."""

_alive: WeakIdSet[Reservation] = WeakIdSet()


def cut_at(multiple: int, address: int, nbytes: int) -> list[tuple[int, int]]:
    """(address, bytes) of the parts of a run that is cut wherever an address is a multiple."""
    first = address // multiple + 1
    borders = [address, *range(first * multiple, address + nbytes, multiple), address + nbytes]
    return [(start, end - start) for start, end in itertools.pairwise(borders)]


class _Span:
    """What is registered in one call."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.address = address
        self.nbytes = nbytes
        self.pieces = cut_at(PIECE_BYTES, address, nbytes)
        self.arrived = itertools.count(1)
        """Counts pieces; a step of it cannot be interrupted, so exactly one thread sees the last number."""
        self.reason: str | None = None
        self.pinned: bool | None = None
        """None: not decided yet."""

    def meets(self, address: int, nbytes: int) -> bool:
        return self.address < address + nbytes and address < self.address + self.nbytes


class Reservation:
    """The memory behind a slab, and how far it is ready.

    The slab holds it, and so does a thread while it works on a piece: the memory goes when the last of them has let go.

    Args:
        slab: when it dies, no further piece is begun.
        nbytes: promised from now on: whoever asks for memory is told that it is taken.

    Attributes:
        ready: set once every part is registered or refused.
        undo: what to call before unmapping.
    """

    def __init__(self, slab: object, nbytes: int) -> None:
        self._dead: list[object] = []
        self._slab = weakref.ref(slab, self._dead.append)  # plain C: no interrupt can cut it short
        self.ready = threading.Event()
        self.undo: list[Callable[[], None]] = []
        self.untouched = [nbytes]
        """Bytes promised and not taken from the machine yet, by piece. Each entry has one writer."""
        self.spans: Sequence[_Span] = ()
        self._pieces: list[tuple[_Span, int, int]] = []
        self._let_go = itertools.count(1)
        _alive.add(self)

    def begin(self, address: int, touch: Touch | None, register: Register, unregister: Callable[[int], None] | None) -> None:
        """Hand the memory over to the threads.

        Args:
            touch: takes memory from the machine; None: it is taken already.
            unregister: undoes `register`; called for what was registered, and for what raised in between.
        """
        self._touch, self._register, self._unregister = touch, register, unregister
        self.spans = [_Span(*part) for part in cut_at(SPAN_BYTES, address, sum(self.untouched))]
        self._pieces = [(span, *piece) for span in self.spans for piece in span.pieces]
        self.untouched = [nbytes if touch else 0 for _, _, nbytes in self._pieces]
        _pool.submit(self, len(self._pieces))

    def countdown(self) -> Callable[[], None]:
        """For a thread to call when it holds this object no more. The last call for a piece sets `ready`, so that a slab that
        dies after that gives its memory back at once."""
        return functools.partial(_count_down, self._let_go, len(self._pieces), self.ready)

    @property
    def is_wanted(self) -> bool:
        return not self._dead and not _pool.stopping.is_set()

    @property
    def reason(self) -> str | None:
        """Why something is not registered: the first in address order."""
        return next((span.reason for span in self.spans if span.pinned is False), None)

    def bytes_where(self, pinned: bool) -> int:
        return sum(span.nbytes for span in self.spans if span.pinned is pinned)

    def prepare(self, index: int) -> None:
        """Touch one piece; with the last piece of a span, register the span."""
        span, address, nbytes = self._pieces[index]

        def progress(done: int) -> bool:
            self.untouched[index] -= done
            return self.is_wanted

        try:
            reason = self._touch(address, nbytes, progress) if self._touch else None
        except BaseException as exc:  # the reason is reported; nobody above this thread could be told
            reason = f"{type(exc).__name__}: {exc}"
        span.reason = reason or span.reason
        if next(span.arrived) == len(span.pieces) and self.is_wanted:
            self._pin(span)

    def _pin(self, span: _Span) -> None:
        if span.reason is None:
            undo = functools.partial(self._unregister or _nothing, span.address)
            self.undo.append(undo)  # first, because a registration that raises may have been made
            try:
                span.reason = self._register(span.address, span.nbytes)
                if span.reason is not None:
                    self.undo.remove(undo)
            except BaseException as exc:
                span.reason = f"{type(exc).__name__}: {exc}"
        span.pinned = span.reason is None


def _count_down(count: Iterator[int], last: int, ready: threading.Event) -> None:
    if next(count) == last and not _pool.stopping.is_set():
        ready.set()


def _nothing(address: int) -> None:
    """For a `register` that needs no undoing."""


class _Pool:
    """The threads. They live while there is work: an idle process has none, and a forked child begins with none."""

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
            # One whose start was interrupted is not alive, and does not count.
            self._threads = {thread for thread in self._threads if thread.is_alive()}
            fresh = [threading.Thread(target=self._work, name="placement-host", daemon=True) for _ in range(most - len(self._threads))]
            self._threads.update(fresh)
            for thread in fresh:  # they begin when the lock is free: a thread's stack cannot be mapped while another one touches
                thread.start()

    def hurry(self, reservation: Reservation) -> None:
        """Somebody waits for it: before everything else."""
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
            del job  # if the slab is dead, its memory goes now
            count_down()

    def stop(self) -> None:
        """At interpreter exit: a thread that comes back from the kernel later than that would take the process down."""
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
    """Bytes that living slabs of this process will take from the machine and have not taken yet."""
    return sum(sum(reservation.untouched) for reservation in _alive)


def wait_until_ready(address: int, nbytes: int) -> None:
    """Wait until nothing in `[address, address + nbytes)` is still to be registered; its slab comes first from now on."""
    for reservation in [] if _pool.stopping.is_set() else _alive:  # at interpreter exit nobody would come
        if not reservation.ready.is_set() and any(span.meets(address, nbytes) for span in reservation.spans):
            _pool.hurry(reservation)
            reservation.ready.wait()
