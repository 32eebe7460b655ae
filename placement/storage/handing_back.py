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
    `have_left`: called with an address when everything that lay there and above has left, so that
    the memory behind it can go before the rest needs as much."""

    device: Device
    scanner: StorageScanner
    on_device: bool
    have_left: Callable[[int], object]
    # the new memory of each storage: see `layout.move_out`
    _homes: dict[int, torch.UntypedStorage] = field(default_factory=dict)

    def run(self) -> None:
        adapter, shown = self.scanner.adapter, self.scanner.state_dict_tensors
        # what was loaded back is the object's own, and goes with what shares its memory
        if self.on_device:
            shown.disown(owned.tensor for owned in adapter.owned())
        shown.leave()
        # first, because a registration that broke off may have tensors to point to other storages
        for r in self.scanner.ranges.all:
            r.move_in()
        everything = list(adapter.owned())
        # Beside the object's own tensors these are named: what its views were made from, and a
        # shard of an optimizer in the module's buffer.
        own = [
            tensor
            for owned in everything
            for tensor in (owned.tensor, owned.tensor._base)
            if tensor is not None
        ]
        # Some lie in a range without having been adopted there: a state dict showed them, and was
        # loaded back. Then memory may go only when these have left, too.
        is_alone = not shown.shown()
        placed = self._in_range(owned.tensor.untyped_storage() for owned in everything)
        self._move_out(placed, (*own, *BORROWED), tells=is_alone)
        others: list[Owned] = []
        if left := self._in_range(shown.shown()):
            # Others have them: an optimizer that outlives the module, a module that got a layer of
            # this one, a variable. The search takes tens of milliseconds, so it comes last.
            others = _users_in_the_process({place.storage._cdata for place in left})
            users = (*registered_tensors(), *(owned.tensor for owned in others))
            self._move_out(left, users, tells=False)
        BORROWED.update(
            owned.tensor
            for owned in everything
            if RANGES.owner_of(owned.tensor.untyped_storage().data_ptr()) is not None
        )
        if adapter.kind == "optimizer" and not self.on_device:
            HANDED_BACK.update(own)
        follow((*everything, *others))
        self.scanner.align_wrappers()
        align_all(others)

    def _in_range(self, more: Iterable[torch.UntypedStorage]) -> list[_Placed]:
        """The storages that lie at addresses of a range, among the adopted ones and these."""
        ranges = self.scanner.ranges
        adopted = [
            storage
            for r in ranges.all
            for entry in r.placed
            if (storage := entry.storage()) is not None
        ]
        placed = []
        for storage in {storage._cdata: storage for storage in (*adopted, *more)}.values():
            if (place := ranges.at(storage.data_ptr())) is not None:
                found = _Placed(storage, *place)
                if storage.data_ptr() == found.address:  # else it lies in the slab
                    placed.append(found)
        return placed

    def _move_out(
        self, placed: list[_Placed], tensors: Iterable[torch.Tensor], *, tells: bool
    ) -> None:
        """Give these storages, and those of these tensors that use them, ordinary memory. Empties
        the list, which keeps them alive. `tells`: whether `have_left` is called meanwhile."""
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
            bytes_now = r.on_device(offset, nbytes) if self.on_device else r.view(offset, nbytes)
            users = [*aliases.get(storage._cdata, {}).values()]
            move_out(self.device, storage, users, target, bytes_now, self._homes)
            moved_bytes += nbytes
            if tells and moved_bytes >= _LEAVING_TOGETHER_BYTES:
                self.have_left(place.address)
                moved_bytes = 0


def _users_in_the_process(storages: Collection[int]) -> list[Owned]:
    """The tensors that use these storages (`_cdata`), among all that Python's garbage collector
    knows. `gc.freeze()` hides some."""
    found: list[Owned] = []
    # the subclasses that anybody made would run code of theirs at each question
    with torch._C.DisableTorchFunctionSubclass():
        for tensor in _tensors_of_the_process():
            # somebody's wrapper that cannot name its parts must not keep this object's values
            with suppress(Exception):
                for path, part in dense_parts(tensor):
                    wrapper, cls = None if part is tensor else tensor, type(part)
                    # A class with a dispatch of its own has not its bytes in a storage of its own,
                    # to be given another.
                    is_plain = (
                        is_plain_type(cls)
                        or cls.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
                    )
                    if is_plain and has_storage(part) and part.untyped_storage()._cdata in storages:
                        found += [
                            Owned(path, each, wrapper=wrapper)
                            for each in (part, part._base)
                            if each is not None
                        ]
    return found


def _tensors_of_the_process() -> Iterator[torch.Tensor]:
    # Not isinstance, which asks some objects for their `__class__`, and lazy ones then run code of
    # theirs.
    known: list[torch.Tensor] = [
        each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)
    ]
    for each in known:
        if not torch._C._functorch.is_functorch_wrapped_tensor(each):
            yield each
            if is_leaf(each) and (gradient := each.grad) is not None:
                yield gradient
