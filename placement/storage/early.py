"""The chunks of one range that arrive early: copies of the host slab, behind addresses of their own, while the handle is offloaded.

The handle's own addresses keep their poison until it is loaded, so a wrong read or write is found as ever, and the host copy stays the
authoritative one. A load maps the early chunks behind the handle's addresses instead of copying them anew. Whoever needs their memory
before that discards them: nothing is lost.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

from placement.devices.base import Addresses, Chunk, Copy, Device, Mark
from placement.storage.transfer.chunk_pool import ChunkPool

Stop = Callable[[int], None]


class EarlyChunks:
    """Memory behind addresses of its own, in the layout of a range.

    Args:
        sizes: bytes of the range's chunks; each but the last is a full chunk.
        used_bytes: the part of them that the slab has bytes for.
        slab_address: where the slab begins.
        stop: makes sure that no further copy is started; called before chunks are given up. Takes the bytes whose copies were in vain.

    Raises:
        DeviceMemoryError: no addresses are left.
    """

    def __init__(self, device: Device, sizes: Sequence[int], used_bytes: int, slab_address: int, stop: Stop) -> None:
        self._device = device
        self._stop = stop
        self._addresses = device.reserve(sum(sizes))
        self._sizes = sizes
        self._used_bytes = used_bytes
        self._slab_address = slab_address
        self.chunks: dict[int, Chunk] = {}
        """The chunks by index in the range. An interrupt may leave one here that is not mapped."""
        self.copied: dict[int, Mark | None] = {}
        """The mark behind each copy that was started, by index; None if an interrupt or an error may have come before the mark. Another
        thread adds to it."""
        self.is_stale = False
        """Whether the slab may have been written since the first of these copies."""

    @property
    def nbytes(self) -> int:
        """Device bytes that are held."""
        return sum([chunk.nbytes for chunk in [*self.chunks.values()]])

    def add(self, indices: Sequence[int], chunk_pool: ChunkPool) -> None:
        """Put memory behind these neighbouring chunks (ascending).

        Raises:
            DeviceMemoryError: there is not enough memory. None of it was added.
        """
        chunks = chunk_pool.take([self._sizes[index] for index in indices])
        self.chunks.update(zip(indices, chunks, strict=True))
        try:
            self._device.map(self._addresses, chunks, self._start(indices[0]))
        except BaseException:
            self.discard(indices, chunk_pool)
            raise

    def copies(self, indices: Iterable[int]) -> Iterator[Copy]:
        """The copies that fill these chunks (ascending) from the slab, with neighbours joined."""
        for run in _runs(indices):
            start = self._start(run[0])
            yield Copy(self._addresses.base + start, self._slab_address + start, self._used(run))

    def discard(self, indices: Iterable[int], chunk_pool: ChunkPool) -> None:
        """Give up chunks. Waits for the copies into them that have been started. Idempotent."""
        gone = sorted({*indices} & self.chunks.keys())
        if not gone:
            return
        self._stop(0)
        self._wait(gone)
        for run in _runs(gone):
            self._device.unmap(self._addresses, sum(self._sizes[index] for index in run), self._start(run[0]))
        copied = [index for index in gone if index in self.copied]
        for index in copied:
            del self.copied[index]
        self._stop(sum(self._sizes[index] for index in copied))
        # Out of here first. A chunk that an interrupt then drops is freed once collected; one that was in both might be given out twice.
        chunk_pool.give([self.chunks.pop(index) for index in gone])

    def discard_all(self, chunk_pool: ChunkPool) -> None:
        """Give up every chunk, for the same price. What arrives after this is fresh."""
        self.discard([*self.chunks], chunk_pool)
        self.is_stale = False

    def settle(self, chunk_pool: ChunkPool) -> None:
        """Give up the chunks that a load cannot use: those whose copy was not started, and all if the slab may have been written."""
        if self.is_stale:
            self.discard_all(chunk_pool)
        else:
            self.discard([index for index in self.chunks if self.copied.get(index) is None], chunk_pool)

    def hand_over(self, addresses: Addresses, into: dict[int, Chunk]) -> int:
        """Map all chunks behind the range's own addresses, once their copies are complete. Returns the bytes that arrived early.

        Args:
            into: the range's chunks. They get these chunks before the addresses do.

        Raises:
            DeviceMemoryError: the driver refused. The caller vacates the range.
        """
        handed = 0
        for run in _runs(sorted(self.chunks)):
            self._wait(run)
            start = self._start(run[0])
            self._device.unmap(self._addresses, sum(self._sizes[index] for index in run), start)
            chunks = [self.chunks[index] for index in run]
            into.update(zip(run, chunks, strict=True))  # before they leave this object: a chunk is in both rather than in neither
            for index in run:
                self.copied.pop(index, None)
                self.chunks.pop(index, None)
            self._device.map(addresses, chunks, start)
            handed += self._used(run)
        return handed

    def forget(self, chunks: Iterable[Chunk]) -> None:
        """Remove chunks that an interrupted `hand_over` has given to the range already."""
        theirs = {id(chunk) for chunk in chunks}
        for index in [index for index, chunk in self.chunks.items() if id(chunk) in theirs]:
            self.copied.pop(index, None)
            self.chunks.pop(index, None)

    def _wait(self, indices: Iterable[int]) -> None:
        """Wait for the copies into these chunks that were started."""
        marks = {id(mark): mark for index in indices if index in self.copied for mark in (self.copied[index],)}
        for mark in marks.values():
            if mark is None:
                self._device.sync()
            else:
                self._device.wait(mark)

    def _start(self, index: int) -> int:
        return index * self._device.chunk_bytes

    def _used(self, run: Sequence[int]) -> int:
        end = self._start(run[-1]) + self._sizes[run[-1]]
        return min(end, self._used_bytes) - self._start(run[0])


def _runs(indices: Iterable[int]) -> Iterator[list[int]]:
    """Runs of neighbours among ascending indices."""
    for _, run in itertools.groupby(enumerate(indices), key=lambda pair: pair[1] - pair[0]):
        yield [index for _, index in run]
