"""Where new storages of an object go: finding them, and giving each a place in a range with its bytes saved."""

from __future__ import annotations

import itertools
import operator
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from placement.core.errors import RegistrationError
from placement.core.weak_set import WeakIdSet
from placement.devices.base import Addresses, Copy, Device, HostSlab
from placement.storage import range_layout
from placement.storage.address_map import RANGES, Owner
from placement.storage.places import NewStorages, Places, Relocated
from placement.storage.range import Range, storage_use_count, used_bytes
from placement.tensors.owned import Adapter, Owned
from placement.tensors.sparse import is_sparse


def byte_view(storage: torch.UntypedStorage) -> torch.Tensor:
    """A uint8 tensor over a whole storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))


_CDATA = operator.attrgetter("_cdata")
_SCANNERS: WeakIdSet[StorageScanner] = WeakIdSet()
_BORROWED: WeakIdSet[torch.Tensor] = WeakIdSet()
"""Tensors that lay in storages of other objects at the last look at theirs, which may have left placement since."""


def alias_tables() -> list[dict[int, int]]:
    """Of each registered object, how many of its tensors use each storage (`_cdata`), as of the last look at it. None is ever changed:
    another look that finds others makes another table."""
    return [scanner.aliases for scanner in _SCANNERS]


def known_aliases(storages: Sequence[int]) -> list[int]:
    """How many tensors of registered objects use each storage (`_cdata`), as of the last look at each: a main shard is the optimizer's."""
    total = [0] * len(storages)
    for table in alias_tables():  # tens of thousands of storages at an offload: all of them by functions of C
        total = list(map(operator.add, total, map(table.get, storages, itertools.repeat(0))))
    return total


def borrowed() -> Iterator[torch.Tensor]:
    """Tensors of all objects in storages of others: a shard of an optimizer's in the model's buffer."""
    return iter(_BORROWED)


def stepped() -> Iterator[torch.Tensor]:
    """The parameters that registered optimizers step. An optimizer holds them even when their module is gone."""
    return (tensor for scanner in _SCANNERS for tensor in scanner.stepped())


class Versions(NamedTuple):
    """What the version counters of an object's tensors said at one look, by storage (`_cdata`). Gradients are not in it: see
    `GradientWrites`."""

    sums: Mapping[int, int]
    """Of all its tensors together: views share a counter, and what was bound by `.data =` has one of its own."""
    counts: Mapping[int, int]
    """How many tensors these were."""

    def written_since(self, before: Versions) -> set[int]:
        """The storages that were written since another look. One that has got or lost a tensor since is not compared."""
        if self.sums == before.sums:  # at once, however many there are
            return set()
        known, counts = before.sums, before.counts
        return {key for key, now in self.sums.items() if now > known.get(key, now) and self.counts[key] == counts[key]}


class _Found:
    """A storage, and who uses it."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = storage
        self.owned: list[Owned] = []
        self.state_dict_tensors: list[torch.Tensor] = []

    def add(self, owned: Owned) -> None:
        """One more tensor. One without elements names nothing, so the first comes after one with them."""
        if self.owned and not self.owned[0].tensor.numel():
            self.owned.insert(0, owned)
        else:
            self.owned.append(owned)

    def claim(self) -> range_layout.Claim:
        return range_layout.Claim(
            self.owned[0].name, self.storage, (*(each.tensor for each in self.owned), *self.state_dict_tensors), tuple(self.owned)
        )


class StorageScanner:
    """Takes in what one object comes to own: at registration, at its offloads, and when it is loaded.

    Args:
        owner: whose ranges these become, in the table of the process.
    """

    def __init__(self, device: Device, adapter: Adapter, name: str, owner: Owner) -> None:
        self._device = device
        self._adapter = adapter
        self._name = name
        self._owner = weakref.ref(owner)
        self.versions = Versions({}, {})
        """Of what lies in a range, at the last look: a write in between raises it."""
        self.aliases: dict[int, int] = {}
        """Tensors of the object by storage at the last look, storages of other objects included."""
        self._alive: list[StorageWeakRef] = []
        """Of the keys of `aliases`: while it is weakly held, no new storage gets the address of a dead one and its count."""
        self._last: tuple[tuple[Range, ...], Sequence[int], list[int], list[int]] | None = None
        """The last look, where it found everything in its place: the ranges, and of each tensor its storage, address and version."""
        self.places = Places()
        """What lay where, as of the last offload."""
        self.reserved: HostSlab | None = None
        """Host memory set aside for what is not born yet."""
        self._reserved_addresses: Addresses | None = None
        _SCANNERS.add(self)

    def stepped(self) -> Iterator[torch.Tensor]:
        """See `Adapter.stepped`."""
        return self._adapter.stepped()

    def new_storages(self, ranges: tuple[Range, ...], state_dict_tensors: Iterable[torch.Tensor], *, shares_addresses: bool) -> NewStorages:
        """What the object owns outside its places now.

        Args:
            shares_addresses: see `StateDictTensors`.
        """
        if self._is_as_before(ranges, shares_addresses):
            return NewStorages([], [], [])
        placed = [entry.ref.cdata for r in ranges for entry in r.placed]
        addresses = [base + entry.offset for r in ranges for base in (r.layout.addresses.base,) for entry in r.placed]
        known = dict(itertools.compress(zip(placed, addresses, strict=True), map(storage_use_count, placed)))
        sums: dict[int, int] = {}
        counts: dict[int, int] = {}
        aliases: dict[int, int] = {}
        found: dict[int, _Found] = {}
        elsewhere: dict[int, _Found] = {}
        storages: list[int] = []
        in_place: list[Owned] = []
        alive = [entry.ref for r in ranges for entry in r.placed]
        for owned in self._adapter.owned():
            storage = owned.tensor.untyped_storage()
            key = storage._cdata
            storages.append(key)
            aliases[key] = aliases.get(key, 0) + 1
            if (address := known.get(key)) is not None:
                if not owned.transient:
                    sums[key] = sums.get(key, 0) + owned.version
                    counts[key] = counts.get(key, 0) + 1
                if storage.data_ptr() == address:
                    in_place.append(owned)
                else:
                    elsewhere.setdefault(key, _Found(storage)).add(owned)
                continue
            alive.append(StorageWeakRef(storage))
            if storage.nbytes() and not self._belongs_elsewhere(owned, storage):
                found.setdefault(key, _Found(storage)).add(owned)
        hosts = []
        for tensor in self._adapter.borrowed():
            _BORROWED.add(tensor)
            hosts.append(StorageWeakRef(tensor.untyped_storage()))
        self.versions, self._alive = Versions(sums, counts), alive + hosts
        self.aliases = dict(Counter(aliases) + Counter(host.cdata for host in hosts)) if hosts else aliases
        self._note(ranges, storages if len(in_place) == len(storages) else ())
        for tensor in state_dict_tensors:
            key = tensor.untyped_storage()._cdata
            if (entry := found.get(key) or elsewhere.get(key)) is not None:
                entry.state_dict_tensors.append(tensor)
        entries = {entry.ref.cdata: (r, entry) for r in ranges for entry in r.placed} if elsewhere else {}
        relocated = [Relocated(*entries[key], each.claim(), each.owned[0].transient) for key, each in elsewhere.items()]
        new = [(each.owned[0].transient, each.claim()) for each in found.values() if each.owned[0].tensor.numel()]
        stay, goes = [claim for transient, claim in new if not transient], [claim for transient, claim in new if transient]
        return NewStorages(stay, goes, relocated, in_place, self._adapter.other_names())

    def _note(self, ranges: tuple[Range, ...], storages: Sequence[int]) -> None:
        """Remember a look that found everything in its place, for the next one."""
        self._last = None
        if storages and (found := self._adapter.unchanged()) is not None:
            self._last = ranges, storages, found.addresses, found.versions

    def _is_as_before(self, ranges: tuple[Range, ...], shares_addresses: bool) -> bool:
        """Whether the object owns what it owned at the last look, all in its place; brings the version counters up to date."""
        if self._last is None or self._last[0] is not ranges or (found := self._adapter.unchanged()) is None:
            return False
        _, storages, addresses, last_versions = self._last
        versions = found.versions
        if found.addresses != addresses:
            return False
        # The adapter says what is as at ITS last walk, which need not be the one of this look: a state dict that was loaded back in
        # between lies at the same addresses, in storages that are not adopted.
        if shares_addresses and list(map(_CDATA, map(torch.Tensor.untyped_storage, found.tensors))) != storages:
            return False
        if versions == last_versions:
            return True
        sums = dict(zip(storages, versions, strict=True))
        if len(sums) < len(storages):
            sums = dict.fromkeys(sums, 0)
            for key, version in zip(storages, versions, strict=True):
                sums[key] += version
        self.versions = self.versions._replace(sums=sums)
        self._last = ranges, storages, addresses, versions  # last: what an interrupt leaves out is made up for by the next look
        return True

    def _belongs_elsewhere(self, owned: Owned, storage: torch.UntypedStorage) -> bool:
        """Whether another handle owns the storage: an optimizer leaves it there, a module must not claim it a second time, and a sparse
        gradient gets one of its own before it is moved."""
        owner = RANGES.owner_of(storage.data_ptr())
        if owner is None or owner is self._owner():
            return False
        if self._adapter.kind == "optimizer" or (owned.wrapper is not None and is_sparse(owned.wrapper)):
            return True
        raise RegistrationError(
            f"{owned.name!r} of {self._name!r} lies in a storage that belongs to {owner.name!r} already; a storage has one owner. "
            "What shares storages is registered once, as one module: torch.nn.ModuleList([actor, critic]) for two with one trunk."
        )

    def take_in(self, claims: list[range_layout.Claim], transient: bool) -> Range | None:
        """Reserve range and slab for new storages and save their bytes. They stay where they are until `move_in`."""
        if not claims:
            return None
        layout = range_layout.prepare(self._device, claims, self._addresses)
        fresh = Range(self._device, layout, self._slab(used_bytes(layout.nbytes)), tuple(claims), transient)
        copies = []
        for claim, offset in zip(claims, layout.offsets, strict=True):
            if claim.storage.device == self._device.torch_device:
                copies.append(Copy(claim.storage.data_ptr(), fresh.slab.address + offset, claim.storage.nbytes()))
            else:
                fresh.slab.view(offset, claim.storage.nbytes()).copy_(byte_view(claim.storage))
        if copies:
            self._device.copy(copies, "to_host")
        return fresh

    def reserve(self, sizes: Sequence[int]) -> None:
        """Set host memory and addresses aside for storages that are not born yet, so that their first offload cannot lack them.

        Raises:
            HostMemoryError, DeviceMemoryError: there is not enough.
        """
        if sizes:
            nbytes = used_bytes(range_layout.expected_bytes(self._device, sizes))
            self._reserved_addresses = self._device.reserve(nbytes)
            self.reserved = self._device.host(nbytes)

    def _addresses(self, nbytes: int) -> Addresses:
        if self._reserved_addresses is not None and self._reserved_addresses.nbytes >= nbytes:
            addresses, self._reserved_addresses = self._reserved_addresses, None
            return addresses
        return self._device.reserve(nbytes)

    def _slab(self, nbytes: int) -> HostSlab:
        if self.reserved is not None and self.reserved.nbytes >= nbytes:
            slab, self.reserved = self.reserved, None
            return slab
        return self._device.host(nbytes)
