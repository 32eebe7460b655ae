"""The early chunks of one range: device memory with its bytes, behind addresses of their own, while the handle is offloaded.

They arrive in one of two ways. Either they are copied from the slab while a phase computes, for a load or a streamed step that comes
later. Or an offload leaves them there (`save`): then the slab gets what it lacks from them, while the next phase computes.

The handle's own addresses have poison in either case, so a wrong read or write is found as ever. A load or a step maps the early chunks
behind the handle's addresses instead of copying them. Whoever needs their memory before that discards them, once the copies from or to
them are complete: nothing is lost. What an offload left can also give its memory to what arrives early for a phase that comes sooner
(`surrender`, `receive`), once it is saved.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

from placement.devices.base import Device
from placement.devices.memory import Addresses, Chunk, Copy, Mark
from placement.storage.transfer.chunk_pool import ChunkPool

Stop = Callable[[int], None]

_SAVED_TOGETHER = 4
"""The number of chunks that are saved by one copy call, and known to be saved together."""
_GONE = object()


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
        """The chunks by index in the range. An interrupt may leave one here that is not mapped. Another thread changes it."""
        self.copied: dict[int, Mark | None] = {}
        """The mark behind each copy that was started, by index; None if an interrupt or an error may have come before the mark. Another
        thread adds to it."""
        self._saving: set[int] = set()
        """The chunks whose bytes may still be on their way to the slab."""
        self._left: set[int] = set()
        """The chunks that an offload has left here. Nothing was copied in vain when these are given up."""
        self._unsaved: list[int] = []
        """The chunks whose copies to the slab have still to be started."""
        self.is_receiving = False
        """Whether another thread may put memory behind more chunks at any time, and copy the slab's bytes there."""
        self.is_stale = False
        """Whether the slab may have been written since the first of these copies."""

    @property
    def nbytes(self) -> int:
        """Device bytes that are held."""
        return sum([chunk.nbytes for chunk in [*self.chunks.values()]])

    @property
    def left(self) -> list[int]:
        """The chunks that an offload has left here, in the order in which they are saved."""
        return sorted(self.chunks.keys() & self._left)

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

    def receive(self, indices: Sequence[int], chunks: Sequence[Chunk]) -> None:
        """Put memory that others have surrendered behind these chunks (ascending).

        Raises:
            DeviceMemoryError, RuntimeError: the driver refused, or the device failed. The memory is dropped.
        """
        given = iter(chunks)
        for run in runs(indices):
            now = [*itertools.islice(given, len(run))]
            try:
                self._device.map(self._addresses, now, self._start(run[0]))
            except BaseException:
                self._device.unmap(self._addresses, sum(self._sizes[index] for index in run), self._start(run[0]))
                raise
            self.chunks.update(zip(run, now, strict=True))

    def surrender(self, indices: Sequence[int]) -> list[Chunk]:
        """Take the memory from behind chunks (ascending) that an offload has left here, once they are saved. Returns it."""
        self.wait(indices)
        for run in runs(indices):
            self._device.unmap(self._addresses, sum(self._sizes[index] for index in run), self._start(run[0]))
        for index in indices:
            self.copied.pop(index, None)
        self._saving.difference_update(indices)
        self._left.difference_update(indices)
        return [self.chunks.pop(index) for index in indices]

    def copies(self, indices: Iterable[int]) -> Iterator[Copy]:
        """The copies between these chunks (ascending) and the slab, with neighbours joined."""
        for run in runs(indices):
            start = self._start(run[0])
            yield Copy(self._addresses.base + start, self._slab_address + start, self._used(run))

    def stay(self, addresses: Addresses, theirs: dict[int, Chunk], indices: Sequence[int], dirty: Sequence[int]) -> None:
        """Take neighbouring chunks from behind the range's addresses, where poison takes their place. `save` saves them.

        Args:
            addresses: those of the range.
            theirs: the range's chunks, which these leave before they are unmapped.
            indices: the chunks (ascending).
            dirty: those of them that differ from the slab.

        Raises:
            DeviceMemoryError, RuntimeError: the driver refused, or the device failed. `give_back` gives the chunks back.
        """
        if not self.chunks:
            self.is_stale = False
        chunks, start = [theirs[index] for index in indices], self._start(indices[0])
        self.chunks.update(zip(indices, chunks, strict=True))
        self._left.update(indices)
        for index in indices:
            del theirs[index]
        self._device.unmap(addresses, sum(self._sizes[index] for index in indices), start)
        self._device.map(self._addresses, chunks, start)
        self._unsaved.extend(dirty)
        self.copied.update(dict.fromkeys(indices))
        self.copied.update(dict.fromkeys({*indices}.difference(dirty), self._device.mark("to_host")))

    def save(self) -> None:
        """Start saving the chunks that have stayed. Before the offload is committed.

        After all of them have moved, because the driver is quick only while the link is idle.

        Raises:
            RuntimeError: the device failed. `give_back` gives the chunks back.
        """
        while self._unsaved:
            now = self._unsaved[:_SAVED_TOGETHER]
            self._saving.update(now)
            self._device.copy([*self.copies(now)], "to_host")
            self.copied.update(dict.fromkeys(now, self._device.mark("to_host")))
            del self._unsaved[: len(now)]

    def wait_until_saved(self) -> None:
        """Wait until the slab has every byte."""
        if self._saving:
            self.wait([*self._saving])
            self._saving.clear()

    def discard(self, indices: Iterable[int], chunk_pool: ChunkPool) -> None:
        """Give up chunks. Waits for the copies from and to them that have been started. Idempotent."""
        indices = {*indices}
        if not indices & self.chunks.keys():
            return
        self._stop(0)
        gone = sorted(indices & self.chunks.keys())
        self.wait(gone)
        for run in runs(gone):
            self._device.unmap(self._addresses, sum(self._sizes[index] for index in run), self._start(run[0]))
        copied = [index for index in gone if index in self.copied]
        for index in copied:
            del self.copied[index]
        self._stop(sum(self._sizes[index] for index in copied if index not in self._left))
        self._saving.difference_update(gone)
        self._left.difference_update(gone)
        self._unsaved = [index for index in self._unsaved if index not in gone]
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

    def hand_over(self, addresses: Addresses, into: dict[int, Chunk], indices: Iterable[int] | None = None) -> int:
        """Map chunks behind the range's own addresses, once their copies are complete. Returns the bytes that arrived early.

        Args:
            into: the range's chunks. They get these chunks before the addresses do.
            indices: the chunks (ascending); None: all.

        Raises:
            DeviceMemoryError: the driver refused. The caller vacates the range.
        """
        handed = 0
        for run in runs(sorted(self.chunks) if indices is None else indices):
            self.wait(run)
            start = self._start(run[0])
            self._device.unmap(self._addresses, sum(self._sizes[index] for index in run), start)
            chunks = [self.chunks[index] for index in run]
            into.update(zip(run, chunks, strict=True))  # before they leave this object: a chunk is in both rather than in neither
            for index in run:
                self.copied.pop(index, None)
                self.chunks.pop(index, None)
            self._device.map(addresses, chunks, start)
            handed += self._used(run)
            self._saving.difference_update(run)
            self._left.difference_update(run)
        return handed

    def give_back(self, addresses: Addresses, into: dict[int, Chunk]) -> None:
        """Undo `stay`: map all chunks behind the range's addresses again. Only they have certain bytes.

        Raises:
            DeviceMemoryError: the driver refused. The chunks that are still here can be given back later.
        """
        self.forget(into.values())
        for run in runs(sorted(self.chunks)):
            self.wait(run)
            start, nbytes = self._start(run[0]), sum(self._sizes[index] for index in run)
            self._device.unmap(self._addresses, nbytes, start)
            self._device.unmap(addresses, nbytes, start)
            chunks = [self.chunks[index] for index in run]
            self._device.map(addresses, chunks, start)
            into.update(zip(run, chunks, strict=True))  # after they are mapped: what the range has, has its bytes
            self.forget(chunks)
        self._saving.clear()
        self._left.clear()
        self._unsaved.clear()

    def forget(self, chunks: Iterable[Chunk]) -> None:
        """Remove chunks that the range has got, or has still."""
        theirs = {id(chunk) for chunk in chunks}
        for index in [index for index, chunk in self.chunks.items() if id(chunk) in theirs]:
            self.copied.pop(index, None)
            self.chunks.pop(index, None)

    def wait(self, indices: Iterable[int]) -> None:
        """Wait for the copies from and to these chunks that were started."""
        marks = {id(mark): mark for mark in [self.copied.get(index, _GONE) for index in indices] if mark is not _GONE}
        for mark in marks.values():
            if not isinstance(mark, Mark):
                self._device.sync()
            else:
                self._device.wait(mark)

    def _start(self, index: int) -> int:
        return index * self._device.chunk_bytes

    def _used(self, run: Sequence[int]) -> int:
        end = self._start(run[-1]) + self._sizes[run[-1]]
        return min(end, self._used_bytes) - self._start(run[0])


def runs(indices: Iterable[int]) -> Iterator[list[int]]:
    """Runs of neighbours among ascending indices."""
    for _, run in itertools.groupby(enumerate(indices), key=lambda pair: pair[1] - pair[0]):
        yield [index for _, index in run]
