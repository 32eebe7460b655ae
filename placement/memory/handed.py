"""Tensors of state dicts that we handed out: they follow the handle.

A state dict's tensors alias the live ones. Over a range they would read poison after the next offload, so the living ones are
pointed to the host copy when the bytes go there, and back to the device when they return: whoever holds a state dict reads
what the object holds, wherever it is.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator

import torch
from torch.multiprocessing.reductions import StorageWeakRef

Finder = Callable[[torch.Tensor], torch.Tensor | None]


class Handed:
    """The living tensors of the state dicts of one object."""

    def __init__(self) -> None:
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

    def point_to(self, find: Finder) -> None:
        """Point every living tensor to what `find` gives for it; None leaves it where it is. Idempotent."""
        for tensor in self:
            there = find(tensor)
            if there is not None:
                with torch.no_grad():
                    tensor.data = there
        self._tensors = [ref for ref in self._tensors if ref() is not None]
        self._storages = {address: storage for address, storage in self._storages.items() if not storage.expired()}
