"""The end of adoption: every tensor of an object gets ordinary memory again, on the device or on the host."""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress

import torch

from placement.devices.base import Device
from placement.storage.layout import move_out
from placement.storage.range import RANGES, Range
from placement.storage.scan import BORROWED, StorageScanner, tensors_of_all_objects
from placement.storage.writes import dense_parts
from placement.tensors.plain import Owned, align_all, follow, has_storage, is_leaf, is_plain_type

_InRange = tuple[torch.UntypedStorage, Range, int]  # a storage at the addresses of a range, the range, and its offset there


class Unadoption:
    """Gives the tensors of one object ordinary memory, on the device or on the host."""

    def __init__(self, scanner: StorageScanner, device: Device, *, on_device: bool) -> None:
        self._scanner = scanner
        self._device = device
        self._on_device = on_device
        self._target = device.torch_device if on_device else torch.device("cpu")
        self._homes: dict[int, torch.UntypedStorage] = {}  # the new memory of storages, by their old addresses

    def run(self) -> None:
        """Move everything out. The ranges stay, empty. Idempotent: where memory lacks, it can be repeated."""
        scanner = self._scanner
        scanner.state_dict_tensors.leave()
        for r in scanner.ranges.all:  # first, because a registration that broke off may have tensors to point to other storages
            r.move_in()
        everything = list(scanner.adapter.owned())
        # On another device only the tensors that are named here follow. Beside the object's own these are what its views were made from,
        # and a shard of an optimizer in the module's buffer.
        own = [each for owned in everything for each in (owned.tensor, owned.tensor._base) if each is not None]
        # Some lie in a range without having been adopted there: a state dict showed them, and was loaded back.
        self._move_out(self._in_range(each.tensor.untyped_storage() for each in everything), (*own, *BORROWED))
        others: list[Owned] = []
        if left := self._in_range(scanner.state_dict_tensors.shown()):
            # Somebody else has them: an optimizer that outlives the module, a module that got a layer of this one, a variable. To find them
            # takes tens of milliseconds, so nobody is asked before.
            others = _users_in_the_process({storage._cdata for storage, _, _ in left})
            self._move_out(left, (*tensors_of_all_objects(), *(each.tensor for each in others)))
        BORROWED.update(each.tensor for each in everything if RANGES.owner_of(each.tensor.untyped_storage().data_ptr()) is not None)
        follow((*everything, *others))
        scanner.align_wrappers()
        align_all(others)

    def _move_out(self, placed: list[_InRange], tensors: Iterable[torch.Tensor]) -> None:
        """Give these storages, and those of these tensors that use them, ordinary memory. Empties the list, which keeps them alive."""
        aliases: dict[int, dict[int, torch.Tensor]] = {}
        for tensor in tensors:
            aliases.setdefault(tensor.untyped_storage()._cdata, {})[id(tensor)] = tensor
        while placed:
            storage, r, offset = placed.pop()
            nbytes = storage.nbytes()
            bytes_now = r.on_device(offset, nbytes) if self._on_device else r.view(offset, nbytes, even_if_lost=True)
            users = [*aliases.get(storage._cdata, {}).values()]
            move_out(self._device, storage, users, self._target, bytes_now, self._homes)

    def _in_range(self, more: Iterable[torch.UntypedStorage]) -> list[_InRange]:
        """The storages that lie at addresses of a range, among the adopted ones and these."""
        adopted = [storage for r in self._scanner.ranges.all for entry in r.placed if (storage := entry.storage()) is not None]
        storages = {storage._cdata: storage for storage in (*adopted, *more)}.values()
        places = [(storage, *place) for storage in storages if (place := self._scanner.ranges.at(storage.data_ptr())) is not None]
        return [(s, r, offset) for s, r, offset in places if s.data_ptr() == r.layout.addresses.base + offset]


def _users_in_the_process(storages: Collection[int]) -> list[Owned]:
    """The tensors that use these storages (`_cdata`), among all that Python's garbage collector knows. `gc.freeze()` hides some."""
    found: list[Owned] = []
    with torch._C.DisableTorchFunctionSubclass():  # the subclasses that anybody made would run code of theirs at each question
        for tensor in _tensors_of_the_process():
            with suppress(Exception):  # somebody's wrapper that cannot name its parts must not keep this object's values
                for path, part in dense_parts(tensor):
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
