"""What one object has adopted: its ranges, the way of its storages into them, and what of it lies outside of them.

It decides nothing: which side has the authoritative bytes is the business of its `ManagedStorage`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from placement.core.errors import IntegrityError
from placement.devices.base import Device
from placement.devices.host.slab import round_up
from placement.storage import range_layout, stray_references
from placement.storage.address_map import RANGES, Owner
from placement.storage.gradients import Gradients
from placement.storage.offloaded import changes as poisoned
from placement.storage.offloaded.changes import Changes, computed_from_poison
from placement.storage.offloaded.gradient_writes import Found, GradientWrites
from placement.storage.offloaded.put_back import bring_back, put_back, renew_empty
from placement.storage.offloaded.relocated import RelocatedStorages
from placement.storage.offloaded.state_dict_tensors import StateDictTensors
from placement.storage.places import NewStorages
from placement.storage.range import Range, RangesByAddress
from placement.storage.range_layout import Claim
from placement.storage.scanner import StorageScanner, Versions
from placement.storage.transfer.chunk_pool import ChunkPool
from placement.storage.transfer.fingerprint import fingerprints
from placement.tensors.owned import Adapter
from placement.tensors.plain import align
from placement.tensors.sparse import own_storages


class ObjectStorages:
    """The ranges of one object on one device.

    Args:
        owner: whose ranges these are, in the table of the process; it holds this object.
        intake: takes in what the object owns; None: into ranges of this process alone.
    """

    def __init__(self, device: Device, adapter: Adapter, name: str, owner: Owner, scanner: StorageScanner | None = None) -> None:
        self.name = name
        self.by_address = RangesByAddress(())
        self.state_dict_tensors = StateDictTensors(device, name, adapter)
        self.gradients = Gradients(adapter)
        self.versions_offloaded: Versions | None = Versions({}, {})
        """As of the offload; None where a state dict that was alive then shares the counters, and may be written by right."""
        self.moving_in: frozenset[int] = frozenset()
        """Storages that this offload takes in: what a state dict shows of them follows by itself."""
        self.relocated = RelocatedStorages(device)
        self.unadopted_bytes = 0
        """Owned bytes that lie in torch's own memory, as of the last look (state born since the last offload, gradients)."""
        self.unborn_bytes = 0
        """Device bytes that state will need which steps have still to create, as of the last look, as far as its size can be told."""
        self.born_bytes = 0
        """Of these, what is there by now, in torch's own memory, as last measured."""
        self._num_entries = 0
        """As of the last look."""
        self.kept_by_framework: tuple[tuple[str, int], ...] = ()
        """Name and bytes of what a framework keeps on the device for the object, offloaded or not, as of the last look."""
        self._device = device
        self._adapter = adapter
        self._owner = weakref.ref(owner)
        self._scanner = scanner or StorageScanner(device, adapter, name, owner)
        self._gradient_writes = GradientWrites(device, adapter)

    @property
    def ranges(self) -> tuple[Range, ...]:
        return self.by_address.ranges

    @ranges.setter
    def ranges(self, ranges: tuple[Range, ...]) -> None:
        self.by_address = RangesByAddress(ranges)

    # --- measuring

    @property
    def device_bytes(self) -> int:
        """Device bytes that it takes to have memory behind every range."""
        return sum([r.device_bytes for r in self.by_address.ranges])

    @property
    def chunk_bytes(self) -> int:
        """Bytes of chunks behind the ranges."""
        return sum([r.resident_bytes for r in self.by_address.ranges])

    @property
    def host_bytes(self) -> int:
        """Host memory of the slabs, and what is set aside for state that is not born yet."""
        return sum(r.slab.held_bytes for r in self.ranges) + (0 if (aside := self._scanner.reserved) is None else aside.nbytes)

    @property
    def host_pageable_bytes(self) -> int:
        return sum(r.slab.pageable_bytes for r in self.ranges)

    def new_storages(self) -> NewStorages:
        """What the object owns outside its places now."""
        shares_addresses = self.state_dict_tensors.shares_addresses
        return self._scanner.new_storages(self.ranges, self.state_dict_tensors, shares_addresses=shares_addresses)

    def _movable_new(self) -> NewStorages:
        """The same, in storages that can be moved: nothing else uses those of sparse gradients."""
        born = self.new_storages()
        sparse = list(self._adapter.sparse())
        if not sparse:
            return born
        del born  # it uses them, too
        for tensor in sparse:
            own_storages(tensor)
        return self.new_storages()

    def look(self) -> None:
        """Measure what the object owns in torch's memory, and what of it is still to be born."""
        self.unadopted_bytes = sum(claim.storage.nbytes() for claims in self.new_storages()[:2] for claim in claims)
        self.look_at_unborn()
        self.look_at_framework_memory()

    def look_at_unborn(self) -> None:
        """What is there, in a range or in torch's memory, must not count a second time."""
        self._num_entries = self._adapter.num_entries()
        self.unborn_bytes, self.born_bytes = self._measure_unborn(), 0

    def measure_births(self) -> None:
        """Whether state was born since the last look. Looks at no tensor."""
        if self.unborn_bytes and self._adapter.num_entries() != self._num_entries:
            self.born_bytes = max(0, self.unborn_bytes - self._measure_unborn())

    def _measure_unborn(self) -> int:
        sizes = self._adapter.unborn_sizes()
        return round_up(range_layout.expected_bytes(self._device, sizes), self._device.granularity) if sizes else 0

    def look_at_framework_memory(self) -> None:
        self.kept_by_framework = tuple(self._adapter.kept_by_framework())

    def fingerprint(self, r: Range, first: int, last: int) -> torch.Tensor:
        """Of chunks `first` up to `last` (not included), where they lie on the device; int64, enqueued on the current stream."""
        sizes = r.used_sizes[first:last]
        if not sizes:
            return torch.empty(0, dtype=torch.int64, device="cpu")
        return fingerprints(self._device.view(r.layout.addresses, r.starts[first], sum(sizes)), sizes)

    # --- coming in

    def reserve(self, sizes: Sequence[int]) -> None:
        """Set host memory and addresses aside for storages of these sizes that are not born yet."""
        self._scanner.reserve(sizes)
        self.look_at_unborn()

    def keep(self, ranges: tuple[Range, ...]) -> None:
        """Store the ranges, and tell the process whose addresses they are."""
        owner = self._owner()
        assert owner is not None
        for r in ranges:
            if r.claims is not None:
                self._scanner.places.add(r)
            RANGES.add(owner, r.layout.addresses.base, r.nbytes)
        self.ranges = ranges

    def adopt(self) -> None:
        """Register: every storage gets its place, its bytes are in the slab, and poison is behind it.

        Raises:
            Exception: what stopped it; the caller undoes what was done.
        """
        born = self._movable_new()
        self._scanner.places.note(born)
        stay, transient = born.stay, born.transient
        fresh = self._take_in(stay, transient)
        self._device.sync()
        self.keep(fresh)
        for new in self.ranges:
            new.move_in()
        was_on_device = any(claim.storage.device == self._device.torch_device for claim in (*stay, *transient))
        del born, stay, transient, fresh
        self.look_at_framework_memory()
        self.align_wrappers()
        self.count_uses()
        self.new_storages()
        self.note_versions()
        self.note_gradients()
        if was_on_device:
            self._device.trim()  # the old memory would stay in torch's cache, invisible to other processes and to our own chunks

    def _take_in(self, stay: list[Claim], transient: list[Claim]) -> tuple[Range, ...]:
        return tuple(r for r in (self._scanner.take_in(stay, False), self._scanner.take_in(transient, True)) if r is not None)

    def take_in_from_elsewhere(self) -> tuple[Range, ...]:
        """Adopt what was added on another device while the object was offloaded (adapters created on the CPU); it comes along."""
        before, here = self.ranges, 0
        born = self.new_unless_changed()
        for transient, claims in enumerate((born.stay, born.transient)):
            here += sum(c.nbytes for c in claims if c.storage.device == self._device.torch_device)
            fresh = self._scanner.take_in([c for c in claims if c.storage.device != self._device.torch_device], bool(transient))
            if fresh is not None:
                self.keep((*self.ranges, fresh))
                fresh.move_in()
        if len(self.ranges) > len(before):
            self.align_wrappers()
            self.new_storages()
            self._note_more_versions()  # the load may fail, and be tried again
        self.unadopted_bytes = here
        self.look_at_unborn()
        return self.ranges[len(before) :]

    def take_in_to_stay(self) -> Range | None:
        """Save what was born and stays for good, all of it; it moves in when the caller has decided."""
        return self._scanner.take_in(self.new_storages().stay, False)

    def take_in_new(self, *, drops: bool) -> tuple[tuple[Range, ...], bool]:
        """Reserve a place for what was born since the last offload and start saving it. Also: whether any of it stays for good.

        Args:
            drops: leave the gradients out; they die with the decision.
        """
        born = self._movable_new()
        self._scanner.places.note(born)
        self.relocated.note(born.relocated)
        stay, transient = born.stay, born.transient
        stay += self.relocated.grown(transient=False)
        transient += self.relocated.grown(transient=True)
        self.note_versions()
        if drops:
            transient = self.gradients.besides(transient)
        self.moving_in = frozenset(claim.storage._cdata for claim in (*stay, *transient))
        return self._take_in(stay, transient), bool(stay)

    def bring_back(self) -> None:
        """What this offload found away from its place is pointed there again."""
        self.relocated.bring_back(self.ranges, self._scanner.places)

    def set_aside(self, r: Range) -> None:
        """The slab of a range that nothing moved into is kept for what will."""
        self._scanner.reserved = r.slab

    def note_versions(self) -> None:
        """What is written from now on, as seen from the last look, is written while offloaded."""
        self.versions_offloaded = self._scanner.versions

    def _note_more_versions(self) -> None:
        """The same of what the last look has found for the first time."""
        if (noted := self.versions_offloaded) is not None:
            now = self._scanner.versions
            self.versions_offloaded = Versions({**now.sums, **noted.sums}, {**now.counts, **noted.counts})

    def written(self) -> list[str]:
        """Names of what was written in place since the offload, gradients left out, as far as version counters tell."""
        self.new_storages()
        return self._written()

    def _written(self) -> list[str]:
        noted = self.versions_offloaded
        return [] if noted is None else poisoned.written(noted, self._scanner.versions, self.ranges)

    def forget_writes(self) -> None:
        """What the last look has found is reported: only what is written from now on counts."""
        if self.versions_offloaded is not None:
            self.note_versions()

    def new_unless_changed(self) -> NewStorages:
        """What the offloaded object owns outside its places. Where it is not what it was, that is undone as far as it can be.

        Raises:
            IntegrityError: what was written or changed, and what to do. Each is raised once.
        """
        born = self.new_storages()
        if names := self._written():
            self.forget_writes()
            poisoned.refuse_written(self.name, names)
        changes = self.put_back(born)
        if not changes:
            return born
        message = changes.message(self.name)
        del born, changes  # whoever keeps the error keeps no tensor
        self.new_storages()  # what was put back lies in other storages now, which were never counted
        self.forget_writes()
        raise IntegrityError(message)

    def put_back(self, born: NewStorages) -> Changes:
        """Undo what was done to registered tensors of the offloaded object; says what it was.

        Gradients are put back with values only: alone they are of a backward, and what was there before may have been dropped on purpose.
        """
        if not born:
            return Changes()
        places = self._scanner.places.within(self.ranges)
        bring_back(self._device, born.relocated, places)
        changes = replace(computed_from_poison(born.stay, born.transient, places), moved=[each.claim for each in born.relocated])
        if changes.replaced:
            gradients = [claim for claim in changes.gradients if any(owned.name in places for owned in claim.owned)]
            if put_back(self._device, [*changes.replaced, *gradients], places, self._scanner.places.outlines()):
                changes = replace(changes, lost=self._adapter.lost_by_conversion)
            self.align_wrappers()
            renew_empty(self._adapter.with_gradients())
            self._adapter.follow_parameters()
        if changes:
            self.state_dict_tensors.point_to_host(self.by_address)
        return changes

    def align_wrappers(self) -> None:
        """A wrapper whose parts were rebound to another device says so itself."""
        for owned in self._adapter.owned():
            if owned.wrapper is not None and owned.wrapper.device != owned.tensor.device:
                align(owned.wrapper)

    # --- going

    def dead(self) -> list[Range]:
        """Ranges without a storage of theirs, and without one that came from a state dict of ours and lies in the same place."""
        dead = [r for r in self.ranges if not r.is_alive]
        if not dead:
            return []
        used = sorted(owned.tensor.untyped_storage().data_ptr() for owned in self._adapter.owned())
        return [r for r in dead if not r.has_any(used)]

    def drop(self, gone: Sequence[Range], chunk_pool: ChunkPool) -> None:
        """Take ranges out. They leave the list last, so that an interrupt loses none of them with memory behind it."""
        if gone:
            self.state_dict_tensors.leave(RangesByAddress(tuple(gone)))
        for r in gone:
            self.vacate(r, chunk_pool)
            RANGES.remove(r.layout.addresses.base)
        if gone:
            out = set(gone)
            self.ranges = tuple(r for r in self.ranges if r not in out)

    def vacate(self, r: Range, chunk_pool: ChunkPool) -> None:
        """Take all memory from behind a range. Its bytes are elsewhere, or nobody's."""
        if r.chunks:
            self._device.unmap(r.layout.addresses, r.nbytes)
            r.give([*r.chunks], chunk_pool)

    # --- who else uses it

    def count_uses(self) -> None:
        """Take the base of the stray references, once, when nothing of ours holds the storages any more."""
        if stray_references.uncounted(self.ranges):
            self.new_storages()  # rebinding gave tensors another storage since the last look
            self._note_more_versions()  # nothing of theirs has been written yet
        stray_references.count(self.ranges)

    def stray_references(self, ranges: Iterable[Range]) -> dict[str, int]:
        """By name, the references to storages adopted into these ranges that others hold now."""
        return stray_references.find(ranges, self.gradients.lasting())

    # --- gradients that are written while offloaded

    def note_gradients(self) -> None:
        """The object is offloaded: what is written into its gradients from now on is found. Idempotent until `forget_gradients`."""
        self._gradient_writes.note(self.ranges)

    def forget_gradients(self) -> None:
        """The object is on the device: its gradients may be written."""
        self._gradient_writes.forget()

    def written_gradients(self) -> Found:
        """What was written since; several share their poison, so all holdings are asked before `take_gradients`."""
        return self._gradient_writes.find(self.ranges)

    def take_gradients(self, found: Found) -> None:
        self._gradient_writes.take(found, self.ranges)

    def drifted(self, *, on_device: bool) -> list[tuple[str, int]]:
        """See `ManagedStorage.drifted`."""
        found = [(entry.name, entry.nbytes) for r in self.ranges for entry in r.outside()]
        found += self._adapter.replaced()
        born = self.new_storages()
        stay, transient = born.stay, born.transient  # what is relocated was found by its address
        if on_device and self._adapter.kind == "optimizer":
            return found
        if on_device:
            replaced = {entry.name for r in self.ranges if not r.transient for entry in r.placed}
            return found + [(claim.name, claim.nbytes) for claim in stay if claim.name in replaced]
        return found + [(claim.name, claim.nbytes) for claim in (*stay, *transient)]
