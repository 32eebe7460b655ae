"""Tensors of state dicts that we handed out: they follow the handle.

A state dict's tensors alias the live ones. Over a range they would read poison after the next offload, so the living ones are
pointed to the host copy when the bytes go there, and back to the device when they return: whoever holds a state dict reads
what the object holds, wherever it is.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from placement.memory.base import Device
from placement.memory.range import Range


class Handed:
    """The living tensors of the state dicts of one object."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._tensors: list[weakref.ref[torch.Tensor]] = []
        self._storages: dict[int, StorageWeakRef] = {}
        """The storage that shows a place, by address, while anybody holds it."""

    def over(self, tensor: torch.Tensor, address: int, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """A tensor of the same type, shape and strides over other bytes.

        Tensors that shared a storage share one again: `torch.save` writes tied weights and views of one buffer once.

        Args:
            address: where the storage begins that `make` gives as a tensor; storages at one address are of one size.
        """
        with torch.no_grad():
            known = self._storages.get(address)
            storage = None if known is None or known.expired() else torch.UntypedStorage._new_with_weak_ptr(known.cdata)
            if storage is None:
                storage = make().untyped_storage()
                self._storages[address] = StorageWeakRef(storage)
            empty = torch.empty(0, dtype=tensor.dtype, device=storage.device)
            return empty.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        """Remember a tensor that is about to be handed out; it must be nobody else's object."""
        self._tensors = [ref for ref in self._tensors if ref() is not None] if len(self._tensors) % 256 == 255 else self._tensors
        self._tensors.append(weakref.ref(tensor))
        return tensor

    def disown(self, live: Iterable[torch.Tensor]) -> None:
        """Forget tensors that are the object's own now: `load_state_dict` of an optimizer takes over the tensors that it is given."""
        if self._tensors:
            own = {id(tensor) for tensor in live}
            self._tensors = [ref for ref in self._tensors if (tensor := ref()) is not None and id(tensor) not in own]

    def __bool__(self) -> bool:
        return bool(self._tensors)

    def __iter__(self) -> Iterator[torch.Tensor]:
        for ref in self._tensors:
            tensor = ref()
            if tensor is not None:
                yield tensor

    # --- where they point

    def hand_out(self, tensor: torch.Tensor, ranges: Sequence[Range], *, from_host: bool) -> torch.Tensor:
        """A live tensor of the object as a state dict may show it.

        Args:
            from_host: its values are in the host copy now, and no longer on the device.
        """
        if tensor.untyped_storage().nbytes() == 0:
            return tensor
        host = self.over_host(tensor, ranges) if from_host else None
        if host is not None:
            self.note_shown(ranges, [host])
            return self.add(host)
        if isinstance(tensor, torch.nn.Parameter):
            return tensor  # asked for with keep_vars: the live parameter itself
        return self.add(tensor.detach())

    def over_host(self, tensor: torch.Tensor, ranges: Sequence[Range]) -> torch.Tensor | None:
        """The same tensor over the host copy; None when its storage is not in a range.

        Its storage has the size of the original, so that saving it writes no more than that.
        """
        place = _place(tensor, ranges)
        if place is None:
            return None
        slab, offset = place[0].slab, place[1]
        return self.over(tensor, slab.address + offset, lambda: slab.view(offset, tensor.untyped_storage().nbytes()))

    def _over_device(self, tensor: torch.Tensor, ranges: Sequence[Range]) -> torch.Tensor | None:
        """The same tensor over the range; None when its storage is not over the host copy of one."""
        place = _place(tensor, ranges)
        if place is None or tensor.untyped_storage().data_ptr() == place[0].adoption.addresses.base + place[1]:
            return None
        addresses, offset = place[0].adoption.addresses, place[1]
        return self.over(
            tensor, addresses.base + offset, lambda: self._device.view(addresses, offset, tensor.untyped_storage().nbytes())
        )

    def note_shown(self, ranges: Sequence[Range], tensors: Iterable[torch.Tensor] | None = None) -> None:
        """The host copies of these tensors (None: of all) can be written through from now on."""
        for tensor in self if tensors is None else tensors:
            place = _place(tensor, ranges)
            if place is not None:
                place[0].is_shown = True

    def point_to_host(self, ranges: Sequence[Range], except_for: Collection[int] = ()) -> None:
        """Point every living tensor to the host copy, but for those of storages that follow by themselves. Idempotent."""

        def find(tensor: torch.Tensor) -> torch.Tensor | None:
            return None if tensor.untyped_storage()._cdata in except_for else self.over_host(tensor, ranges)

        self._point_to(find)

    def point_to_device(self, ranges: Sequence[Range]) -> None:
        """Point every living tensor to the device. Idempotent."""
        self._point_to(lambda tensor: self._over_device(tensor, ranges))

    def _point_to(self, find: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        """Point every living tensor to what `find` gives for it; None leaves it where it is. Idempotent."""
        for tensor in self:
            there = find(tensor)
            if there is not None:
                with torch.no_grad():
                    tensor.data = there
        self._tensors = [ref for ref in self._tensors if ref() is not None]
        self._storages = {address: storage for address, storage in self._storages.items() if not storage.expired()}


def _place(tensor: torch.Tensor, ranges: Sequence[Range]) -> tuple[Range, int] | None:
    """The range that a tensor's storage lies in, by its device addresses or by its slab, and the storage's offset there."""
    address = tensor.untyped_storage().data_ptr()
    for r in ranges:
        for base in (r.adoption.addresses.base, r.slab.address):
            if 0 <= address - base < r.nbytes:
                return r, address - base
    return None
