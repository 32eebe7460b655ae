"""Where new storages of an object go: finding them, and giving each a place in a range with its bytes saved."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence

import torch

from placement.adapters.base import Adapter, Owned
from placement.errors import RegistrationError
from placement.memory import adopt
from placement.memory.base import Addresses, Copy, Device, HostSlab
from placement.memory.claims import RANGES, Owner
from placement.memory.range import Range, used_bytes


def byte_view(storage: torch.UntypedStorage) -> torch.Tensor:
    """A uint8 tensor over a whole storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))


_INTAKES: weakref.WeakSet[Intake] = weakref.WeakSet()


def known_aliases(storage: int) -> int:
    """How many tensors of registered objects use a storage (`_cdata`), as of the last look at each: a main shard is the optimizer's."""
    return sum(intake.aliases.get(storage, 0) for intake in _INTAKES)


def guests_elsewhere(intake: Intake) -> Iterator[torch.Tensor]:
    """Tensors of all other objects in storages that are not theirs."""
    return (tensor for other in _INTAKES if other is not intake for tensor in other._adapter.guests())


class Intake:
    """Takes in what one object comes to own: at registration, at its offloads, and when it is loaded.

    Args:
        owner: whose ranges these become, in the table of the process.
    """

    def __init__(self, device: Device, adapter: Adapter, name: str, owner: Owner) -> None:
        self._device = device
        self._adapter = adapter
        self._name = name
        self._owner = weakref.ref(owner)
        self.versions: dict[int, int] = {}
        """By storage in a range, the version counter of its tensors at the last look: a write in between raises it."""
        self.aliases: dict[int, int] = {}
        """Tensors of the object by storage at the last look, storages of other objects included."""
        self.reserved: HostSlab | None = None
        """Host memory set aside for what is not born yet."""
        self._reserved_addresses: Addresses | None = None
        _INTAKES.add(self)

    def newborn(self, ranges: Iterable[Range], handed: Iterable[torch.Tensor]) -> tuple[list[adopt.Claim], list[adopt.Claim]]:
        """What the object owns outside its ranges: (to stay, loose), one claim a storage, in the adapter's order."""
        known = {entry.ref.cdata: r for r in ranges for entry in r.placed if not entry.ref.expired()}
        versions: dict[int, int] = {}
        aliases: dict[int, int] = {}
        found: dict[int, tuple[Owned, torch.UntypedStorage, list[torch.Tensor]]] = {}
        for owned in self._adapter.owned():
            storage = owned.tensor.untyped_storage()
            key = storage._cdata
            aliases[key] = aliases.get(key, 0) + 1
            if key in known:
                if not owned.loose:  # views share their base's counter
                    versions[key] = max(versions.get(key, 0), owned.version)
                continue
            if storage.nbytes() == 0 or self._belongs_elsewhere(owned, storage):
                continue
            if key not in found:
                found[key] = (owned, storage, [owned.tensor])
            elif found[key][0].tensor.numel():
                found[key][2].append(owned.tensor)
            else:  # a tensor without elements is one more user of a storage, and names nothing
                found[key] = (owned, storage, [owned.tensor, *found[key][2]])
        for tensor in self._adapter.guests():
            key = tensor.untyped_storage()._cdata
            aliases[key] = aliases.get(key, 0) + 1
        self.versions, self.aliases = versions, aliases
        for tensor in handed:
            entry = found.get(tensor.untyped_storage()._cdata)
            if entry is not None:
                entry[2].append(tensor)
        stay: list[adopt.Claim] = []
        loose: list[adopt.Claim] = []
        for first, storage, tensors in found.values():
            if not first.tensor.numel():
                continue
            claim = adopt.Claim(first.name, storage, tuple(tensors))
            (loose if first.loose else stay).append(claim)
        return stay, loose

    def _belongs_elsewhere(self, owned: Owned, storage: torch.UntypedStorage) -> bool:
        """Whether another handle owns the storage: an optimizer leaves it there, a module must not claim it a second time."""
        owner = RANGES.owner_of(storage.data_ptr())
        if owner is None or owner is self._owner():
            return False
        if self._adapter.kind == "optimizer":
            return True
        raise RegistrationError(
            f"{owned.name!r} of {self._name!r} lies in a storage that belongs to {owner.name!r} already; a storage has one owner. "
            "What shares storages is registered once, as one module: torch.nn.ModuleList([actor, critic]) for two with one trunk."
        )

    def take_in(self, claims: list[adopt.Claim], loose: bool) -> Range | None:
        """Reserve range and slab for new storages and save their bytes. They stay where they are until `move_in`."""
        if not claims:
            return None
        adoption = adopt.prepare(self._device, claims, self._addresses)
        fresh = Range(self._device, adoption, self._slab(used_bytes(adoption.nbytes)), tuple(claims), loose)
        copies = []
        for claim, offset in zip(claims, adoption.offsets, strict=True):
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
            nbytes = used_bytes(adopt.expected_bytes(self._device, sizes))
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
