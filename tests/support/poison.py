"""What lies behind offloaded memory, for tests that look at the bytes there."""

from __future__ import annotations

import torch

from placement.devices.base import poison_bytes


def poison(offset: int, nbytes: int) -> torch.Tensor:
    """The poison in `[offset, offset + nbytes)` of a range."""
    return torch.frombuffer(bytearray(poison_bytes(offset, nbytes)), dtype=torch.uint8) if nbytes else torch.empty(0, dtype=torch.uint8)


def reads_poison(view: torch.Tensor, offset: int = 0) -> bool:
    return torch.equal(view.cpu(), poison(offset, view.numel()))


def poison_like(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor that reads what an offloaded one must. Ranges begin at whole words, so the address tells the place in the word."""
    storage = tensor.untyped_storage()
    behind = poison(storage.data_ptr(), storage.nbytes()).untyped_storage()
    return torch.empty(0, dtype=tensor.dtype).set_(behind, tensor.storage_offset(), tensor.size(), tensor.stride())
