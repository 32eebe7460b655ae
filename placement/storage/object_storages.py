"""The adopted storages of one object: its ranges, how storages get into and out of them, and the object's storages outside of them.

Nothing here decides which side has the authoritative bytes; `ManagedStorage` does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence, Set

import torch

from placement.devices.base import Device
from placement.devices.host.mapping import round_up
from placement.devices.memory import HostSlab
from placement.storage import range_layout
from placement.storage.address_map import RANGES, Owner
from placement.storage.gradients import Gradients
from placement.storage.offloaded.relocated import RelocatedStorages
from placement.storage.offloaded.state_dict_tensors import StateDictTensors
from placement.storage.offloaded.writes import WritesWhileOffloaded
from placement.storage.range import Range, RangesByAddress
from placement.storage.range_layout import Claim
from placement.storage.scanning import stray_references
from placement.storage.scanning.places import NewStorages, Place
from placement.storage.scanning.scanner import StorageScanner, borrowed
from placement.storage.scanning.unadopted import Unadopted
from placement.storage.transfer.chunk_pool import ChunkPool
from placement.storage.transfer.fingerprint import fingerprints
from placement.tensors.owned import Adapter, align_all
from placement.tensors.sparse import own_storages


class ObjectStorages:
    """The ranges of one object on one device.

    Args:
        owner: the owner of these ranges in the process's table (`RANGES`). It holds this object.
        scanner: finds new storages and gives them places; None: in ranges of this process alone.
    """

    def __init__(self, device: Device, adapter: Adapter, name: str, owner: Owner, scanner: StorageScanner | None = None) -> None:
        self.name = name
        self.by_address = RangesByAddress(())
        self._scanner = scanner or StorageScanner(device, adapter, name, owner)
        self.state_dict_tensors = StateDictTensors(device, name, adapter, self._scanner.places)
        self.gradients = Gradients(adapter)
        self.moving_in: frozenset[int] = frozenset()
        """New storages (`_cdata`) that this offload takes in. State dict tensors that use them follow them without being pointed anew."""
        self.relocated = RelocatedStorages(device)
        self.unadopted_bytes = 0
        """Owned bytes in torch's own memory (gradients, and state created since the last offload), as of the last look."""
        self._unadopted = Unadopted(adapter)
        self.unborn_bytes = 0
        """Device bytes for state that steps have still to create, as of the last look, as far as their size can be told."""
        self.born_bytes = 0
        """The part of `unborn_bytes` that steps have created since, in torch's own memory, as last measured."""
        self._num_entries = 0
        """The adapter's `num_entries` as of the last look."""
        self.kept_by_framework: tuple[tuple[str, int], ...] = ()
        """Name and bytes of device memory that a framework keeps for the object, offloaded or not, as of the last look."""
        self._device = device
        self._adapter = adapter
        self._owner = weakref.ref(owner)
        self.writes = WritesWhileOffloaded(self, device, adapter, self._scanner)

    @property
    def ranges(self) -> tuple[Range, ...]:
        return self.by_address.ranges

    @ranges.setter
    def ranges(self, ranges: tuple[Range, ...]) -> None:
        self.by_address = RangesByAddress(ranges)

    def find_host_copies(self) -> None:
        """Look up the addresses of the host copies anew, because a range has got another one."""
        self.ranges = self.by_address.ranges

    # --- measuring

    @property
    def device_bytes(self) -> int:
        """Device bytes that it takes to put memory behind every range."""
        return sum([r.device_bytes for r in self.by_address.ranges])

    @property
    def chunk_bytes(self) -> int:
        """Bytes of the chunks that are behind the ranges now."""
        return sum([r.resident_bytes for r in self.by_address.ranges])

    @property
    def early_bytes(self) -> int:
        """Bytes of the memory that is aside."""
        return sum([r.pages.aside_bytes for r in self.by_address.ranges])

    @property
    def host_bytes(self) -> int:
        """Host memory of the slabs, and host memory reserved for state that is not created yet."""
        return sum(r.host.held_bytes for r in self.ranges) + self.reserved_bytes

    @property
    def reserved(self) -> HostSlab | None:
        """The host memory reserved for state that is not created yet."""
        return self._scanner.reserved

    @property
    def reserved_bytes(self) -> int:
        """The bytes of `reserved` that are in host memory."""
        return 0 if self.reserved is None else self.reserved.held_bytes

    def expected_host_bytes(self) -> int:
        """Host memory of this process that adopting the object takes, at its registration."""
        born = self.new_storages()
        return self._scanner.first_host_bytes(born.stay) + self.host_bytes_for([claim.nbytes for claim in born.transient])

    def host_bytes_for(self, sizes: Sequence[int], parts: int = 1) -> int:
        """Host memory that storages of these sizes (bytes) take, at most, in so many ranges."""
        return self._scanner.host_bytes_for(sizes, parts)

    @property
    def disk_bytes(self) -> int:
        """Bytes of the files that the slabs have on disk."""
        return sum({spill: spill.disk_bytes for r in self.ranges if (spill := r.spill) is not None}.values())

    @property
    def host_pageable_bytes(self) -> int:
        return sum(r.host.pageable_bytes for r in self.ranges)

    def new_storages(self) -> NewStorages:
        """The storages that the object owns now outside their places."""
        shares_addresses = self.state_dict_tensors.shares_addresses
        return self._scanner.new_storages(self.ranges, self.state_dict_tensors, shares_addresses=shares_addresses)

    def places(self, ranges: Iterable[Range]) -> Mapping[str, Place]:
        """The places of the object's tensors in these ranges as of the last offload, by name."""
        return self._scanner.places.within(ranges)

    def _movable_new(self) -> NewStorages:
        """The new storages, after sparse gradients have got storages that nothing else uses, so that all can be moved."""
        born = self.new_storages()
        sparse = list(self._adapter.sparse())
        if not sparse:
            return born
        del born  # its tensors use the sparse gradients' storages, too
        for tensor in sparse:
            own_storages(tensor)
        return self.new_storages()

    def look(self) -> None:
        """Measure what the object owns in torch's memory, what steps have still to create, and what the framework keeps."""
        self.unadopted_bytes = self._unadopted.measure(self.new_storages)
        self.look_at_unborn()
        self.look_at_framework_memory()

    def look_at_unborn(self) -> None:
        """Measure `unborn_bytes` anew: state that exists now, wherever it lies, must not count a second time."""
        self._num_entries = self._adapter.num_entries()
        self.unborn_bytes, self.born_bytes = self._measure_unborn(), 0

    def measure_births(self) -> None:
        """Update `born_bytes` if the object's state has got new entries since the last look. Looks at no tensor."""
        if self.unborn_bytes and self._adapter.num_entries() != self._num_entries:
            self.born_bytes = max(0, self.unborn_bytes - self._measure_unborn())

    def _measure_unborn(self) -> int:
        sizes = self._adapter.unborn_sizes()
        return round_up(range_layout.expected_bytes(self._device, sizes), self._device.granularity) if sizes else 0

    def look_at_framework_memory(self) -> None:
        self.kept_by_framework = tuple(self._adapter.kept_by_framework())

    def fingerprint(self, r: Range, first: int, last: int) -> torch.Tensor:
        """Fingerprints of chunks `first` up to `last` (not included), computed from the device; int64, enqueued on the current stream."""
        sizes = r.used_sizes[first:last]
        if not sizes:
            return torch.empty(0, dtype=torch.int64, device="cpu")
        return fingerprints(self._device.view(r.layout.addresses, r.starts[first], sum(sizes)), sizes)

    # --- adopting

    def reserve(self, sizes: Sequence[int], parts: int = 1) -> None:
        """Reserve host memory and addresses for storages of these sizes (bytes) that are not created yet.

        Args:
            parts: how many ranges they may come to lie in, one after the other.
        """
        self._scanner.reserve(sizes, parts)
        self.look_at_unborn()

    def keep(self, ranges: tuple[Range, ...]) -> None:
        """Make these the object's ranges, and enter their addresses into the process's table."""
        owner = self._owner()
        assert owner is not None
        for r in ranges:
            if r.claims is not None:
                self._scanner.places.add(r)
            RANGES.add(owner, r.layout.addresses.base, r.nbytes)
        self.ranges = ranges

    def adopt(self) -> None:
        """Adopt the object at registration: every storage gets its place, its bytes go into the slab, and poison lies behind the place.

        Raises:
            Exception: the adoption failed; the caller undoes the part that was done.
        """
        born = self._movable_new()
        self._scanner.places.note(born)
        stay, transient = born.stay, born.transient
        fresh = self._scanner.take_in_first(stay)
        gradients = self._scanner.take_in(transient, True)
        if gradients is not None:
            fresh = (*fresh, gradients)
        self._device.sync()
        self.keep(fresh)
        for new in self.ranges:
            new.move_in()
        was_on_device = any(claim.storage.device == self._device.torch_device for claim in (*stay, *transient))
        del born, stay, transient, fresh, gradients
        self.look_at_framework_memory()
        self.align_wrappers()
        self.count_uses()
        self.new_storages()
        self.writes.note()
        self.writes.note_gradients()
        if was_on_device:
            self._device.trim()  # else the old memory stays in torch's cache, where neither other processes nor our chunks can use it

    def _take_in(self, stay: list[Claim], transient: list[Claim]) -> tuple[Range, ...]:
        first = self._scanner.take_in(stay, False)  # by name: its slab, to which bytes are on their way, outlives a failure of the second
        second = self._scanner.take_in(transient, True)
        return tuple(r for r in (first, second) if r is not None)

    def take_in_from_elsewhere(self) -> tuple[Range, ...]:
        """Adopt tensors that were added on another device while the object was offloaded (PEFT adapters created on the CPU).

        The coming load loads them, too. Returns their ranges.
        """
        before, here = self.ranges, 0
        born = self.writes.new_unless_changed()
        for transient, claims in enumerate((born.stay, born.transient)):
            here += sum(c.nbytes for c in claims if c.storage.device == self._device.torch_device)
            fresh = self._scanner.take_in([c for c in claims if c.storage.device != self._device.torch_device], bool(transient))
            if fresh is not None:
                self.keep((*self.ranges, fresh))
                fresh.move_in()
        if len(self.ranges) > len(before):
            self.align_wrappers()
            self.new_storages()
            self.writes.note_more()  # the load may fail and be tried again
        self.unadopted_bytes = here
        self.look_at_unborn()
        return self.ranges[len(before) :]

    def give_up_claims(self) -> None:
        """The object's new storages may be another's from now on."""
        self._scanner.claimed = frozenset()

    def take_in_to_stay(self) -> Range | None:
        """Save the new storages that are not transient. They move into the range that is returned when the caller has it do so."""
        return self._scanner.take_in(self.new_storages().stay, False)

    def take_in_born(self, besides: Set[int] = frozenset()) -> Range | None:
        """Like `take_in_to_stay`, for state that comes bucket by bucket: the host memory reserved for all of it is cut into parts.

        Args:
            besides: storages (`_cdata`) to leave out.
        """
        return self._scanner.take_in_part([claim for claim in self.new_storages().stay if claim.storage._cdata not in besides])

    def take_in_new(self, *, drops: bool, look: Callable[[Sequence[Claim]], None]) -> tuple[tuple[Range, ...], bool]:
        """Reserve places for the new storages and start saving them. Returns their ranges, and whether any of them is not transient.

        Args:
            drops: leave the gradients out, because they are dropped when the offload is committed.
            look: called before that with those that are not transient.
        """
        born = self._movable_new()
        look(born.stay)
        self._scanner.places.note(born)
        self.relocated.note(born.relocated)
        stay, transient = born.stay, born.transient
        stay += self.relocated.grown(transient=False)
        transient += self.relocated.grown(transient=True)
        self.writes.note()
        if drops:
            transient = self.gradients.besides(transient)
        self.moving_in = frozenset(claim.storage._cdata for claim in (*stay, *transient))
        self.state_dict_tensors.take_over(self.moving_in)
        return self._take_in(stay, transient), bool(stay)

    def bring_back(self) -> None:
        """Point the relocated storages that this offload found to their places again."""
        self.relocated.bring_back(self.ranges, self._scanner.places)

    def set_aside(self, r: Range) -> None:
        """Keep the slab of a range that nothing moved into for the next one."""
        self._scanner.reserved = r.host

    def align_wrappers(self) -> None:
        """Correct the device that each wrapper names, where its parts were rebound to another one."""
        align_all(self._adapter.owned())

    # --- dropping ranges

    def dead(self) -> list[Range]:
        """The ranges that nobody uses: every adopted storage has died, and no tensor of the object, or lent to another, lies in them.

        A tensor lies in a range without having been adopted there where a state dict was loaded back: that keeps the range.
        """
        dead = [r for r in self.ranges if not r.is_alive]
        if not dead:
            return []
        tensors = (*(owned.tensor for owned in self._adapter.owned()), *borrowed())
        used = sorted(tensor.untyped_storage().data_ptr() for tensor in tensors)
        return [r for r in dead if not r.has_any(used)]

    def offer_slab(self, dead: Iterable[Range]) -> None:
        """Let the coming offload use the host memory of gradients that are dead, until `withdraw_slab`."""
        slabs = [r.host for r in dead if r.transient and not r.is_shared and r.spill is None]
        self._scanner.spare = max(slabs, key=lambda slab: slab.nbytes, default=None)

    def withdraw_slab(self) -> None:
        """Give back the host memory that was offered and not used."""
        self._scanner.spare = None

    def drop(self, gone: Sequence[Range], chunk_pool: ChunkPool) -> None:
        """Drop ranges. They leave `ranges` last, so that a failure never loses a range with memory behind it."""
        if gone:
            self.state_dict_tensors.leave(RangesByAddress(tuple(gone)))
        for r in gone:
            r.pages.discard(chunk_pool)
            r.pages.vacate(range(len(r.chunk_sizes)), chunk_pool)
            RANGES.remove(r.layout.addresses.base)
        if gone:
            out = set(gone)
            self.ranges = tuple(r for r in self.ranges if r not in out)

    # --- references that others hold

    def count_uses(self) -> None:
        """Count once the references that each storage has by right. Called when placement itself holds none of them."""
        if stray_references.uncounted(self.ranges):
            self.new_storages()  # since the last look rebinding has given tensors another storage
            self.writes.note_more()  # these storages have not been written yet
        stray_references.count(self.ranges)

    def stray_references(self, ranges: Iterable[Range]) -> dict[str, int]:
        """The number of stray references to each storage in these ranges, by the storage's name."""
        return stray_references.find(ranges, self.gradients.lasting())

    def drifted(self, *, on_device: bool) -> list[tuple[str, int]]:
        """See `ManagedStorage.drifted`."""
        found = [(entry.name, entry.nbytes) for r in self.ranges for entry in r.outside()]
        found += self._adapter.replaced()
        born = self.new_storages()
        stay, transient = born.stay, born.transient  # relocated storages are in `found` already, by their addresses
        if on_device and self._adapter.kind == "optimizer":
            return found
        if on_device:
            replaced = {entry.name for r in self.ranges if not r.transient for entry in r.placed}
            return found + [(claim.name, claim.nbytes) for claim in stay if claim.name in replaced]
        return found + [(claim.name, claim.nbytes) for claim in (*stay, *transient)]
