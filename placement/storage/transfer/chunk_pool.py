"""The chunk pool: chunks that one handle has given up at a phase transition, for the next one to take."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from placement.core.errors import DeviceMemoryError
from placement.devices.base import Device
from placement.devices.memory import Chunk


class ChunkPool:
    """The chunk pool of one phase transition.

    No chunk goes back to the driver before `release`, so a phase transition that fails maps back the chunks that were given up and asks the
    driver for nothing. There is one exception: for a size that the pool does not have, chunks of other sizes make room. Going back then
    frees the chunk that took their room before it asks the driver for theirs.

    Args:
        room_bytes: device bytes that the driver may be asked for before any chunk goes back to it. The budget leaves so much.
        left_by: the pool of a phase transition that was neither committed nor undone. This pool takes over its chunks.
    """

    def __init__(self, device: Device, room_bytes: int = 0, left_by: ChunkPool | None = None) -> None:
        self._device = device
        self._chunks: dict[int, deque[Chunk]] = {} if left_by is None else left_by._chunks
        """The chunks by size, oldest first. A handle of hundreds of ranges gives up as many tails."""
        self.room_bytes = room_bytes

    def __iter__(self) -> Iterator[Chunk]:
        return itertools.chain.from_iterable(self._chunks.values())

    def __bool__(self) -> bool:
        return any(self._chunks.values())

    @property
    def held_bytes(self) -> int:
        return sum([chunk.nbytes for chunk in self])

    def give(self, chunks: Iterable[Chunk]) -> None:
        """Add chunks that are behind no address any more."""
        for chunk in chunks:
            self._chunks.setdefault(chunk.nbytes, deque()).append(chunk)

    def count(self, sizes: Sequence[int], fresh: int) -> int:
        """How many of these sizes, from the first on, can be served with at most `fresh` chunks from the driver."""
        held = {size: len(self._chunks.get(size, ())) for size in set(sizes)}
        for served, size in enumerate(sizes):
            if held[size]:
                held[size] -= 1
            elif fresh:
                fresh -= 1
            else:
                return served
        return len(sizes)

    def take(self, sizes: Sequence[int]) -> tuple[Chunk, ...]:
        """Chunks of exactly these sizes, from the pool where it has them, else from the driver.

        Raises:
            DeviceMemoryError: the driver has too little memory. The chunks that were taken are in the pool again.
        """
        taken: list[Chunk] = []
        try:
            for size in sizes:
                taken.append(self._one(size))
        except BaseException:
            self.give(taken)
            raise
        return tuple(taken)

    def take_wiped(self, sizes: Sequence[int]) -> tuple[Chunk, ...]:
        """Like `take`, for addresses of a handle, which any thread may read at any time: the chunks are poison until bytes arrive there.

        From the driver a chunk comes with zeros, from another handle with that one's values: numbers like any others, which a checkpoint
        or a loss would take in unnoticed. Wiping behind the addresses would leave them readable until then, and copying before the
        mapping would make every load wait for its last byte. So a chunk is wiped before it is mapped. That is done while earlier chunks
        are copied. Of 12 GiB a load takes 254 to 260 ms and a swap 239 to 252 ms, with it and without it (H100, twelve runs each).

        Raises:
            DeviceMemoryError: the driver has too little memory. The chunks that were taken are in the pool again.
        """
        chunks = self.take(sizes)
        try:
            self._device.wipe(chunks)
        except BaseException:
            self.give(chunks)
            raise
        return chunks

    def _one(self, size: int) -> Chunk:
        if held := self._chunks.get(size):
            return held.popleft()
        # Chunks of other sizes may hold the memory that is needed. Going back frees the chunk made here before it needs theirs again.
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
        """Return all chunks to the driver, because the phase transition is committed."""
        if not self._chunks:
            return
        chunks = list(self)
        self._chunks = {}  # out of the pool first: a released chunk must never be handed out again
        self.room_bytes += sum([chunk.nbytes for chunk in chunks])
        self._device.release(*chunks)

    def _make_way(self) -> None:
        """Return one chunk of the most frequent size to the driver. Tails are single, and needed for going back."""
        held = max(self._chunks.values(), key=len)
        chunk = held.popleft()
        self.room_bytes += chunk.nbytes
        self._device.release(chunk)
