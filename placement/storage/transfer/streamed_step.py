"""Stream an optimizer's state through a small window of device memory while the optimizer steps.

The parameters are stepped in buckets. The state of a bucket comes to the device one or two buckets ahead, is stepped there, and goes back
to the host behind the step, so that the link is busy both ways beside the kernels. At most three buckets are on the device: one that
leaves or is stepped, and two that come. No tensor is touched, because the state keeps its addresses: memory is mapped behind the chunks
of a bucket, and taken away again when its bytes are on the host.

The first buckets of a step can arrive before it, while the work of its phase computes (see `EarlyChunks`). Then the link works both ways
from the step's first moment on.
"""

from __future__ import annotations

import bisect
import itertools
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from placement.core.errors import DeviceMemoryError
from placement.core.torch_modes import without_modes
from placement.devices.memory import Chunk
from placement.storage.managed import ManagedStorage
from placement.storage.range import RangeChunk
from placement.storage.stepping import adopt_created
from placement.storage.transfer.buckets import AHEAD, Bucket, Piece, buckets_of, bytes_of, runs
from placement.storage.transfer.chunk_pool import ChunkPool

_logger = logging.getLogger("placement")


class Streamed(NamedTuple):
    """The result of a streamed step."""

    to_device_bytes: int
    early_bytes: int
    """The part of these that had arrived before the step."""
    to_host_bytes: int
    peak_bytes: int
    """The most device bytes of the state at a time."""


@dataclass
class StreamedStep:
    """One step of an optimizer whose state is on the host.

    Args:
        holding: the optimizer's storage.
        pieces: the state of the parameters or their slices, in the order in which they are stepped.
        bucket_bytes: device bytes of a bucket.
        window_bytes: device bytes that all buckets on the device may have together. A single bucket may have more.
        step: steps what pieces `first` up to `last` (not included) are the state of, on the current stream.
    """

    holding: ManagedStorage
    pieces: Sequence[Piece]
    bucket_bytes: int
    window_bytes: int
    step: Callable[[int, int], object]
    _buckets: list[Bucket] = field(default_factory=list)
    _uses: dict[RangeChunk, list[int]] = field(default_factory=dict)
    """The buckets that have bytes in a chunk, ascending."""
    _fetched: int = 0
    """The number of buckets that have memory."""
    _vacated: int = 0
    """The number of buckets that have left."""
    _before: frozenset[int] = frozenset()
    """The storages (`_cdata`) of state outside the ranges when the step begins, such as a moment that the user has replaced. A later
    bucket may have to step with it, so it is taken in at the end."""
    _is_tight: bool = False
    """Whether the device lacks memory for buckets ahead."""
    _to_device_bytes: int = 0
    _early_bytes: int = 0
    _to_host_bytes: int = 0
    _peak_bytes: int = 0

    def run(self) -> Streamed:
        """Make the step. Returns when all state is complete on the host and its memory is given back.

        Raises:
            DeviceMemoryError: a bucket has no room although no other is on the device.
            HostMemoryError: the state is on disk, and there is not enough memory for it. Nothing was stepped.
            IntegrityError: values of the state are lost. Nothing was stepped.
            Exception: the step's or the device's error. What was stepped has its new state, everything else its old state, on the host.
        """
        holding, device = self.holding, self.holding.device
        self._buckets = buckets_of(self.pieces, self.bucket_bytes)
        uses: defaultdict[RangeChunk, list[int]] = defaultdict(list)
        for index, bucket in enumerate(self._buckets):
            for each in bucket.chunks:
                uses[each].append(index)
        self._uses = dict(uses)
        chunk_pool = ChunkPool(device, self.window_bytes)
        for r in holding.ranges:
            r.claim()  # before anything changes
        holding.host_read_locks.wait()  # from the first bucket on, the host copy is overwritten
        try:
            holding.is_consistent = False
            holding.is_stepping = True
            if any(bucket.unborn_bytes for bucket in self._buckets):
                with without_modes():
                    self._before = frozenset(claim.storage._cdata for claim in holding.storages.rescan().stay)
            self._keep_early(chunk_pool)
            device.order()  # the steps come behind the gradients
            if not self._buckets or not any(_is_early(each) for each in self._buckets[0].chunks):  # else the first step need not wait
                self._fetch_ahead(AHEAD, chunk_pool)
            for index, bucket in enumerate(self._buckets):
                self._fetch_now(index, chunk_pool)
                self._step(index, bucket)
                self._vacate(index, chunk_pool)
                self._fetch_ahead(index + 1 + AHEAD, chunk_pool)
            self._vacate(len(self._buckets), chunk_pool)
            device.order()
            holding.make_consistent(chunk_pool)
        except BaseException as error:
            try:
                device.order()
                holding.make_consistent(chunk_pool)
            except Exception as failure:  # tried again at the next step or phase transition
                error.add_note(f"placement: the state of {holding.name!r} could not go back to the host yet: {failure}")
            raise
        finally:
            chunk_pool.release()
        if any(bucket.unborn_bytes for bucket in self._buckets):
            self._end_of_birth()
        return Streamed(self._to_device_bytes, self._early_bytes, self._to_host_bytes, self._peak_bytes)

    def _keep_early(self, chunk_pool: ChunkPool) -> None:
        """Keep what arrived early for the first buckets, and give up the rest. Waits for bytes that are on their way to the slab."""
        wanted = {each for bucket in self._buckets[: AHEAD + 1] for each in bucket.chunks}
        for r in self.holding.ranges:
            if r.early is not None:
                r.early.settle(chunk_pool)
                r.early.discard([index for index in r.early.chunks if (r, index) not in wanted], chunk_pool)
                r.early.wait_until_saved()
        chunk_pool.room_bytes -= self.holding.storages.early_bytes

    def _end_of_birth(self) -> None:
        for bucket in self._buckets:
            bucket.fresh = None
        with without_modes():
            self.holding.storages.count_uses()
        self.holding.device.trim()  # the memory in which state was created is in torch's cache, where nobody else can use it

    # --- coming

    def _fetch_ahead(self, until: int, chunk_pool: ChunkPool) -> None:
        """Fetch the buckets before `until`, in order, as far as the window and the device have room."""
        while self._fetched < min(until, len(self._buckets)) and not self._is_tight:
            bucket = self._buckets[self._fetched]
            if self._fetched > self._vacated and self._live_bytes() + self._more_bytes(bucket) > self.window_bytes:
                return
            try:
                self._fetch(bucket, chunk_pool)
            except DeviceMemoryError as error:
                self._is_tight = True
                _logger.warning("%s: its step streams bucket by bucket, with none ahead: %s", self.holding.name, str(error))

    def _fetch_now(self, index: int, chunk_pool: ChunkPool) -> None:
        """Fetch the bucket that is stepped next, if it has no memory yet: the buckets before it leave first."""
        if self._fetched > index:
            return
        self._vacate(index, chunk_pool)
        self._vacate_kept(self._buckets[index], chunk_pool)
        try:
            self._fetch(self._buckets[index], chunk_pool)
        except DeviceMemoryError as error:
            error.add_note(
                f"placement: step() of {self.holding.name!r} stopped before its bucket {index + 1} of {len(self._buckets)}; the parameters "
                "before it are stepped. Make streamed_bucket_bytes smaller, or leave more device memory free in this phase."
            )
            raise

    def _fetch(self, bucket: Bucket, chunk_pool: ChunkPool) -> None:
        device = self.holding.device
        self._take_early(bucket, chunk_pool)
        lacking = [each for each in bucket.chunks if each[1] not in each[0].chunks]
        taken = self._take([r.chunk_sizes[index] for r, index in lacking], chunk_pool)
        chunks = iter(taken)
        for r, run in runs(lacking):
            mapped = list(itertools.islice(chunks, len(run)))
            r.chunks.update(zip(run, mapped, strict=True))  # first: what is in `chunks` is vacated after an interrupt
            try:
                device.map(r.layout.addresses, mapped, r.starts[run[0]])
            except DeviceMemoryError:
                r.give(run, chunk_pool)  # poison is behind them
                chunk_pool.give(chunks)
                raise
            device.copy(copies := r.copies(run), "to_device")
            self._to_device_bytes += sum(copy.nbytes for copy in copies)
        bucket.arrived = device.mark("to_device")
        self._fetched += 1
        self._peak_bytes = max(self._peak_bytes, self._live_bytes())

    def _take_early(self, bucket: Bucket, chunk_pool: ChunkPool) -> None:
        """Put what arrived early behind the state's own addresses."""
        for r, run in runs([each for each in bucket.chunks if _is_early(each)]):
            assert r.early is not None
            try:
                handed = r.early.hand_over(r.layout.addresses, r.chunks, run)
            except DeviceMemoryError:
                r.give(run, chunk_pool)  # poison is behind them
                raise
            self._early_bytes += handed
            self._to_device_bytes += handed

    def _take(self, sizes: Sequence[int], chunk_pool: ChunkPool) -> Sequence[Chunk]:
        try:
            return chunk_pool.take_wiped(sizes)
        except DeviceMemoryError:
            self.holding.device.trim()  # torch's cache may have what the driver lacks
            return chunk_pool.take_wiped(sizes)

    def _live_bytes(self) -> int:
        born = sum(bucket.unborn_bytes for bucket in self._buckets[self._vacated : self._fetched])
        return self.holding.chunk_bytes + born

    def _more_bytes(self, bucket: Bucket) -> int:
        return bucket.unborn_bytes + bytes_of(each for each in bucket.chunks if each[1] not in each[0].chunks and not _is_early(each))

    # --- stepping and leaving

    def _step(self, index: int, bucket: Bucket) -> None:
        device = self.holding.device
        assert bucket.arrived is not None
        with device.after(bucket.arrived):
            for r, run in runs(bucket.chunks):
                r.note_written()
                r.newer |= frozenset(run)
            self.step(bucket.first, bucket.last)
            if bucket.unborn_bytes:
                with without_modes():
                    leaving = [each.fresh for each in self._buckets[self._vacated : index] if each.fresh is not None]
                    copied = {claim.storage._cdata for r in leaving for claim in r.claims or ()}
                    bucket.fresh = adopt_created(self.holding, copied | self._before)
                self._to_host_bytes += 0 if bucket.fresh is None else bucket.fresh.nbytes
            bucket.leaving = tuple(each for each in bucket.chunks if self._next_use(each, index) > index + AHEAD)
            for r, run in runs(bucket.leaving):
                device.copy(copies := r.copies(run), "to_host")
                self._to_host_bytes += sum(copy.nbytes for copy in copies)
            bucket.left = device.mark("to_host")

    def _next_use(self, chunk: RangeChunk, index: int) -> float:
        """The next bucket that has bytes in a chunk. A chunk that is used again soon stays until that bucket leaves."""
        uses = self._uses[chunk]
        later = bisect.bisect_right(uses, index)
        return uses[later] if later < len(uses) else float("inf")

    def _vacate(self, until: int, chunk_pool: ChunkPool) -> None:
        """Wait until the buckets before `until` have left, and take their memory away."""
        device, storages = self.holding.device, self.holding.storages
        while self._vacated < until:
            bucket = self._buckets[self._vacated]
            assert bucket.left is not None
            device.wait(bucket.left)
            self._take_away(bucket.leaving, chunk_pool)
            if bucket.fresh is not None:
                with without_modes():
                    storages.keep((*self.holding.ranges, bucket.fresh))
                    bucket.fresh.move_in()
            self._vacated += 1

    def _vacate_kept(self, bucket: Bucket, chunk_pool: ChunkPool) -> None:
        """Take the chunks away that stay for buckets after this one, which has no room beside them."""
        device, wanted = self.holding.device, {*bucket.chunks}
        kept = [(r, index) for r in self.holding.ranges for index in sorted(r.chunks) if (r, index) not in wanted]
        if not kept:
            return
        device.order()  # the copies come behind the steps: nothing else waits for a bucket of which no chunk has left
        for r, run in runs(kept):
            device.copy(copies := r.copies(run), "to_host")
            self._to_host_bytes += sum(copy.nbytes for copy in copies)
        device.wait(device.mark("to_host"))
        self._take_away(kept, chunk_pool)

    def _take_away(self, chunks: Sequence[RangeChunk], chunk_pool: ChunkPool) -> None:
        """Take the memory away from behind chunks that have left."""
        device = self.holding.device
        for r, run in runs(chunks):
            r.newer -= frozenset(run)  # after the wait and before the memory is gone
            device.unmap(r.layout.addresses, sum(r.chunk_sizes[each] for each in run), r.starts[run[0]])
            r.give(run, chunk_pool)


def _is_early(each: RangeChunk) -> bool:
    r, index = each
    return r.early is not None and index in r.early.chunks
