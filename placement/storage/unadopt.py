"""Leave placement for good: every tensor of an object gets ordinary storage again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

from placement.devices.base import Device
from placement.storage import range_layout
from placement.storage.object_storages import ObjectStorages
from placement.storage.range import Range
from placement.storage.scanning.scanner import borrowed, stepped
from placement.tensors.owned import Adapter, Owned
from placement.tensors.sparse import follow


def unadopt(device: Device, adapter: Adapter, storages: ObjectStorages, *, on_device: bool) -> None:
    """Give every tensor ordinary storage with its values, on the device or on the host. The ranges are empty afterwards, but still exist.

    Idempotent, so that an interrupted call can be repeated.

    Raises:
        torch.OutOfMemoryError: no memory for a storage. Storages that left before it stay outside.
    """
    storages.state_dict_tensors.leave()
    for r in storages.ranges:  # first, because a registration that broke off may have tensors to rebind to other storages
        r.move_in()
    target = device.torch_device if on_device else torch.device("cpu")
    aliases: dict[int, list[torch.Tensor]] = {}
    everything = list(adapter.owned())
    # On another device only the tensors that are named here follow. Beside the object's own these are what its views were made from, a
    # shard of an optimizer in the module's buffer, and the parameters of an optimizer that outlives the module.
    own = [each for owned in everything for each in (owned.tensor, owned.tensor._base) if each is not None]
    outliving = () if everything else stepped()  # asks every optimizer of the process: only where the module itself is gone
    for tensor in (*own, *borrowed(), *outliving):
        known = aliases.setdefault(tensor.untyped_storage()._cdata, [])
        if all(each is not tensor for each in known):
            known.append(tensor)
    for storage, r, offset in [*_placed(storages), *_shown_and_loaded_back(storages, everything)]:
        known = aliases.get(storage._cdata, [])
        range_layout.move_out(device, storage, known, target, _filler(device, r, offset, storage.nbytes(), on_device), r.homes)
    follow(everything)
    storages.align_wrappers()


_InRange = tuple[torch.UntypedStorage, Range, int]
"""A storage at the device addresses of a range, the range, and the storage's offset there."""


def _placed(storages: ObjectStorages) -> Iterator[_InRange]:
    """The adopted storages that are alive and at their places."""
    for r in storages.ranges:
        for entry in r.placed:
            storage = entry.storage()
            if storage is not None and storage.data_ptr() == r.layout.addresses.base + entry.offset:
                yield storage, r, entry.offset


def _shown_and_loaded_back(storages: ObjectStorages, owned: Iterable[Owned]) -> Iterator[_InRange]:
    """Storages of the object that lie in a range without having been adopted there: a state dict showed them, and was loaded back."""
    seen = {storage._cdata for storage, _, _ in _placed(storages)}
    for each in owned:
        storage = each.tensor.untyped_storage()
        place = None if storage._cdata in seen else storages.by_address.find(each.tensor)
        seen.add(storage._cdata)
        if place is not None and storage.data_ptr() == place[0].layout.addresses.base + place[1]:
            yield storage, *place


def _filler(device: Device, r: Range, offset: int, nbytes: int, on_device: bool) -> Callable[[torch.Tensor], None]:
    source = device.view(r.layout.addresses, offset, nbytes) if on_device else r.view(offset, nbytes, even_if_lost=True)

    def fill(target: torch.Tensor) -> None:
        target.copy_(source)

    return fill
