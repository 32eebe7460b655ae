"""Address ranges and chunks of a simulated device, the poison behind vacant addresses, and the detection of writes into it.

The same piece of the device's memory file is mapped privately behind every vacant page. A write creates a copy of the page, and the
kernel reports which pages are such copies (`/proc/self/pagemap`). So every write is found together with its place, even one that leaves
the bytes unchanged: poison in float32 is a quiet NaN, whose bits survive x86 arithmetic.

Where the kernel reports no copies (gVisor, no /proc), poison is as on a real device: one shared piece, compared by its bytes.
"""

from __future__ import annotations

import abc
import ctypes
import mmap
import os
import re
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

from placement.devices.base import POISON_WORD, poison_bytes
from placement.devices.host.mapping import MAP_NORESERVE, NO_ACCESS, PAGE, READ_WRITE, libc, map_for_life, round_up
from placement.devices.host.slab import check_span
from placement.devices.memory import Addresses, Chunk, WrittenPoison

_MADV_DONTNEED = 4
_ENTRY_BYTES = 8
_TOP_BYTE = 7 if sys.byteorder == "little" else 0
"""The index of the byte with the flags in an entry of the page map."""
_PRESENT, _SWAPPED, _OF_A_FILE = 0x80, 0x40, 0x20
_IS_COPY = bytes(bool(flags & (_PRESENT | _SWAPPED)) and not flags & _OF_A_FILE for flags in range(256))
"""For each value of the flags, whether the page is a private copy. Chunks' pages and vacant pages only read are no copies."""
_COPIES = re.compile(rb"\x01+")
_PAGES_AT_ONCE = 1 << 18


class SimulatedRange(Addresses):
    def __init__(self, nbytes: int, granularity: int) -> None:
        self.nbytes = nbytes
        self.base = 0
        self.chunks: dict[int, SimulatedChunk] = {}
        """The mapped chunks by offset. Replaced as a whole. Keeps memory under living tensors alive when everything else is dropped."""
        if nbytes:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
            self.base = round_up(map_for_life(self, nbytes + granularity - PAGE, NO_ACCESS, flags), granularity)
        self._vacant: tuple[dict[int, SimulatedChunk], list[tuple[int, int]]] | None = None
        """The `chunks` at the last call of `vacant`, and its answer then."""

    def vacant(self) -> list[tuple[int, int]]:
        """The addresses without a chunk behind them, as ascending [start, end)."""
        if self._vacant is None or self._vacant[0] is not self.chunks:
            chunks, spans, end = self.chunks, [], 0
            for offset in sorted(chunks):
                spans.append((end, offset))
                end = offset + chunks[offset].nbytes
            spans.append((end, self.nbytes))
            self._vacant = chunks, [(start, end) for start, end in spans if start < end]
        return self._vacant[1]


class SimulatedChunk(Chunk):
    def __init__(self, nbytes: int, file_offset: int) -> None:
        self.nbytes = nbytes
        self.file_offset = file_offset
        self.place: tuple[weakref.ref[SimulatedRange], int] | None = None
        """The range and offset where the chunk was mapped last."""

    def is_mapped(self) -> bool:
        addresses = self.place and self.place[0]()
        return self.place is not None and addresses is not None and addresses.chunks.get(self.place[1]) is self


def around(target: SimulatedRange, start: int, end: int) -> dict[int, SimulatedChunk]:
    """The chunks mapped outside of [start, end). Raises ValueError if the end would split a chunk."""
    check_span(start, end - start, target.nbytes)
    found = {offset: chunk for offset, chunk in target.chunks.items() if not start <= offset < end}
    for offset, chunk in target.chunks.items():
        if offset < end < offset + chunk.nbytes:
            raise ValueError(f"[{start}, {end}) cuts the chunk at {offset} in two")
    return found


def runs(placed: dict[int, SimulatedChunk]) -> list[tuple[int, int, int]]:
    """(offset, bytes, file offset) of runs that one call can map: chunks that are neighbours in the file need one mapping together."""
    joined: list[tuple[int, int, int]] = []
    for offset, chunk in placed.items():
        start, nbytes, file_offset = joined[-1] if joined else (0, 0, -1)
        if chunk.file_offset == file_offset + nbytes:
            joined[-1] = (start, nbytes + chunk.nbytes, file_offset)
        else:
            joined.append((offset, chunk.nbytes, chunk.file_offset))
    return joined


class SimulatedPoison(abc.ABC):
    """The poison mapped behind vacant addresses: the first `nbytes` of the device's memory file.

    Attributes:
        flags: the flags with which it is mapped.
        written: the places of the damage that the last `heal` reported, where they are known.
    """

    flags: int

    def __init__(self, file: int, nbytes: int) -> None:
        self._file = file
        self._nbytes = nbytes
        self.written: Sequence[WrittenPoison] = ()
        self._fill()

    def _fill(self) -> None:
        os.pwrite(self._file, poison_bytes(0, self._nbytes), 0)

    @abc.abstractmethod
    def note(self, target: SimulatedRange, start: int, end: int) -> None:
        """Remember writes to these addresses for the next `heal`. Called before their mapping is replaced."""

    @abc.abstractmethod
    def heal(self, ranges: Iterable[SimulatedRange]) -> bool:
        """See `Device.heal_poison`."""


class PrivatePoison(SimulatedPoison):
    """Poison of which every range gets its own copy of a page when something writes there."""

    flags = mmap.MAP_PRIVATE | MAP_NORESERVE

    def __init__(self, file: int, nbytes: int, page_map: int) -> None:
        super().__init__(file, nbytes)
        self._page_map = page_map
        self._noted: list[WrittenPoison] = []

    def note(self, target: SimulatedRange, start: int, end: int) -> None:
        self._noted += [WrittenPoison(target, first, last - first) for first, last in self._copies(target, start, end)]

    def heal(self, ranges: Iterable[SimulatedRange]) -> bool:
        for target in ranges:
            for start, end in target.vacant():
                known = len(self._noted)
                self.note(target, start, end)
                for each in self._noted[known:]:
                    _drop(target, each.start, each.start + each.nbytes)
        self.written, self._noted = self._noted, []
        return bool(self.written)

    def _copies(self, target: SimulatedRange, start: int, end: int) -> Iterator[tuple[int, int]]:
        """The runs of written pages, as [first, last)."""
        for first in range(start, end, _PAGES_AT_ONCE * PAGE):
            count = (min(end - first, _PAGES_AT_ONCE * PAGE) + PAGE - 1) // PAGE
            for run in _COPIES.finditer(_flags_of(self._page_map, target.base + first, count).translate(_IS_COPY)):
                yield first + run.start() * PAGE, first + run.end() * PAGE


class SharedPoison(SimulatedPoison):
    """Poison that all ranges share. A write shows in all of them, and is found by comparing bytes."""

    flags = mmap.MAP_SHARED

    def note(self, target: SimulatedRange, start: int, end: int) -> None:
        """Nothing to remember: the damage stays in the shared piece until that is compared."""

    def heal(self, ranges: Iterable[SimulatedRange]) -> bool:
        if os.pread(self._file, self._nbytes, 0) == poison_bytes(0, self._nbytes):
            return False
        self._fill()
        return True


def poison_of(device: object, file: int, nbytes: int) -> SimulatedPoison:
    """Make the poison of a device at the beginning of its memory file. Files that this opens are closed when the device dies."""
    with suppress(OSError):
        page_map = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(device, os.close, page_map).atexit = False  # like the memory file
        poison = PrivatePoison(file, nbytes, page_map)
        if _tells_copies(page_map, file):
            return poison
    return SharedPoison(file, nbytes)


def _tells_copies(page_map: int, file: int) -> bool:
    """Whether the kernel distinguishes a page that was written from one that was only read; tried on two pages."""
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
    """One byte of flags for each page, beginning at an address.

    Raises:
        OSError: the kernel does not report them.
    """
    entries = bytearray(count * _ENTRY_BYTES)
    found = os.preadv(page_map, [entries], address // PAGE * _ENTRY_BYTES)
    if found != len(entries):
        raise OSError(f"the page map has {found} bytes for {count} pages")
    return entries[_TOP_BYTE::_ENTRY_BYTES]


def _drop(target: SimulatedRange, start: int, end: int) -> None:
    """Drop the private copies of whole pages, so that the file is behind them again."""
    libc.madvise(target.base + start, end - start, _MADV_DONTNEED)
