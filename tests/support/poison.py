"""What lies behind offloaded memory, for tests that look at the bytes there."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest
import torch

from placement.devices.base import poison_bytes
from placement.devices.simulated import device as simulated_device

Made = TypeVar("Made")


def of_an_old_kernel(make: Callable[[], Made]) -> Made:
    """Makes a device on a kernel that does not say which pages were written: all ranges share
    poison, and it is compared by its bytes."""
    with pytest.MonkeyPatch.context() as kernel:
        kernel.setattr(simulated_device, "_tells_copies", lambda page_map, file: False)
        return make()


def poison(offset: int, nbytes: int) -> torch.Tensor:
    """The poison in `[offset, offset + nbytes)` of a range."""
    return (
        torch.frombuffer(bytearray(poison_bytes(offset, nbytes)), dtype=torch.uint8)
        if nbytes
        else torch.empty(0, dtype=torch.uint8)
    )


def reads_poison(view: torch.Tensor, offset: int = 0) -> bool:
    return torch.equal(view.cpu(), poison(offset, view.numel()))


def poison_like(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor that reads what an offloaded one must. Ranges begin at whole words, so the
    address tells the place in the word."""
    storage = tensor.untyped_storage()
    behind = poison(storage.data_ptr(), storage.nbytes()).untyped_storage()
    return torch.empty(0, dtype=tensor.dtype).set_(
        behind, tensor.storage_offset(), tensor.size(), tensor.stride()
    )
