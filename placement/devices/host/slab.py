"""Host memory: mappings that belong to an owner and to this process alone, slabs of exact size in
them, and what the machine has left.

Mappings are made through the C library: Python's own `mmap` can be closed under a live tensor, and
the next read would crash.

A forked child gets none of the memory, because a child that touches it should crash instead of
reading old bytes. It does keep the addresses taken: what it inherits names values by their
addresses, so memory of its own there would be mistaken for the parent's.

A slab lives as long as the last tensor in it. A `SlabPart` is a piece of a slab that was reserved
as a whole, for several ranges.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import itertools
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from placement.core import interrupts
from placement.core.errors import HostMemoryError
from placement.core.interrupts import deferred
from placement.core.weak import WeakIdSet
from placement.devices.base import check_span, round_up, tensor_at
from placement.devices.host.threads import POOL
from placement.devices.memory import HostSlab

PAGE = mmap.PAGESIZE
NO_ACCESS = 0
READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
MAP_FAILED = ctypes.c_void_p(-1).value
MADV_POPULATE_WRITE = 23
MADV_DONTNEED = 4
MADV_FREE = 8
# for every mapping: a forked child that touches it crashes instead of reading old bytes
MADV_DONTFORK = 10
MADV_HUGEPAGE = 14
HUGE_PAGE = 2 << 20
# free blocks of this order and above are whole huge pages: 2**9 pages, which are 2 MiB with pages
# of 4 KiB
_HUGE_ORDER = 9
# the bytes touched in one call. During it no other thread of the process can map or unmap memory.
_TOUCH_STEP = 32 << 20
PIECE_BYTES = 128 << 20  # the unit of work of a background thread
_LOOK_SECONDS = 0.1  # how often a waiting thread looks for a noted interrupt
MAP_NORESERVE = 0x4000
# only at these addresses, and only if nothing is there. A kernel before 4.17 takes the address as a
# hint.
_MAP_FIXED_NOREPLACE = 0x100000

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
libc.mmap.restype = ctypes.c_void_p
libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
libc.mremap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_void_p,
)
libc.mremap.restype = ctypes.c_void_p

Place = Callable[[int, int], object]  # (address, bytes) -> ignored
Pin = Callable[[int, int], str | None]  # (address, bytes) -> None, or the reason why it failed
Touch = Callable[[int, int, Callable[[int], bool]], str | None]
"""(address, bytes, progress) -> None, or the reason for a failure. Calls progress(bytes) after each
step; stops when it returns False."""

# bytes by first address: the mappings of this process, which its children will not have
_mapped: dict[int, int] = {}


_Undo = list[Callable[[], None]]  # functions to call before memory is unmapped


def map_for_life(
    owner: object,
    nbytes: int,
    protection: int,
    flags: int,
    undo: _Undo | None = None,
    *,
    file: int = -1,
) -> int:
    """Map `nbytes` at new addresses, and unmap them when `owner` dies: only in this process, and
    not at interpreter exit.

    Args:
        undo: functions to call before unmapping; the list is read when the owner dies.
        file: the descriptor of a file to map from its beginning, may be closed afterwards; -1:
            anonymous memory.

    Raises:
        OSError: the kernel refused.
    """
    address: int = libc.mmap(None, nbytes, protection, flags, file, 0)
    if address == MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    if undo is None:
        undo = []
    finalizer = weakref.finalize(owner, _unmap, address, nbytes, undo, os.getpid())
    finalizer.atexit = False
    _mapped[address] = nbytes
    libc.madvise(address, nbytes, MADV_DONTFORK)
    return address


def _unmap(address: int, nbytes: int, undo: _Undo, pid: int) -> None:
    if os.getpid() != pid:  # a forked child never had the mapping
        return
    with deferred():
        try:
            for step in undo:
                step()
        finally:
            # first: another thread may map memory there as soon as it is free
            _mapped.pop(address, None)
            libc.munmap(address, nbytes)


def _take_addresses() -> None:
    """In a forked child: let nothing else get the addresses of the parent's mappings."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE | _MAP_FIXED_NOREPLACE
    for address, nbytes in _mapped.items():
        taken = libc.mmap(address, nbytes, NO_ACCESS, flags, -1, 0)
        if taken not in (address, MAP_FAILED):
            libc.munmap(taken, nbytes)
    _mapped.clear()  # a child of this child inherits these mappings


os.register_at_fork(after_in_child=_take_addresses)


def available_bytes() -> int:
    """Bytes that this process can still allocate: the machine's available memory, or the bytes that
    its control groups leave if these are less."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    meminfo = dict(line.split(":", 1) for line in lines)
    total = int(meminfo["MemTotal"].split()[0]) << 10
    available = int(meminfo["MemAvailable"].split()[0]) << 10
    return max(0, min([available, *left_in_cgroups(below=total)]))


def check_available(nbytes: int, of_what: str = "", promised_to_it: int = 0) -> None:
    """Raise HostMemoryError unless there are `nbytes` beside the memory that other slabs will still
    allocate: touching more would kill the process."""
    promised = promised_bytes() - promised_to_it
    available = max(0, available_bytes() - promised)
    if nbytes > available:
        raise HostMemoryError(
            f"host memory: asked for {nbytes:,} bytes{of_what}, {available:,} available, "
            f"{promised:,} more promised to other slabs"
        )


def left_in_cgroups(
    membership: Path = Path("/proc/self/cgroup"),
    root: Path = Path("/sys/fs/cgroup"),
    below: int = sys.maxsize,
) -> Iterator[int]:
    """The bytes left by each control group of this process (versions 1 and 2). Limits of at least
    `below` bytes are no limits."""
    if not membership.exists():
        return
    for line in membership.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit, usage = root, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base, limit, usage = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        group = base / path.lstrip("/")
        for folder in (group, *group.parents):
            value = _read(folder / limit)
            # without a limit the value is "max", or a large number in version 1
            if value.isdigit() and int(value) < below:
                yield int(value) - int(_read(folder / usage) or 0) + _reclaimable(folder)
            if folder == base:
                break


def free_huge_bytes(buddyinfo: Path = Path("/proc/buddyinfo")) -> int:
    """Bytes that the kernel has free in blocks of whole huge pages; 0 where it does not report
    them."""
    total = 0
    # Node 0, zone   Normal   4   1   0 ...: free blocks of each order
    for line in _read(buddyinfo).splitlines():
        counts = line.partition("zone")[2].split()[1:]
        for order, count in enumerate(counts):
            if order >= _HUGE_ORDER:
                total += int(count) << order
    return total * mmap.PAGESIZE


def _reclaimable(group: Path) -> int:
    """Bytes of cached files. They count as used, but are dropped when memory is needed."""
    stat = dict(line.split() for line in _read(group / "memory.stat").splitlines())
    nbytes = 0
    for name in ("active_file", "inactive_file"):
        # version 1: `total_` includes child groups
        nbytes += int(stat.get(f"total_{name}", stat.get(name, 0)))
    return nbytes


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # absent in this version of control groups, or hidden inside a container
        return ""


# --- memory that is prepared in the background
#
# A few threads touch it piece by piece, and the last one has the driver pin it, in one call: the
# driver refuses a copy across memory of two calls ("invalid argument"), and a copy may be of any
# part of a slab. The driver's other calls wait for this one, about 1 s for 16 GB (H100), once.
#
# A slab can be used at once, because touching does not change written bytes. Only placement's own
# copies wait, in `wait_until_ready`, until the memory is pinned: faster than a copy from untouched
# pageable memory, which pays for page faults on one thread.

_alive: WeakIdSet[Reservation] = WeakIdSet()
os.register_at_fork(after_in_child=_alive.clear)


class Reservation:
    """The memory behind a slab, and the progress of its preparation. The slab holds it, and so does
    a thread while it works on a piece. The memory is freed when the last of them lets go. When the
    slab dies, no further piece is begun. Its bytes count as taken from now on, in every check of
    available memory."""

    def __init__(self, slab: object, nbytes: int) -> None:
        self._dead: list[object] = []
        # asking the reference could make a thread of the pool the slab's last user
        self._slab = weakref.ref(slab, self._dead.append)
        self.ready = threading.Event()  # set once it is pinned or refused
        self.undo: _Undo = []
        # bytes that are promised but not yet allocated, for each piece. Each entry has one writer.
        self.untouched = [nbytes]
        self.pinned: bool | None = None  # whether it is pinned; None while that is undecided
        self.reason: str | None = None  # why it is not
        self._address = self._nbytes = 0
        _alive.add(self)

    def begin(
        self,
        address: int,
        nbytes: int,
        touch: Touch | None,
        pin: Pin,
        unpin: Callable[[int], None] | None,
    ) -> None:
        """Hand the memory over to the threads.

        Args:
            touch: allocates memory; None if it is allocated already.
            unpin: undoes `pin`; called where that has succeeded or raised.
        """
        self._touch = touch
        self._pin_by = pin
        self._unpin_by = unpin
        self._address = address
        self._nbytes = nbytes
        self.untouched = []
        for start in range(0, nbytes, PIECE_BYTES):
            self.untouched.append(min(PIECE_BYTES, nbytes - start) if touch else 0)
        # A step of a counter is one step for all threads, so exactly one thread sees the last
        # number.
        self._touched = itertools.count(1)
        self._let_go = itertools.count(1)
        POOL.submit(self, len(self.untouched))

    def wait(self) -> None:
        """Wait until it is pinned or refused."""
        while not self.ready.wait(_LOOK_SECONDS):
            interrupts.check()

    def countdown(self) -> Callable[[], None]:
        """A function for a thread to call when it no longer holds this object. The last call sets
        `ready`: the slab can die at once."""
        return functools.partial(_count_down, self._let_go, len(self.untouched), self.ready)

    def overlaps(self, address: int, nbytes: int) -> bool:
        ends_before = self._address + self._nbytes <= address
        return not ends_before and self._address < address + nbytes

    @property
    def is_wanted(self) -> bool:
        return not self._dead and not POOL.stopping.is_set()

    def prepare(self, index: int) -> None:
        """Touch one piece. After the last one, pin the whole."""
        start = index * PIECE_BYTES
        nbytes = min(PIECE_BYTES, self._nbytes - start)

        def progress(done: int) -> bool:
            self.untouched[index] -= done
            return self.is_wanted

        try:
            if self._touch:
                reason = self._touch(self._address + start, nbytes, progress)
                self.reason = reason or self.reason
        # the reason is stored, because no caller could catch an exception of this thread
        except Exception as exc:
            self.reason = f"{type(exc).__name__}: {exc}"
        if next(self._touched) == len(self.untouched) and self.is_wanted:
            self._pin()

    def _pin(self) -> None:
        if self.reason is None:
            undo = functools.partial(self._unpin_by or (lambda _: None), self._address)
            # first, because a call that raises may have pinned it all the same
            self.undo.append(undo)
            try:
                self.reason = self._pin_by(self._address, self._nbytes)
                if self.reason is not None:
                    self.undo.remove(undo)
            except Exception as exc:
                self.reason = f"{type(exc).__name__}: {exc}"
        self.pinned = self.reason is None


def _count_down(count: Iterator[int], last: int, ready: threading.Event) -> None:
    if next(count) == last and not POOL.stopping.is_set():
        ready.set()


def promised_bytes() -> int:
    """Bytes that living slabs of this process will still allocate."""
    return sum(sum(reservation.untouched) for reservation in _alive)


def wait_until_ready(address: int, nbytes: int) -> None:
    """Wait until the slab of `[address, address + nbytes)` is pinned or refused. It moves to the
    front of the queue."""
    if POOL.stopping.is_set():  # at interpreter exit no thread works any more
        return
    for reservation in _alive:
        if not reservation.ready.is_set() and reservation.overlaps(address, nbytes):
            POOL.hurry(reservation)
            reservation.wait()


# --- slabs


def upload(
    target: torch.Tensor, source: torch.Tensor, *, non_blocking: bool = False
) -> torch.Tensor:
    """`target.copy_(source, non_blocking)` for a source in a slab. It waits until the slab is
    pinned. A cast is made on the device."""
    is_plain = type(source) is type(target) is torch.Tensor
    is_cast = source.dtype != target.dtype
    if is_plain and is_cast and target.device.type != "cpu":
        uncast = torch.empty_like(source, device=target.device)
        return target.copy_(upload(uncast, source, non_blocking=non_blocking))
    if not is_plain or is_cast or source.numel() == 0:
        return target.copy_(source)
    if not source.is_contiguous() or not target.is_contiguous():
        return target.copy_(source)  # torch copies through a buffer of its own
    wait_until_ready(source.data_ptr(), source.nbytes)
    return target.copy_(source, non_blocking=non_blocking)


class ReservedSlab(HostSlab):
    """Host memory with a `Reservation` of its own.

    `taken_bytes`: bytes that count as taken from now on, so that two slabs made at once count each
    other.
    """

    def __init__(
        self,
        nbytes: int,
        taken_bytes: int,
        pin: Pin | None,
        unpin: Callable[[int], None] | None,
    ) -> None:
        self.nbytes = nbytes
        self._size = round_up(nbytes, PAGE)
        self._pin_by = pin
        self._unpin_by = unpin
        self._memory = Reservation(self, taken_bytes)
        self.ready = self._memory.ready

    def pin(self, touch: Touch | None = None) -> None:
        """Pin all of it in the background, if the device wants that. `touch`: allocates the memory;
        None if it is allocated already."""
        if self._pin_by is None or not self.nbytes:
            self._memory.untouched = [0]
            self.ready.set()
        else:
            self._memory.begin(self.address, self._size, touch, self._pin_by, self._unpin_by)

    @property
    def pinned(self) -> bool:
        return bool(self._memory.pinned)

    @property
    def pageable_reason(self) -> str | None:
        return self._memory.reason


class Slab(ReservedSlab):
    """Anonymous, zero-filled memory that forked children do not have. See `HostSlab`. Without `pin`
    the memory is touched before the constructor returns. With it the constructor returns at once,
    and the memory is touched and pinned in the background.

    Args:
        nbytes: the exact size; 0 maps nothing.
        pin: pins `(address, nbytes)` for a device, all of it at once; returns None, or the reason
            for a failure. Called on a background thread. A slab that it refuses stays pageable.
        unpin: undoes `pin`, given the address. Called before the memory is freed, also for a `pin`
            that raised.
        place: chooses where `(address, nbytes)` will be allocated, such as `prefer`. Called before
            the memory is touched.

    Raises:
        HostMemoryError: the machine or the control group does not have that much, beside the memory
            that other slabs will still allocate.
    """

    def __init__(
        self,
        nbytes: int,
        pin: Pin | None = None,
        unpin: Callable[[int], None] | None = None,
        place: Place | None = None,
    ) -> None:
        if nbytes < 0:
            raise ValueError(f"a slab cannot have {nbytes} bytes; give 0 or more")
        super().__init__(nbytes, round_up(nbytes, PAGE), pin, unpin)
        self.address = 0
        self._uses = object()  # every view refers to it, so that its references count the views
        try:
            if nbytes:
                check_available(self._size, promised_to_it=self._size)
                self.address = map_for_life(
                    self._memory,
                    self._size,
                    READ_WRITE,
                    mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,
                    self._memory.undo,
                )
                # else the kernel would move memory to make huge pages
                if self._size >= HUGE_PAGE and free_huge_bytes() >= self._size:
                    libc.madvise(self.address, self._size, MADV_HUGEPAGE)
                if place is not None:
                    place(self.address, self._size)
            self._prepare()
        except Exception as exc:
            # the error may keep the memory alive, but it promises no more
            self._memory.untouched = [0]
            if isinstance(exc, OSError):
                raise HostMemoryError(
                    f"host memory: cannot allocate {self._size:,} bytes: {exc.strerror}"
                ) from exc
            raise

    @property
    def has_views(self) -> bool:
        return sys.getrefcount(self._uses) > 2  # this object's reference, and that of the call

    def view(self, offset: int, nbytes: int) -> torch.Tensor:
        check_span(offset, nbytes, self.nbytes)
        return tensor_at(self.address + offset, nbytes, (self, self._uses))

    def _prepare(self) -> None:
        """Touch all of the memory, now or in the background, and have it pinned."""
        # A kernel before 5.14 cannot touch without overwriting, so the memory is touched now,
        # before a value is written there.
        touches_later = self._pin_by is not None and self.nbytes > 0
        if touches_later and libc.madvise(self.address, PAGE, MADV_POPULATE_WRITE) == 0:
            self.pin(_touch)
        else:
            populate(self.address, self._size)
            self.pin()


def populate(address: int, nbytes: int) -> None:
    """Allocate the memory of a mapping, before anything is written there. Raises OSError: the
    kernel refused."""
    for start, step in _steps(address, nbytes):
        if libc.madvise(start, step, MADV_POPULATE_WRITE):
            number = ctypes.get_errno()
            if number != errno.EINVAL:
                raise OSError(number, os.strerror(number))
            ctypes.memset(start, 0, step)


def _steps(address: int, nbytes: int) -> Iterator[tuple[int, int]]:
    for start in range(address, address + nbytes, _TOUCH_STEP):
        yield start, min(_TOUCH_STEP, address + nbytes - start)


def _touch(
    address: int,
    nbytes: int,
    progress: Callable[[int], bool],
) -> str | None:
    """Allocate memory on a background thread. See `Touch`."""
    available = available_bytes()
    if nbytes > available:  # other processes have taken memory since the slab was made
        return (
            f"{nbytes:,} bytes were not allocated: only {available:,} bytes of host memory are "
            "available"
        )
    for start, step in _steps(address, nbytes):
        if libc.madvise(start, step, MADV_POPULATE_WRITE):
            return (
                f"cannot allocate {step:,} bytes of host memory: {os.strerror(ctypes.get_errno())}"
            )
        if not progress(step):
            break
    return None


_CACHE_LINE = 64  # bytes


class SlabPart(HostSlab):
    """`[offset, offset + nbytes)` of another slab, which it keeps alive. The whole's memory is
    freed when its last part is gone."""

    def __init__(self, whole: HostSlab, offset: int, nbytes: int) -> None:
        check_span(offset, nbytes, whole.nbytes)
        self.whole = whole
        self._offset = offset
        self.address = whole.address + offset
        self.nbytes = nbytes
        self.ready = whole.ready

    @property
    def pinned(self) -> bool:
        return self.whole.pinned

    @property
    def pageable_reason(self) -> str | None:
        return self.whole.pageable_reason

    @property
    def held_bytes(self) -> int:
        if not self.whole.nbytes:
            return 0
        return self.nbytes * self.whole.held_bytes // self.whole.nbytes

    @property
    def file_bytes(self) -> int:
        return self.nbytes if self.whole.file_bytes else 0

    def view(self, offset: int, nbytes: int) -> torch.Tensor:
        check_span(offset, nbytes, self.nbytes)
        return self.whole.view(self._offset + offset, nbytes)


def cut(whole: HostSlab, nbytes: int) -> tuple[SlabPart, SlabPart | None]:
    """A part of `nbytes` from the beginning of a slab, and the part from the next cache line on;
    None where nothing follows.

    Raises ValueError: the slab is shorter.
    """
    start = round_up(nbytes, _CACHE_LINE)
    following = None
    if start < whole.nbytes:
        following = SlabPart(whole, start, whole.nbytes - start)
    return SlabPart(whole, 0, nbytes), following
