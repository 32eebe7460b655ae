"""The bytes of one registered object: where they are, and how they come and go as a whole.

A holding is the unit of a move. `on_device` is its one decision: storing it commits a move, and everything after that store
is work that `settle` can do again. So an interrupt leaves the holding with its bytes complete on one side, whichever side
the decision names, and `settle` brings the rest in line.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from placement.adapters.base import Adapter
from placement.adapters.tensors import align
from placement.errors import DeviceMemoryError, IntegrityError
from placement.memory import adopt, poisoned, strays
from placement.memory.base import Device
from placement.memory.claims import RANGES
from placement.memory.fingerprint import fingerprints
from placement.memory.gradients import Gradients
from placement.memory.handed import Handed
from placement.memory.intake import Intake, guests
from placement.memory.loans import Loans
from placement.memory.range import Range
from placement.memory.stock import Stock
from placement.memory.zeroed import Place, Zeroed

_WAITS_SECONDS = (0.0, 0.001, 0.003, 0.01, 0.03)
"""How long strays are waited for before somebody complains of them, where there is a process group."""


@dataclass(frozen=True, slots=True)
class Moved:
    """What a move did, in bytes, and how long it took."""

    seconds: float = 0.0
    copied_bytes: int = 0
    skipped_bytes: int = 0
    rewritten_chunks: int = 0
    """Chunks of a readonly object whose bytes changed on the device."""
    stray_references: int = 0
    strays: str = ""
    """The tensors that somebody else holds, by name."""


class Holding:
    """The ranges of one object on one device."""

    def __init__(self, device: Device, adapter: Adapter, name: str, readonly: bool) -> None:
        self.device = device
        self.adapter = adapter
        self.name = name
        self.readonly = readonly
        self.ranges: tuple[Range, ...] = ()
        self.on_device = False
        """The decision: whether the device's bytes are the authoritative ones. Then every range is mapped."""
        self.handed = Handed(device)
        self.loans = Loans()
        self._intake = Intake(device, adapter, name, self)
        self._zeroed = Zeroed(device, adapter)
        self.gradients = Gradients(adapter)
        self.offloaded_timestamp_seconds = time.time()
        """When the host copy became the authoritative one (Unix time); while on the device, the last time."""
        self.lost: str | None = None
        """What of its values is lost, and since when; None while all are there. It then stays where it is until it leaves for good."""
        self._dropped: tuple[Range, ...] | None = None
        """Ranges of gradients that die with the decision of this offload; None: gradients move."""
        self.is_leaving = False
        """Whether it began to leave placement for good: an interrupted `rehome` must be called again before anything moves."""
        self._is_settled = True
        """Whether everything is in line with the decision. False from before the first change of a move to the end of `settle`."""
        self._is_vacating = False
        """Whether chunks may have been given up that no decision has taken from us yet."""
        self._versions_offloaded: dict[int, int] = {}
        """As of the offload; empty where a state dict that was alive then shares the counters, and may be written by right."""
        self._moving_in: frozenset[int] = frozenset()
        """Storages that this offload takes in: what a state dict shows of them follows by itself."""
        self._may_have_strays = True
        self._is_copying = False
        """Whether copies to the device may be under way that no decision has taken over yet."""
        self.loose_bytes = 0
        """Owned bytes that lie in torch's own memory, as of the last look (state born since the last offload, gradients)."""
        self.foreign: tuple[tuple[str, int], ...] = ()
        """Name and bytes of what a framework keeps on the device for the object, offloaded or not, as of the last look."""

    # --- measuring

    @property
    def num_bytes(self) -> int:
        """Device bytes that it takes to be resident."""
        return sum(r.device_bytes for r in self.ranges) + (self.loose_bytes if self.on_device else 0)

    @property
    def resident_bytes(self) -> int:
        """Device bytes behind its ranges, and what it owns in torch's memory."""
        return sum(r.resident_bytes for r in self.ranges) + (self.loose_bytes if self.on_device else 0)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of chunks behind its ranges."""
        return sum(r.resident_bytes for r in self.ranges)

    @property
    def host_bytes(self) -> int:
        return sum(r.slab.nbytes for r in self.ranges) + (0 if (aside := self._intake.reserved) is None else aside.nbytes)

    @property
    def host_pageable_bytes(self) -> int:
        return sum(r.slab.pageable_bytes for r in self.ranges)

    def newborn(self) -> tuple[list[adopt.Claim], list[adopt.Claim]]:
        """What the object owns outside its ranges: (to stay, loose), one claim a storage, in the adapter's order."""
        return self._intake.newborn(self.ranges, self.handed)

    def look(self) -> None:
        """Measure what the object owns in torch's memory."""
        self.loose_bytes = sum(claim.storage.nbytes() for claims in self.newborn() for claim in claims)
        self.foreign = tuple(self.adapter.foreign())

    # --- adopting

    def reserve(self, sizes: Sequence[int]) -> None:
        """Set host memory and addresses aside for storages of these sizes that are not born yet."""
        self._intake.reserve(sizes)

    def _keep(self, ranges: tuple[Range, ...]) -> None:
        """Store the ranges, and tell the process whose addresses they are."""
        for r in ranges:
            RANGES.add(self, r.adoption.addresses.base, r.nbytes)
        self.ranges = ranges

    def adopt(self) -> None:
        """Register: every storage gets its place, its bytes are in the slab, and poison is behind it.

        Raises:
            RegistrationError: a storage belongs to another handle, or has an alias that nobody named; nothing changed.
            DeviceMemoryError, HostMemoryError: no addresses, no host memory; nothing changed.
        """
        stay, loose = self.newborn()
        try:
            fresh = [r for r in (self._intake.take_in(stay, False), self._intake.take_in(loose, True)) if r is not None]
            self.device.sync()
            self._keep(tuple(fresh))
            for new in self.ranges:
                new.move_in()
        except BaseException:
            self.rehome()
            raise
        was_on_device = any(claim.storage.device == self.device.torch_device for claim in (*stay, *loose))
        del stay, loose, fresh
        self.foreign = tuple(self.adapter.foreign())
        self._align_wrappers()
        self.count_uses()
        self.newborn()
        self._versions_offloaded = self._intake.versions
        if was_on_device:
            self.device.trim()  # the old memory would stay in torch's cache, invisible to other processes and to our own chunks

    def take_in_from_elsewhere(self) -> tuple[Range, ...]:
        """Adopt what was added on another device while the object was offloaded (adapters created on the CPU); it comes along."""
        before, here = self.ranges, 0
        born = self.newborn()
        self._refuse_poisoned(born)
        before_versions, self._versions_offloaded = self._versions_offloaded, self._intake.versions
        poisoned.refuse_written(self.name, before_versions, self._intake.versions, self.ranges)
        for loose, claims in enumerate(born):
            here += sum(c.nbytes for c in claims if c.storage.device == self.device.torch_device)
            fresh = self._intake.take_in([c for c in claims if c.storage.device != self.device.torch_device], bool(loose))
            if fresh is not None:
                self._keep((*self.ranges, fresh))
                fresh.move_in()
        if len(self.ranges) > len(before):
            self._align_wrappers()
        self.loose_bytes = here
        return self.ranges[len(before) :]

    def take_in_restored(self) -> None:
        """Adopt what was put into the offloaded object with its values (state from a checkpoint): they go straight to the host copy."""
        stay, _ = self.newborn()
        fresh = self._intake.take_in(stay, False)
        if fresh is not None:
            self.device.sync()
            self._is_settled = False
            self._keep((*self.ranges, fresh))
            del stay
            self.settle(Stock(self.device))
            self._align_wrappers()
            self.count_uses()

    def _refuse_poisoned(self, born: poisoned.Born) -> None:
        try:
            poisoned.refuse(self.device, self.name, born, self.ranges)
        except IntegrityError:
            self.newborn()  # what was put back lies in other storages now, which were never counted
            self._versions_offloaded = self._intake.versions
            raise

    def _align_wrappers(self) -> None:
        """A wrapper whose parts were rebound to another device says so itself."""
        for owned in self.adapter.owned():
            if owned.wrapper is not None and owned.wrapper.device != owned.tensor.device:
                align(owned.wrapper)

    def drop_dead(self, stock: Stock) -> None:
        """Return ranges that no tensor uses any more (dropped gradients, replaced optimizer state)."""
        self._drop(self._dead(), stock)

    def _dead(self) -> list[Range]:
        """Ranges without a storage of theirs, and without one that came from a state dict of ours and lies in the same place."""
        dead = [r for r in self.ranges if not r.is_alive]
        if not dead:
            return []
        used = [owned.tensor.untyped_storage().data_ptr() for owned in self.adapter.owned()]
        return [r for r in dead if not any(r.has(address) for address in used)]

    def _drop(self, gone: Sequence[Range], stock: Stock) -> None:
        """Take ranges out. They leave the list last, so that an interrupt loses none of them with memory behind it."""
        self.handed.leave(gone)
        for r in gone:
            self._vacate(r, stock)
            RANGES.remove(r.adoption.addresses.base)
        if gone:
            self.ranges = tuple(r for r in self.ranges if r not in gone)

    # --- moving: the steps of an `Exchange`, in their order

    def begin_move(self, stock: Stock) -> None:
        """From here to the end of `settle` nothing may be taken for granted.

        Raises:
            IntegrityError: values of it are lost, or were computed from poison; nothing has begun.
        """
        if self.lost is not None:
            raise IntegrityError(self.lost)
        if self.on_device:
            self.loans.wait()  # what leaves the device is written over the host copy
        if not self.on_device and self._dead():
            # Before the dead are dropped, with the only good values in them.
            self._refuse_poisoned(self.newborn())
        self._is_settled = False
        self._is_copying = not self.on_device
        if self.on_device:
            self.adapter.ready()
        if self.on_device and self.handed:
            self.handed.disown(owned.tensor for owned in self.adapter.owned())
        self.drop_dead(stock)

    def take_in_newborn(self, *, drops: bool = False) -> tuple[tuple[Range, ...], bool]:
        """Reserve a place for what was born since the last offload and start saving it. Also: whether any of it stays for good.

        Args:
            drops: leave the gradients out; they die with the decision.
        """
        stay, loose = self.newborn()
        self._versions_offloaded = self._intake.versions
        if drops:
            dead = self.gradients.tensors()
            loose = [claim for claim in loose if not all(id(alias) in dead for alias in claim.aliases)]
        self._moving_in = frozenset(claim.storage._cdata for claim in (*stay, *loose))
        # Counted while the link is busy; with none now, none has to be looked for when it is not.
        self._may_have_strays = bool(self.handed) or bool(self.strays())
        return tuple(r for r in (self._intake.take_in(stay, False), self._intake.take_in(loose, True)) if r is not None), bool(stay)

    def commit_offload(
        self, fresh: tuple[Range, ...], prints: Sequence[tuple[Range, torch.Tensor]], dropped: tuple[Range, ...] | None = None
    ) -> tuple[int, str]:
        """Every byte is in the slabs: decide. Returns the stray references and the names of what they hold.

        Args:
            dropped: ranges that were not saved, because every gradient becomes None with the decision; None: gradients moved.
        """
        before = self.ranges
        for r, now in prints:
            r.prints = now
        self.handed.point_to_host(self.ranges, except_for=self._moving_in)
        surplus = self.strays(before) if self._may_have_strays else {}
        self._keep(before + fresh)
        self.offloaded_timestamp_seconds = time.time()
        self._dropped = dropped
        self.on_device = False
        return sum(surplus.values()), ", ".join([*surplus][:8])

    def strays(self, ranges: Sequence[Range] | None = None) -> dict[str, int]:
        """By name, the references to adopted storages that others hold now."""
        return strays.find(self.ranges if ranges is None else ranges, self.gradients.lasting())

    def lasting_strays(self) -> dict[str, int]:
        """The same, but for those that go by themselves: a process group's thread lets go of what it sent a moment after its collective."""
        for seconds in _WAITS_SECONDS:
            if not (found := self.strays()) or not (torch.distributed.is_available() and torch.distributed.is_initialized()):
                return found
            time.sleep(seconds)
        return self.strays()

    def commit_load(self) -> None:
        """Every byte is on its way, and the current stream waits for it: decide."""
        for r in self.ranges:
            if r.prints is None or (r.is_shown and not self.readonly):
                r.prints = self.fingerprint(r, 0, len(r.chunk_sizes))
            r.is_shown = False
        self.on_device = True

    def settle(self, stock: Stock) -> None:
        """Bring everything in line with the decision. Idempotent; the second half of every move and the whole of recovery.

        What was given up and cannot be had back decides otherwise: then the rest goes to the host, too.
        """
        if self._is_settled:
            return
        if self.on_device:
            for r in self.ranges:
                if r.claims is not None:  # saved for an offload that did not come; what was set aside for it is kept for the next
                    self._intake.reserved = r.slab
            self._drop([*(r for r in self.ranges if r.claims is not None), *self._dead()], stock)
            stock.forget(chunk for r in self.ranges for chunk in r.chunks.values())
            if self._is_vacating:
                self.on_device = self._have_back(stock)
            self.handed.point_to_device(self.ranges)
        if not self.on_device:
            if self._is_copying:
                self.device.sync()
            if self._dropped is not None:
                self.gradients.drop(zero_buffers=False)
                staying = self.gradients.zero_lasting(self._dropped)
                self._drop([r for r in self._dropped if r not in staying], stock)
            for r in self.ranges:
                self._vacate(r, stock)
                r.move_in()
            self.handed.point_to_host(self.ranges)
            self.handed.note_shown(self.ranges)
            if self.handed:
                self._versions_offloaded = {}
            self.loose_bytes = 0
            self.adapter.drop_caches()
            self.foreign = tuple(self.adapter.foreign())
        self._is_copying = self._is_vacating = False
        self._dropped, self._moving_in = None, frozenset()
        self._is_settled = True

    def vacate(self, r: Range, first: int, last: int, stock: Stock) -> None:
        """Take the memory from behind chunks `first` up to `last` (not included), whose bytes are on the host."""
        if not self._is_vacating and self.handed:  # another thread may be writing a checkpoint from them: never over poison
            self.device.wait(self.device.mark("to_host"))
            self.handed.point_to_host(self.ranges, except_for=self._moving_in)
        self._is_vacating = True
        for index in range(first, last):  # first, so that what is on record is mapped, whenever an interrupt comes
            r.give(index, stock)
        self.device.unmap(r.adoption.addresses, sum(r.chunk_sizes[first:last]), r.starts[first])

    def _have_back(self, stock: Stock) -> bool:
        """An offload that was broken off: the chunks that it gave up come back and are filled from the slab, which has their bytes.

        Returns False where their memory is gone; then what is left was copied to the host, which has everything.
        """
        self.device.sync()
        missing = [(r, index) for r in self.ranges for index in r.missing()]
        for r, index in missing:
            self.device.unmap(r.adoption.addresses, r.chunk_sizes[index], r.starts[index])
        try:
            for r, index in missing:
                (chunk,) = stock.take([r.chunk_sizes[index]])
                try:
                    self.device.map(r.adoption.addresses, (chunk,), r.starts[index])
                    self.device.copy(r.copies((index,)), "to_device")
                except BaseException:
                    self.device.unmap(r.adoption.addresses, r.chunk_sizes[index], r.starts[index])
                    stock.give((chunk,))
                    raise
                r.chunks[index] = chunk  # last: what is on record has its bytes
        except DeviceMemoryError:
            for r in self.ranges:
                r.prints = None
                self.device.copy(r.copies(sorted(r.chunks)), "to_host")
            self.device.sync()
            return False
        self.device.order()
        return True

    def forget_writes(self) -> None:
        """What was written while offloaded has been reported."""
        self._versions_offloaded = {}

    def zeroed(self) -> list[Place]:
        """Gradients that were zeroed in place while offloaded; for `take_zeroed`, once all holdings were asked."""
        return [] if self.on_device else self._zeroed.find(self.ranges)

    def take_zeroed(self, places: list[Place]) -> None:
        self._zeroed.take(places, self.ranges)

    def count_uses(self) -> None:
        """Take the base of the stray references, once, when nothing of ours holds the storages any more."""
        self._zeroed.note(self.ranges)
        if strays.uncounted(self.ranges):
            self.newborn()  # rebinding gave tensors another storage since the last look
        strays.count(self.ranges)

    def _vacate(self, r: Range, stock: Stock) -> None:
        if r.chunks:
            self.device.unmap(r.adoption.addresses, r.nbytes)
            for index in list(r.chunks):
                r.give(index, stock)

    def fingerprint(self, r: Range, first: int, last: int) -> torch.Tensor:
        """Of chunks `first` up to `last` (not included), where they lie on the device; int64, enqueued on the current stream."""
        sizes = r.used_sizes[first:last]
        if not sizes:
            return torch.empty(0, dtype=torch.int64)
        return fingerprints(self.device.view(r.adoption.addresses, r.starts[first], sum(sizes)), sizes)

    # --- reading and leaving

    def over_host(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The same tensor over the host copy; None when its storage is not in a range. Meaningful while offloaded."""
        return self.handed.over_host(tensor, self.ranges)

    def over_mirror(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """`over_host` after `mirror`, in either state; None for what is not in the host copy now."""
        ranges = self.ranges if not self.on_device else tuple(r for r in self.ranges if not r.loose and r.claims is None)
        return self.handed.over_host(tensor, ranges)

    def hand_out(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor as a state dict may show it: readable now, and following the bytes from now on."""
        return self.handed.hand_out(tensor, self.ranges, from_host=not self.on_device or self._is_vacating)

    def drifted(self) -> list[tuple[str, int]]:
        """Name and bytes of what lies neither in a range nor where an owned tensor of this moment may lie, and of what was torn apart.

        On the device new tensors may be born; of a module, what bears the name of one that has a place was put there instead of it (an
        optimizer's state is replaced whenever it is loaded).
        """
        found = [(entry.name, entry.nbytes) for r in self.ranges for entry in r.outside()]
        found += self.adapter.torn()
        stay, loose = self.newborn()
        if self.on_device and self.adapter.kind == "optimizer":
            return found
        if self.on_device:
            replaced = {entry.name for r in self.ranges if not r.loose for entry in r.placed}
            return found + [(claim.name, claim.nbytes) for claim in stay if claim.name in replaced]
        return found + [(claim.name, claim.nbytes) for claim in (*stay, *loose)]

    def rehome(self) -> None:
        """Give every tensor ordinary storage again, on the device while resident, else on the host, and drop the ranges."""
        if not self.ranges:
            return
        self.loans.wait()
        target = self.device.torch_device if self.on_device else torch.device("cpu")
        if self.on_device or self._is_copying:
            self.device.sync()
        if not self.on_device and self._is_settled:  # nothing of it may leave with poison for values
            poisoned.put_back(self.device, self.newborn(), self.ranges)
        self.is_leaving = True
        self.handed.leave()
        aliases: dict[int, list[torch.Tensor]] = {}
        for owned in self.adapter.owned():
            aliases.setdefault(owned.tensor.untyped_storage()._cdata, []).append(owned.tensor)
        for guest in guests():  # a shard of an optimizer's goes where the module's buffer goes
            if guest.untyped_storage()._cdata in aliases:
                aliases[guest.untyped_storage()._cdata].append(guest)
        for r in self.ranges:
            r.move_in()
            for entry in r.placed:
                storage = entry.storage()
                if storage is None or storage.data_ptr() != r.adoption.addresses.base + entry.offset:
                    continue
                known = aliases.get(storage._cdata, [])
                adopt.rehome(self.device, storage, known, target, self._filler(r, entry.offset, storage.nbytes()))
        self._align_wrappers()
        stock = Stock(self.device)
        self.on_device = False
        for r in self.ranges:
            self._vacate(r, stock)
            RANGES.remove(r.adoption.addresses.base)
        stock.release()
        self.ranges = ()

    def _filler(self, r: Range, offset: int, nbytes: int) -> Callable[[torch.Tensor], None]:
        source = self.device.view(r.adoption.addresses, offset, nbytes) if self.on_device else r.slab.view(offset, nbytes)

        def fill(target: torch.Tensor) -> None:
            target.copy_(source)

        return fill
