"""From the name of a device to the device."""

from __future__ import annotations

import re

import torch

from placement.errors import PlacementError
from placement.memory.base import Device

_CUDA = re.compile(r"cuda(?::(\d+))?")


def select_device(name: str) -> Device:
    """The device called "auto", "cuda" or "cuda:N".

    Raises:
        ValueError: no such name.
        PlacementError: this process has no accelerator, or lacks what its virtual memory needs.
    """
    match = _CUDA.fullmatch(name)
    if name != "auto" and match is None:
        raise ValueError(f'device {name!r} is not known; write "auto", "cuda:0", or pass a Device: placement.testing.SimulatedDevice')
    if not torch.cuda.is_available():
        raise PlacementError(
            f"device {name!r}: torch sees no CUDA device in this process. On a machine without one, pass "
            "device=placement.testing.SimulatedDevice(capacity_bytes=...), which behaves the same in host memory."
        )
    from placement.memory.cuda import CudaDevice

    index = match.group(1) if match is not None else None
    return CudaDevice(torch.cuda.current_device() if index is None else int(index))
