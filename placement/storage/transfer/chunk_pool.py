"""Chunks between two owners: what one handle gave up at a phase transition, the next may take."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from placement.core.errors import DeviceMemoryError
from placement.devices.base import Chunk, Device


class ChunkPool:
    """The chunks of one phase transition.

    Nothing goes back to the driver before `release`, so that a phase transition that fails maps back what was given up and allocates
    nothing. A chunk that an interrupt drops on the way is freed by its own death.

    Args:
        room_bytes: device bytes that the driver may be asked for before anything goes back to it: what the budget leaves.
        left_by: the pool of a transition that ended without a decision; its chunks are in this pool now.
    """

    def __init__(self, device: Device, room_bytes: int = 0, left_by: ChunkPool | None = None) -> None:
        self._device = device
        self._chunks: dict[int, OrderedDict[int, Chunk]] = {} if left_by is None else left_by._chunks
        """By size, then by identity, oldest first: handles of hundreds of ranges leave as many tails."""
        self.room_bytes = room_bytes

    def __iter__(self) -> Iterator[Chunk]:
        return (chunk for chunks in self._chunks.values() for chunk in chunks.values())

    def __bool__(self) -> bool:
        return any(self._chunks.values())

    @property
    def held_bytes(self) -> int:
        return sum([chunk.nbytes for chunk in self])

    def give(self, chunks: Iterable[Chunk]) -> None:
        """Add chunks that are behind no address any more; a chunk that is in the pool already is not added again."""
        for chunk in chunks:
            self._chunks.setdefault(chunk.nbytes, OrderedDict()).setdefault(id(chunk), chunk)

    def count(self, sizes: Sequence[int], fresh: int) -> int:
        """How many of these sizes, from the first on, the pool can serve with at most `fresh` chunks from the driver."""
        held = {size: len(self._chunks.get(size, ())) for size in set(sizes)}
        for served, size in enumerate(sizes):
            if held[size]:
                held[size] -= 1
            elif fresh:
                fresh -= 1
            else:
                return served
        return len(sizes)

    def forget(self, chunks: Iterable[Chunk]) -> None:
        """Drop chunks that turned out to be behind addresses still."""
        for chunk in chunks:
            if held := self._chunks.get(chunk.nbytes):
                held.pop(id(chunk), None)

    def take(self, sizes: Sequence[int]) -> tuple[Chunk, ...]:
        """Chunks of exactly these sizes: from the pool, the rest from the driver.

        Raises:
            DeviceMemoryError: the driver has not enough; the pool is as before.
        """
        taken: list[Chunk] = []
        try:
            for size in sizes:
                taken.append(self._one(size))
        except BaseException:
            self.give(taken)
            raise
        return tuple(taken)

    def _one(self, size: int) -> Chunk:
        if held := self._chunks.get(size):
            return held.popitem(last=False)[1]
        # Chunks of other sizes may stand in the way. Whoever goes back after this gets memory of its own size in exchange for ours.
        while self and self.room_bytes < size:
            self._make_way()
        try:
            chunk = self._device.create(size)
        except DeviceMemoryError:
            if not self or self._device.memory().free_bytes >= size:
                raise
            while self and self._device.memory().free_bytes < size:
                self._make_way()
            chunk = self._device.create(size)
        self.room_bytes -= size
        return chunk

    def release(self) -> None:
        """Return everything to the driver: the phase transition is decided."""
        chunks = list(self)
        try:
            self._chunks = {}  # out of the pool first: a released chunk must never be handed out again
            self.room_bytes += sum([chunk.nbytes for chunk in chunks])
            self._device.release(*chunks)
        except BaseException:  # an interrupt: its traceback would keep them, and their memory, from who goes back
            self._chunks = {}
            self._device.release(*chunks)
            raise

    def _make_way(self) -> None:
        """Return one chunk of the size that there is most of: tails are single, and needed for going back."""
        held = max(self._chunks.values(), key=len)
        chunk = held.popitem(last=False)[1]
        self.room_bytes += chunk.nbytes
        self._device.release(chunk)
