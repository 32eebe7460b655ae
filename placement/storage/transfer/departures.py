"""The chunks that leave at one phase transition: which of them are copied to the host, in what order, and which stay as early ones."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from placement.devices.base import Device
from placement.devices.memory import Mark
from placement.storage.managed import ManagedStorage
from placement.storage.range import Range
from placement.storage.transfer.fingerprint import changed_chunks
from placement.storage.transfer.verification import Span, Verifier

BATCH = 2
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


@dataclass(slots=True)
class Batch:
    """Neighbouring chunks of one range, `first` up to `last` (not included), on their way to the host."""

    range: Range
    first: int
    last: int
    mark: Mark | None
    """Tells when their bytes have arrived on the host; None if nothing had to be copied."""

    def cut(self, spans: Mapping[Range, Span]) -> list[Span]:
        """The parts of these spans that are in the batch."""
        r, first, last = spans.get(self.range, (self.range, 0, 0))
        first, last = max(first, self.first), min(last, self.last)
        return [(r, first, last)] if first < last else []


@dataclass(slots=True)
class Leaving:
    """One storage that goes to the host."""

    holding: ManagedStorage
    fresh: tuple[Range, ...] = ()
    is_first: bool = False
    """Whether new storages that are not transient were taken in. Torch caches their old memory now."""
    staying: list[tuple[Range, range, list[int]]] = field(default_factory=list)
    """Neighbouring chunks that become early ones, and those of them that differ from the slab, to which they are saved afterwards."""
    held_back: list[tuple[Range, int, Sequence[bool]]] = field(default_factory=list)
    """Neighbouring chunks that leave once the others stay: the range, the first chunk, and whether each is dirty."""
    batches: deque[Batch] = field(default_factory=deque)
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

    def adopt_new(self) -> None:
        """Start saving the new storages."""
        self.fresh, self.is_first = self.holding.adopt_new(drops=self.dropped is not None)
        self.copied_bytes += sum(claim.nbytes for r in self.fresh for claim in r.claims or ())


class Departures:
    """Finds the chunks that are not clean, and starts their copies.

    Args:
        is_awaited: whether chunks that come wait for the memory of those that leave.
    """

    def __init__(self, device: Device, verifier: Verifier, is_awaited: Callable[[], bool]) -> None:
        self._device = device
        self._verifier = verifier
        self._is_awaited = is_awaited

    def enqueue(self, leaving: Leaving, *, holds_back: bool) -> Iterator[None]:
        """Find the chunks that are not clean, enqueue their copies, and cut all into batches. Yields after each part.

        Args:
            holds_back: leave the copies and batches to `let_stay`.
        """
        holding = leaving.holding
        dropped = set(leaving.dropped or ())
        ranges = [r for r in holding.ranges if r not in dropped]
        leaving.chosen = {span[0]: span for span in self._verifier.choose(ranges)}
        for r in ranges:
            host_prints = None if r.prints is None else r.prints.cpu()
            # The host copy of a readonly handle stays as it is: nothing is copied, and what differs counts as a wrong write. Its gradients,
            # which are in transient ranges, may change.
            keeps_host_copy = holding.readonly and (r.is_shared or (host_prints is not None and not r.transient))
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
                wrong = [keeps_host_copy and is_dirty for is_dirty in dirty]
                if keeps_host_copy:
                    leaving.rewritten_chunks += sum(wrong)
                    dirty = [False] * len(answer)
                elif any(dirty):
                    holding.own_host_copy(r)
                    r.prints = None  # from here on the slab has neither the old content nor the new
                if holds_back:
                    self._hold_back(leaving, r, first, dirty, wrong)
                else:
                    leaving.batches.extend(self._copy_out(r, first, dirty))
                # Enqueued after the copies, which would wait for it. Without copies the device computes it while this part is vacated.
                asked = self._ask(holding, r, last, count if any(dirty) else last + max(_SECOND, _GROWTH * len(answer)))
                copied = sum(size for size, is_dirty in zip(r.used_sizes[first:last], dirty, strict=True) if is_dirty)
                leaving.copied_bytes += copied
                leaving.skipped_bytes += sum(r.used_sizes[first:last]) - copied
                yield

    def _ask(self, holding: ManagedStorage, r: Range, first: int, last: int) -> Callable[[], torch.Tensor]:
        return self._device.ask(holding.storages.fingerprint(r, first, last))

    def _hold_back(self, leaving: Leaving, r: Range, first: int, dirty: Sequence[bool], wrong: Sequence[bool]) -> None:
        """Note that the first of these chunks become early ones, as far as there is room, and that the others leave after that.

        Args:
            wrong: the chunks with bytes that must not come back. None of them stays.
        """
        last = first
        while r.early is not None and last < first + len(dirty) and r.chunk_sizes[last] <= leaving.early_bytes and not wrong[last - first]:
            leaving.early_bytes -= r.chunk_sizes[last]
            last += 1
        if last > first:
            leaving.staying.append((r, range(first, last), [index for index in range(first, last) if dirty[index - first]]))
        if rest := dirty[last - first :]:
            leaving.held_back.append((r, last, rest))

    def _copy_out(self, r: Range, first: int, dirty: Sequence[bool]) -> Iterator[Batch]:
        """Enqueue the copies of the dirty chunks. Batches are short where coming chunks wait for their memory."""
        is_awaited = self._is_awaited()
        for is_dirty, run in itertools.groupby(range(first, first + len(dirty)), key=lambda index: dirty[index - first]):
            indices = list(run)
            step = _CLEAN_BATCH if not is_dirty else 1 if is_awaited else BATCH
            rest = _LAST if is_dirty and not is_awaited and indices[-1] + 1 == len(r.chunk_sizes) else 0
            starts = [*range(0, max(1, len(indices) - rest), step)]
            if 0 < rest < len(indices):
                starts.append(len(indices) - rest)
            for start, end in zip(starts, [*starts[1:], len(indices)], strict=True):
                wanted = indices[start:end]
                if is_dirty:
                    self._device.copy(r.copies(wanted), "to_host")
                yield Batch(r, wanted[0], wanted[-1] + 1, self._device.mark("to_host") if is_dirty else None)

    def let_stay(self, leaving: Sequence[Leaving]) -> None:
        """Remap the chunks that stay as early ones, and only then enqueue the copies of those that were held back."""
        for each in leaving:
            for r, indices, dirty in each.staying:
                each.holding.stay_early(r, indices, dirty)
        for each in leaving:
            for r, first, is_dirty in each.held_back:
                each.batches.extend(self._copy_out(r, first, is_dirty))
