"""The end of an object's ranges: every tensor in them gets ordinary memory again, with its values."""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from functools import partial

import torch

from placement.devices.base import Device
from placement.storage import scan
from placement.storage.point import move_out
from placement.storage.range import Range
from placement.storage.scan import StorageScanner
from placement.tensors.plain import Owned, align_all, has_storage, is_leaf, is_plain_type, parts_of
from placement.tensors.sparse import follow, is_sparse, sparse_parts

_InRange = tuple[torch.UntypedStorage, Range, int]
"""A storage at the device addresses of a range, the range, and the storage's offset there."""


class Unadoption:
    """Gives the tensors of one object ordinary memory, on the device or on the host.

    Args:
        on_device: whether the values are on the device, and stay there.
    """

    def __init__(self, scanner: StorageScanner, device: Device, *, on_device: bool) -> None:
        self._scanner = scanner
        self._device = device
        self._on_device = on_device
        self._homes: dict[int, torch.UntypedStorage] = {}
        """The new memory of storages, by their old addresses."""

    def run(self) -> None:
        """Move everything out. The ranges stay, empty. Idempotent, so that a call that failed can be repeated.

        Raises:
            torch.OutOfMemoryError: no memory for a storage. Storages that left before it stay outside.
        """
        scanner = self._scanner
        scanner.state_dict_tensors.leave()
        for r in scanner.ranges:  # first, because a registration that broke off may have tensors to point to other storages
            r.move_in()
        everything = list(scanner.adapter.owned())
        # On another device only the tensors that are named here follow. Beside the object's own these are what its views were made from,
        # and a shard of an optimizer in the module's buffer.
        own = [each for owned in everything for each in (owned.tensor, owned.tensor._base) if each is not None]
        self._move_out([*self._placed(), *self._loaded_back(everything)], (*own, *scan.borrowed()))
        others: list[Owned] = []
        if left := [*self._placed(), *self._in_range(scanner.state_dict_tensors.shown())]:
            # Somebody else has them: an optimizer that outlives the module, a module that got a layer of this one, a variable. To find them
            # takes tens of milliseconds, so nobody is asked before.
            others = _users_in_the_process({storage._cdata for storage, _, _ in left})
            self._move_out(left, (*scan.stepped(), *scan.tensors_of_all_objects(), *(each.tensor for each in others)))
        scan.note_borrowed(owned.tensor for owned in everything)
        follow((*everything, *others))
        scanner.align_wrappers()
        align_all(others)

    def _move_out(self, placed: list[_InRange], tensors: Iterable[torch.Tensor]) -> None:
        """Give storages that lie in ranges, and those of these tensors that use them, ordinary memory.

        Drops the list's content, so that a storage that nobody else uses is gone afterwards.
        """
        device = self._device
        aliases: dict[int, dict[int, torch.Tensor]] = {}
        for tensor in tensors:
            aliases.setdefault(tensor.untyped_storage()._cdata, {})[id(tensor)] = tensor
        while placed:
            storage, r, offset = placed.pop()
            nbytes = storage.nbytes()
            bytes_now = device.view(r.layout.addresses, offset, nbytes) if self._on_device else r.view(offset, nbytes, even_if_lost=True)
            target = device.torch_device if self._on_device else torch.device("cpu")
            users = [*aliases.get(storage._cdata, {}).values()]
            move_out(device, storage, users, target, partial(_fill, bytes_now), self._homes)

    def _placed(self) -> Iterator[_InRange]:
        """The adopted storages that are alive and at their places."""
        for r in self._scanner.ranges:
            for entry in r.placed:
                storage = entry.storage()
                if storage is not None and storage.data_ptr() == r.layout.addresses.base + entry.offset:
                    yield storage, r, entry.offset

    def _loaded_back(self, owned: Iterable[Owned]) -> Iterator[_InRange]:
        """Storages of the object that lie in a range without having been adopted there: a state dict showed them, and was loaded back."""
        placed = {storage._cdata for storage, _, _ in self._placed()}
        yield from self._in_range({s._cdata: s for each in owned if (s := each.tensor.untyped_storage())._cdata not in placed}.values())

    def _in_range(self, storages: Iterable[torch.UntypedStorage]) -> Iterator[_InRange]:
        for storage in storages:
            place = self._scanner.by_address.at(storage.data_ptr())
            if place is not None and storage.data_ptr() == place[0].layout.addresses.base + place[1]:
                yield storage, *place


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
