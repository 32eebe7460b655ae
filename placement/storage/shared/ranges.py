"""The ranges of which ranks share the host copy, and their pages, of which each rank copies its share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from placement.devices.base import Device
from placement.devices.host.slab import PAGE, round_up
from placement.devices.memory import Copy, HostSlab
from placement.storage.layout import Adoptee, RangeLayout
from placement.storage.pages import Behind, Pages, Side
from placement.storage.range import Range, used_bytes
from placement.storage.shared.copy import ALONE, SharedCopy, Shares


def chunk_spans(nbytes: int, chunk_bytes: int) -> list[tuple[int, int]]:
    """(offset, bytes) of each chunk's used bytes, rounded up to whole pages."""
    end = round_up(nbytes, PAGE)
    return [(start, min(chunk_bytes, end - start)) for start in range(0, end, chunk_bytes)]


def spans_of(rank: int, nbytes: int, chunk_bytes: int, shares: Shares) -> list[tuple[int, int]]:
    """(offset, bytes) of each span that a rank writes in the host copy of a range of `nbytes`, in order."""
    spans = [(start, *shares.of(rank, length)) for start, length in chunk_spans(used_bytes(nbytes), chunk_bytes)]
    return [(start + offset, own) for start, offset, own in spans if own]


class SharedPages(Pages):
    """Pages that ranks save together: each its share of a page. `SharedCopy` says how."""

    together: SharedCopy | None = None  # the host copy that the ranks are writing now; None: this rank saves whole pages
    shares: Shares

    def share(self, rank: int, index: int) -> Copy | None:
        """The copy of a rank's share of a page; None where it has none, because the page is too small to divide."""
        start, used = self.starts[index], self.used_sizes[index]
        offset, nbytes = self.shares.of(rank, round_up(used, PAGE))
        nbytes = min(nbytes, used - offset)
        return Copy(self._addresses.base + start + offset, self.host.address + start + offset, nbytes) if nbytes > 0 else None

    def reserve_aside(self, stop: object) -> None:
        """Do nothing: what other ranks copy or wait for does not stay aside."""

    def bytes_to_save(self, indices: Iterable[int]) -> int:
        if self.together is None:
            return super().bytes_to_save(indices)
        return sum(copy.nbytes for index in indices if (copy := self.share(self.shares.rank, index)) is not None)

    def save(self, indices: Iterable[int]) -> int:
        if self.together is None:
            return super().save(indices)
        pages = ((index, self.table[index]) for index in indices)
        unsaved = [index for index, page in pages if page.newest is Side.DEVICE and page.behind is Behind.OWN]
        if unsaved:
            self.prints = None
            self._num_saves += 1
            # Newest stays the device until the shares of all ranks are there.
            self._send([self.shares.rank], unsaved)
        return self.bytes_to_save(unsaved)

    def wait(self, indices: Iterable[int]) -> None:
        """Where the ranks write together, wait for the shares of all of them as well, of all pages up to the last of these."""
        wanted = [*indices]
        if self.together is None:
            super().wait(wanted)
            return
        last = max((index for index in wanted if self._is_sent(index)), default=-1)
        sent = [index for index in range(last + 1) if self._is_sent(index)]
        super().wait([*{*wanted, *sent}])
        if not sent:
            return
        self.together.note_arrived(last + 1)
        if lost := self.together.wait_for_shares(last + 1):
            self._send(sorted(lost), sent)
            super().wait(sent)
        for index in sent:
            page = self.table[index]
            page.newest, page.copied, page.mark = Side.BOTH, None, None

    def _is_sent(self, index: int) -> bool:
        """Whether this rank has started to copy its share of a page, and the shares of others may lack."""
        page = self.table[index]
        return page.copied == "to_host" and page.newest is Side.DEVICE

    def _send(self, ranks: Sequence[int], indices: Sequence[int]) -> None:
        for index in indices:
            self.table[index].copied, self.table[index].mark = "to_host", None
        if copies := [copy for index in indices for rank in ranks if (copy := self.share(rank, index)) is not None]:
            self._device.copy(copies, "to_host")
        mark = self._device.mark("to_host")
        for index in indices:
            self.table[index].mark = mark


class SharedRange(Range):
    """A range whose chunks are divided among the ranks one by one, so that a chunk can be gathered as soon as its parts have arrived.
    `slab`: the host copy to begin with: that of `copy`, or one of this rank's own.
    `is_frozen`: whether training does not change what is in it."""

    is_replica = True
    _pages_class = SharedPages
    pages: SharedPages

    def __init__(
        self, device: Device, layout: RangeLayout, slab: HostSlab, adoptees: tuple[Adoptee, ...], copy: SharedCopy, *, is_frozen: bool
    ) -> None:
        super().__init__(device, layout, slab, adoptees, transient=False)
        self.copy: SharedCopy | None = copy  # shared by the ranks; None once this rank has left it for good. `is_shared`: it is in use.
        self.shares = self.pages.shares = copy.shares
        self.is_frozen = is_frozen
        self.alone: str | None = None  # why this rank loads everything over its own link from now on; None while the ranks load together
        self._spans = chunk_spans(self.nbytes, device.chunk_bytes)

    @property
    def is_shared(self) -> bool:
        return self.copy is not None and self.pages.host is self.copy.slab

    @property
    def held_host_bytes(self) -> int:
        kept = 0 if self.copy is None or self.is_shared else self.copy.slab.held_bytes
        return super().held_host_bytes + kept

    def leave(self, reason: str) -> None:
        """Share no host copy from now on. This rank has one of its own."""
        if self.copy is not None:
            self.alone = self.alone or reason
            self.copy.leave(ALONE)
            self.copy = None

    def part_bytes(self, index: int) -> int:
        """Size in bytes of each rank's part of one chunk; 0 where the chunk is too small to divide."""
        return self.shares.part_bytes(self._spans[index][1])

    def gathered(self, index: int) -> tuple[int, int]:
        """(offset, bytes) in the range of the parts of all ranks together, in one chunk."""
        return self._spans[index][0], self.shares.world_size * self.part_bytes(index)

    def own_copies(self, index: int) -> list[Copy]:
        """The copies that this rank makes of one chunk: its part, and the undivided rest."""
        part, after = self.part_bytes(index), self.shares.world_size * self.part_bytes(index)
        return self._copies(index, [(self.shares.rank * part, part), (after, self.used_sizes[index] - after)])

    def others_copies(self, index: int) -> list[Copy]:
        """The copies of the other ranks' parts of one chunk."""
        part = self.part_bytes(index)
        last = (self.shares.rank + 1) * part
        return self._copies(index, [(0, self.shares.rank * part), (last, self.shares.world_size * part - last)])

    def _copies(self, index: int, runs: list[tuple[int, int]]) -> list[Copy]:
        device, host = self.layout.addresses.base + self.starts[index], self.host.address + self.starts[index]
        return [Copy(device + start, host + start, nbytes) for start, nbytes in runs if nbytes > 0]

    def names_in(self, index: int) -> str:
        """The names of the tensors in a chunk, for a message."""
        start, end = self.starts[index], self.starts[index] + self.used_sizes[index]
        names = [repr(each.name) for each in self.placed if each.offset < end and each.offset + each.nbytes > start]
        return " or ".join(names[:4] + ([f"{len(names) - 4} more"] if len(names) > 4 else []))
