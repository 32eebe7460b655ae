"""The bytes of an object that every rank of one machine has alike: one host copy for all of them, loaded by all of them together.

Each rank copies its parts over its own link, chunk by chunk, and the rest comes by all-gather, over NVLink where there is one.
While a rank may still fail for lack of memory nobody may wait for it in a collective, so a load has two halves:

* in the phase transition's move: map everything, enqueue the own parts, an event behind each chunk's. It is not decided yet; a vote that
  fails takes the memory away again, and the host copy was authoritative all the time.
* once the group has decided: all-gather chunk by chunk, each behind its event, and decide.

A load that the group does not vote on (going back after a failure) and one that cannot count on the others copies everything
over the own link. Every rank says in the shared memory which change it has prepared, before it votes; afterwards all of them
see the same: all or none gather. A rank that has left, or whose collective failed, says so there for good.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress

import torch

from placement.devices.base import Copy, Device, Mark
from placement.storage.managed import ManagedStorage
from placement.storage.object_storages import ObjectStorages
from placement.storage.range import Range
from placement.storage.replicated.range import SharedRange
from placement.storage.replicated.ranks import Ranks
from placement.storage.replicated.registration import SharedScanner, words_of
from placement.storage.transfer.chunk_pool import ChunkPool
from placement.tensors.owned import Adapter

_logger = logging.getLogger("placement")
_ALONE, _LEFT = -1, -2
_REASONS = {_ALONE: "rank {} takes part no more, and has logged why", _LEFT: "rank {} has unregistered it"}


class ReplicatedStorage(ManagedStorage):
    """A readonly object of which every rank holds the same bytes.

    Args:
        ranks: they register it in the same change.
    """

    def __init__(self, device: Device, adapter: Adapter, name: str, ranks: Ranks) -> None:
        super().__init__(device, adapter, name, readonly=True)
        self.storages = ObjectStorages(device, adapter, name, self, SharedScanner(device, adapter, name, self, ranks))
        self._ranks = ranks
        self._waiting: list[tuple[SharedRange, int, Mark]] = []
        """Chunks whose own part is on its way, and when it has arrived."""
        self._prepared = 0
        """The change in which they were brought."""
        self.alone: str | None = None
        """Why every load brings everything over the own link from now on; None while the ranks load together."""

    # --- loading

    def begin_move(self, chunk_pool: ChunkPool) -> None:
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
            if r.part_bytes(index):
                self._waiting.append((r, index, self.device.mark("to_device")))
        return brought

    @property
    def is_complete(self) -> bool:
        return not self._waiting

    def complete_alone(self) -> None:
        self._complete(gathers=False)

    def complete_together(self) -> None:
        """Get what the other ranks have brought: by all-gather when all of them wait for it as well, else from the shared copy.

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
        except BaseException:  # an interrupt: the others are in their collectives, and wait for this rank's
            with suppress(Exception):
                self._ranks.finish(works)
            self._get_rest(gathers, works)
            raise
        self._waiting.clear()

    def make_consistent(self, chunk_pool: ChunkPool) -> None:
        if self._waiting and not self.on_device and self.alone is None:
            self._say(0)  # who has not looked yet does not wait for this rank
        super().make_consistent(chunk_pool)
        self._waiting.clear()

    def unadopt(self) -> None:
        if self._shared() is not None:
            self._say(_LEFT)
        super().unadopt()

    def _get_rest(self, gathers: bool, works: list[object]) -> None:
        """Idempotent with the same `works`, which are the collectives that have been issued."""
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
        # In an order that is the same on every rank, whatever chunks a rank's chunk pool had for it.
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

    # --- who takes part

    def _may_gather(self) -> bool:
        if self.alone is None and (reason := self._ranks.gone) is not None:
            self._give_up(reason)
        return self.alone is None

    def _all_are_ready(self) -> bool:
        """Whether every rank is about to gather the same load, now that all of them have voted."""
        said = self._words().tolist()
        for rank, word in enumerate(said):
            if word in _REASONS:
                self._give_up(_REASONS[word].format(rank))
        return self.alone is None and set(said) == {self._prepared}

    def _give_up(self, reason: str) -> None:
        """From now on every load is this rank's own business, and the others know."""
        if self.alone is None:
            self.alone = reason
            self._say(_ALONE)
            _logger.warning("%r is loaded by each rank alone from now on, at the speed of its own link: %s", self.name, reason)

    def _words(self) -> torch.Tensor:
        """What each rank says: the change for which it has prepared a load, or why it takes part no more."""
        r = self._shared()
        assert r is not None
        return words_of(r.shared_slab, self._ranks.shares.world_size)

    def _shared(self) -> SharedRange | None:
        return next((r for r in self.ranges if isinstance(r, SharedRange)), None)

    def _say(self, word: int) -> None:
        self._words()[self._ranks.shares.rank] = word
