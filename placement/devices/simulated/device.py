"""A device in host memory with the contract of an accelerator. It works on any Linux machine.

Each chunk has a home: addresses where its pages are while nothing else has them. `map` moves the
pages behind other addresses, and `unmap` moves them home. The pages may be huge ones, and no byte
is copied. Only a kernel before 5.7, and gVisor, copy.

The poison is a memory file of one chunk, mapped privately behind every vacant page. A write
creates a copy of the page, and the kernel reports which pages are such copies
(`/proc/self/pagemap`). So every write is found together with its place, even one that leaves the
bytes unchanged: poison in float32 is a quiet NaN, whose bits survive x86 arithmetic. Where the
kernel reports no copies (gVisor, no /proc), poison is as on a real device: one shared piece,
compared by its bytes.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import re
import sys
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, cast

import torch

from placement.core import interrupts
from placement.core.errors import DeviceMemoryError, PlacementError
from placement.core.settings import bytes_of
from placement.core.weak import WeakIdSet
from placement.devices.base import (
    POISON_WORD,
    Device,
    check_slots,
    check_span,
    poison_bytes,
    round_up,
    tensor_at,
)
from placement.devices.host import slab
from placement.devices.host.file_slab import read_ahead
from placement.devices.host.shared_slab import MappedSlab
from placement.devices.host.slab import (
    MAP_NORESERVE,
    PAGE,
    READ_WRITE,
    Slab,
    libc,
    map_for_life,
)
from placement.devices.memory import (
    Addresses,
    Chunk,
    Copy,
    DeviceMemory,
    Direction,
    HostSlab,
    Mark,
    WrittenPoison,
)
from placement.devices.simulated.capacity import SharedCapacity

_MAP_FIXED = 0x10
# MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP: the old addresses stay, without pages
_MOVE_PAGES = 0x01 | 0x02 | 0x04
_MEMORY = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
# the addresses taken at once for homes
_HOMES_BYTES = 1 << 30
# the number of the process's memory mappings that the device leaves to all other code
_OTHER_MAPPINGS = 4096
# a smaller chunk makes small tests move many, a larger one makes a real model move few
_LEAST_CHUNK_BYTES = 256 << 10
_MOST_CHUNKS = 4096
_ENTRY_BYTES = 8
# the index of the byte with the flags in an entry of the page map
_TOP_BYTE = 7 if sys.byteorder == "little" else 0
_PRESENT, _SWAPPED, _OF_A_FILE = 0x80, 0x40, 0x20
_IS_COPY = bytes(
    bool(flags & (_PRESENT | _SWAPPED)) and not flags & _OF_A_FILE for flags in range(256)
)
"""For each value of the flags, whether the page is a private copy. Chunks' pages and vacant pages
only read are no copies."""
_COPIES = re.compile(rb"\x01+")
_PAGES_AT_ONCE = 1 << 18


class _Time(Mark):
    def __init__(self, seconds: float) -> None:
        # the time on the monotonic clock when the simulated link has finished the copies
        self.seconds = seconds


class SimulatedDevice(Device):
    """A device of `capacity_bytes` in host memory. Its tensors always report the CPU as their
    device.

    Args:
        capacity_bytes: device bytes for all chunks together; "1GiB" works too. Poison is extra:
            `memory().total_bytes` is the sum of both.
        chunk_bytes: the size of a full chunk and of the poison. Each offloaded chunk needs a
            mapping; the kernel allows 65,530 by default. None: 256 KiB up to a capacity of 1 GiB,
            and above that so many that the device has at most 4,096 chunks.
        granularity: sizes of ranges and chunks are multiples of it; it is a multiple of the page
            size.
        bandwidth_bytes_per_second: the speed of the simulated link in each direction; None: no
            limit.
        shared_with: a path, the same for all processes that share the capacity. Memory that a
            process drops without releasing is free for the others after its own next call; memory
            of a dead process is free at once.

    Attributes:
        outside_bytes: capacity that something else in this process has taken, such as a
            communicator. A test sets it; 0 at first.

    A forked child cannot use the device: a call that would change the parent's memory raises
    `PlacementError`.
    """

    def __init__(
        self,
        capacity_bytes: int | str,
        *,
        chunk_bytes: int | None = None,
        granularity: int = 4096,
        bandwidth_bytes_per_second: float | None = None,
        shared_with: str | Path | None = None,
    ) -> None:
        capacity_bytes = bytes_of("capacity_bytes", capacity_bytes)
        if capacity_bytes < 0 or (bandwidth_bytes_per_second or 1) < 0:
            raise ValueError(
                f"negative capacity_bytes {capacity_bytes} or bandwidth_bytes_per_second "
                f"{bandwidth_bytes_per_second}"
            )
        if chunk_bytes is None:
            chunk_bytes = _LEAST_CHUNK_BYTES
            while chunk_bytes * _MOST_CHUNKS < capacity_bytes:
                chunk_bytes *= 2
        if granularity <= 0 or granularity % PAGE or chunk_bytes <= 0 or chunk_bytes % granularity:
            raise ValueError(
                f"chunk_bytes {chunk_bytes} must be a multiple of granularity {granularity}, and "
                f"that of the page size {PAGE}"
            )
        self.name = "simulated"
        self.torch_device = torch.device("cpu")
        self.granularity = granularity
        self.chunk_bytes = chunk_bytes
        self.capacity_bytes = capacity_bytes
        self.outside_bytes = 0
        self._bandwidth = bandwidth_bytes_per_second or float("inf")
        self._link_free_at: dict[Direction, float] = {"to_device": 0.0, "to_host": 0.0}
        self._pid = os.getpid()
        self._shared = (
            None if shared_with is None else SharedCapacity(Path(shared_with), capacity_bytes)
        )
        if self._shared:
            weakref.finalize(self, self._shared.leave).atexit = False
        # Huge pages are moved as a whole where all addresses are multiples of their size.
        self._alignment = granularity if chunk_bytes % slab.HUGE_PAGE else slab.HUGE_PAGE
        self._homes = Homes(0, self._alignment)
        self._spare_homes: dict[int, deque[Home]] = defaultdict(deque)  # by their bytes
        self._num_chunks = 0
        # the ledger: the bytes of every chunk that holds memory, by its number
        self._held: dict[int, int] = {}
        # numbers and homes of chunks that died, on whatever thread. The next call removes them from
        # the ledger.
        self._dead: list[tuple[int, Home]] = []
        self._ranges: WeakIdSet[SimulatedRange] = WeakIdSet()
        self._poison = _poison_of(self, chunk_bytes)
        # managers of several threads may share the device, and `heal_poison` looks at all ranges
        self._remapping = threading.RLock()
        self._when_out_of_memory: list[Callable[[], object]] = []

    @property
    def uuid(self) -> str:
        """An identity that all processes with the same path share; empty where no other process can
        use the device."""
        return "" if self._shared is None else f"simulated{self._shared.path}"

    def host(self, nbytes: int) -> HostSlab:
        self._check_process()
        return Slab(nbytes)

    def shared_host(
        self, file: int, nbytes: int, own: Sequence[tuple[int, int]], extra_bytes: int
    ) -> MappedSlab:
        self._check_process()
        return MappedSlab(file, nbytes, own, extra_bytes)

    def reserve(self, nbytes: int) -> Addresses:
        self._check_process()
        if nbytes < 0:
            raise ValueError(f"a range cannot have {nbytes} bytes; give 0 or more")
        nbytes = round_up(nbytes, self.granularity)
        # In the worst case each place of a chunk is a mapping of its own, and so is each home. The
        # check is here, because `unmap` must not fail.
        places = sum(
            -(-size // self.chunk_bytes) for size in (nbytes, *(r.nbytes for r in self._ranges))
        )
        mappings = places + min(places, self.capacity_bytes // self.chunk_bytes)
        limit = int(Path("/proc/sys/vm/max_map_count").read_text()) - _OTHER_MAPPINGS
        if mappings > limit:
            raise DeviceMemoryError(
                f"simulated: {mappings:,} chunks of addresses need more mappings than "
                f"vm.max_map_count leaves ({limit:,}); chunk_bytes is {self.chunk_bytes:,}, make "
                "it larger"
            )
        try:
            addresses = SimulatedRange(nbytes, self._alignment)
        except OSError as exc:
            raise DeviceMemoryError(
                f"simulated: cannot reserve {nbytes:,} bytes of addresses: {exc.strerror}"
            ) from exc
        self._ranges.add(addresses)
        return addresses

    def create(self, nbytes: int) -> Chunk:
        self._check_process()
        if nbytes <= 0 or nbytes % self.granularity:
            raise ValueError(
                f"a chunk of {nbytes} bytes is not a multiple of the granularity {self.granularity}"
            )
        held = self._held_bytes()
        others = self._shared.claim(held, nbytes) if self._shared else 0
        free = max(0, self.capacity_bytes - held - others - self.outside_bytes)
        if nbytes > free:
            elsewhere = f", {others:,} held by other processes" if self._shared else ""
            raise DeviceMemoryError(
                f"simulated: asked for {nbytes:,} bytes, {free:,} free of "
                f"{self.capacity_bytes:,}{elsewhere}"
            )
        self._num_chunks += 1
        chunk = SimulatedChunk(nbytes, self._home_for(nbytes), self._num_chunks, self._held)
        self._held[chunk.number] = nbytes
        weakref.finalize(chunk, self._dead.append, (chunk.number, chunk.home)).atexit = False
        return chunk

    def _home_for(self, nbytes: int) -> Home:
        if spare := self._spare_homes[nbytes]:
            return spare.popleft()
        if not self._homes.has_room(nbytes):
            self._homes = Homes(max(_HOMES_BYTES, nbytes), self._alignment)
        return self._homes.take(nbytes)

    def wipe(self, chunks: Sequence[Chunk]) -> None:
        for chunk in map(self._held_here, chunks):
            ctypes.memmove(chunk.home.address, self._poison.bytes_of_a_chunk, chunk.nbytes)

    def map(self, addresses: Addresses, chunks: Sequence[Chunk], start: int = 0) -> None:
        self._check_process()
        with self._remapping:
            target = self._own(addresses)
            check_slots(chunks, start, self.chunk_bytes)
            placed: dict[int, SimulatedChunk] = {}
            end = start
            for chunk in map(self._held_here, chunks):
                if chunk.is_mapped() and target.chunks.get(end) is not chunk:
                    raise ValueError(
                        "the chunk is already behind other addresses: unmap those first"
                    )
                placed[end] = chunk
                end += chunk.nbytes
            beside = _around(target, start, end)
            if any(
                start <= offset < end and placed.get(offset) is not chunk
                for offset, chunk in target.chunks.items()
            ):
                raise ValueError(f"other memory is behind [{start}, {end}) already: unmap it first")
            try:
                for offset, chunk in placed.items():
                    # Where the addresses of its pages are dead, so are the pages.
                    chunk.is_away = chunk.is_mapped()
                    chunk.place = (weakref.ref(target), offset)
                self._poison.note(target, start, end)
                # before the pages are mapped, so that none can be released while it is behind an
                # address
                target.replace_chunks(beside | placed)
                for offset, chunk in placed.items():
                    if not chunk.is_away:
                        _move_pages(chunk.home.address, target.base + offset, chunk.nbytes)
                        chunk.is_away = True
                libc.madvise(target.base + start, end - start, slab.MADV_DONTFORK)
            except Exception:
                self.unmap(addresses, end - start, start)
                raise

    def unmap(self, addresses: Addresses, nbytes: int, start: int = 0) -> None:
        self._check_process()
        with self._remapping:
            target = self._own(addresses)
            check_slots((), start, self.chunk_bytes)
            end = start + round_up(nbytes, self.granularity)
            beside = _around(target, start, end)
            self._poison.note(target, start, end)
            for offset in range(start, end, self.chunk_bytes):
                chunk = target.chunks.get(offset)
                if chunk is not None and chunk.is_away:
                    _move_pages(target.base + offset, chunk.home.address, chunk.nbytes)
                    chunk.is_away = False
                self._poison.put(target.base + offset, min(self.chunk_bytes, end - offset))
            libc.madvise(target.base + start, end - start, slab.MADV_DONTFORK)
            target.replace_chunks(beside)

    def release(self, *chunks: Chunk) -> None:
        self._check_process()
        held = [
            chunk for chunk in chunks if isinstance(chunk, SimulatedChunk) and self._is_held(chunk)
        ]
        if any(chunk.is_mapped() for chunk in held):
            raise ValueError("the chunk is still behind addresses: unmap those first")
        for chunk in held:
            self._free(chunk.number, chunk.home)
        if held and self._shared:
            self._shared.claim(self._held_bytes(), 0)

    def copy(self, copies: Sequence[Copy], direction: Direction) -> None:
        self._check_process()
        begin = max(time.monotonic(), self._link_free_at[direction])
        for run in copies:
            if direction == "to_device":
                read_ahead(run.host_address, run.nbytes)
                ctypes.memmove(run.device_address, run.host_address, run.nbytes)
            else:
                ctypes.memmove(run.host_address, run.device_address, run.nbytes)
        self._link_free_at[direction] = begin + sum(run.nbytes for run in copies) / self._bandwidth

    def order(self, direction: Direction | None = None) -> None:
        # A CPU has no streams that could wait, so the caller waits.
        _sleep_until(
            max(self._link_free_at.values()) if direction is None else self._link_free_at[direction]
        )

    def sync(self) -> None:
        _sleep_until(max(self._link_free_at.values()))
        interrupts.check()

    def mark(self, direction: Direction) -> Mark:
        return _Time(self._link_free_at[direction])

    def wait(self, mark: Mark) -> None:
        _sleep_until(cast(_Time, mark).seconds)
        interrupts.check()

    def view(self, addresses: Addresses, offset: int, nbytes: int) -> torch.Tensor:
        check_span(offset, nbytes, addresses.nbytes)
        return tensor_at(addresses.base + offset, nbytes, addresses)

    def memory(self) -> DeviceMemory:
        self._check_process()
        held = self._held_bytes()
        others = self._shared.claim(held, 0) if self._shared else 0
        return DeviceMemory(
            total_bytes=self.capacity_bytes + self.chunk_bytes,
            free_bytes=max(0, self.capacity_bytes - held - others - self.outside_bytes),
            torch_reserved_bytes=0,
            chunk_bytes=held,
            poison_bytes=self.chunk_bytes,
        )

    def heal_poison(self, wait: bool = True) -> bool:
        self._check_process()
        with self._remapping:
            return self._poison.heal([*self._ranges])

    def written_poison(self) -> Sequence[WrittenPoison]:
        return self._poison.written

    def when_out_of_memory(self, give_back: Callable[[], object]) -> None:
        self._when_out_of_memory.append(give_back)

    def run_out_of_memory(self) -> None:
        """Do what torch's allocator does on a real device when it finds no memory, before it
        raises."""
        for give_back in self._when_out_of_memory:
            give_back()

    def close(self) -> None:
        if os.getpid() == self._pid:
            # frees the memory of dropped chunks; the rest goes with this object and the last tensor
            self.memory()

    def _is_held(self, chunk: SimulatedChunk) -> bool:
        return chunk.ledger is self._held and chunk.number in self._held

    def _held_here(self, chunk: Chunk) -> SimulatedChunk:
        if not isinstance(chunk, SimulatedChunk) or not self._is_held(chunk):
            raise ValueError(
                "this device does not hold the chunk: it was released, or belongs to another device"
            )
        return chunk

    def _held_bytes(self) -> int:
        while self._dead:
            self._free(*self._dead.pop())
        return sum(self._held.values())

    def _free(self, number: int, home: Home) -> None:
        nbytes = self._held.pop(number, None)
        if nbytes is None:
            return
        size = round_up(nbytes, self._alignment)
        # The kernel takes the pages as soon as anybody needs memory. A chunk that is created before
        # that has them at once: huge pages that go back to the host of a virtual machine cost it 1
        # to 5 seconds a GiB to get again.
        if libc.madvise(home.address, size, slab.MADV_FREE):
            libc.madvise(home.address, size, slab.MADV_DONTNEED)
        self._spare_homes[nbytes].append(home)

    def _own(self, addresses: Addresses) -> SimulatedRange:
        if not isinstance(addresses, SimulatedRange) or addresses not in self._ranges:
            raise ValueError("the addresses belong to another device")
        return addresses

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise PlacementError(
                "this simulated device belongs to the parent process; make a new one in a forked "
                "child"
            )


def _map_fixed(address: int, nbytes: int, flags: int, file: int = -1) -> None:
    """Put new memory, or a file from its beginning, behind addresses in place of what is there."""
    if libc.mmap(address, nbytes, READ_WRITE, flags | _MAP_FIXED, file, 0) == slab.MAP_FAILED:
        raise _cannot_map(nbytes)


def _move_pages(source: int, target: int, nbytes: int) -> None:
    """Take the pages behind `source` to `target`, in place of what is there. At no moment can
    another thread's new mapping take one of the addresses."""
    if libc.mremap(source, nbytes, nbytes, _MOVE_PAGES, target) != slab.MAP_FAILED:
        return
    if ctypes.get_errno() != errno.EINVAL:
        raise _cannot_map(nbytes)
    # A kernel before 5.7, and gVisor, cannot leave the old addresses in place.
    _map_fixed(target, nbytes, _MEMORY)
    ctypes.memmove(target, source, nbytes)
    libc.madvise(source, nbytes, slab.MADV_DONTNEED)


def _cannot_map(nbytes: int) -> DeviceMemoryError:
    reason = os.strerror(ctypes.get_errno())
    return DeviceMemoryError(f"simulated: cannot map {nbytes:,} bytes: {reason}")


def _sleep_until(seconds: float) -> None:
    """Sleep until a time of the monotonic clock. Skipped where it has passed, because a sleep of 0
    s costs 85 us."""
    if (left := seconds - time.monotonic()) > 0:
        time.sleep(left)


# --- ranges, chunks and poison


class SimulatedRange(Addresses):
    def __init__(self, nbytes: int, alignment: int) -> None:
        self.nbytes = nbytes
        self.base = 0
        self.chunks: dict[int, SimulatedChunk] = {}
        """The mapped chunks by offset. Replaced as a whole. Keeps memory under living tensors alive
        when everything else is dropped."""
        if nbytes:
            first = map_for_life(self, nbytes + alignment - PAGE, slab.NO_ACCESS, _MEMORY)
            self.base = round_up(first, alignment)
        # the answer of `vacant` since `chunks` was replaced
        self._vacant: list[tuple[int, int]] | None = None

    def replace_chunks(self, chunks: dict[int, SimulatedChunk]) -> None:
        self.chunks = chunks
        self._vacant = None

    def vacant(self) -> list[tuple[int, int]]:
        """The addresses without a chunk behind them, as ascending [start, end)."""
        if self._vacant is None:
            vacant = []
            end = 0
            for offset, chunk in sorted(self.chunks.items()):
                if end < offset:
                    vacant.append((end, offset))
                end = offset + chunk.nbytes
            if end < self.nbytes:
                vacant.append((end, self.nbytes))
            self._vacant = vacant
        return self._vacant


class Homes:
    """Addresses for the homes of chunks, one after the other, so that neighbours are one mapping.
    They are given back when the last home is dead."""

    def __init__(self, nbytes: int, alignment: int) -> None:
        self._alignment = alignment
        self._next = self._end = 0
        if nbytes:
            nbytes = round_up(nbytes, alignment) + alignment
            first = map_for_life(self, nbytes, READ_WRITE, _MEMORY)
            self._next, self._end = round_up(first, alignment), first + nbytes
            if alignment == slab.HUGE_PAGE:
                libc.madvise(first, nbytes, slab.MADV_HUGEPAGE)

    def has_room(self, nbytes: int) -> bool:
        return self._next + nbytes <= self._end

    def take(self, nbytes: int) -> Home:
        home = Home(self._next, self)
        self._next += round_up(nbytes, self._alignment)
        return home


class Home(NamedTuple):
    """Where the pages of a chunk are while nothing else has them."""

    address: int
    homes: Homes  # keeps the address


class SimulatedChunk(Chunk):
    def __init__(self, nbytes: int, home: Home, number: int, ledger: dict[int, int]) -> None:
        self.nbytes = nbytes
        self.home = home
        self.number = number
        self.ledger = ledger  # the ledger of the device that made the chunk
        self.is_away = False  # whether its pages are behind other addresses than its home
        # the range and offset where the chunk was mapped last
        self.place: tuple[weakref.ref[SimulatedRange], int] | None = None

    def is_mapped(self) -> bool:
        addresses = self.place and self.place[0]()
        return (
            self.place is not None
            and addresses is not None
            and addresses.chunks.get(self.place[1]) is self
        )


def _around(target: SimulatedRange, start: int, end: int) -> dict[int, SimulatedChunk]:
    """The chunks mapped outside of [start, end). Raises ValueError if the end would split a
    chunk."""
    check_span(start, end - start, target.nbytes)
    for offset, chunk in target.chunks.items():
        if offset < end < offset + chunk.nbytes:
            raise ValueError(f"[{start}, {end}) cuts the chunk at {offset} in two")
    return {offset: chunk for offset, chunk in target.chunks.items() if not start <= offset < end}


class SharedPoison:
    """The poison behind vacant addresses: a memory file of `nbytes`, compared by its bytes. A write
    shows in all ranges."""

    flags = mmap.MAP_SHARED  # the flags with which it is mapped

    def __init__(self, file: int, nbytes: int) -> None:
        self._file = file
        # Kept, because to make it anew takes five times as long as to write it.
        self.bytes_of_a_chunk = poison_bytes(0, nbytes)
        # the places of the damage that the last `heal` reported, where they are known
        self.written: Sequence[WrittenPoison] = ()
        os.pwrite(file, self.bytes_of_a_chunk, 0)

    def put(self, address: int, nbytes: int) -> None:
        """Map it behind addresses, at most a chunk of them."""
        _map_fixed(address, nbytes, self.flags, self._file)

    def note(self, target: SimulatedRange, start: int, end: int) -> None:
        """Remember writes to these addresses for the next `heal`, before their mapping is replaced.
        Here they stay where they are."""

    def heal(self, ranges: Iterable[SimulatedRange]) -> bool:
        poison = self.bytes_of_a_chunk
        if is_damaged := os.pread(self._file, len(poison), 0) != poison:
            os.pwrite(self._file, poison, 0)
        return is_damaged


class PrivatePoison(SharedPoison):
    """Poison of which every range gets its own copy of a page when something writes there."""

    flags = mmap.MAP_PRIVATE | MAP_NORESERVE

    def __init__(self, file: int, nbytes: int, page_map: int) -> None:
        super().__init__(file, nbytes)
        self._page_map = page_map
        self._noted: list[WrittenPoison] = []

    def note(self, target: SimulatedRange, start: int, end: int) -> None:
        for first_vacant, end_vacant in target.vacant():
            self._note_vacant(target, max(start, first_vacant), min(end, end_vacant))

    def _note_vacant(self, target: SimulatedRange, start: int, end: int) -> None:
        for first in range(start, end, _PAGES_AT_ONCE * PAGE):
            count = (min(end - first, _PAGES_AT_ONCE * PAGE) + PAGE - 1) // PAGE
            are_copies = _flags_of(self._page_map, target.base + first, count).translate(_IS_COPY)
            if b"\x01" not in are_copies:
                continue
            for run in _COPIES.finditer(are_copies):
                self._noted.append(
                    WrittenPoison(
                        target, first + run.start() * PAGE, (run.end() - run.start()) * PAGE
                    )
                )

    def heal(self, ranges: Iterable[SimulatedRange]) -> bool:
        for target in ranges:
            for start, end in target.vacant():
                noted_before = len(self._noted)
                self._note_vacant(target, start, end)
                # drop the copies: the file is behind them again
                for each in self._noted[noted_before:]:
                    libc.madvise(target.base + each.start, each.nbytes, slab.MADV_DONTNEED)
        self.written, self._noted = self._noted, []
        return bool(self.written)


def _poison_of(device: object, nbytes: int) -> SharedPoison:
    """Make the poison of a device. Files that this opens are closed when the device dies."""
    file = os.memfd_create("placement-device", os.MFD_CLOEXEC)
    # threads may still use it during interpreter exit
    weakref.finalize(device, os.close, file).atexit = False
    os.ftruncate(file, max(nbytes, 2 * PAGE))  # two pages, to try what the kernel reports
    poison = SharedPoison(file, nbytes)
    with suppress(OSError):
        page_map = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(device, os.close, page_map).atexit = False
        if _tells_copies(page_map, file):
            poison = PrivatePoison(file, nbytes, page_map)
    return poison


def _tells_copies(page_map: int, file: int) -> bool:
    """Whether the kernel distinguishes a page that was written from one that was only read; tried
    on two pages."""
    pages = mmap.mmap(file, 2 * PAGE, mmap.MAP_PRIVATE, READ_WRITE)
    first = ctypes.c_char.from_buffer(pages)
    try:
        address = ctypes.addressof(first)
        ctypes.string_at(address, 2 * PAGE)
        ctypes.memset(address + PAGE, POISON_WORD[0], 1)
        return _flags_of(page_map, address, 2).translate(_IS_COPY) == b"\x00\x01"
    finally:
        del first
        pages.close()


def _flags_of(page_map: int, address: int, count: int) -> bytearray:
    """One byte of flags for each page, beginning at an address. Raises OSError where the kernel
    does not report them."""
    entries = bytearray(count * _ENTRY_BYTES)
    found = os.preadv(page_map, [entries], address // PAGE * _ENTRY_BYTES)
    if found != len(entries):
        raise OSError(f"the page map has {found} bytes for {count} pages")
    return entries[_TOP_BYTE::_ENTRY_BYTES]
