"""What is behind the addresses of one range of a CUDA device, slot by slot.

A slot is `chunk_bytes` of addresses, and holds a full chunk; or poison in one piece; or a shorter chunk with poison after it in
pieces of the granularity, because a mapping shorter than its chunk is refused (error 801). So the driver may be asked to unmap
any run of whole slots: it unmaps many mappings in one call, but none in part. The last slot of a range has all of its addresses,
used or not, so that its poison is one piece as well: each piece costs the driver as much as a full one (25 us on an H200).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import Any, NamedTuple

from placement.memory.base import Chunk, check_slots
from placement.memory.cuda_driver import Driver
from placement.memory.cuda_lifetime import uninterrupted
from placement.memory.host import check_span

Mapping = tuple[int, int, int, int, int]
"""Arguments of cuMemMap: address, bytes, 0, handle, 0."""


class DriverChunk(Chunk):
    def __init__(self, handle: int, nbytes: int) -> None:
        self.handle = handle
        self.nbytes = nbytes


class PoisonChunks(NamedTuple):
    full: DriverChunk
    tail: DriverChunk
    """Of the granularity."""


class Slot(NamedTuple):
    """What may be behind one slot. `is_settled`: it is there, all of it. Otherwise each mapping may be there or not."""

    chunk: DriverChunk | None
    """Held here, so that what may be mapped counts as held also when everybody else has dropped it."""
    mappings: tuple[Mapping, ...]
    nbytes: int
    """Length of the mappings together, from the start of the slot."""
    is_settled: bool


_EMPTY = Slot(None, (), 0, True)


class Extent:
    """The slots of one range. A call costs what the slots that it changes cost.

    An interrupt cannot fall between the driver's calls of one change, nor between them and their entry in the ledger. Cut after
    them, a change leaves its slots in doubt: the next change of these takes none of their mappings for granted.
    """

    def __init__(self, driver: Driver, base: int, nbytes: int, chunk_bytes: int) -> None:
        self._driver = driver
        self._base = base
        self._nbytes = nbytes
        """Used; the addresses go on to the end of the last slot."""
        self._chunk_bytes = chunk_bytes
        self._slots: dict[int, Slot] = {}
        """By index; a slot without an entry has nothing behind it."""

    def plan(self, start: int, nbytes: int, chunks: Sequence[DriverChunk], poison: PoisonChunks | None) -> dict[int, Slot]:
        """What the slots of `[start, start + nbytes)` must become: chunks from the start on, poison after them.

        Raises:
            ValueError: as `Device.map` and `Device.unmap` say.
        """
        size = self._chunk_bytes
        check_slots(chunks, start, size)
        check_span(start, nbytes, self._nbytes)
        planned: dict[int, Slot] = {}
        indices = range(start // size, -(-(start + nbytes) // size))
        for index, chunk in zip(indices, itertools.chain(chunks, repeat(None)), strict=False):
            room = min(size, self._nbytes - index * size)
            end = min(room, start + nbytes - index * size)
            old = self._slots.get(index, _EMPTY)
            if old.chunk is not None and end < old.chunk.nbytes:
                raise ValueError(f"[{start}, {start + nbytes}) cuts the chunk at {index * size} in two")
            if chunk is not None or old.chunk is not None or old.nbytes < end or not old.is_settled:
                end = max(end, min(room, old.nbytes))
                mappings = self._mappings(index, chunk, end, end == room, poison)
                planned[index] = Slot(chunk, mappings, sum(mapping[1] for mapping in mappings), False)
        return planned

    def _mappings(
        self, index: int, chunk: DriverChunk | None, end: int, is_whole: bool, poison: PoisonChunks | None
    ) -> tuple[Mapping, ...]:
        base = self._base + index * self._chunk_bytes
        if chunk is None and poison is not None and is_whole:
            chunk = poison.full
        found = [] if chunk is None else [(base, chunk.nbytes, 0, chunk.handle, 0)]
        rest = 0 if chunk is None else chunk.nbytes
        if poison is not None:
            size = poison.tail.nbytes
            found += zip(range(base + rest, base + end, size), repeat(size), repeat(0), repeat(poison.tail.handle), repeat(0), strict=False)
        return tuple(found)

    def apply(self, planned: dict[int, Slot]) -> None:
        """Make the slots what `plan` says: one unmap, the maps, one call for the access rights.

        Raises:
            DeviceMemoryError: the driver has no memory for the mappings; the slots may have nothing behind them.
            RuntimeError: any other error of the driver.
        """
        if not planned:
            return
        first, last = min(planned), max(planned)
        begin = self._base + first * self._chunk_bytes
        nbytes = (last - first) * self._chunk_bytes + planned[last].nbytes
        maps = [mapping for slot in planned.values() for mapping in slot.mappings]
        access = (begin, nbytes, self._driver.access, len(self._driver.access))
        with self._driver:
            done: list[tuple[str, list[tuple[Any, ...]]]] = []
            uninterrupted(
                self._calls("cuMemUnmap", self._runs(planned), done),
                functools.partial(self._slots.update, planned),
                self._calls("cuMemMap", maps, done),
                self._calls("cuMemSetAccess", [access], done),
            )
            for function, outcomes in done:
                for outcome in outcomes:
                    self._driver.value(function, outcome)
        self._slots.update({index: slot._replace(is_settled=True) for index, slot in planned.items()})

    def end(self, *then: Callable[[], object]) -> None:
        """Unmap everything, and call `then` right after, without an interrupt in between."""
        done: list[tuple[str, list[tuple[Any, ...]]]] = []
        uninterrupted(self._calls("cuMemUnmap", self._runs(sorted(self._slots)), done), self._slots.clear, *then)
        for function, outcomes in done:
            for outcome in outcomes:
                self._driver.value(function, outcome)

    def _calls(
        self, function: str, calls: Sequence[tuple[Any, ...]], done: list[tuple[str, list[tuple[Any, ...]]]]
    ) -> Callable[[], object]:
        """All these calls of the driver as one that runs no bytecode. Their outcomes are in `done` afterwards."""
        outcomes: list[tuple[Any, ...]] = []
        done.append((function, outcomes))
        return functools.partial(outcomes.extend, itertools.starmap(getattr(self._driver.api, function), calls))

    def _runs(self, indices: Iterable[int]) -> list[tuple[int, int]]:
        """(address, bytes) of what one call each unmaps in these slots, in order. What is in doubt is unmapped here."""
        runs: list[tuple[int, int]] = []
        for index in indices:
            slot = self._slots.get(index, _EMPTY)
            if not slot.is_settled:
                for mapping in slot.mappings:
                    self._driver.failed("cuMemUnmap", *mapping[:2])  # it may be there or not
            elif slot.nbytes:
                address = self._base + index * self._chunk_bytes
                if runs and sum(runs[-1]) == address:
                    address, nbytes = runs.pop()
                    runs.append((address, nbytes + slot.nbytes))
                else:
                    runs.append((address, slot.nbytes))
        return runs
