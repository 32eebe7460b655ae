"""Bring chunks of offloaded storages to the device while a phase computes, for a later load to find there (see `EarlyChunks`).

Memory is put behind all chunks at once, at the end of a phase transition, because the driver is quick while the link is idle. The copies
are started in bursts, so that the next phase transition waits for one or two bursts at most. A thread starts them: each burst takes it a
few calls, which a busy interpreter delays by milliseconds, while the copies of the burst before keep the link busy.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from placement.core.errors import DeviceMemoryError
from placement.core.journal import logger
from placement.devices.base import Copy, Device, Mark
from placement.storage.early import EarlyChunks
from placement.storage.managed import ManagedStorage
from placement.storage.range import Range
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


class Prefetch:
    """The early chunks of one device. All methods are called with the manager's lock held."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._copying: _Copying | None = None
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

    def begin(self, wanted: Iterable[tuple[ManagedStorage, int]], chunk_pool: ChunkPool) -> None:
        """Put memory behind more chunks, as far as there is memory, and start copying all that is missing. Call `hold` before.

        Args:
            wanted: the offloaded storages, soonest needed first, each with the device bytes that may arrive early.
            chunk_pool: gives the memory.
        """
        bursts: deque[_Burst] = deque()
        for storage, nbytes in wanted:
            try:
                self._add(storage, nbytes - storage.prefetched_bytes, chunk_pool)
            except DeviceMemoryError:  # others have taken it
                break
            finally:
                bursts.extend(self._bursts(storage))
        if bursts:
            self._copying = _Copying(self._device, bursts)
            self._copying.start_first()

    def prepare(self, storage: ManagedStorage) -> None:
        """Give the ranges of a storage addresses for early chunks, as far as there can be any."""
        for r in storage.ranges:
            if r.early is None and _can_arrive_early(r):
                storage.storages.may_have_early = True
                r.early = EarlyChunks(self._device, r.chunk_sizes, r.nbytes, r.host.address, self.hold)

    def _add(self, storage: ManagedStorage, room_bytes: int, chunk_pool: ChunkPool) -> None:
        """Put memory behind chunks of a storage."""
        self.prepare(storage)
        for r in storage.ranges:
            if r.early is None or not _can_arrive_early(r):
                continue
            if r.early.is_stale:
                r.early.discard_all(chunk_pool)
            for run in _runs_within(r, room_bytes):
                r.early.add(run, chunk_pool)
                room_bytes -= sum(r.chunk_sizes[index] for index in run)

    def _bursts(self, storage: ManagedStorage) -> Iterator[_Burst]:
        """The copies that a storage's early chunks still need, cut into bursts."""
        burst, left = _Burst([], []), BURST_CHUNKS
        for r in storage.ranges:
            missing = [] if r.early is None else sorted(r.early.chunks.keys() - r.early.copied.keys())
            while r.early is not None and missing:
                now, missing = missing[:left], missing[left:]
                burst.copies.extend(r.early.copies(now))
                burst.chunks.append((r.early, now))
                left -= len(now)
                if not left:
                    yield burst
                    burst, left = _Burst([], []), BURST_CHUNKS
        if burst.copies:
            yield burst


def _can_arrive_early(r: Range) -> bool:
    """Whether the slab has the range's bytes, for this process alone, and nobody was shown it who may write there at any time."""
    return not (r.is_shared or r.is_shown or r.claims is not None)


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
        """Start the first bursts here, and the rest in a thread."""
        for _ in range(min(_AHEAD, len(self._bursts))):
            self._start(self._bursts.popleft())
        if self._bursts:
            threading.Thread(target=self._start_rest, name="placement-prefetch", daemon=True).start()

    def stop(self) -> None:
        """Return once it is certain that no further copy is started. Waits while the thread starts one burst."""
        self._bursts.clear()
        while self._is_starting:
            time.sleep(_GLANCE_SECONDS)

    def _start_rest(self) -> None:
        try:
            while self._bursts:
                self._device.wait(self._started.popleft())
                self._is_starting = True
                if burst := self._next():
                    self._start(burst)
                self._is_starting = False
        except Exception as error:  # the device failed: the next phase transition meets the same, and says so
            logger.warning("prefetch stopped: %s", str(error))
        finally:
            self._bursts.clear()
            self._is_starting = False

    def _next(self) -> _Burst | None:
        try:
            return self._bursts.popleft()
        except IndexError:  # stopped meanwhile
            return None

    def _start(self, burst: _Burst) -> None:
        for early, indices in burst.chunks:
            early.copied.update(dict.fromkeys(indices))
        self._device.copy(burst.copies, "to_device")
        mark = self._device.mark("to_device")
        for early, indices in burst.chunks:
            early.copied.update(dict.fromkeys(indices, mark))
        self._started.append(mark)
