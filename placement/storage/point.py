"""Point tensors and storages to memory: to a place in a range, back to it, and to ordinary memory.

A storage that is given other memory takes everything along that uses it. Where torch cannot do that (another device, an old release), each
known tensor is pointed by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from placement.devices import adoption
from placement.devices.base import Device
from placement.tensors.plain import as_lazy_as

Form = tuple[torch.dtype, int, torch.Size, tuple[int, ...]]
"""Dtype, storage offset, size and strides of a tensor."""


def form_of(tensor: torch.Tensor) -> Form:
    return tensor.dtype, int(tensor.storage_offset()), tensor.size(), tensor.stride()


def over(storage: torch.UntypedStorage, form: Form) -> torch.Tensor:
    """A new tensor of this form over a storage."""
    dtype, offset, size, stride = form
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, size, stride)


def byte_view(storage: torch.UntypedStorage) -> torch.Tensor:
    """A uint8 tensor over a whole storage."""
    return over(storage, (torch.uint8, 0, torch.Size((storage.nbytes(),)), (1,)))


def point(tensor: torch.Tensor, home: torch.UntypedStorage, form: Form) -> None:
    """Point one tensor to a part of a storage by `.data =`. It stays an inference tensor if it is one."""
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():  # torch gives an inference tensor nothing but another one's data
        tensor.data = as_lazy_as(tensor, over(home, form))


def point_all(tensors: Iterable[torch.Tensor], home: torch.UntypedStorage) -> None:
    """Point tensors to a storage, each in its present form. Idempotent."""
    with torch._C.DisableTorchFunctionSubclass():
        for tensor in tensors:
            if tensor.untyped_storage().data_ptr() != home.data_ptr():
                point(tensor, home, form_of(tensor))


def exchange(storage: torch.UntypedStorage, home: torch.UntypedStorage) -> bool:
    """Give a storage, for everybody who uses it, the memory of another one of any size. False where torch cannot."""
    if storage.device != home.device or not adoption.can_swap():
        return False
    if storage.nbytes() != home.nbytes():  # torch swaps only storages of one size, or with an empty one
        storage._swap_data_ptr_(torch.UntypedStorage(0, device=home.device))  # type: ignore[attr-defined]
    storage._swap_data_ptr_(home)  # type: ignore[attr-defined]
    return True


def move_out(
    device: Device,
    storage: torch.UntypedStorage,
    aliases: Sequence[torch.Tensor],
    target: torch.device,
    fill: Callable[[torch.Tensor], None],
    homes: dict[int, torch.UntypedStorage] | None = None,
) -> None:
    """Give a storage that lies in a range, and its tensors, ordinary torch memory again.

    If the target is the range's own device, every user of the storage follows. Otherwise `aliases` are pointed to the new memory, and a
    tensor that is not among them stays in the range.

    Args:
        fill: writes the bytes into a uint8 tensor of the storage's size on `target`.
        homes: the new memory of each storage, by its old address, for calls that name other aliases of the same storage.

    Raises:
        torch.OutOfMemoryError: no memory on the target; nothing changed.
    """
    nbytes = storage.nbytes()
    if nbytes == 0:
        return
    follows = storage.device == target == device.torch_device
    if follows and device.adopter.way(storage) == "pool":
        device.adopter.reallocate(storage)
        fill(byte_view(storage))
        return
    homes = {} if homes is None else homes
    home = homes.get(storage.data_ptr())
    if home is None:
        home = torch.UntypedStorage(nbytes, device=target)
        fill(byte_view(home))
    if not (follows and exchange(storage, home)):
        homes[storage.data_ptr()] = home
        point_all(aliases, home)
