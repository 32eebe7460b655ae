"""Bring pages of offloaded storages to the device while a phase computes, for a later load. Their memory is aside until then.

Memory is put aside for all pages at once, at the end of a phase transition, because the driver is quick while the link is idle. The copies
are started in bursts, so that the next phase transition waits for one or two bursts at most. A thread starts them: each burst takes it a
few calls, which a busy interpreter delays by milliseconds, while the copies of the burst before keep the link busy.

Where memory lacks because an offload has left pages that are still being saved, the thread gives it to other pages as they are saved.
"""

from __future__ import annotations

import itertools
import operator
import threading
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from placement.core.errors import DeviceMemoryError
from placement.core.journal import logger
from placement.devices.background import BackgroundThread
from placement.devices.base import Device
from placement.devices.memory import Mark
from placement.storage.managed import ManagedStorage
from placement.storage.pages import Behind, Pages, Part, fill, runs
from placement.storage.range import Range
from placement.storage.transfer.chunk_pool import ChunkPool

BURST_CHUNKS = 4
"""The bytes of a burst, in full chunks: 1 GiB on CUDA, which takes 19 ms at 55 GB/s. A Python thread that has to wait 5 ms for each of
three calls (the interpreter's switch interval) keeps up with that."""
_AHEAD = 2
"""The number of bursts whose copies are started and not complete."""


class _Burst(NamedTuple):
    parts: list[Part]
    sources: list[Part]
    """The pages that give their memory to this burst's once they are saved; empty if it has memory."""


class Prefetch:
    """The prefetched pages of one device. All methods are called with the manager's lock held."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._copying: _Copying | None = None
        self._receivers: list[Pages] = []
        """Those that get memory while the phase computes."""
        self.discarded_bytes = 0
        """Device bytes of pages that were prefetched and given up unused, so far."""

    def hold(self, discarded_bytes: int = 0) -> None:
        """Start no further copy until the next `begin`. Does not wait for copies that have been started.

        Args:
            discarded_bytes: bytes that were copied in vain, to be counted.
        """
        self.discarded_bytes += discarded_bytes
        if self._copying is not None:
            self._copying.stop()
            self._copying = None
        while self._receivers:
            self._receivers.pop().is_receiving = False

    def begin(self, shares: Mapping[ManagedStorage, tuple[int, int]], chunk_pool: ChunkPool) -> None:
        """Put memory aside for more pages, as far as there is memory, and start copying all that is missing. Call `hold` before.

        Args:
            shares: the offloaded storages, soonest needed first, each with the most device bytes that may be aside at first, and in the
                end: when what earlier offloads have left is saved.
            chunk_pool: gives the memory.
        """
        bursts: deque[_Burst] = deque()
        for storage, (first_bytes, _) in shares.items():
            try:
                self._add(storage, first_bytes - storage.prefetched_bytes, chunk_pool)
            except DeviceMemoryError:  # others have taken it
                break
            finally:
                bursts.extend(_bursts(storage))
        successive = [*_successive(shares)]
        bursts.extend(successive)
        for pages, _ in itertools.chain.from_iterable(burst.parts for burst in successive):
            self._receivers.append(pages)
            pages.is_receiving = True
        if bursts:
            self._copying = _Copying(self._device, bursts)
            self._copying.start_first()

    def prepare(self, storage: ManagedStorage) -> None:
        """Reserve addresses aside for the ranges of a storage, as far as anything can be there."""
        for r in storage.ranges:
            if _claim_for_prefetch(storage, r):
                r.pages.reserve_aside(self.hold)

    def _add(self, storage: ManagedStorage, room_bytes: int, chunk_pool: ChunkPool) -> None:
        """Put memory aside for pages of a storage."""
        self.prepare(storage)
        for r in storage.ranges:
            if not r.pages.can_be_aside or not _claim_for_prefetch(storage, r):
                continue
            if r.pages.is_stale:
                r.pages.discard(chunk_pool)
            for run in runs(_lacking_within(r.pages, room_bytes)):
                r.pages.put(run, chunk_pool.take([r.chunk_sizes[index] for index in run]), chunk_pool, Behind.ASIDE)
                room_bytes -= r.pages.bytes_of(run)


def _bursts(storage: ManagedStorage) -> Iterator[_Burst]:
    """The copies that the pages of a storage that are aside still need, cut into bursts."""
    missing = [(r.pages, index) for r in storage.ranges for index in r.pages.unfilled()]
    for start in range(0, len(missing), BURST_CHUNKS):
        by_range = itertools.groupby(missing[start : start + BURST_CHUNKS], key=operator.itemgetter(0))
        yield _Burst([(pages, [index for _, index in those]) for pages, those in by_range], [])


def _successive(shares: Mapping[ManagedStorage, tuple[int, int]]) -> Iterator[_Burst]:
    """The copies to pages that get their memory from pages that are being saved, cut into bursts."""
    sources: defaultdict[int, deque[tuple[Pages, int]]] = defaultdict(deque)
    for storage, (_, last_bytes) in shares.items():
        surplus = storage.prefetched_bytes - last_bytes
        for r in storage.ranges:
            for index in r.pages.left():
                if r.chunk_sizes[index] <= surplus:
                    sources[r.chunk_sizes[index]].append((r.pages, index))
                    surplus -= r.chunk_sizes[index]
    for storage, (_, last_bytes) in shares.items():
        room_bytes = last_bytes - storage.prefetched_bytes
        for r in storage.ranges:
            if not r.pages.can_be_aside or not _claim_for_prefetch(storage, r):
                continue
            for size, each in itertools.groupby(_lacking_within(r.pages, room_bytes), key=r.chunk_sizes.__getitem__):
                indices = [*itertools.islice(each, len(sources[size]))]
                room_bytes -= size * len(indices)
                for start in range(0, len(indices), BURST_CHUNKS):
                    now = indices[start : start + BURST_CHUNKS]
                    by_range = itertools.groupby([sources[size].popleft() for _ in now], key=operator.itemgetter(0))
                    yield _Burst([(r.pages, now)], [(pages, [index for _, index in those]) for pages, those in by_range])


def _claim_for_prefetch(storage: ManagedStorage, r: Range) -> bool:
    """Claim the host copy. Returns whether it has the range's bytes in host memory, for this process alone, and nobody may write there."""
    is_exposed = r.is_shown and storage.state_dict_tensors.are_held
    return not (r.is_shared or is_exposed or r.moving_in is not None) and (r.spill is None or r.spill.claim_if_here())


def _lacking_within(pages: Pages, room_bytes: int) -> list[int]:
    """The first pages without memory, as many as fit into `room_bytes`."""
    lacking = pages.without_memory()
    ends = itertools.accumulate(pages.sizes[index] for index in lacking)
    return [index for index, end in zip(lacking, ends, strict=True) if end <= room_bytes]


class _Copying:
    """The copies of one `Prefetch.begin`, started burst by burst."""

    def __init__(self, device: Device, bursts: deque[_Burst]) -> None:
        self._device = device
        self._bursts = bursts
        self._lock = threading.RLock()  # reentrant: a collection on the thread may end this prefetch's manager
        """Held while a burst is taken from `_bursts` and started."""
        self._is_stopped = False
        self._started: deque[Mark] = deque()

    def start_first(self) -> None:
        """Start the first bursts here, as far as they have memory, and the rest in a thread."""
        while self._bursts and not self._bursts[0].sources and len(self._started) < _AHEAD:
            self._start(self._bursts.popleft())
        if self._bursts:
            BackgroundThread("placement-prefetch", self._start_rest).start()

    def stop(self) -> None:
        """Return once it is certain that no further copy is started. Waits while the thread starts one burst."""
        self._is_stopped = True  # first: the thread may have the lock again before this has it
        with self._lock:
            self._bursts.clear()

    def _start_rest(self) -> None:
        try:
            while self._wait_for_next():
                with self._lock:
                    if self._bursts and not self._is_stopped:
                        self._start(self._bursts.popleft())
        except Exception as error:  # the device failed: the next phase transition meets the same, and says so
            logger.warning("prefetch stopped: %s", str(error))
        finally:
            self.stop()

    def _wait_for_next(self) -> bool:
        """Wait until the link has done with an earlier burst, and the memory of the next one is saved. Returns whether there is one."""
        if len(self._started) >= _AHEAD:
            self._device.wait(self._started.popleft())
        with self._lock:
            sources = self._bursts[0].sources if self._bursts else []
        for pages, indices in sources:
            pages.wait(indices)
        return bool(self._bursts) and not self._is_stopped

    def _start(self, burst: _Burst) -> None:
        chunk_pool = ChunkPool(self._device)
        for pages, indices in burst.sources:
            pages.vacate(indices, chunk_pool)
        for pages, indices in burst.parts if burst.sources else ():
            pages.put(indices, chunk_pool.take([pages.sizes[index] for index in indices]), chunk_pool, Behind.ASIDE)
        fill(self._device, burst.parts)
        pages, indices = burst.parts[0]
        if (mark := pages.table[indices[0]].mark) is not None:
            self._started.append(mark)
