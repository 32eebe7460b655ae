"""The end of adoption: every tensor gets ordinary memory again, and its storage leaves the range.

On the device every user of a storage follows. On the host only the tensors that are named follow:
the object's own, and those of other handles. Where a state dict has shown a place, all tensors of
the process are searched, too.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from placement.devices.base import Device
from placement.ownership.adapter import HANDED_BACK
from placement.storage.layout import move_out
from placement.storage.owners import RANGES
from placement.storage.range import Range
from placement.storage.scan import BORROWED, StorageScanner, registered_tensors
from placement.tensors.plain import (
    Owned,
    align_all,
    dense_parts,
    follow,
    has_storage,
    is_leaf,
    is_plain_type,
)

_LEAVING_TOGETHER_BYTES = 1 << 30


class _Placed(NamedTuple):
    """A storage at the addresses of a range, and its offset there."""

    storage: torch.UntypedStorage
    range: Range
    offset: int

    @property
    def address(self) -> int:
        return self.range.layout.addresses.base + self.offset


@dataclass
class HandingBack:
    """One attempt to give every tensor of an object ordinary memory, on the device or on the host.
    The ranges stay, empty. Where memory lacks, another attempt goes on.
    `have_left`: called with an address when all storages that lay there and above have left. The
    memory behind it can go then, before the rest needs as much."""

    device: Device
    scanner: StorageScanner
    on_device: bool
    have_left: Callable[[int], object]
    # the new memory of each storage: see `layout.move_out`
    _homes: dict[int, torch.UntypedStorage] = field(default_factory=dict)

    def run(self) -> None:
        adapter = self.scanner.adapter
        shown = self.scanner.state_dict_tensors
        # a tensor that was loaded back is the object's own, and goes with those that share its
        # memory
        if self.on_device:
            shown.disown(owned.tensor for owned in adapter.owned())
        shown.leave()
        # first, because a registration that broke off may have tensors to point to other storages
        for r in self.scanner.ranges.all:
            r.move_in()
        tensors_of_object = list(adapter.owned())
        # Beside the object's own tensors these are named: the bases of its views, and a shard of an
        # optimizer in the module's buffer.
        own = list[torch.Tensor]()
        for owned in tensors_of_object:
            own.append(owned.tensor)
            if owned.tensor._base is not None:
                own.append(owned.tensor._base)
        # Some lie in a range without having been adopted there: a state dict showed them, and was
        # loaded back. Then memory may go only when these have left, too.
        is_alone = not shown.shown()
        placed = self._in_range(owned.tensor.untyped_storage() for owned in tensors_of_object)
        self._move_out(placed, (*own, *BORROWED), reports=is_alone)
        users: list[Owned] = []
        staying = self._in_range(shown.shown())
        if staying:
            # They have users outside the object: an optimizer that outlives the module, a module
            # that got a layer of this one, a variable. The search takes tens of milliseconds, so it
            # comes last.
            users = _users_in_the_process({place.storage._cdata for place in staying})
            tensors = (*registered_tensors(), *(owned.tensor for owned in users))
            self._move_out(staying, tensors, reports=False)
        for owned in tensors_of_object:
            if RANGES.owner_of(owned.tensor.untyped_storage().data_ptr()) is not None:
                BORROWED.add(owned.tensor)
        if adapter.kind == "optimizer" and not self.on_device:
            HANDED_BACK.update(own)
        follow((*tensors_of_object, *users))
        self.scanner.align_wrappers()
        align_all(users)

    def _in_range(self, more: Iterable[torch.UntypedStorage]) -> list[_Placed]:
        """The storages that lie at addresses of a range, among the adopted ones and these."""
        ranges = self.scanner.ranges
        storages = {storage._cdata: storage for storage in more}
        for r in ranges.all:
            for entry in r.placed:
                adopted = entry.storage()
                if adopted is not None:
                    storages[adopted._cdata] = adopted
        placed = []
        for storage in storages.values():
            place = ranges.at(storage.data_ptr())
            if place is not None:
                in_range = _Placed(storage, *place)
                if storage.data_ptr() == in_range.address:  # else it lies in the slab
                    placed.append(in_range)
        return placed

    def _move_out(
        self, placed: list[_Placed], tensors: Iterable[torch.Tensor], *, reports: bool
    ) -> None:
        """Give these storages ordinary memory, the highest address first, and point those of these
        tensors to it that use them. Empties the list, which keeps the storages alive: after an
        error it has the rest.
        `reports`: whether `have_left` is called meanwhile."""
        aliases: dict[int, dict[int, torch.Tensor]] = {}
        for tensor in tensors:
            aliases.setdefault(tensor.untyped_storage()._cdata, {})[id(tensor)] = tensor
        target = self.device.torch_device if self.on_device else torch.device("cpu")
        placed.sort(key=lambda place: place.address)
        moved_bytes = 0
        while placed:
            place = placed.pop()
            storage, r, offset = place
            nbytes = storage.nbytes()
            content = r.on_device(offset, nbytes) if self.on_device else r.view(offset, nbytes)
            users = [*aliases.get(storage._cdata, {}).values()]
            move_out(self.device, storage, users, target, content, self._homes)
            moved_bytes += nbytes
            if reports and moved_bytes >= _LEAVING_TOGETHER_BYTES:
                self.have_left(place.address)
                moved_bytes = 0


def _users_in_the_process(storages: Collection[int]) -> list[Owned]:
    """The tensors that use these storages (`_cdata`), among all that Python's garbage collector
    knows. `gc.freeze()` hides some."""
    users: list[Owned] = []
    # any subclass would run its own code at each question
    with torch._C.DisableTorchFunctionSubclass():
        for tensor in _tensors_of_the_process():
            # a foreign wrapper that cannot name its parts must not keep this object's values
            with suppress(Exception):
                for path, part in dense_parts(tensor):
                    if not _can_have_another_storage(part):
                        continue
                    if part.untyped_storage()._cdata in storages:
                        wrapper = None if part is tensor else tensor
                        users.append(Owned(path, part, wrapper=wrapper))
                        if part._base is not None:
                            users.append(Owned(path, part._base, wrapper=wrapper))
    return users


def _can_have_another_storage(tensor: torch.Tensor) -> bool:
    """Not a tensor whose class has a dispatch of its own: its bytes are in no storage of its
    own."""
    cls = type(tensor)
    is_plain = is_plain_type(cls) or cls.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    return is_plain and has_storage(tensor)


def _tensors_of_the_process() -> Iterator[torch.Tensor]:
    """All tensors that the garbage collector knows, and the gradients of leaves, which may be no
    Python objects before they are asked for. Those inside torch.func have no storage: left out."""
    # Not isinstance, which asks some objects for their `__class__`, and lazy ones then run code of
    # theirs.
    objects = gc.get_objects()
    tensors: list[torch.Tensor] = [
        instance for instance in objects if issubclass(type(instance), torch.Tensor)
    ]
    del objects
    for tensor in tensors:
        if not torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            yield tensor
            if is_leaf(tensor) and tensor.grad is not None:
                yield tensor.grad
