"""Bring chunks of offloaded storages to the device while a phase computes, for a later load or streamed step (see `EarlyChunks`).

Memory is put behind all chunks at once, at the end of a phase transition or of a streamed step, because the driver is quick while the
link is idle. The copies are started in bursts, so that the next phase transition waits for one or two bursts at most. A thread starts
them: each burst takes it a few calls, which a busy interpreter delays by milliseconds, while the copies of the burst before keep the
link busy.

Where memory lacks because an offload has left chunks that are still being saved, the thread puts it behind other chunks as they are saved.
"""

from __future__ import annotations

import itertools
import operator
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from placement.core.errors import DeviceMemoryError
from placement.core.journal import logger
from placement.devices.background import BackgroundThread
from placement.devices.base import Device
from placement.devices.memory import Copy, Mark
from placement.storage.early import EarlyChunks, runs
from placement.storage.managed import ManagedStorage
from placement.storage.range import Range, RangeChunk
from placement.storage.transfer.chunk_pool import ChunkPool

BURST_CHUNKS = 4
"""The bytes of a burst, in full chunks: 1 GiB on CUDA, which takes 19 ms at 55 GB/s. A Python thread that has to wait 5 ms for each of
three calls (the interpreter's switch interval) keeps up with that."""
_AHEAD = 2
"""The number of bursts whose copies are started and not complete."""

_GLANCE_SECONDS = 1e-4
"""How long to sleep between two looks at the thread. Starting a burst takes about as long."""


class _Burst(NamedTuple):
    copies: list[Copy]
    chunks: list[tuple[EarlyChunks, list[int]]]
    sources: list[tuple[EarlyChunks, list[int]]]
    """The chunks that surrender their memory for this burst; empty if it has memory."""


class Prefetch:
    """The early chunks of one device. All methods are called with the manager's lock held."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._copying: _Copying | None = None
        self._receivers: list[EarlyChunks] = []
        """Those that get memory while the phase computes."""
        self.discarded_bytes = 0
        """Device bytes of chunks that arrived early and were given up unused, so far."""

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

    def begin(
        self,
        shares: Mapping[ManagedStorage, tuple[int, int]],
        chunk_pool: ChunkPool,
        steps: Mapping[ManagedStorage, Sequence[Sequence[RangeChunk]]],
    ) -> None:
        """Put memory behind more chunks, as far as there is memory, and start copying all that is missing. Call `hold` before.

        Args:
            shares: the offloaded storages, soonest needed first, each with the most device bytes that may be early at first, and in the
                end: when what earlier offloads have left is saved.
            chunk_pool: gives the memory.
            steps: the storages of streamed steps that come within this phase, each with the chunks of its first buckets. They come first.
        """
        bursts: deque[_Burst] = deque()
        for storage, buckets in steps.items():
            self.prepare(storage)
            bursts.extend(burst for bucket in buckets if (burst := self._burst_of(storage, bucket, chunk_pool)).copies)
        for storage, (first_bytes, _) in shares.items():
            try:
                self._add(storage, first_bytes - storage.prefetched_bytes, chunk_pool)
            except DeviceMemoryError:  # others have taken it
                break
            finally:
                bursts.extend(self._bursts(storage))
        successive = [*_successive(shares)]
        bursts.extend(successive)
        for early, _ in itertools.chain.from_iterable(burst.chunks for burst in successive):
            self._receivers.append(early)
            early.is_receiving = True
        if bursts:
            self._copying = _Copying(self._device, bursts)
            self._copying.start_first()

    def _burst_of(self, storage: ManagedStorage, bucket: Sequence[RangeChunk], chunk_pool: ChunkPool) -> _Burst:
        """Put memory behind the chunks of a bucket. Returns the copies that they still need."""
        burst = _Burst([], [], [])
        for r, places in itertools.groupby(bucket, key=operator.itemgetter(0)):
            if r.early is None or not _can_arrive_early(storage, r):
                continue
            if r.early.is_stale:
                r.early.discard_all(chunk_pool)
            indices = [index for _, index in places]
            try:
                for run in runs(index for index in indices if index not in r.early.chunks):
                    r.early.add(run, chunk_pool)
            except DeviceMemoryError as error:  # others have taken it
                logger.debug("part of a bucket does not come early: %s", str(error))
            missing = [index for index in indices if index in r.early.chunks and index not in r.early.copied]
            burst.copies.extend(r.early.copies(missing))
            burst.chunks.append((r.early, missing))
        return burst

    def prepare(self, storage: ManagedStorage) -> None:
        """Give the ranges of a storage addresses for early chunks, as far as there can be any."""
        for r in storage.ranges:
            if r.early is None and _can_arrive_early(storage, r):
                storage.storages.may_have_early = True
                r.early = EarlyChunks(self._device, r.chunk_sizes, r.nbytes, r.host.address, self.hold)

    def _add(self, storage: ManagedStorage, room_bytes: int, chunk_pool: ChunkPool) -> None:
        """Put memory behind chunks of a storage."""
        self.prepare(storage)
        for r in storage.ranges:
            if r.early is None or not _can_arrive_early(storage, r):
                continue
            if r.early.is_stale:
                r.early.discard_all(chunk_pool)
            for run in _runs_within(r, room_bytes):
                r.early.add(run, chunk_pool)
                room_bytes -= sum(r.chunk_sizes[index] for index in run)

    def _bursts(self, storage: ManagedStorage) -> Iterator[_Burst]:
        """The copies that a storage's early chunks still need, cut into bursts."""
        burst, left = _Burst([], [], []), BURST_CHUNKS
        for r in storage.ranges:
            missing = [] if r.early is None else sorted(r.early.chunks.keys() - r.early.copied.keys())
            while r.early is not None and missing:
                now, missing = missing[:left], missing[left:]
                burst.copies.extend(r.early.copies(now))
                burst.chunks.append((r.early, now))
                left -= len(now)
                if not left:
                    yield burst
                    burst, left = _Burst([], [], []), BURST_CHUNKS
        if burst.copies:
            yield burst


def _successive(shares: Mapping[ManagedStorage, tuple[int, int]]) -> Iterator[_Burst]:
    """The copies to chunks that get their memory from chunks that are being saved, cut into bursts."""
    sources: defaultdict[int, deque[tuple[EarlyChunks, int]]] = defaultdict(deque)
    for storage, (_, last_bytes) in shares.items():
        surplus = storage.prefetched_bytes - last_bytes
        for r, early in [(r, r.early) for r in storage.ranges if r.early is not None]:
            for index in early.left:
                if r.chunk_sizes[index] <= surplus:
                    sources[r.chunk_sizes[index]].append((early, index))
                    surplus -= r.chunk_sizes[index]
    for storage, (_, last_bytes) in shares.items():
        room_bytes = last_bytes - storage.prefetched_bytes
        for r in storage.ranges:
            if r.early is None or not _can_arrive_early(storage, r):
                continue
            lacking = [index for run in _runs_within(r, room_bytes) for index in run]
            for size, each in itertools.groupby(lacking, key=r.chunk_sizes.__getitem__):
                indices = [*itertools.islice(each, len(sources[size]))]
                room_bytes -= size * len(indices)
                for start in range(0, len(indices), BURST_CHUNKS):
                    now = indices[start : start + BURST_CHUNKS]
                    by_range = itertools.groupby([sources[size].popleft() for _ in now], key=operator.itemgetter(0))
                    given = [(early, [index for _, index in those]) for early, those in by_range]
                    yield _Burst([*r.early.copies(now)], [(r.early, now)], given)


def _can_arrive_early(storage: ManagedStorage, r: Range) -> bool:
    """Whether the slab has the range's bytes in host memory, for this process alone, and nobody may write there at any time."""
    is_exposed = r.is_shown and storage.storages.state_dict_tensors.are_held
    return not (r.is_shared or is_exposed or r.claims is not None) and (r.spill is None or r.spill.claim_if_here())


def _runs_within(r: Range, room_bytes: int) -> Iterator[Sequence[int]]:
    """Runs of neighbouring chunks that have not arrived early, as many as fit into `room_bytes`."""
    assert r.early is not None
    run: list[int] = []
    for index, size in enumerate(r.chunk_sizes):
        if index in r.early.chunks or size > room_bytes:
            if run:
                yield run
            run = []
            if size > room_bytes:
                return
        else:
            run.append(index)
            room_bytes -= size
    if run:
        yield run


class _Copying:
    """The copies of one `Prefetch.begin`, started burst by burst.

    There is no lock between the two threads: an interrupt could leave the calling thread with a lock that nobody releases.
    """

    def __init__(self, device: Device, bursts: deque[_Burst]) -> None:
        self._device = device
        self._bursts = bursts
        self._is_starting = False
        """Whether the thread is taking a burst from `_bursts` and starting it. Set before it is taken."""
        self._started: deque[Mark] = deque()

    def start_first(self) -> None:
        """Start the first bursts here, as far as they have memory, and the rest in a thread."""
        while self._bursts and not self._bursts[0].sources and len(self._started) < _AHEAD:
            self._start(self._bursts.popleft())
        if self._bursts:
            BackgroundThread("placement-prefetch", self._start_rest).start()

    def stop(self) -> None:
        """Return once it is certain that no further copy is started. Waits while the thread starts one burst."""
        self._bursts.clear()
        while self._is_starting:
            time.sleep(_GLANCE_SECONDS)

    def _start_rest(self) -> None:
        try:
            while self._bursts:
                self._wait_for_next()
                self._is_starting = True
                if burst := self._next():
                    self._start(burst)
                self._is_starting = False
        except Exception as error:  # the device failed: the next phase transition meets the same, and says so
            logger.warning("prefetch stopped: %s", str(error))
        finally:
            self._bursts.clear()
            self._is_starting = False

    def _wait_for_next(self) -> None:
        """Wait until the link has done with an earlier burst, and until the memory of the next one has been saved."""
        if len(self._started) >= _AHEAD:
            self._device.wait(self._started.popleft())
        for early, indices in [source for burst in [*self._bursts][:1] for source in burst.sources]:
            early.wait(indices)

    def _next(self) -> _Burst | None:
        try:
            return self._bursts.popleft()
        except IndexError:  # stopped meanwhile
            return None

    def _start(self, burst: _Burst) -> None:
        given = [chunk for early, indices in burst.sources for chunk in early.surrender(indices)]
        if given:
            ((receiver, indices),) = burst.chunks
            receiver.receive(indices, given)
        for early, indices in burst.chunks:
            early.copied.update(dict.fromkeys(indices))
        self._device.copy(burst.copies, "to_device")
        mark = self._device.mark("to_device")
        for early, indices in burst.chunks:
            early.copied.update(dict.fromkeys(indices, mark))
        self._started.append(mark)
