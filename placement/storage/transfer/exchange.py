"""Move several handles at once: both directions of the link are busy, and memory that one gives up goes behind the next.

A handle that leaves is copied to the host chunk by chunk. As soon as a chunk has arrived there, its memory is taken from behind the old
addresses and, if another handle comes, put behind the new ones. So a swap needs the memory of the larger side, plus `WINDOW` chunks.

The order of the steps keeps each chunk's bytes complete somewhere: a chunk is vacated after its bytes are in the slab, and a move is
committed after its last chunk. `ManagedStorage.make_consistent` repairs the rest after an error or an interrupt.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch

from placement.devices.base import Device, Mark
from placement.storage.managed import ManagedStorage
from placement.storage.range import Range
from placement.storage.transfer.arrivals import WINDOW, Arrivals
from placement.storage.transfer.chunk_pool import ChunkPool
from placement.storage.transfer.fingerprint import changed_chunks
from placement.storage.transfer.load import ALONE, Load
from placement.storage.transfer.result import MoveResult
from placement.storage.transfer.verification import Span, Verifier

_BATCH = 2
"""The number of copied chunks that are vacated together when no chunk waits for their memory. While the link is busy the driver takes
0.9 ms to put poison behind a chunk; while it is idle, 0.03 ms (H200)."""
_LAST = 1
"""The number of last chunks of a range that are vacated separately, once the link is idle: copying them takes longer than vacating the
chunks before them."""
_CLEAN_BATCH = 64
"""The number of chunks that are vacated together when they need not be copied."""
_LEAD = 2
"""The number of chunks whose fingerprints are computed first, so that the link has work while the others are computed."""
_SECOND = 16
"""The least number of chunks in the second part, if none has to be copied: the device computes it while every tensor is looked at."""
_GROWTH = 3
"""Each later part has this many times the chunks of the one before: vacating a chunk takes three times as long as its fingerprint, which
takes 0.16 ms for 256 MiB (H200)."""


def nothing() -> None:
    """Do nothing: the default of `while_copying`."""


@dataclass(slots=True)
class _Batch:
    """Neighbouring chunks of one range, `first` up to `last` (not included), on their way to the host."""

    range: Range
    first: int
    last: int
    mark: Mark | None
    """Tells when their bytes have arrived on the host; None if nothing had to be copied, or not before their memory is taken away."""
    saving: Sequence[int] | None = None
    """For chunks that become early ones: those that differ from the slab, to which they are copied afterwards. None: their memory goes."""

    def cut(self, spans: Mapping[Range, Span]) -> list[Span]:
        """The parts of these spans that are in the batch."""
        r, first, last = spans.get(self.range, (self.range, 0, 0))
        first, last = max(first, self.first), min(last, self.last)
        return [(r, first, last)] if first < last else []


@dataclass(slots=True)
class _Leaving:
    """One storage that goes to the host."""

    holding: ManagedStorage
    fresh: tuple[Range, ...] = ()
    is_first: bool = False
    """Whether new storages that are not transient were taken in. Torch caches their old memory now."""
    batches: deque[_Batch] = field(default_factory=deque)
    prints: list[tuple[Range, torch.Tensor]] = field(default_factory=list)
    copied_bytes: int = 0
    skipped_bytes: int = 0
    rewritten_chunks: int = 0
    dropped: tuple[Range, ...] | None = None
    """Gradient ranges that are dropped instead of saved; None: gradients are saved."""
    on_host: dict[Range, torch.Tensor] = field(default_factory=dict)
    """The fingerprints that the host copy has when the copies have completed, as far as they are computed."""
    chosen: Mapping[Range, Span] = field(default_factory=dict)
    """The chunks that the verifier compares, by range."""
    early_bytes: int = 0
    """Device bytes of chunks that may become early ones, beside those that do already."""

    def take_in_new(self) -> None:
        """Start saving the new storages."""
        self.fresh, self.is_first = self.holding.take_in_new(drops=self.dropped is not None)
        self.copied_bytes += sum(claim.nbytes for r in self.fresh for claim in r.claims or ())


class Exchange:
    """The moves of one phase transition.

    Args:
        chunk_pool: gives chunks to the handles that come, and gets those that nobody takes.
        verifier: compares the bytes that arrive with those that were sent.
        room_bytes: device bytes that may be taken from the driver before any chunk was given up.
        early_release: give chunks that nobody waits for back to the driver while the rest is still being copied. Going back after a
            failure may then have to ask the driver for memory.
        dropping: storages whose gradients are dropped when they leave, instead of saved.
        load: the links over which the loaded bytes come.
        staying: device bytes of storages that leave which may stay as early chunks, so that nobody waits while they are saved.
        while_copying: called once the link has work, if any storage leaves.
    """

    def __init__(
        self,
        device: Device,
        chunk_pool: ChunkPool,
        *,
        verifier: Verifier,
        room_bytes: int,
        early_release: bool = False,
        dropping: Collection[ManagedStorage] = (),
        load: Load = ALONE,
        staying: Mapping[ManagedStorage, int] = MappingProxyType({}),
        while_copying: Callable[[], None] = nothing,
    ) -> None:
        self._device = device
        self._staying = staying
        self._while_copying = while_copying
        self._chunk_pool = chunk_pool
        self._verifier = verifier
        self._dropping = dropping
        self._room_bytes = room_bytes
        self._early_release = early_release
        self._arrivals = Arrivals(device, chunk_pool, load)

    def run(self, leaving: Sequence[ManagedStorage], coming: Sequence[ManagedStorage]) -> dict[ManagedStorage, MoveResult]:
        """Offload `leaving` and load `coming`. Storages that are on the right side already are left alone.

        Returns when the offloaded bytes are complete on the host and their memory is vacated. The loaded ones may still be on the link; the
        calling thread's current stream waits for them.

        Raises:
            DeviceMemoryError, HostMemoryError: no memory. Every storage is settled on one side or the other.
            IntegrityError: the bytes that arrived are not those that were sent. Every storage is settled, as above.
        """
        began = time.monotonic()
        for holding in (*leaving, *coming):  # an earlier exchange of this phase transition may have left one in between
            holding.make_consistent(self._chunk_pool)
        out = [holding for holding in leaving if holding.on_device]
        into = [holding for holding in coming if not holding.on_device]
        try:
            moved = self._offload(out, into)
            moved |= self._load(into)
        except BaseException as error:
            # Storages that give up memory come first, so that those that need it back find it. A storage that cannot be made consistent now
            # is tried again at the next phase transition.
            for holding in sorted((*out, *into), key=lambda each: each.on_device):
                try:
                    holding.make_consistent(self._chunk_pool)
                except Exception as failure:
                    error.add_note(f"placement: {holding.name!r} could not go back yet: {failure}")
            raise
        seconds = time.monotonic() - began
        return {holding: replace(each, seconds=seconds) for holding, each in moved.items()}

    # --- offloading

    def _offload(self, holdings: Sequence[ManagedStorage], coming: Sequence[ManagedStorage]) -> dict[ManagedStorage, MoveResult]:
        if holdings:
            self._device.sync()
        for holding in (*holdings, *coming):
            holding.begin_move(self._chunk_pool)
        for holding in coming:
            self._arrivals.expect(holding, holding.ranges)
        self._limit_room(holdings, coming)
        leaving = [_Leaving(each, dropped=self._dropped(each), early_bytes=self._early_bytes(each)) for each in holdings]
        parts = self._start(leaving)
        # Look at every tensor only now, while the link is busy. Vacate only after that: the memory of a range may hold new tensors, which a
        # state dict gave the object, and they must be taken in first.
        for each in leaving:
            each.take_in_new()
        for holding in coming:
            self._arrivals.expect(holding, holding.storages.take_in_from_elsewhere())
        for each, rest in zip(leaving, parts, strict=True):
            for _ in rest:  # while this vacates, the device computes the next fingerprints
                self._vacate(each, waits=False)
        for each in leaving:
            self._vacate(each, waits=True)
        if leaving and (not self._staying or any(each.fresh for each in leaving)):
            self._device.wait(self._device.mark("to_host"))  # the copies of new storages, which are in no batch
        for each in leaving:
            self._verifier.check_newborn(each.holding, each.fresh)
        return self._decide(leaving)

    def _start(self, leaving: Sequence[_Leaving]) -> list[Iterator[None]]:
        """Give the link work. Returns the unfinished `_enqueue` of each storage. They are finished here if anything has to be copied."""
        parts = [self._enqueue(each) for each in leaving]
        for part in parts:
            next(part, None)
        if leaving:
            self._arrivals.fill(fresh=self._arrivals.window(self._room_bytes), longest=1)
        else:  # two bursts keep the link busy while every tensor is looked at
            self._arrivals.bring_more()
            self._arrivals.bring_more()
        if any(each.copied_bytes for each in leaving):
            for part in parts:
                deque(part, maxlen=0)
        if leaving:
            self._while_copying()
        return parts

    def _vacate(self, leaving: _Leaving, *, waits: bool) -> None:
        """Take away the memory behind chunks that are on the host by now, in order, and put it behind chunks that come.

        Args:
            waits: also wait for chunks that are still being copied.
        """
        while leaving.batches and (waits or leaving.batches[0].mark is None):
            batch = leaving.batches.popleft()
            if batch.mark is not None:
                self._device.wait(batch.mark)
            self._verifier.check_host(leaving.holding, batch.cut(leaving.chosen), leaving.on_host)
            if batch.saving is not None:
                leaving.holding.save_early(batch.range, range(batch.first, batch.last), batch.saving)
                continue
            leaving.holding.vacate(batch.range, batch.first, batch.last, self._chunk_pool)
            if self._early_release and not self._arrivals:
                self._chunk_pool.release()
            self._arrivals.fill(fresh=0, longest=_BATCH)

    def _dropped(self, holding: ManagedStorage) -> tuple[Range, ...] | None:
        return holding.gradients.ranges(holding.ranges) if holding in self._dropping else None

    def _early_bytes(self, holding: ManagedStorage) -> int:
        # Not where something may read the host copy at any moment, or where what arrives there is to be compared.
        return 0 if holding.storages.state_dict_tensors or self._verifier.is_on else self._staying.get(holding, 0)

    def _limit_room(self, leaving: Sequence[ManagedStorage], coming: Sequence[ManagedStorage]) -> None:
        """Limit the memory that a swap takes, however much is free, to the larger side and the window, and leave the rest to others."""
        if leaving and coming:
            freed = sum(max(0, each.chunk_bytes - self._early_bytes(each)) for each in leaving)
            gain = sum(each.storages.device_bytes - each.prefetched_bytes for each in coming) - freed
            self._chunk_pool.room_bytes = min(self._chunk_pool.room_bytes, max(0, gain) + WINDOW * self._device.chunk_bytes)

    def _decide(self, leaving: Sequence[_Leaving]) -> dict[ManagedStorage, MoveResult]:
        """Commit the offloads. Every byte that leaves is complete on the host."""
        moved = {}
        for each in leaving:
            found = each.holding.commit_offload(each.fresh, each.prints, each.dropped)
            each.holding.make_consistent(self._chunk_pool)
            moved[each.holding] = replace(
                found, copied_bytes=each.copied_bytes, skipped_bytes=each.skipped_bytes, rewritten_chunks=each.rewritten_chunks
            )
            each.fresh = ()  # the ranges' claims hold the storages, which would count as references below
        for each in leaving:
            each.holding.storages.count_uses()
        if any(each.is_first for each in leaving):
            self._device.trim()  # else the memory that torch freed stays in its cache, where other processes cannot use it
        return moved

    def _enqueue(self, leaving: _Leaving) -> Iterator[None]:
        """Find the chunks that are not clean, enqueue their copies, and cut all into batches. Yields after each part."""
        holding = leaving.holding
        dropped = set(leaving.dropped or ())
        ranges = [r for r in holding.ranges if r not in dropped]
        leaving.chosen = {span[0]: span for span in self._verifier.choose(ranges)}
        for r in ranges:
            host_prints = None if r.prints is None else r.prints.cpu()
            # Not the transient ranges: a readonly module's gradients may change.
            keeps_host_copy = r.is_shared or (holding.readonly and host_prints is not None and not r.transient)
            count = len(r.chunk_sizes)
            device_prints = torch.empty(count, dtype=torch.int64, device="cpu")
            leaving.on_host[r] = host_prints if keeps_host_copy and host_prints is not None else device_prints
            if not keeps_host_copy:
                leaving.prints.append((r, device_prints))
            last, asked = 0, self._ask(holding, r, 0, _LEAD)
            while last < count:
                first, answer = last, asked()
                last = first + len(answer)
                device_prints[first:last] = answer
                dirty = changed_chunks(None if host_prints is None else host_prints[first:last], answer)
                if keeps_host_copy:
                    leaving.rewritten_chunks += sum(dirty)
                    dirty = [False] * len(answer)
                elif any(dirty):
                    r.prints = None  # from here on the slab has neither the old content nor the new
                rest = self._stay(leaving, r, first, dirty)
                leaving.batches.extend(self._copy_out(r, first + len(dirty) - len(rest), rest))
                # Enqueued after the copies, which would wait for it. Without copies the device computes it while this part is vacated.
                asked = self._ask(holding, r, last, count if any(dirty) else last + max(_SECOND, _GROWTH * len(answer)))
                copied = sum(size for size, is_dirty in zip(r.used_sizes[first:last], dirty, strict=True) if is_dirty)
                leaving.copied_bytes += copied
                leaving.skipped_bytes += sum(r.used_sizes[first:last]) - copied
                yield

    def _ask(self, holding: ManagedStorage, r: Range, first: int, last: int) -> Callable[[], torch.Tensor]:
        return self._device.ask(holding.storages.fingerprint(r, first, last))

    def _stay(self, leaving: _Leaving, r: Range, first: int, dirty: Sequence[bool]) -> Sequence[bool]:
        """Let the first of these chunks become early ones, as far as there is room. Returns `dirty` of the others."""
        last = first
        while r.early is not None and last < first + len(dirty) and r.chunk_sizes[last] <= leaving.early_bytes:
            leaving.early_bytes -= r.chunk_sizes[last]
            last += 1
        if last > first:
            saving = [index for index in range(first, last) if dirty[index - first]]
            leaving.batches.append(_Batch(r, first, last, None, saving))
        return dirty[last - first :]

    def _copy_out(self, r: Range, first: int, dirty: Sequence[bool]) -> Iterator[_Batch]:
        """Enqueue the copies of the dirty chunks. Batches are short where coming chunks wait for their memory."""
        is_awaited = bool(self._arrivals)
        for is_dirty, run in itertools.groupby(range(first, first + len(dirty)), key=lambda index: dirty[index - first]):
            indices = list(run)
            step = _CLEAN_BATCH if not is_dirty else 1 if is_awaited else _BATCH
            rest = _LAST if is_dirty and not is_awaited and indices[-1] + 1 == len(r.chunk_sizes) else 0
            starts = [*range(0, max(1, len(indices) - rest), step)]
            if 0 < rest < len(indices):
                starts.append(len(indices) - rest)
            for start, end in zip(starts, [*starts[1:], len(indices)], strict=True):
                wanted = indices[start:end]
                if is_dirty:
                    self._device.copy(r.copies(wanted), "to_host")
                yield _Batch(r, wanted[0], wanted[-1] + 1, self._device.mark("to_host") if is_dirty else None)

    # --- loading

    def _load(self, holdings: Sequence[ManagedStorage]) -> dict[ManagedStorage, MoveResult]:
        while self._arrivals:
            self._arrivals.bring_more()
        early = {holding: holding.take_early() for holding in holdings}
        if holdings:
            self._device.order("to_device")  # what an offload leaves to be saved goes on beside the work that follows
        complete = [holding for holding in holdings if holding.is_complete]
        for holding in complete:
            self._verifier.check_device(holding)
        for holding in complete:
            holding.commit_load()
            holding.make_consistent(self._chunk_pool)
        brought = self._arrivals.brought_bytes
        return {holding: MoveResult(copied_bytes=brought[holding], prefetched_bytes=early[holding]) for holding in holdings}
