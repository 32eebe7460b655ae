"""The storage of an object that has the same bytes on every rank of one machine. The ranks share one host copy and load it together.

A readonly object has all of its bytes in the shared range. Another one has its frozen parameters there; what it trains is in ranges of
each rank's own. The shared host copy is never written. If frozen parameters change on a rank (a LoRA merge), its next offload gives this
rank a host copy of its own, with the new values.

Each rank copies its parts over its own link, chunk by chunk. The rest comes by all-gather, over NVLink where there is one. No rank may
wait in a collective for another one that may still fail for lack of memory. So a load has two halves:

* In the phase transition's move, each rank maps all chunks, and enqueues the copies of its own parts with an event behind each chunk's.
  The load is not committed yet. If the vote fails, the memory is taken away again; the host copy was authoritative all the time.
* Once the group has decided, the ranks all-gather chunk by chunk, each behind its event, and commit.

Some loads copy everything over the rank's own link: those that the group does not vote on (going back after a failure), and those that
cannot count on the other ranks. Before it votes, every rank writes into the shared memory for which change it has prepared a load. After
the vote all ranks read the same words, so all of them gather or none does. A rank that has left, or whose collective failed, writes that
there for good.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress

import torch

from placement.devices.base import Device
from placement.devices.memory import Copy, Mark, SharedSlab
from placement.storage.managed import ManagedStorage
from placement.storage.object_storages import ObjectStorages
from placement.storage.pages import Behind
from placement.storage.range import Range
from placement.storage.replicated.range import SharedRange
from placement.storage.replicated.ranks import Ranks
from placement.storage.replicated.registration import SharedScanner, words_of
from placement.storage.transfer.chunk_pool import ChunkPool
from placement.tensors.owned import Adapter

_logger = logging.getLogger("placement")
_ALONE, _LEFT = -1, -2
_REASONS = {_ALONE: "rank {} takes part no longer, and has logged why", _LEFT: "rank {} has unregistered it"}


class ReplicatedStorage(ManagedStorage):
    """The storage of an object of which every rank has the same bytes, or the same frozen parameters.

    Args:
        ranks: the ranks that share it. All of them register it in the same change of the group.
    """

    def __init__(self, device: Device, adapter: Adapter, name: str, readonly: bool, ranks: Ranks) -> None:
        super().__init__(device, adapter, name, readonly)
        self.storages = ObjectStorages(device, adapter, name, self, SharedScanner(device, adapter, name, self, ranks, readonly=readonly))
        self._ranks = ranks
        self._waiting: list[tuple[SharedRange, int, Mark]] = []
        """Chunks whose own part is on its way, each with a mark that tells when it has arrived."""
        self._prepared = 0
        """The number of the group's change for which this rank has last prepared a load."""
        self.alone: str | None = None
        """Why this rank loads everything over its own link from now on; None while the ranks load together."""

    @property
    def can_prefetch(self) -> bool:
        """Whether bytes can arrive early: those of this rank alone. A load gathers what other ranks copy, so all ranks would have to bring
        the same chunks of the shared range early."""
        return any(not r.is_shared for r in self.ranges)

    # --- loading

    def begin_move(self, chunk_pool: ChunkPool) -> None:
        if self.alone is None and self._prepared == self._ranks.change:
            self._say(0)  # a second attempt in one change: what the first has prepared is not gathered, and the others must not wait for it
        self._waiting.clear()
        super().begin_move(chunk_pool)

    def bring_share(self, r: Range, indices: Sequence[int]) -> int:
        if not isinstance(r, SharedRange) or not self._may_gather():
            return self.bring(r, indices)
        self._prepared = self._ranks.change
        self._say(self._prepared)
        brought = 0
        for index in indices:
            copies = r.own_copies(index)
            self.device.copy(copies, "to_device")
            brought += sum(copy.nbytes for copy in copies)
            r.pages.note_filling((index,))
            if r.part_bytes(index):
                self._waiting.append((r, index, self.device.mark("to_device")))
        return brought

    @property
    def is_complete(self) -> bool:
        return not self._waiting

    def complete_alone(self) -> None:
        self._complete(gathers=False)

    def complete_together(self) -> None:
        """Get the parts of the other ranks: by all-gather if all ranks are waiting for it, else from the shared host copy.

        Raises:
            RuntimeError: the device failed. The host copy is complete.
        """
        self._complete(gathers=True)

    def _complete(self, *, gathers: bool) -> None:
        works: list[object] = []
        try:
            self._get_rest(gathers, works)
        except Exception:
            raise
        except BaseException:  # an interrupt: the other ranks are in their collectives and wait for this one
            with suppress(Exception):
                self._ranks.finish(works)
            self._get_rest(gathers, works)
            raise
        self._waiting.clear()

    def make_consistent(self, chunk_pool: ChunkPool) -> None:
        if self._waiting and not self.on_device and self.alone is None:
            self._say(0)  # so that a rank that has not looked yet does not wait for this one
        super().make_consistent(chunk_pool)
        self._waiting.clear()

    def unadopt(self) -> None:
        self._say(_LEFT)
        super().unadopt()

    def _get_rest(self, gathers: bool, works: list[object]) -> None:
        """Get the other ranks' parts. Idempotent with the same `works`, the collectives that have been issued."""
        if not gathers and self.alone is None:
            self._say(0)
        if gathers and self._all_are_ready():
            try:
                self._gather(works)
            except Exception as error:
                self._give_up(f"a collective failed: {error}")
                self._load_alone()
        else:
            self._load_alone()
        self.device.order()

    def _gather(self, works: list[object]) -> None:
        # Sorted, so that every rank gathers in the same order, whatever chunks its chunk pool had.
        order = {r: position for position, r in enumerate(self.ranges)}
        waiting = sorted(self._waiting, key=lambda each: (order[each[0]], each[1]))
        for r, index, mark in waiting[len(works) :]:
            with self.device.after(mark):
                self._ranks.gather(self.device.view(r.layout.addresses, *r.gathered(index)), works)

    def _load_alone(self) -> None:
        copies: list[Copy] = []
        for r, index, _ in self._waiting:
            copies += r.others_copies(index)
        self.device.copy(copies, "to_device")

    # --- a host copy of this rank's own

    def take_in_new(self, *, drops: bool = False) -> tuple[tuple[Range, ...], bool]:
        fresh = super().take_in_new(drops=drops)
        if not self.readonly:
            for r in self.storages.relocated.ranges:
                self.own_host_copy(r)
        return fresh

    def own_host_copy(self, r: Range) -> None:
        if isinstance(r, SharedRange) and r.is_shared:
            own = self.device.host(r.nbytes)
            own.view(0, r.nbytes).copy_(r.host.view(0, r.nbytes))
            self._give_up(f"its frozen parameters changed on this rank, which has a host copy of {r.nbytes:,} bytes of its own from now on")
            r.leave_shared(own)
            self.storages.find_host_copies()

    def save_rest(self, r: Range) -> None:
        if r.is_shared and not self.readonly and self._has_changed(r):
            self.own_host_copy(r)
        elif r.is_shared:
            r.pages.note_clean(r.pages.at(Behind.OWN))

    def _has_changed(self, r: Range) -> bool:
        """Whether any chunk that a range has on the device differs from the host copy."""
        prints = None if r.prints is None else r.prints.cpu()
        held = r.pages.at(Behind.OWN)
        return prints is None or any(self.storages.fingerprint(r, each, each + 1).cpu()[0] != prints[each] for each in held)

    # --- who takes part

    def _may_gather(self) -> bool:
        if self.alone is None and (reason := self._ranks.gone) is not None:
            self._give_up(reason)
        return self.alone is None

    def _all_are_ready(self) -> bool:
        """Whether every rank has prepared the same load and will gather it. Meaningful once all of them have voted."""
        said = self._words().tolist()
        for rank, word in enumerate(said):
            if word in _REASONS:
                self._give_up(_REASONS[word].format(rank))
        return self.alone is None and set(said) == {self._prepared}

    def _give_up(self, reason: str) -> None:
        """Load alone from now on, and tell the other ranks."""
        if self.alone is None:
            self.alone = reason
            self._say(_ALONE)
            _logger.warning("%r is loaded by each rank alone from now on, at the speed of its own link: %s", self.name, reason)

    def _words(self) -> torch.Tensor:
        """The word of each rank: the number of the change for which it has prepared a load, or why it takes part no longer."""
        slab = self._shared_slab()
        assert slab is not None
        return words_of(slab, self._ranks.shares.world_size)

    def _shared_slab(self) -> SharedSlab | None:
        return next((r.shared_slab for r in self.ranges if isinstance(r, SharedRange)), None)

    def _say(self, word: int) -> None:
        """Write this rank's word, unless it does not share the host copy any more: its last word stays."""
        if self._shared_slab() is not None:
            self._words()[self._ranks.shares.rank] = word
