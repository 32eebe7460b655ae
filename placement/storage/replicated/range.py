"""A range whose host copy the ranks of one machine share, and the part of it that each rank copies to its device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from placement.devices.base import Device
from placement.devices.host.mapping import PAGE, round_up
from placement.devices.memory import Copy, HostSlab, SharedSlab
from placement.storage.range import Range, used_bytes
from placement.storage.range_layout import Claim, RangeLayout


@dataclass(frozen=True, slots=True)
class Shares:
    """How a run of bytes is divided among ranks: one equal part of whole pages for each, in rank order, and then an undivided rest."""

    rank: int
    world_size: int

    def part_bytes(self, nbytes: int) -> int:
        """Size in bytes of each rank's part."""
        return nbytes // self.world_size // PAGE * PAGE

    def own(self, nbytes: int) -> tuple[int, int]:
        """(offset, bytes) of the span that this rank writes: its part, and for the last rank the rest as well."""
        part = self.part_bytes(nbytes)
        start = self.rank * part
        return start, nbytes - start if self.rank == self.world_size - 1 else part


def chunk_spans(nbytes: int, chunk_bytes: int) -> Iterator[tuple[int, int]]:
    """(offset, bytes) of each chunk's used bytes, rounded up to whole pages."""
    end = round_up(nbytes, PAGE)
    for start in range(0, end, chunk_bytes):
        yield start, min(chunk_bytes, end - start)


class SharedRange(Range):
    """A range whose chunks are divided among the ranks one by one, so that a chunk can be gathered as soon as its parts have arrived."""

    def __init__(self, device: Device, layout: RangeLayout, slab: SharedSlab, claims: tuple[Claim, ...], shares: Shares) -> None:
        super().__init__(device, layout, slab, claims, transient=False)
        self.shared_slab: SharedSlab | None = slab
        """The host copy of all ranks; None once this rank has one of its own."""
        self.shares = shares
        self._spans = tuple(chunk_spans(self.nbytes, device.chunk_bytes))

    @property
    def is_shared(self) -> bool:
        return self.shared_slab is not None

    def leave_shared(self, own: HostSlab) -> None:
        """Use another slab, which has the same bytes, from now on."""
        self.pages.host, self.shared_slab = own, None

    def part_bytes(self, index: int) -> int:
        """Size in bytes of each rank's part of one chunk; 0 where the chunk is too small to divide."""
        return self.shares.part_bytes(self._spans[index][1])

    def gathered(self, index: int) -> tuple[int, int]:
        """(offset, bytes) in the range of the parts of all ranks together, in one chunk."""
        return self._spans[index][0], self.shares.world_size * self.part_bytes(index)

    def own_copies(self, index: int) -> list[Copy]:
        """The copies that this rank makes of one chunk: its part, and the undivided rest."""
        part, used = self.part_bytes(index), self.used_sizes[index]
        runs = [(self.shares.rank * part, part), (self.shares.world_size * part, used - self.shares.world_size * part)]
        return [self._copy(self.starts[index] + start, nbytes) for start, nbytes in runs if nbytes > 0]

    def others_copies(self, index: int) -> list[Copy]:
        """The copies of the other ranks' parts of one chunk."""
        part = self.part_bytes(index)
        first, last = self.shares.rank * part, (self.shares.rank + 1) * part
        runs = [(0, first), (last, self.shares.world_size * part - last)]
        return [self._copy(self.starts[index] + start, nbytes) for start, nbytes in runs if nbytes > 0]

    def _copy(self, offset: int, nbytes: int) -> Copy:
        return Copy(self.layout.addresses.base + offset, self.slab.address + offset, nbytes)


def own_spans(layout: RangeLayout, chunk_bytes: int, shares: Shares) -> list[tuple[int, int]]:
    """(offset, bytes) of each span that this rank writes in the host copy of a range, in order."""
    spans = []
    for start, nbytes in chunk_spans(used_bytes(layout.nbytes), chunk_bytes):
        offset, own = shares.own(nbytes)
        if own:
            spans.append((start + offset, own))
    return spans
