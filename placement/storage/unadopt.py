"""Leave placement for good: every tensor of an object gets ordinary storage again."""

from __future__ import annotations

from collections.abc import Callable

import torch

from placement.devices.base import Device
from placement.storage import range_layout
from placement.storage.object_storages import ObjectStorages
from placement.storage.range import Range
from placement.storage.scanner import borrowed
from placement.tensors.owned import Adapter
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
    for owned in everything:
        aliases.setdefault(owned.tensor.untyped_storage()._cdata, []).append(owned.tensor)
    for guest in borrowed():  # an optimizer's shard in a module's buffer goes where the buffer goes
        if guest.untyped_storage()._cdata in aliases:
            aliases[guest.untyped_storage()._cdata].append(guest)
    for r in storages.ranges:
        for entry in r.placed:
            storage = entry.storage()
            if storage is None or storage.data_ptr() != r.layout.addresses.base + entry.offset:
                continue
            known = aliases.get(storage._cdata, [])
            range_layout.move_out(device, storage, known, target, _filler(device, r, entry.offset, storage.nbytes(), on_device), r.homes)
    follow(everything)
    storages.align_wrappers()


def _filler(device: Device, r: Range, offset: int, nbytes: int, on_device: bool) -> Callable[[torch.Tensor], None]:
    source = device.view(r.layout.addresses, offset, nbytes) if on_device else r.slab.view(offset, nbytes)

    def fill(target: torch.Tensor) -> None:
        target.copy_(source)

    return fill
