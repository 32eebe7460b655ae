"""What comes to the device at one phase transition: which chunks wait for memory, in order, and the start of their copies."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Iterable

from placement.devices.base import Device
from placement.storage.managed import ManagedStorage
from placement.storage.range import Range
from placement.storage.transfer.chunk_pool import ChunkPool
from placement.storage.transfer.load import Load

WINDOW = 2
"""Chunks that a swap may create before the first one is given up. On an H200, with chunks of 128 MiB: 97 to 99 % of both directions."""
_FIRST = 1
"""Chunks of the first burst of a load. Of one range, all chunks of a burst are mapped before the first is copied."""
_GROWTH = 16
"""And how many times as many in each after it, up to all that wait. They are mapped under the copies of those before: on an H200 a chunk
of 256 MiB takes 4.9 ms to copy, 0.09 ms to map."""


class Arrivals:
    """Chunks of holdings on their way to the device.

    Args:
        chunk_pool: where their memory comes from.
        load: see `Exchange`.
    """

    def __init__(self, device: Device, chunk_pool: ChunkPool, load: Load) -> None:
        self._device = device
        self._chunk_pool = chunk_pool
        self._load = load
        self._full: deque[tuple[ManagedStorage, Range, int]] = deque()
        self._tails: deque[tuple[ManagedStorage, Range, int]] = deque()
        """Short chunks are no full chunk that was given up, so nothing may have to wait behind them."""
        self._burst = 0
        """Chunks of the last burst."""
        self.brought_bytes: Counter[ManagedStorage] = Counter()
        """Copied, by holding."""

    def __bool__(self) -> bool:
        """Whether any chunk still waits for memory."""
        return bool(self._full or self._tails)

    def expect(self, holding: ManagedStorage, ranges: Iterable[Range]) -> None:
        """Every chunk of these ranges will come, after what is expected already."""
        for r in ranges:
            for index, size in enumerate(r.chunk_sizes):
                (self._full if size == self._device.chunk_bytes else self._tails).append((holding, r, index))

    def window(self, room_bytes: int) -> int:
        """How many chunks find room beside everything that leaves."""
        sizes = itertools.accumulate(r.chunk_sizes[index] for _, r, index in itertools.islice(self._full, WINDOW))
        return sum(nbytes <= room_bytes for nbytes in sizes)

    def bring_more(self) -> None:
        """The next burst: memory from the pool or the driver, and the start of its copies. It may go over several ranges, however
        small, because what gives the link work is the burst as a whole."""
        self._burst = left = min(self._next_burst(), len(self._full or self._tails))
        while left:
            left -= self._bring(left, longest=left)[0]

    def fill(self, *, fresh: int, longest: int) -> None:
        """Put memory behind what comes next and start its copies: from the pool, and up to `fresh` chunks from the driver.

        Args:
            longest: chunks that are mapped together.
        """
        while self:
            served, created = self._bring(fresh, longest=longest)
            if not served:
                return
            fresh -= created

    def _bring(self, fresh: int, *, longest: int) -> tuple[int, int]:
        """Bring the next neighbours in one range. Returns how many chunks, and how many of them the driver gave; 0 where memory lacks."""
        waiting = self._full or self._tails
        holding, r, first = waiting[0]
        run = itertools.takewhile(lambda each: each[1] is r, itertools.islice(waiting, longest))
        wanted = [index for _, _, index in run]
        sizes = [r.chunk_sizes[index] for index in wanted]
        served = self._chunk_pool.count(sizes, fresh)
        if not served:
            return 0, 0
        created = served - min(served, self._chunk_pool.count(sizes, 0))
        chunks = self._chunk_pool.take(sizes[:served])
        r.chunks.update(zip(wanted, chunks, strict=False))
        self._device.map(r.layout.addresses, chunks, r.starts[first])
        self.brought_bytes[holding] += self._load.start(holding, r, wanted[:served])
        for _ in range(served):
            waiting.popleft()
        return served, created

    def _next_burst(self) -> int:
        """How many chunks to bring together. The first few start the link; the longer it has work, the more may be mapped."""
        gathered = self._load.burst(r for _, r, _ in self._full or self._tails)
        return gathered or self._burst * _GROWTH or _FIRST
