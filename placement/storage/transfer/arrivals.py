"""The chunks that come to the device at one phase transition: they wait for memory, in order, and then their copies start."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Iterable

from placement.devices.base import Device
from placement.storage.managed import ManagedStorage
from placement.storage.range import Range
from placement.storage.transfer.chunk_pool import ChunkPool

WINDOW = 2
"""The number of chunks that a swap may create before the first one is given up.

On an H200, with chunks of 128 MiB, two use 97 to 99 % of both directions of the link.
"""
_FIRST = 1
"""The number of chunks in the first burst of a load. In a burst, all chunks of one range are mapped before the first is copied."""
_GROWTH = 16
"""Each later burst has this many times the chunks of the one before, up to all that wait. They are mapped while the earlier ones are
copied: on an H200 a chunk of 256 MiB takes 4.9 ms to copy and 0.09 ms to map."""
_GATHERED = 2
"""The number of chunks in each burst where N ranks share a host copy: each copies 1/N of a chunk, which takes hardly longer than mapping
that chunk (four busy H200s: 1.7 ms of copying, 1.3 ms of creating and mapping). Four ranks load 8.6 GB in 63 ms, and in 67 to 70 ms where
half of it is mapped first."""


class Arrivals:
    """Chunks on their way to the device.

    Args:
        chunk_pool: gives their memory.
    """

    def __init__(self, device: Device, chunk_pool: ChunkPool) -> None:
        self._device = device
        self._chunk_pool = chunk_pool
        self._full: deque[tuple[ManagedStorage, Range, int]] = deque()
        self._tails: deque[tuple[ManagedStorage, Range, int]] = deque()
        """Chunks shorter than a full one. A full chunk that was given up does not fit them, so they wait in a queue of their own."""
        self._burst = 0
        """The number of chunks in the last burst."""
        self.brought_bytes: Counter[ManagedStorage] = Counter()
        """Bytes that this process copies to the device, by storage."""

    def __bool__(self) -> bool:
        """Whether any chunk still waits for memory."""
        return bool(self._full or self._tails)

    def expect(self, holding: ManagedStorage, ranges: Iterable[Range]) -> None:
        """Add the chunks of these ranges to the end of the queues, without those that arrived early."""
        for r in ranges:
            there = () if r.early is None else r.early.chunks
            for index, size in enumerate(r.chunk_sizes):
                if index not in there:
                    (self._full if size == self._device.chunk_bytes else self._tails).append((holding, r, index))

    def window(self, room_bytes: int) -> int:
        """How many of the first `WINDOW` waiting chunks fit into `room_bytes`, the room beside everything that leaves."""
        sizes = itertools.accumulate(r.chunk_sizes[index] for _, r, index in itertools.islice(self._full, WINDOW))
        return sum(nbytes <= room_bytes for nbytes in sizes)

    def bring_more(self) -> None:
        """Bring the next burst: put memory from the pool or the driver behind its chunks, and start their copies.

        A burst may cover several ranges, however small, because the burst as a whole keeps the link busy.
        """
        self._burst = left = min(self._next_burst(), len(self._full or self._tails))
        while left:
            left -= self._bring(left, longest=left)[0]

    def fill(self, *, fresh: int, longest: int) -> None:
        """Put memory behind the next chunks and start their copies, until memory lacks.

        Args:
            fresh: the number of chunks that the driver may be asked for. All others come from the pool.
            longest: the most chunks to map together.
        """
        while self:
            served, created = self._bring(fresh, longest=longest)
            if not served:
                return
            fresh -= created

    def _bring(self, fresh: int, *, longest: int) -> tuple[int, int]:
        """Bring the next neighbouring chunks of one range. Returns their number (0: memory lacks), and how many of them the driver gave."""
        waiting = self._full or self._tails
        holding, r, first = waiting[0]
        # The next chunk of a range is no neighbour where chunks between the two arrived early.
        places = enumerate(itertools.islice(waiting, longest), first)
        wanted = [place for place, _ in itertools.takewhile(lambda each: each[1][1:] == (r, each[0]), places)]
        sizes = [r.chunk_sizes[index] for index in wanted]
        served = self._chunk_pool.count(sizes, fresh)
        if not served:
            return 0, 0
        created = served - min(served, self._chunk_pool.count(sizes, 0))
        chunks = self._chunk_pool.take_wiped(sizes[:served])
        r.chunks.update(zip(wanted, chunks, strict=False))
        self._device.map(r.layout.addresses, chunks, r.starts[first])
        self.brought_bytes[holding] += holding.bring(r, wanted[:served])
        for _ in range(served):
            waiting.popleft()
        return served, created

    def _next_burst(self) -> int:
        """The number of chunks in the next burst. A short first one starts the link; the longer it has work, the more may be mapped."""
        if any(r.is_shared for _, r, _ in self._full or self._tails):
            return _GATHERED
        return self._burst * _GROWTH or _FIRST
