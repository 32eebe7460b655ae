"""The adopted storages of one object: its ranges, how storages get into and out of them, and the object's storages outside of them.

Nothing here decides which side has the authoritative bytes; `ManagedStorage` does.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from functools import partial

import torch

from placement.devices.base import Device
from placement.devices.host.mapping import round_up
from placement.devices.memory import HostSlab
from placement.ownership.adapter import Adapter
from placement.storage import scan
from placement.storage.gradients import Gradients
from placement.storage.layout import RANGES, Adoptee, Owner, expected_bytes
from placement.storage.point import move_out
from placement.storage.range import Range, RangesByAddress
from placement.storage.scan import Place, Relocated, Scan, StorageScanner, borrowed
from placement.storage.state_dicts import StateDictTensors
from placement.storage.transfer.chunk_pool import ChunkPool
from placement.storage.transfer.fingerprint import fingerprints
from placement.storage.writes import WritesWhileOffloaded
from placement.tensors.plain import (
    Owned,
    align_all,
    follow,
    has_storage,
    is_leaf,
    is_plain_type,
    is_sparse,
    own_storages,
    parts_of,
    sparse_parts,
)


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
        self._relocated: Sequence[Relocated] = ()
        """The storages that this offload has found away from their places. They get new ones, and leave the old ones empty."""
        self.unadopted_bytes = 0
        """Owned bytes in torch's own memory (gradients, and state created since the last offload), as of the last look."""
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
        """Bytes of the memory behind the ranges, and of that aside."""
        return sum([r.pages.own_bytes + r.pages.aside_bytes for r in self.by_address.ranges])

    @property
    def aside_bytes(self) -> int:
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
        born = self.rescan()
        return self._scanner.first_host_bytes(born.stay) + self.host_bytes_for([adoptee.nbytes for adoptee in born.transient])

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

    def rescan(self) -> Scan:
        """Look at the object anew: refresh versions and aliases. Returns the storages outside their places."""
        shares_addresses = self.state_dict_tensors.shares_addresses
        return self._scanner.rescan(self.ranges, self.state_dict_tensors, shares_addresses=shares_addresses)

    def places(self, ranges: Iterable[Range]) -> Mapping[str, Place]:
        """The places of the object's tensors in these ranges as of the last offload, by name."""
        return self._scanner.places.within(ranges)

    def _movable_new(self) -> Scan:
        """The new storages, after sparse gradients have got storages that nothing else uses, so that all can be moved."""
        born = self.rescan()
        sparse = list(self._adapter.sparse())
        if not sparse:
            return born
        del born  # its tensors use the sparse gradients' storages, too
        for tensor in sparse:
            own_storages(tensor)
        return self.rescan()

    def look(self) -> None:
        """Measure what the object owns in torch's memory, what steps have still to create, and what the framework keeps."""
        self.unadopted_bytes = self._scanner.unadopted_bytes(self.ranges, self.rescan)
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
        return round_up(expected_bytes(self._device, sizes), self._device.granularity) if sizes else 0

    def look_at_framework_memory(self) -> None:
        self.kept_by_framework = tuple(self._adapter.kept_by_framework())

    def fingerprint(self, r: Range, first: int, last: int) -> torch.Tensor:
        """Fingerprints of chunks `first` up to `last` (not included), computed from the device; int64, enqueued on the current stream."""
        sizes = r.used_sizes[first:last]
        if not sizes:
            return torch.empty(0, dtype=torch.int64, device="cpu")
        known = self._device.known_fingerprints(r.layout.addresses, r.starts[first], sizes)
        return fingerprints(self._device.view(r.layout.addresses, r.starts[first], sum(sizes)), sizes) if known is None else known

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
        was_on_device = self._adopt_all()  # in a call of its own: no variable here refers to a storage when uses are counted
        self.look_at_framework_memory()
        self.align_wrappers()
        self.count_uses()
        self.rescan()
        self.writes.note()
        if was_on_device:
            self._device.trim()  # else the old memory stays in torch's cache, where neither other processes nor our chunks can use it

    def _adopt_all(self) -> bool:
        """Give every storage its place. Returns whether any of them was on the device."""
        born = self._movable_new()
        self._scanner.places.note(born)
        fresh = self._scanner.adopt_first(born.stay)
        if (gradients := self._scanner.adopt(born.transient, transient=True)) is not None:
            fresh = (*fresh, gradients)
        self._device.sync()
        self.keep(fresh)
        for new in self.ranges:
            new.move_in()
        return any(adoptee.storage.device == self._device.torch_device for adoptee in (*born.stay, *born.transient))

    def adopt_from_elsewhere(self) -> tuple[Range, ...]:
        """Adopt tensors that were added on another device while the object was offloaded (PEFT adapters created on the CPU).

        The coming load loads them, too. Returns their ranges.
        """
        before, here = self.ranges, 0
        born = self.writes.new_unless_changed()
        for transient, adoptees in enumerate((born.stay, born.transient)):
            here += sum(c.nbytes for c in adoptees if c.storage.device == self._device.torch_device)
            away = [c for c in adoptees if c.storage.device != self._device.torch_device]
            fresh = self._scanner.adopt(away, transient=bool(transient))
            if fresh is not None:
                self.keep((*self.ranges, fresh))
                fresh.move_in()
        if len(self.ranges) > len(before):
            self.align_wrappers()
            self.rescan()
            self.writes.note_more()  # the load may fail and be tried again
        self.unadopted_bytes = here
        self.look_at_unborn()
        return self.ranges[len(before) :]

    def give_up_discovered(self) -> None:
        """The object's new storages may be another's from now on."""
        self._scanner.discovered = frozenset()

    def adopt_lasting(self, besides: Set[int] = frozenset(), *, in_parts: bool = False) -> Range | None:
        """Save the new storages that are not transient. They move into the range that is returned when the caller has it do so.

        Args:
            besides: storages (`_cdata`) to leave out.
            in_parts: more state will come (bucket by bucket), so the host memory reserved for all of it is cut.
        """
        return self._scanner.adopt([adoptee for adoptee in self.rescan().stay if adoptee.storage._cdata not in besides], in_parts=in_parts)

    def adopt_new(self, *, drops: bool, look: Callable[[Sequence[Adoptee]], None]) -> tuple[tuple[Range, ...], bool]:
        """Reserve places for the new storages and start saving them. Returns their ranges, and whether any of them is not transient.

        Args:
            drops: leave the gradients out, because they are dropped when the offload is committed.
            look: called before that with those that are not transient.
        """
        born = self._movable_new()
        look(born.stay)
        self._scanner.places.note(born)
        self._relocated = born.relocated
        stay = born.stay + [each.adoptee for each in born.relocated if each.adoptee.nbytes and not each.transient]
        transient = born.transient + [each.adoptee for each in born.relocated if each.adoptee.nbytes and each.transient]
        self.writes.note()
        if drops:
            transient = self.gradients.besides(transient)
        self.moving_in = frozenset(adoptee.storage._cdata for adoptee in (*stay, *transient))
        self.state_dict_tensors.take_over(self.moving_in)
        first = self._scanner.adopt(stay)  # by name: its slab, to which bytes are on their way, outlives a failure of the second
        second = self._scanner.adopt(transient, transient=True)
        return tuple(r for r in (first, second) if r is not None), bool(stay)

    @property
    def relocated_names(self) -> list[str]:
        """Names of the storages that this offload has found in other memory than theirs, in which it was given them."""
        return [each.entry.name for each in self._relocated if each.adoptee.nbytes == each.entry.nbytes]

    def end_offload(self) -> None:
        """Leave the places of relocated storages empty. They have moved to new ones."""
        for r, entry, _, _ in self._relocated:
            r.forget(entry)
        self.forget_offload()

    def forget_offload(self) -> None:
        """Forget what an offload has found; it was committed, or undone."""
        self._relocated, self.moving_in, self._scanner.spare = (), frozenset(), None

    def keep_slab_of(self, r: Range) -> None:
        """Keep the slab of a range that nothing moved into for the next one."""
        self._scanner.reserved = r.host

    def align_wrappers(self) -> None:
        """Correct the device that each wrapper names, where its parts were rebound to another one."""
        if self._adapter.unchanged() is None:  # else the last walk found none
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
        """Let the coming offload use the host memory of gradients that are dead, until `forget_offload`."""
        slabs = [r.host for r in dead if r.transient and not r.is_shared and r.spill is None]
        self._scanner.spare = max(slabs, key=lambda slab: slab.nbytes, default=None)

    def drop(self, gone: Sequence[Range], chunk_pool: ChunkPool) -> None:
        """Drop ranges. They leave `ranges` last, so that a failure loses no range with memory behind it."""
        if gone:
            self.state_dict_tensors.leave(RangesByAddress(tuple(gone)))
        for r in gone:
            r.pages.discard(chunk_pool)
            r.pages.vacate(range(len(r.chunk_sizes)), chunk_pool)
            RANGES.remove(r.layout.addresses.base)
        if gone:
            out = set(gone)
            self.ranges = tuple(r for r in self.ranges if r not in out)

    # --- leaving

    def unadopt(self, *, on_device: bool) -> None:
        """Give every tensor ordinary storage with its values, on the device or on the host. The ranges stay, empty.

        Idempotent, so that a call that failed can be repeated.

        Raises:
            torch.OutOfMemoryError: no memory for a storage. Storages that left before it stay outside.
        """
        self.state_dict_tensors.leave()
        for r in self.ranges:  # first, because a registration that broke off may have tensors to point to other storages
            r.move_in()
        everything = list(self._adapter.owned())
        # On another device only the tensors that are named here follow. Beside the object's own these are what its views were made from,
        # and a shard of an optimizer in the module's buffer.
        own = [each for owned in everything for each in (owned.tensor, owned.tensor._base) if each is not None]
        homes: dict[int, torch.UntypedStorage] = {}
        self._move_out([*self._placed(), *self._loaded_back(everything)], (*own, *borrowed()), on_device, homes)
        others: list[Owned] = []
        if left := [*self._placed(), *self._shown()]:
            # Somebody else has them: an optimizer that outlives the module, a module that got a layer of this one, a variable. To find them
            # takes tens of milliseconds, so nobody is asked before.
            others = _users_in_the_process({storage._cdata for storage, _, _ in left})
            users = (*scan.stepped(), *scan.tensors_of_all_objects(), *(each.tensor for each in others))
            self._move_out(left, users, on_device, homes)
        scan.note_borrowed(owned.tensor for owned in everything)
        follow((*everything, *others))
        self.align_wrappers()
        align_all(others)

    def _move_out(
        self, placed: list[_InRange], tensors: Iterable[torch.Tensor], on_device: bool, homes: dict[int, torch.UntypedStorage]
    ) -> None:
        """Give storages that lie in ranges, and those of these tensors that use them, ordinary memory.

        Drops the list's content, so that a storage that nobody else uses is gone afterwards.
        """
        aliases: dict[int, dict[int, torch.Tensor]] = {}
        for tensor in tensors:
            aliases.setdefault(tensor.untyped_storage()._cdata, {})[id(tensor)] = tensor
        while placed:
            storage, r, offset = placed.pop()
            nbytes = storage.nbytes()
            bytes_now = self._device.view(r.layout.addresses, offset, nbytes) if on_device else r.view(offset, nbytes, even_if_lost=True)
            target = self._device.torch_device if on_device else torch.device("cpu")
            users = [*aliases.get(storage._cdata, {}).values()]
            move_out(self._device, storage, users, target, partial(_fill, bytes_now), homes)

    def _placed(self) -> Iterator[_InRange]:
        """The adopted storages that are alive and at their places."""
        for r in self.ranges:
            for entry in r.placed:
                storage = entry.storage()
                if storage is not None and storage.data_ptr() == r.layout.addresses.base + entry.offset:
                    yield storage, r, entry.offset

    def _loaded_back(self, owned: Iterable[Owned]) -> Iterator[_InRange]:
        """Storages of the object that lie in a range without having been adopted there: a state dict showed them, and was loaded back."""
        placed = {storage._cdata for storage, _, _ in self._placed()}
        yield from self._in_range({s._cdata: s for each in owned if (s := each.tensor.untyped_storage())._cdata not in placed}.values())

    def _shown(self) -> Iterator[_InRange]:
        """Storages that state dicts have shown, of which somebody has a view."""
        return self._in_range(self.state_dict_tensors.shown())

    def _in_range(self, storages: Iterable[torch.UntypedStorage]) -> Iterator[_InRange]:
        for storage in storages:
            place = self.by_address.at(storage.data_ptr())
            if place is not None and storage.data_ptr() == place[0].layout.addresses.base + place[1]:
                yield storage, *place

    # --- references that others hold

    def count_uses(self) -> None:
        """Count once the references that each storage has by right. Called when placement itself holds none of them."""
        if scan.uncounted(self.ranges):
            self.rescan()  # since the last look rebinding has given tensors another storage
            self.writes.note_more()  # these storages have not been written yet
        scan.count_uses(self.ranges)

    def stray_references(self, ranges: Iterable[Range]) -> dict[str, int]:
        """The number of stray references to each storage in these ranges, by the storage's name."""
        return scan.stray_references(ranges, self.gradients.lasting())

    def drifted(self, *, on_device: bool) -> list[tuple[str, int]]:
        """See `ManagedStorage.drifted`."""
        found = [(entry.name, entry.nbytes) for r in self.ranges for entry in r.outside()]
        found += [each for framework in self._adapter.frameworks for each in framework.replaced()]
        born = self.rescan()
        stay, transient = born.stay, born.transient  # relocated storages are in `found` already, by their addresses
        if on_device and self._adapter.kind == "optimizer":
            return found
        if on_device:
            replaced = {entry.name for r in self.ranges if not r.transient for entry in r.placed}
            return found + [(adoptee.name, adoptee.nbytes) for adoptee in stay if adoptee.name in replaced]
        return found + [(adoptee.name, adoptee.nbytes) for adoptee in (*stay, *transient)]


_InRange = tuple[torch.UntypedStorage, Range, int]
"""A storage at the device addresses of a range, the range, and the storage's offset there."""


def _fill(source: torch.Tensor, target: torch.Tensor) -> None:
    target.copy_(source)


def _users_in_the_process(storages: Collection[int]) -> list[Owned]:
    """The tensors that use these storages (`_cdata`), among all that Python's garbage collector knows. `gc.freeze()` hides some."""
    found: list[Owned] = []
    with torch._C.DisableTorchFunctionSubclass():  # the subclasses that anybody made would run code of theirs at each question
        for tensor in _tensors_of_the_process():
            with suppress(Exception):  # somebody's wrapper that cannot name its parts must not keep this object's values
                for path, part in sparse_parts(tensor, "") if is_sparse(tensor) else parts_of(tensor, ""):
                    wrapper = None if part is tensor else tensor
                    if _can_be_rebound(part) and part.untyped_storage()._cdata in storages:
                        found += [Owned(path, each, wrapper=wrapper) for each in (part, part._base) if each is not None]
    return found


def _tensors_of_the_process() -> Iterator[torch.Tensor]:
    # Not isinstance, which asks some objects for their `__class__`, and lazy ones then run code of theirs.
    known: list[torch.Tensor] = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    for each in known:
        if not torch._C._functorch.is_functorch_wrapped_tensor(each):
            yield each
            if is_leaf(each) and (gradient := each.grad) is not None:
                yield gradient


def _can_be_rebound(part: torch.Tensor) -> bool:
    """Whether a tensor has its bytes in a storage of its own, and may be given another. A class with a dispatch of its own has not."""
    return (is_plain_type(type(part)) or type(part).__torch_dispatch__ is torch.Tensor.__torch_dispatch__) and has_storage(part)
