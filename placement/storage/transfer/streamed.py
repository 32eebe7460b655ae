"""Stream an optimizer's state through a small window of device memory while the optimizer steps.

The parameters are stepped in buckets. The state of a bucket comes to the device one or two buckets
ahead, is stepped there, and goes back to the host behind the step. So the link is busy both ways
beside the kernels. The first buckets may have come aside before the step (`Prefetcher`). No tensor
is touched, because the state keeps its addresses.

The host copy stays authoritative, except for pages that are newest on the device: those whose
parameters are stepped, until their bytes are on the host again. State that a step has created is in
torch's own memory until it is taken in. `ManagedStorage.make_consistent` brings both home. So after
an error stepped parameters have their new state, and others their old state, as in an ordinary
step. The same holds for the elements of a parameter that is stepped in slices; its counter counts
once all are.
"""

from __future__ import annotations

import itertools
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from placement.core import interrupts
from placement.core.errors import DeviceMemoryError
from placement.core.journal import logger
from placement.core.modes import without_modes
from placement.devices.memory import Mark
from placement.storage.managed import ManagedStorage
from placement.storage.move import Stage
from placement.storage.pages import Behind, ChunkPool, fill, runs
from placement.storage.range import Range, RangeChunk

# the number of buckets that come while one is stepped. With one, the link would wait for each
# bucket's kernels and driver calls.
AHEAD = 2


class Piece(NamedTuple):
    """The state of one parameter, or of a slice of it: the least that can be stepped."""

    chunks: tuple[RangeChunk, ...] = ()  # the chunks that have bytes of it
    unborn_bytes: int = 0  # bytes of state that the step will create

    @property
    def nbytes(self) -> int:
        """Device bytes that it takes to step it alone."""
        return self.unborn_bytes + bytes_of(self.chunks)


@dataclass(slots=True)
class Bucket:
    """Neighbouring pieces, `first` up to `last` (not included), which are stepped together."""

    first: int
    last: int
    chunks: tuple[RangeChunk, ...]
    unborn_bytes: int
    arrived: Mark | None = None  # tells when its bytes are on the device
    saved: Mark | None = None  # tells when those that leave with it are on the host
    leaving: tuple[RangeChunk, ...] = ()
    # where the state that its step has created moves when it has been copied
    fresh: Range | None = None


def buckets_of(pieces: Sequence[Piece], bucket_bytes: int) -> list[Bucket]:
    """Cut pieces into buckets of at most `bucket_bytes`, or of one piece. A chunk that the bucket
    before has, too, takes none of these bytes: it is on the device already."""
    firsts = [0] if pieces else []
    nbytes = 0
    chunks_before = set[RangeChunk]()  # those of the bucket before
    chunks = set[RangeChunk]()  # those of this bucket so far
    for index, piece in enumerate(pieces):
        more_bytes = piece.unborn_bytes + bytes_of({*piece.chunks} - chunks - chunks_before)
        if index > firsts[-1] and nbytes + more_bytes > bucket_bytes:
            firsts.append(index)
            chunks_before, chunks, nbytes = chunks, set(), 0
            more_bytes = piece.unborn_bytes + bytes_of({*piece.chunks} - chunks_before)
        chunks.update(piece.chunks)
        nbytes += more_bytes
    ends = [*firsts, len(pieces)][1:]
    bounds = zip(firsts, ends, strict=True)
    return [_bucket(pieces, first, last) for first, last in bounds]


def _bucket(pieces: Sequence[Piece], first: int, last: int) -> Bucket:
    chunks = set[RangeChunk]()
    unborn_bytes = 0
    for piece in pieces[first:last]:
        chunks.update(piece.chunks)
        unborn_bytes += piece.unborn_bytes
    by_address = sorted(chunks, key=_address)
    return Bucket(first, last, tuple(by_address), unborn_bytes)


def _address(chunk: RangeChunk) -> int:
    r, index = chunk
    return r.layout.addresses.base + r.starts[index]


def most_buckets(nbytes: int, bucket_bytes: int) -> int:
    """The most buckets into which state of so many bytes is cut: two neighbours together have more
    than one bucket's bytes."""
    return 2 * (nbytes // bucket_bytes) + 1


def first_chunks(
    pieces: Sequence[Piece], bucket_bytes: int, window_bytes: int
) -> tuple[RangeChunk, ...]:
    """The chunks of the buckets that a step fetches before it steps the first one, as many as the
    window has room for."""
    chunks = dict[RangeChunk, None]()  # in order
    for bucket in buckets_of(pieces, bucket_bytes)[: 1 + AHEAD]:
        more = dict.fromkeys(bucket.chunks)
        if bytes_of(chunks | more) > window_bytes:
            break
        chunks |= more
    return tuple(chunks)


def window_of(pieces: Sequence[Piece], bucket_bytes: int) -> int:
    """The most device bytes that a streamed step of some or all of these pieces needs at a time,
    where memory lacks nowhere."""
    largest = max((piece.nbytes for piece in pieces), default=0)
    whole = _bucket(pieces, 0, len(pieces))
    whole_bytes = bytes_of(whole.chunks) + whole.unborn_bytes
    return min(whole_bytes, AHEAD * bucket_bytes + max(bucket_bytes, largest))


def bytes_of(chunks: Iterable[RangeChunk]) -> int:
    return sum(r.chunk_sizes[index] for r, index in chunks)


def page_runs(chunks: Iterable[RangeChunk]) -> Iterator[tuple[Range, list[int]]]:
    """These chunks as runs of neighbours, each in one range."""
    for r, chunks_of_range in itertools.groupby(chunks, key=operator.itemgetter(0)):
        for run in runs(index for _, index in chunks_of_range):
            yield r, run


@dataclass(slots=True)
class Streamed:
    """The result of a streamed step."""

    to_device_bytes: int = 0
    early_bytes: int = 0  # the part of them that came before the step
    to_host_bytes: int = 0
    peak_bytes: int = 0  # the most device bytes of the state at a time


@dataclass
class StreamedStep:
    """One step of an optimizer whose state is on the host.
    `holding`: the optimizer's storage.
    `pieces`: the state of the parameters or their slices, in the order in which they are stepped.
    `bucket_bytes`: device bytes of a bucket.
    `window_bytes`: device bytes that all buckets on the device may have together. A single bucket
    may have more.
    `step`: steps what pieces `first` up to `last` (not included) are the state of, on the current
    stream."""

    holding: ManagedStorage
    pieces: Sequence[Piece]
    bucket_bytes: int
    window_bytes: int
    step: Callable[[int, int], object]
    _buckets: list[Bucket] = field(default_factory=list)
    # buckets with bytes in a chunk, ascending
    _uses: defaultdict[RangeChunk, list[int]] = field(default_factory=lambda: defaultdict(list))
    _fetched: int = 0  # the number of buckets that have memory
    _vacated: int = 0  # the number of buckets that have left
    _before: frozenset[int] = frozenset()
    """The storages (`_cdata`) of state outside the ranges when the step begins: a later bucket may
    step with it, so it is taken in last."""
    # whether the device has lacked memory for a bucket ahead: from then on none comes ahead
    _is_tight: bool = False
    _done: Streamed = field(default_factory=Streamed)

    def run(self) -> Streamed:
        """Make the step. Returns when all state is complete on the host and its memory is given
        back. After an error stepped parameters have their new state, all others their old state, on
        the host."""
        holding = self.holding
        device = holding.device
        self._buckets = buckets_of(self.pieces, self.bucket_bytes)
        for index, bucket in enumerate(self._buckets):
            for chunk in bucket.chunks:
                self._uses[chunk].append(index)
        creates = any(bucket.unborn_bytes for bucket in self._buckets)
        chunk_pool = ChunkPool(device, self.window_bytes)
        unusable = ChunkPool(device)
        holding.wait_for_host_readers()  # from the first bucket on, the host copy is overwritten
        try:
            for r in holding.ranges:
                r.pages.discard_unusable(unusable)
            unusable.release()
            # memory aside is a part of the window
            chunk_pool.room_bytes -= holding.prefetched_bytes
            holding.stage = Stage.STEPPING
            if creates:
                with without_modes():
                    self._before = frozenset(
                        adoptee.storage._cdata for adoptee in holding.scanner.rescan().lasting
                    )
            device.order()  # the steps come behind the gradients
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
                error.add_note(
                    f"placement: the state of {holding.name!r} could not go back to the host yet: "
                    f"{failure}"
                )
            raise
        finally:
            chunk_pool.release()
        if creates:
            # their ranges hold the new storages, which would count as references below
            self._buckets.clear()
            with without_modes():
                holding.count_uses()
            # the memory in which state was created is in torch's cache, where other processes
            # cannot use it
            device.trim()
        self._done.to_device_bytes += self._done.early_bytes
        return self._done

    def _fetch_ahead(self, until: int, chunk_pool: ChunkPool) -> None:
        """Fetch the buckets before `until`, in order, as far as the window and the device have
        room."""
        while self._fetched < min(until, len(self._buckets)) and not self._is_tight:
            bucket = self._buckets[self._fetched]
            more_bytes = bucket.unborn_bytes + bytes_of(self._lacking(bucket))
            if self._live_bytes() + more_bytes > self.window_bytes:
                return
            try:
                self._fetch(bucket, chunk_pool)
            except DeviceMemoryError as error:
                self._is_tight = True
                logger.warning(
                    "%s: its step streams bucket by bucket, with none ahead: %s",
                    self.holding.name,
                    str(error),
                )

    def _fetch_now(self, index: int, chunk_pool: ChunkPool) -> None:
        """Fetch the bucket that is stepped next, if it has no memory yet: the buckets before it
        leave first."""
        if self._fetched > index:
            return
        self._vacate(index, chunk_pool)
        self._vacate_later(self._buckets[index], chunk_pool)
        try:
            self._fetch(self._buckets[index], chunk_pool)
        except DeviceMemoryError as error:
            error.add_note(
                f"placement: step() of {self.holding.name!r} stopped before its bucket {index + 1} "
                f"of {len(self._buckets)}; the parameters before it are stepped. Leave more device "
                "memory free in this phase."
            )
            raise

    def _fetch(self, bucket: Bucket, chunk_pool: ChunkPool) -> None:
        """Give the next bucket memory, and start the copies of its pages that have not come early.
        Raises DeviceMemoryError, with nothing changed: there is no memory. After another error
        `make_consistent` takes the pages back."""
        device = self.holding.device
        lacking = self._lacking(bucket)
        sizes = [r.chunk_sizes[index] for r, index in lacking]
        try:
            chunk_pool.stock(sizes)
        except DeviceMemoryError:
            device.trim()  # torch's cache may have what the driver lacks
            chunk_pool.stock(sizes)
        for r, run in page_runs(lacking):
            r.pages.put(run, chunk_pool)
            self._done.to_device_bytes += fill(device, [(r.pages, run)])
        for r, run in page_runs(bucket.chunks):
            self._done.early_bytes += r.pages.show(run)  # those that came early are aside
        bucket.arrived = device.mark("to_device")
        self._fetched += 1
        self._done.peak_bytes = max(self._done.peak_bytes, self._live_bytes())

    def _live_bytes(self) -> int:
        """Device bytes of the state now, with what the buckets there will create."""
        buckets = self._buckets[self._vacated : self._fetched]
        return self.holding.chunk_bytes + sum(bucket.unborn_bytes for bucket in buckets)

    def _lacking(self, bucket: Bucket) -> list[RangeChunk]:
        """The chunks that have no memory."""
        lacking = []
        for r, index in bucket.chunks:
            if r.pages.table[index].memory is None:
                lacking.append((r, index))
        return lacking

    def _step(self, index: int, bucket: Bucket) -> None:
        """Step one bucket once it has arrived, and begin to save what leaves with it. Its pages
        count as newest on the device before the step, so that an interrupted one is found. State
        that the step creates is taken in, too; without host memory it stays in torch's."""
        device = self.holding.device
        assert bucket.arrived is not None
        with device.after(bucket.arrived):
            for r, run in page_runs(bucket.chunks):
                r.note_written()
                r.pages.note_changed(run)
            self.step(bucket.first, bucket.last)
            if bucket.unborn_bytes:
                with without_modes():
                    besides = {*self._before}  # and what earlier buckets are still moving
                    for earlier in self._buckets[self._vacated : index]:
                        if earlier.fresh is not None:
                            moving_in = earlier.fresh.moving_in or ()
                            besides.update(adoptee.storage._cdata for adoptee in moving_in)
                    bucket.fresh = self.holding.take_in_created(besides)
                self._done.to_host_bytes += 0 if bucket.fresh is None else bucket.fresh.nbytes
            # A chunk that is used again soon stays until that bucket leaves.
            next_buckets = {*range(index + 1, index + AHEAD + 1)}
            bucket.leaving = tuple(
                chunk for chunk in bucket.chunks if next_buckets.isdisjoint(self._uses[chunk])
            )
            for r, run in page_runs(bucket.leaving):
                self._done.to_host_bytes += r.pages.save(run)
            bucket.saved = device.mark("to_host")

    def _vacate(self, until: int, chunk_pool: ChunkPool) -> None:
        """Wait until the buckets before `until` have left, and take their memory away."""
        while self._vacated < until:
            bucket = self._buckets[self._vacated]
            assert bucket.saved is not None
            self.holding.device.wait(bucket.saved)
            interrupts.check()
            wipes = self._fetched < len(self._buckets)  # for a bucket that comes
            for r, run in page_runs(bucket.leaving):
                r.pages.vacate(run, chunk_pool, wipes=wipes)
            if bucket.fresh is not None:
                with without_modes():
                    self.holding.move_in((bucket.fresh,))
            self._vacated += 1

    def _vacate_later(self, bucket: Bucket, chunk_pool: ChunkPool) -> None:
        """Take the chunks away that stay for buckets after this one, which has no room beside
        them."""
        chunks = {*bucket.chunks}
        later_chunks = []
        for r in self.holding.ranges:
            for index in r.pages.at(Behind.OWN, Behind.ASIDE):
                if (r, index) not in chunks:
                    later_chunks.append((r, index))
        if not later_chunks:
            return
        # the copies come behind the steps: nothing else waits for a bucket of which no chunk has
        # left
        self.holding.device.order()
        for r, run in page_runs(later_chunks):
            self._done.to_host_bytes += r.pages.save(run)
        for r, run in page_runs(later_chunks):
            r.pages.vacate(run, chunk_pool)
