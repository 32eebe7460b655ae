"""Host copies that leave host memory for files on a local disk, and come back before anybody needs
them.

Whoever uses a host copy counts the use, and then looks where it is; whoever moves it looks for
uses, and says that it is away, in one step under a lock. Another lock is held for the whole of a
move: by the keeper's thread, or by who cannot wait for it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import enum
import errno
import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from placement.core import interrupts
from placement.core.errors import HostMemoryError, IntegrityError
from placement.core.interrupts import BackgroundThread, WeakIdSet
from placement.core.journal import HandleCounters, logger
from placement.devices.host.disk_file import DiskFile, GoesOn
from placement.devices.host.slab import Slab

_NAN = 0xFF
NO_OTHER_COPY = (
    "and no other copy of them exists. The handle stays off the device: unregister it, load a "
    "checkpoint into the object, and register it again."
)
# errors of a read that tell of the kernel's memory, and nothing of the file
_FOR_NOW = (errno.ENOMEM, errno.EAGAIN)
_EXIT_SECONDS = 10.0  # how many seconds interpreter exit waits for the thread
_GLANCE_SECONDS = 0.1  # how often who waits looks for a Ctrl-C


class Place(enum.Enum):
    """Where the bytes of a host copy are."""

    MEMORY = enum.auto()
    DISK = enum.auto()
    NOWHERE = enum.auto()  # only on the device, whose next offload writes all of them


class Spill:
    """The host copy in one slab, of which one range or several have a part, while it may be away
    from host memory.
    `slab`, `holder`: kept alive by others alone. The holder is an `AdoptedStorage`.
    `directory`: the folder of files; None: it leaves only where it `drops`."""

    def __init__(
        self,
        slab: Slab,
        holder: Any,
        name: str,
        directory: str | None,
        counters: HandleCounters,
        keeper: Keeper,
    ) -> None:
        self.place = Place.MEMORY
        # whether somebody may use its addresses until the keeper is told anew what is needed. If
        # so, it stays.
        self.is_claimed = False
        self.is_used = False  # whether anybody has used it since then
        # whether nothing but a claim or a tensor over it speaks against leaving
        self.can_leave = False
        # whether the device has the bytes, and its next offload copies all of them: nothing need be
        # written
        self.drops = False
        # whether it is to leave although there is room for it, because nobody is expected to need
        # it
        self.is_idle = False
        self.lost: str | None = None  # which values are lost, and why; None while none is
        self._slab, self._holder = weakref.ref(slab), weakref.ref(holder)
        self._name = name
        self._directory = directory
        self._counters = counters
        self._keeper = keeper
        self._num_uses = 0
        # kept while the bytes are in host memory: what does not change need not be written again
        self._file: DiskFile | None = None
        slab.before_use, slab.on_claim = self._use, self.claim

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that it takes while it is there."""
        return 0 if (slab := self._slab()) is None else slab.nbytes

    @property
    def held_bytes(self) -> int:
        return 0 if (slab := self._slab()) is None else slab.held_bytes

    @property
    def disk_bytes(self) -> int:
        return 0 if (file := self._file) is None else file.nbytes

    @property
    def is_here(self) -> bool:
        return self.place is Place.MEMORY

    @property
    def may_leave(self) -> bool:
        return self.is_here and self.can_leave and not self.is_claimed

    def claim(self) -> None:
        """Have the bytes in host memory, and keep them there until the keeper is told anew. Waits
        for the disk if it must. Any thread."""
        self.is_claimed = True
        self._use()

    def claim_if_here(self) -> bool:
        """Claim the bytes without waiting for them. Returns whether they are here."""
        self.is_claimed = True
        return self._note_use()

    def _use(self) -> None:
        """Have the bytes in host memory, where they stay as long as a tensor over them lives, which
        must be there already."""
        if not self._note_use():
            self._keeper.bring(self)

    def _note_use(self) -> bool:
        with self._keeper.lock:
            self._num_uses += 1
            self.is_used = True
            return self.is_here

    def require_values(self) -> None:
        if self.lost is not None:
            raise IntegrityError(self.lost)

    def leave(self, goes_on: GoesOn, settle: Callable[[], object]) -> bool:
        """Free the host memory. Returns False if somebody wants the bytes, or it was stopped. Then,
        and if it raises, they are in host memory.
        `settle`: waits until no copy of the device uses the host copy."""
        slab, drops, num_uses = self._slab(), self.drops, self._num_uses
        if slab is None or not self.may_leave or slab.has_views:
            return False
        settle()
        while not slab.ready.wait(_GLANCE_SECONDS):
            interrupts.check()
        is_written = drops or self._write(slab, goes_on)
        with self._keeper.lock:
            is_used = num_uses != self._num_uses
            if is_used and self._file is not None:
                self._file.forget()  # the bytes may have changed while they were written
            if is_used or not is_written:
                return False
            self.place = Place.NOWHERE if drops else Place.DISK
            if drops:
                self._forget_prints()
        try:
            self._release(slab)
        except BaseException:
            self.place = Place.MEMORY
            raise
        return True

    def come(self, goes_on: GoesOn) -> bool:
        """Bring the bytes back into host memory. Returns False if it was stopped. What cannot be
        read as it was written is lost.
        Raises HostMemoryError: there is not enough memory now. The bytes are where they were."""
        slab = self._slab()
        if slab is not None and not self.is_here:
            if not self._renew(
                slab,
                None
                if self.place is Place.NOWHERE
                else functools.partial(self._read, slab, goes_on),
            ):
                return False
            self.place = Place.MEMORY
        return True

    # A forecast has no memory and no file, and overrides these three.

    def _release(self, slab: Slab) -> None:
        slab.release()

    def _renew(self, slab: Slab, fill: Callable[[], bool] | None) -> bool:
        return slab.renew(fill)

    def _new_file(self, slab: Slab) -> DiskFile:
        assert self._directory is not None
        return DiskFile(self._directory, f"{self._name}-{id(self):x}.spill", slab.nbytes)

    def _write(self, slab: Slab, goes_on: GoesOn) -> bool:
        if self._file is None:
            self._file = self._new_file(slab)
        try:
            written_bytes, is_whole = self._file.write(slab.address, goes_on)
        except BaseException:
            self._file = None  # and its space is given back
            raise
        self._counters.spilled_bytes += written_bytes
        return is_whole

    def _read(self, slab: Slab, goes_on: GoesOn) -> bool:
        file = self._file
        assert file is not None
        try:
            damaged = file.read(slab.address, goes_on)
        except OSError as error:
            if error.errno in _FOR_NOW:
                raise HostMemoryError(
                    f"the host copy of {self._name!r} cannot be read from the disk now: "
                    f"{error.strerror}"
                ) from error
            self._lost(
                slab,
                file,
                range(file.num_blocks),
                f"could not be read from {file.path}: {error.strerror}",
            )
            return True
        if damaged is None:
            return False
        self._counters.disk_read_bytes += slab.nbytes
        if damaged:
            self._lost(
                slab,
                file,
                damaged,
                f"came back from {file.path} with other bytes than were written there",
            )
        return True

    def _lost(self, slab: Slab, file: DiskFile, chunks: Sequence[int], what: str) -> None:
        for index in chunks:  # NaN, as offloaded tensors read it, rather than half of the bytes
            offset, nbytes = file.block(index)
            ctypes.memset(slab.address + offset, _NAN, nbytes)
        self.lost = (
            f"{chunk_words(chunks, file.num_blocks)} of the host copy of {self._name!r} {what}, "
            f"{NO_OTHER_COPY}"
        )
        self._file = None
        self._forget_prints()
        if (holder := self._holder()) is not None:
            holder.lost = self.lost
        logger.error("%s", self.lost)

    def _forget_prints(self) -> None:
        holder = self._holder()
        for r in () if holder is None else holder.ranges:
            if r.spill is self:
                r.pages.prints = None


def chunk_words(chunks: Sequence[int], num_chunks: int) -> str:
    numbers = ", ".join(map(str, chunks[:8])) + (", ..." if len(chunks) > 8 else "")
    return f"chunk{'s' if len(chunks) > 1 else ''} {numbers} of {num_chunks}"


class HostCopy(NamedTuple):
    """The facts about one host copy that decide its place."""

    nbytes: int
    is_here: bool  # whether it is in host memory now
    can_leave: bool = True
    is_idle: bool = False  # whether it leaves although there is room for it


def next_step(copies: Sequence[HostCopy], fixed_bytes: int, limit_bytes: int) -> int | None:
    """The position of the host copy, among `copies` (soonest needed first), that leaves or comes
    next; None when each is where it should be, as far as the limit allows. Copies leave only where
    the limit is exceeded, where one that is needed sooner takes their place, or where they are
    idle. `fixed_bytes` is host memory beside them that counts and cannot leave."""
    held = fixed_bytes + sum(copy.nbytes for copy in copies if copy.is_here)
    leaving = [
        index
        for index, copy in enumerate(copies)
        if copy.is_here and copy.can_leave and copy.nbytes
    ]
    if held > limit_bytes:
        return leaving[-1] if leaving else None
    idle = [index for index in leaving if copies[index].is_idle]
    if idle:
        return idle[-1]
    for index, copy in enumerate(copies):
        lacking = held + copy.nbytes - limit_bytes
        if copy.is_idle or copy.is_here:
            continue
        if lacking <= 0:
            return index
        if sum(copies[later].nbytes for later in leaving if later > index) >= lacking:
            return leaving[-1]
    return None


class Keeper:
    """Keeps the host copies of one manager within `limit_bytes`, and has a thread that reads ahead
    what is needed next. Who waits for a host copy goes before that. Others make room for it first,
    and it goes over the limit where there is none to make: a phase transition does not fail for
    that."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.lock = threading.RLock()  # held for a moment. No other is taken meanwhile.
        self._changed = threading.Condition(self.lock)
        self._disk = threading.RLock()  # held while a host copy moves
        self._order: Sequence[Spill] = ()
        self._fixed_bytes = 0
        self._wait: Callable[[], object] = lambda: None
        # the host copies of each caller that has the disk, or waits for it
        self._waiting: list[Sequence[Spill]] = []
        self._is_paused = True
        self._is_due = False  # whether there may be something to do for what was arranged
        self._is_stopping = False
        self._warned: set[str] = set()
        # total time that callers have waited for the disk, or for memory to be freed
        self.waited_seconds = 0.0
        self._thread = BackgroundThread("placement-disk", self._work)
        _alive.add(self)
        self._thread.start()

    def arrange(self, order: Sequence[Spill], fixed_bytes: int, wait: Callable[[], object]) -> None:
        """Tell what is needed when. The thread begins to work on it.
        `order`: soonest needed first.
        `fixed_bytes`: host memory that counts, beside the bytes of `order`.
        `wait`: waits until no copy to or from the device is under way that was started before.
        Called before anything leaves."""
        with self._changed:
            self._order, self._fixed_bytes, self._wait = order, fixed_bytes, wait
            for spill in order:
                spill.is_claimed = spill.is_used = False
            self._is_paused, self._is_due = False, True
            self._changed.notify()

    def pause(self) -> None:
        """Begin nothing in the background before the next `arrange`. What is under way goes on, and
        stops where it is claimed."""
        self._is_paused = True

    def bring(self, *spills: Spill) -> None:
        """Have these host copies in host memory. Raises HostMemoryError: the machine has not enough
        memory for them now."""
        with self._in_front(spills):
            if not self._have_room(sum(spill.nbytes - spill.held_bytes for spill in spills)):
                self._warn(
                    "limit",
                    "what is needed at once does not fit host_limit_bytes "
                    f"({self._limit_bytes:,}), and goes over it",
                )
            began, given_back = (
                time.monotonic(),
                sum(spill.nbytes for spill in spills if spill.place is Place.NOWHERE),
            )
            for spill in spills:
                spill.come(_unless_interrupted)
            if given_back:
                logger.info(
                    "waited %.3f s for %d bytes of host memory that had been given back",
                    time.monotonic() - began,
                    given_back,
                )

    def make_room(self, nbytes: int) -> bool:
        """Make room for so many bytes within the limit. False if not enough can leave."""
        with self._in_front(()):
            return self._have_room(nbytes)

    @property
    def held_bytes(self) -> int:
        """Host memory of everything that is arranged."""
        with self.lock:
            return self._fixed_bytes + sum(spill.held_bytes for spill in self._order)

    def stop(self) -> None:
        # it is not in a forked child, in which nobody would give the lock back
        if self._thread.is_alive():
            with self._changed:
                self._is_stopping = True
                self._changed.notify()
            self._thread.join(_EXIT_SECONDS)

    @contextlib.contextmanager
    def _in_front(self, spills: Sequence[Spill]) -> Iterator[None]:
        """Have the disk, before the thread goes on with others than these."""
        began = time.monotonic()
        with interrupts.deferred():
            self._waiting.append(spills)
            try:
                while not self._disk.acquire(timeout=_GLANCE_SECONDS):
                    interrupts.check()
                try:
                    yield
                finally:
                    self._disk.release()
            finally:
                with self._changed:
                    self._waiting.remove(spills)
                    self.waited_seconds += time.monotonic() - began
                    self._changed.notify()

    def _have_room(self, nbytes: int) -> bool:
        """Have host copies leave, those needed last first, until so many bytes fit. False if not
        enough can."""
        for spill in reversed(self._order):
            if (
                spill.may_leave
                and not self._is_stopping
                and self.held_bytes + nbytes > self._limit_bytes
            ):
                self._leave(spill, _unless_interrupted)
        return self.held_bytes + nbytes <= self._limit_bytes

    def _leave(self, spill: Spill, goes_on: GoesOn) -> bool:
        try:
            return spill.leave(lambda: goes_on() and not spill.is_claimed, self._wait)
        except Exception as error:  # the disk is full or broken, or the device is
            self._warn(
                "spill",
                "a host copy stays in host memory, which goes over host_limit_bytes: it cannot "
                f"leave: {error}",
            )
            return False

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._is_stopping or (self._is_due and not self._waiting)
                )
                if self._is_stopping:
                    return
            with self._disk:
                self._is_due = False  # an arrangement that is made from now on sets it again
                try:
                    if self._step():
                        self._is_due = True
                except Exception:  # whatever it was, others must get the disk
                    logger.exception(
                        "the disk tier met an error, and goes on with the next phase transition"
                    )
                    self._is_paused = True

    def _step(self) -> bool:
        with self.lock:
            copies = [
                HostCopy(spill.nbytes, spill.is_here, spill.may_leave, spill.is_idle)
                for spill in self._order
            ]
            position = (
                None if self._is_paused else next_step(copies, self._fixed_bytes, self._limit_bytes)
            )
            if position is None:
                return False
            spill = self._order[position]

        def goes_on() -> bool:
            return not self._is_stopping and all(spill in each for each in [*self._waiting])

        if not spill.is_here:
            try:
                spill.come(goes_on)
            except HostMemoryError as error:
                self._is_paused = True
                self._warn("memory", f"cannot read ahead: {error}")
        elif not self._leave(spill, goes_on) and goes_on():
            # until the next arrangement: whatever stopped it now would stop it again
            spill.can_leave = False
        return True

    def _warn(self, what: str, text: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            logger.warning("disk tier: %s", text)


def _unless_interrupted() -> bool:
    """Go on, unless a Ctrl-C has come: then KeyboardInterrupt is raised."""
    interrupts.check()
    return True


_alive: WeakIdSet[Keeper] = WeakIdSet()


@atexit.register
def _stop_all() -> None:
    """At interpreter exit: a thread that came back from the kernel later would crash the
    process."""
    for keeper in _alive:
        keeper.stop()
