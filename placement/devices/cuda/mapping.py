"""The mappings behind the addresses of one range of a CUDA device, slot by slot.

A slot is `chunk_bytes` of addresses. It holds a chunk, then poison in large pieces and, where no
large one fits, in pieces of the granularity: a mapping shorter than its memory is refused (error
801). So the driver can unmap any run of whole slots: one call unmaps many mappings, but none in
part. The last slot of a range has all its addresses, used or not, so that large pieces fit there,
too: each piece costs the driver about as much as a full chunk (28 us of 38 us on an H200).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import NamedTuple

from placement.devices.base import check_slots, check_span
from placement.devices.cuda.driver import Driver
from placement.devices.memory import Chunk

Mapping = tuple[int, int, int, int, int]  # arguments of cuMemMap: address, bytes, 0, handle, 0


class DriverChunk(Chunk):
    def __init__(self, handle: int, nbytes: int) -> None:
        self.handle = handle
        self.nbytes = nbytes


class PoisonChunks(NamedTuple):
    large: DriverChunk
    small: DriverChunk  # a chunk with the size of the granularity


class Slot(NamedTuple):
    """The content of one slot."""

    # this reference keeps memory that may be mapped in the ledger, when all others have dropped it
    chunk: DriverChunk | None
    mappings: tuple[Mapping, ...]
    nbytes: int  # the number of covered bytes, from the slot's start


_EMPTY = Slot(None, (), 0)


class Extent:
    """The slots of one range. The cost of a call depends only on the slots that it changes. If the
    driver refuses a part of a change, its slots are in doubt: the next change of these slots
    assumes nothing about their mappings."""

    def __init__(self, driver: Driver, base: int, nbytes: int, chunk_bytes: int) -> None:
        self._driver = driver
        self._base = base
        self._nbytes = nbytes  # the used length; the addresses extend to the end of the last slot
        self._chunk_bytes = chunk_bytes
        # slots by index. Nothing is behind a slot without an entry.
        self._slots: dict[int, Slot] = {}
        self._doubtful: set[int] = set()  # slots in doubt: each of their mappings may exist or not

    def plan(
        self, start: int, nbytes: int, chunks: Sequence[DriverChunk], poison: PoisonChunks | None
    ) -> dict[int, Slot]:
        """Compute the new content of the slots of `[start, start + nbytes)`: chunks from the start
        on, then poison.
        Raises ValueError: see `Device.map` and `Device.unmap`."""
        size = self._chunk_bytes
        check_slots(chunks, start, size)
        check_span(start, nbytes, self._nbytes)
        planned: dict[int, Slot] = {}
        indices = range(start // size, -(-(start + nbytes) // size))
        new_chunks = itertools.chain(chunks, repeat(None))
        for index, chunk in zip(indices, new_chunks, strict=False):
            room = min(size, self._nbytes - index * size)
            end = min(room, start + nbytes - index * size)
            old = self._slots.get(index, _EMPTY)
            if old.chunk is not None and end < old.chunk.nbytes:
                raise ValueError(
                    f"[{start}, {start + nbytes}) cuts the chunk at {index * size} in two"
                )
            is_taken = (
                old.chunk is not None and old.chunk is not chunk and index not in self._doubtful
            )
            if chunk is not None and is_taken:
                raise ValueError(
                    f"other memory is behind [{start}, {start + nbytes}) already: unmap it first"
                )
            if (
                chunk is not None
                or old.chunk is not None
                or old.nbytes < end
                or index in self._doubtful
            ):
                end = max(end, min(room, old.nbytes))
                planned[index] = self._slot(index, chunk, end, end == room, poison)
        return planned

    def _slot(
        self,
        index: int,
        chunk: DriverChunk | None,
        end: int,
        is_whole: bool,
        poison: PoisonChunks | None,
    ) -> Slot:
        base = self._base + index * self._chunk_bytes
        room = self._chunk_bytes if is_whole else end
        mappings: list[Mapping] = []
        covered = 0
        if chunk is not None:
            mappings.append((base, chunk.nbytes, 0, chunk.handle, 0))
            covered = chunk.nbytes
        while poison is not None and covered < end:
            fits = covered + poison.large.nbytes <= room
            piece = poison.large if fits else poison.small
            mappings.append((base + covered, piece.nbytes, 0, piece.handle, 0))
            covered += piece.nbytes
        return Slot(chunk, tuple(mappings), covered)

    def apply(self, planned: dict[int, Slot]) -> None:
        """Change slots to the content that `plan` computed: one unmap, the maps, one call for
        access rights.
        Raises DeviceMemoryError: the driver has no memory for the mappings. Nothing may be behind
        the slots then.
        Raises RuntimeError: any other error of the driver."""
        if not planned:
            return
        first, last = min(planned), max(planned)
        begin = self._base + first * self._chunk_bytes
        nbytes = (last - first) * self._chunk_bytes + planned[last].nbytes
        maps = [mapping for slot in planned.values() for mapping in slot.mappings]
        access = (begin, nbytes, self._driver.access, len(self._driver.access))
        with self._driver:
            runs = self._runs(planned)
            self._doubtful.update(planned)  # first: a signal's handler may raise after each call
            unmapped = self._driver.outcomes("cuMemUnmap", runs)
            self._slots.update(planned)
            mapped = self._driver.outcomes("cuMemMap", maps)
            allowed = self._driver.outcomes("cuMemSetAccess", [access])
            self._driver.check("cuMemUnmap", unmapped)
            self._driver.check("cuMemMap", mapped)
            self._driver.check("cuMemSetAccess", allowed)
        self._doubtful.difference_update(planned)

    def end(self) -> None:
        """Unmap everything. Raises RuntimeError: the driver refused. The slots count as unmapped
        all the same."""
        outcomes = self._driver.outcomes("cuMemUnmap", self._runs(sorted(self._slots)))
        self._slots.clear()
        self._doubtful.clear()
        self._driver.check("cuMemUnmap", outcomes)

    def _runs(self, indices: Iterable[int]) -> list[tuple[int, int]]:
        """(address, bytes) of runs of these slots that one call can unmap, in order. Slots in doubt
        are unmapped here."""
        runs: list[tuple[int, int]] = []
        for index in indices:
            slot = self._slots.get(index, _EMPTY)
            if index in self._doubtful:
                for mapping in slot.mappings:
                    self._driver.failed("cuMemUnmap", *mapping[:2])  # the mapping may exist or not
            elif slot.nbytes:
                address = self._base + index * self._chunk_bytes
                if runs and sum(runs[-1]) == address:
                    address, nbytes = runs.pop()
                    runs.append((address, nbytes + slot.nbytes))
                else:
                    runs.append((address, slot.nbytes))
        return runs
