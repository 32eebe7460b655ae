"""Leave placement for good: every tensor of an object gets ordinary storage again."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress

import torch

from placement.devices.base import Device
from placement.ownership.adapter import Adapter
from placement.storage import range_layout
from placement.storage.object_storages import ObjectStorages
from placement.storage.range import Range
from placement.storage.scanning.scanner import borrowed, note_borrowed, stepped, tensors_of_all_objects
from placement.tensors.plain import Owned, align_all, has_storage, is_leaf, is_plain_type, parts_of
from placement.tensors.sparse import follow, is_sparse, sparse_parts


def unadopt(device: Device, adapter: Adapter, storages: ObjectStorages, *, on_device: bool) -> None:
    """Give every tensor ordinary storage with its values, on the device or on the host. The ranges are empty afterwards, but still exist.

    Idempotent, so that an interrupted call can be repeated.

    Raises:
        torch.OutOfMemoryError: no memory for a storage. Storages that left before it stay outside.
    """
    storages.state_dict_tensors.leave()
    for r in storages.ranges:  # first, because a registration that broke off may have tensors to rebind to other storages
        r.move_in()
    everything = list(adapter.owned())
    # On another device only the tensors that are named here follow. Beside the object's own these are what its views were made from, and a
    # shard of an optimizer in the module's buffer.
    own = [each for owned in everything for each in (owned.tensor, owned.tensor._base) if each is not None]
    target = device.torch_device if on_device else torch.device("cpu")
    _move_out(device, [*_placed(storages), *_shown_and_loaded_back(storages, everything)], (*own, *borrowed()), target, on_device)
    others: list[Owned] = []
    if left := [*_placed(storages), *_shown(storages)]:
        # Somebody else has them: an optimizer that outlives the module, a module that got a layer of this one, a variable. To find them
        # takes tens of milliseconds, so nobody is asked before.
        others = _users_in_the_process({storage._cdata for storage, _, _ in left})
        _move_out(device, left, (*stepped(), *tensors_of_all_objects(), *(each.tensor for each in others)), target, on_device)
    note_borrowed(owned.tensor for owned in everything)
    follow((*everything, *others))
    storages.align_wrappers()
    align_all(others)


_InRange = tuple[torch.UntypedStorage, Range, int]
"""A storage at the device addresses of a range, the range, and the storage's offset there."""


def _move_out(device: Device, placed: list[_InRange], tensors: Iterable[torch.Tensor], target: torch.device, on_device: bool) -> None:
    """Give storages that lie in ranges, and those of these tensors that use them, ordinary memory.

    Drops the list's content, so that a storage that nobody else uses is gone afterwards.
    """
    aliases: dict[int, list[torch.Tensor]] = {}
    for tensor in tensors:
        known = aliases.setdefault(tensor.untyped_storage()._cdata, [])
        if all(each is not tensor for each in known):
            known.append(tensor)
    while placed:
        storage, r, offset = placed.pop()
        filler = _filler(device, r, offset, storage.nbytes(), on_device)
        range_layout.move_out(device, storage, aliases.get(storage._cdata, ()), target, filler, r.homes)


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


def _shown(storages: ObjectStorages) -> Iterator[_InRange]:
    """Storages that state dicts have shown, of which somebody has a view."""
    for storage in storages.state_dict_tensors.shown():
        place = storages.by_address.at(storage.data_ptr())
        if place is not None and storage.data_ptr() == place[0].layout.addresses.base + place[1]:
            yield storage, *place


def _filler(device: Device, r: Range, offset: int, nbytes: int, on_device: bool) -> Callable[[torch.Tensor], None]:
    source = device.view(r.layout.addresses, offset, nbytes) if on_device else r.view(offset, nbytes, even_if_lost=True)

    def fill(target: torch.Tensor) -> None:
        target.copy_(source)

    return fill
