"""The storage of an object that has the same bytes on every rank of one machine. The ranks share its host copy and load it together.

`shared.copy` says how they write the host copy. To load it, each rank copies its parts over its own link, chunk by chunk. The rest comes by
all-gather, over NVLink where there is one. No rank may wait in a collective for another one that may still fail for lack of memory, so a
load has two halves. In the phase transition's move, each rank maps all chunks, and enqueues the copies of its own parts with an event
behind each chunk's. The load is not committed yet: if the transition fails, the host copy was authoritative all the time. Then `complete`
gets the rest. Where the ranks have agreed on the change for which they prepared the load, they all-gather, each chunk behind its event.
Everywhere else (going back after a failure, a rank that is alone) the rest comes over the rank's own link.

Before it votes, every rank writes into the shared memory for which change it has prepared a load. After the vote all ranks read the same
words, so all of them gather or none does. A rank that has left, or whose collective failed, writes that there for good.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from placement.core.errors import HostMemoryError
from placement.core.journal import logger
from placement.devices.base import Device
from placement.devices.memory import HostSlab, Mark
from placement.ownership.adapter import Adapter
from placement.storage.layout import Adoptee
from placement.storage.managed import ManagedStorage
from placement.storage.pages import Behind, ChunkPool
from placement.storage.range import Range
from placement.storage.shared.copy import ALONE, LEFT, Ranks, Refusal, SharedCopy
from placement.storage.shared.ranges import SharedRange
from placement.storage.shared.scanner import SharedScanner
from placement.storage.state_dicts import are_only_read

_REASONS = {ALONE: "rank {} takes part no longer, and has logged why", LEFT: "rank {} has unregistered it"}


class ReplicatedStorage(ManagedStorage):
    """The storage of an object of which every rank has the same bytes, but for what is each rank's own (buffers, gradients).
    `ranks`: the ranks that share it. All of them register it in the same change of the group."""

    scanner: SharedScanner

    def __init__(self, device: Device, adapter: Adapter, name: str, readonly: bool, ranks: Ranks) -> None:
        super().__init__(device, adapter, name, readonly, SharedScanner(device, adapter, name, self, ranks, readonly=readonly))
        self._ranks = ranks
        self._waiting: list[tuple[SharedRange, int, Mark]] = []  # chunks whose own part is on its way, and what tells its arrival
        self._prepared = 0  # the number of the group's change for which this rank has last prepared a load

    @property
    def can_prefetch(self) -> bool:  # what other ranks copy cannot come early: all ranks would have to bring the same chunks early
        return any(not r.is_replica for r in self.ranges)

    @property
    def is_written_together(self) -> bool:
        return not self.readonly and any(True for _ in self._copies())

    def _shared_ranges(self) -> Iterator[SharedRange]:
        return (r for r in self.ranges if isinstance(r, SharedRange))

    def _copies(self) -> Iterator[SharedCopy]:
        """The host copies that this rank shares, or may share again."""
        copies = [r.copy for r in self._shared_ranges()]
        return filter(None, [*copies, self.scanner.free_state()])

    def adopt_apart(self, adoptees: list[Adoptee]) -> tuple[list[Range], list[Adoptee]]:
        return self.scanner.adopt_shared(adoptees)

    def bring(self, r: Range, indices: Sequence[int]) -> int:
        if not isinstance(r, SharedRange) or r.copy is None or not r.is_shared or not self._may_gather(r):
            return super().bring(r, indices)
        self._prepared = r.copy.loads[r.shares.rank] = self._ranks.change
        brought = 0
        for index in indices:
            copies = r.own_copies(index)
            self.device.copy(copies, "to_device")
            brought += sum(copy.nbytes for copy in copies)
            r.pages.note_filling((index,))
            if r.part_bytes(index):
                self._waiting.append((r, index, self.device.mark("to_device")))
                self.is_complete = False
        return brought

    def complete(self) -> None:
        together: set[SharedRange] = set()
        if self._prepared == self._ranks.agreed_change:
            together = {r for r in {r for r, _, _ in self._waiting} if self._all_are_ready(r)}
        else:
            self._prepare_nothing()
        try:
            self._gather(together)
        except Exception as error:
            for r in self._shared_ranges():
                self._give_up(r, f"a collective failed: {error}")
            together = set()
        if rest := [each for r, index, _ in self._waiting if r not in together for each in r.others_copies(index)]:
            self.device.copy(rest, "to_device")
        self.device.order()
        self._waiting.clear()
        self.is_complete = True

    def _gather(self, ranges: set[SharedRange]) -> None:
        # Sorted, so that every rank gathers in the same order, whatever chunks its chunk pool had.
        order = {r: position for position, r in enumerate(self.ranges)}
        for r, index, mark in sorted(self._waiting, key=lambda each: (order[each[0]], each[1])):
            if r in ranges:
                with self.device.after(mark):
                    self._ranks.gather(r.on_device(*r.gathered(index)))

    def begin_move(self, chunk_pool: ChunkPool) -> None:
        super().begin_move(chunk_pool)
        for copy in self._copies():  # before this rank votes: another one may be about to offload right after
            copy.note_place(on_device=True)

    def make_consistent(self, chunk_pool: ChunkPool) -> None:
        if self.on_device and self.scanner.moves_together:  # an offload has failed
            for copy in self._copies():
                copy.fail()
        for r in self._shared_ranges():
            r.pages.together = None
        self.scanner.moves_together = False
        if not self.on_device and self._prepared == self._ranks.change:
            self._prepare_nothing()
        super().make_consistent(chunk_pool)
        self._waiting.clear()
        self.is_complete = True
        for copy in self._copies():
            copy.note_place(on_device=self.on_device)

    def unadopt(self) -> None:
        for copy in self._copies():
            copy.leave(LEFT)
        super().unadopt()

    def pages_to_save(self, r: Range, prints: torch.Tensor, changed: Sequence[int]) -> Sequence[int]:
        if not isinstance(r, SharedRange) or r.copy is None:
            return changed
        refusal = self._refusal(r, prints, is_clean=r.is_shared and not changed)
        if refusal is None:
            if not r.is_shared:
                self._use(r, r.copy.slab)
                changed = range(len(prints))
            r.pages.together = r.copy
            return changed
        if r.is_shared and changed:
            logger.warning("%r has %s bytes of host memory on this rank alone now: %s", self.name, f"{r.nbytes:,}", refusal.reason)
            self.make_host_copy_own(r)
        if refusal.is_final and not r.is_shared:
            r.leave(refusal.reason)
        return changed

    def _refusal(self, r: SharedRange, prints: torch.Tensor, *, is_clean: bool) -> Refusal | None:
        """Why this rank does not write pages with the others now; None if it does, or has nothing to write."""
        assert r.copy is not None
        if (reason := self._ranks.parted) is not None:
            return Refusal(reason, True)
        if not self.scanner.moves_together or r.copy.has_met:
            return Refusal("this rank has offloaded it alone", False)
        r.copy.meet(prints, num_arrived=len(prints) if is_clean else 0)
        return None if is_clean else r.copy.wait_for_all(len(prints), self._ranks.deadline_seconds, r.names_in)

    def show_host_copy(self) -> None:
        # Where somebody has a tensor of a state dict, it will show a host copy of this rank's own: whoever writes there, writes alone.
        if self.state_dict_tensors or self.state_dict_tensors.are_held:
            for r in self._shared_ranges():
                if r.is_shared and not r.is_frozen:
                    r.pages.wait(range(len(r.chunk_sizes)))
                    self.make_host_copy_own(r)
        super().show_host_copy()

    def before_shown(self) -> None:
        super().before_shown()
        for r in () if are_only_read.get() else self._shared_ranges():
            if r.is_shared and not r.is_frozen and not self.on_device:
                try:
                    self.make_host_copy_own(r)
                except HostMemoryError as error:
                    error.add_note(f"placement: ranks share {self.name!r}, and this one needs its own to write there; load it first")
                    raise

    def make_host_copy_own(self, r: Range) -> None:
        if isinstance(r, SharedRange) and r.is_shared:
            prints, own = r.prints, self.device.host(r.nbytes)
            own.view(0, r.nbytes).copy_(r.host.view(0, r.nbytes))
            self._use(r, own)
            r.prints = prints

    def _use(self, r: SharedRange, slab: HostSlab) -> None:
        r.pages.host, r.pages.prints = slab, None
        self.object_ranges.set(self.ranges)

    def before_forced_offload(self, r: Range) -> None:
        if not isinstance(r, SharedRange) or not r.is_shared:
            return
        held = r.pages.at(Behind.OWN)
        prints = None if r.prints is None else r.prints.cpu()
        if not self.readonly and (prints is None or any(self.fingerprint(r, each, each + 1).cpu()[0] != prints[each] for each in held)):
            self.make_host_copy_own(r)
            r.pages.note_changed(held)
        else:
            r.pages.note_clean(held)

    def _may_gather(self, r: SharedRange) -> bool:
        if r.alone is None and (reason := self._ranks.gone) is not None:
            self._give_up(r, reason)
        return r.alone is None

    def _all_are_ready(self, r: SharedRange) -> bool:
        """Whether every rank has prepared the same load and will gather it. Meaningful once all of them have voted."""
        said = [] if r.copy is None else r.copy.loads.tolist()
        for rank, word in enumerate(said):
            if word in _REASONS:
                self._give_up(r, _REASONS[word].format(r.shares.members[rank]))
        return r.alone is None and set(said) == {self._prepared}

    def _give_up(self, r: SharedRange, reason: str) -> None:
        if r.alone is None:
            r.alone = reason
            if r.copy is not None:
                r.copy.loads[r.shares.rank] = ALONE
            logger.warning("%r is loaded by each rank alone from now on, at the speed of its own link: %s", self.name, reason)

    def _prepare_nothing(self) -> None:
        """So that a rank that has not looked yet does not wait for this one."""
        for r in self._shared_ranges():
            if r.alone is None and r.copy is not None:
                r.copy.loads[r.shares.rank] = 0
