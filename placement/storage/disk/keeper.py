"""The thread that keeps host copies within their limit: it writes those needed last to the disk, and reads ahead what is needed next."""

from __future__ import annotations

import atexit
import contextlib
import functools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from placement.core.errors import HostMemoryError, PlacementError
from placement.core.journal import logger
from placement.core.weak_set import WeakIdSet
from placement.devices.background import BackgroundThread
from placement.storage.disk.room import HostCopy, next_step
from placement.storage.disk.spill import Place, Spill

_EXIT_SECONDS = 10.0
"""How many seconds interpreter exit waits for the thread."""
_GLANCE_SECONDS = 1.0
"""How often a thread that waits looks whether the keeper's is alive."""

_alive: WeakIdSet[Keeper] = WeakIdSet()


class Arrangement(NamedTuple):
    """The host copies in the order in which they are needed."""

    order: Sequence[Spill] = ()
    """Soonest needed first."""
    fixed_bytes: int = 0
    """Host memory that counts, beside the bytes of `order`."""
    wait: Callable[[], None] | None = None
    """Waits until no copy to or from the device is under way that was started before. Called before anything leaves."""


class _Request:
    """Host copies that somebody waits for."""

    def __init__(self, spills: Iterable[Spill], room_bytes: int = 0) -> None:
        self.spills = tuple(spills)
        self.room_bytes = room_bytes
        self.done = threading.Event()
        self.error: Exception | None = None

    @property
    def lacking_bytes(self) -> int:
        """Host memory that it takes to serve this."""
        return self.room_bytes + sum(spill.nbytes - spill.held_bytes for spill in self.spills)


class Keeper:
    """Keeps the host copies of one manager within `limit_bytes`.

    A request goes before everything else. It makes room first, and goes over the limit where there is none to make: a phase transition
    does not fail for that.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._arrangement = Arrangement()
        self._settled: Arrangement | None = None
        """The last arrangement whose `wait` has returned."""
        self._is_held = True
        self._queue: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._awaiting_idle: deque[threading.Event] = deque()
        self._requests: deque[_Request] = deque()
        self._stopping = threading.Event()
        self._warned: set[str] = set()
        self.waited_seconds = 0.0
        """Total time that callers have waited for the disk, or for memory to be freed."""
        self._thread = BackgroundThread("placement-disk", self._work)
        _alive.add(self)
        self._thread.start()

    # --- other threads

    def arrange(self, arrangement: Arrangement) -> None:
        """Tell what is needed when. The keeper begins to work on it."""
        self._arrangement = arrangement  # before anything may leave under it
        for spill in arrangement.order:
            spill.is_stuck = spill.is_claimed = spill.is_used = False
        self._is_held = False
        self._queue.put(None)

    def hold(self) -> None:
        """Begin nothing before the next `arrange`, except for requests. What is under way goes on, and stops where it is claimed."""
        self._is_held = True

    def bring(self, *spills: Spill) -> None:
        """Wait until these host copies are in host memory.

        Raises:
            HostMemoryError: the machine has not enough memory for them now.
        """
        self._wait_for(_Request(spills))

    def make_room(self, nbytes: int) -> bool:
        """Wait until so many bytes fit within the limit. False if not enough can leave."""
        self._wait_for(_Request((), nbytes))
        return self.held_bytes + nbytes <= self._limit_bytes

    def wait_until_idle(self, timeout_seconds: float) -> bool:
        """Wait until everything is done that was asked for or arranged. False if that took longer."""
        is_idle = threading.Event()
        self._awaiting_idle.append(is_idle)
        self._queue.put(None)
        return is_idle.wait(timeout_seconds)

    def stop(self) -> None:
        """Stop the thread. Idempotent."""
        self._stopping.set()
        self._queue.put(None)
        self._thread.join(_EXIT_SECONDS)

    def _wait_for(self, request: _Request) -> None:
        self._queue.put(request)
        began = time.monotonic()
        try:
            while not request.done.wait(_GLANCE_SECONDS):
                if not self._thread.is_alive():
                    raise PlacementError("host copies are on disk, and the thread that reads them has ended: the process is about to end")
        finally:
            self.waited_seconds += time.monotonic() - began
        if request.error is not None:
            raise request.error

    # --- the keeper's thread

    def _work(self) -> None:
        while not self._stopping.is_set():
            try:
                is_busy = self._serve_next() or self._step()
            except Exception:  # whatever it was, requests must be served
                logger.exception("the disk tier met an error, and goes on with the next phase transition")
                self._is_held, is_busy = True, False
            self._take_in(waits=not is_busy)

    def _take_in(self, *, waits: bool) -> None:
        """Take in all requests that have been made.

        Args:
            waits: for one, or for a new arrangement, if there is none.
        """
        waits = waits and not self._requests
        while waits and self._queue.empty() and self._awaiting_idle:
            self._awaiting_idle.popleft().set()
        with contextlib.suppress(queue.Empty):
            while True:
                request = self._queue.get(block=waits)
                waits = False
                if request is not None:
                    self._requests.append(request)

    def _serve_next(self) -> bool:
        if not self._requests:
            return False
        self._serve(self._requests.popleft())
        return True

    def _serve(self, request: _Request) -> None:
        try:
            while self.held_bytes + request.lacking_bytes > self._limit_bytes and self._evict():
                pass
            if request.spills and self.held_bytes + request.lacking_bytes > self._limit_bytes:
                self._warn("limit", f"what is needed at once does not fit host_limit_bytes ({self._limit_bytes:,}), and goes over it")
            for spill in request.spills:
                spill.come(self._goes_on)
        except Exception as error:
            request.error = error
        finally:
            request.done.set()

    def _step(self) -> bool:
        """Do the next thing of the arrangement. False if there is nothing to do."""
        if self._is_held:
            return False
        arrangement = self._arrangement
        known = [spill for spill in arrangement.order if spill.is_here or not spill.is_stuck]
        copies = [HostCopy(spill.nbytes, spill.is_here, spill.may_leave) for spill in known]
        step = next_step(copies, arrangement.fixed_bytes, self._limit_bytes)
        if step is None:
            return False
        spill = known[step.position]
        if step.what == "leave":
            self._leave(spill)
            return True
        try:
            return spill.come(self._goes_on)
        except HostMemoryError as error:
            spill.is_stuck = True
            self._warn("memory", f"cannot read ahead: {error}")
        return True

    def _evict(self) -> bool:
        """Have the host copy leave that is needed last. False if none can."""
        for spill in reversed(self._arrangement.order):
            if spill.place is Place.MEMORY and spill.may_leave and spill.nbytes:
                self._leave(spill)
                return True
        return False

    def _leave(self, spill: Spill) -> None:
        try:
            has_left = spill.leave(functools.partial(self._goes_on, spill), self._settle)
        except Exception as error:  # the disk is full or broken, or the device is
            has_left = False
            self._warn("spill", f"a host copy stays in host memory, which goes over host_limit_bytes: it cannot leave: {error}")
        spill.is_stuck = not has_left  # whatever stopped it now would stop it again

    def _settle(self) -> None:
        arrangement = self._arrangement
        if self._settled is not arrangement and arrangement.wait is not None:
            arrangement.wait()
        self._settled = arrangement

    def _goes_on(self, leaving: Spill | None = None) -> bool:
        """Between two blocks: serve requests that need no room, and see whether this one is wanted."""
        self._take_in(waits=False)
        for request in [*self._requests]:
            in_transit = any(spill.place in (Place.COMING, Place.LEAVING) for spill in request.spills)
            if not in_transit and self.held_bytes + request.lacking_bytes <= self._limit_bytes:
                self._requests.remove(request)
                self._serve(request)
        return not self._stopping.is_set() and not (leaving is not None and leaving.is_claimed)

    @property
    def held_bytes(self) -> int:
        """Host memory of everything that is arranged."""
        arrangement = self._arrangement
        return arrangement.fixed_bytes + sum(spill.held_bytes for spill in arrangement.order)

    def _warn(self, what: str, text: str) -> None:
        """Log a warning, once of each kind."""
        if what not in self._warned:
            self._warned.add(what)
            logger.warning("disk tier: %s", text)


def _stop_all() -> None:
    """At interpreter exit: a thread that came back from the kernel later would crash the process."""
    for keeper in _alive:
        keeper.stop()


atexit.register(_stop_all)
