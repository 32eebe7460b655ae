"""From the name of a device to the device."""

from __future__ import annotations

import re

import torch

from placement.core.errors import PlacementError
from placement.devices.base import Device
from placement.devices.cuda.driver import refuse_rocm

_CUDA = re.compile(r"cuda(?::(\d+))?")


def select_device(name: str, *, is_tight: bool = False) -> Device:
    """The device called "auto", "cuda" or "cuda:N".

    Args:
        is_tight: its memory was portioned out, so that a swap may have little room beside the larger side.

    Raises:
        ValueError: no such name.
        PlacementError: this process has no accelerator, one that is not supported, or lacks what its virtual memory needs.
    """
    match = _CUDA.fullmatch(name)
    if name != "auto" and match is None:
        raise ValueError(f'device {name!r} is not known; write "auto", "cuda:0", or pass a Device: placement.testing.SimulatedDevice')
    refuse_rocm(name)
    if not torch.cuda.is_available():
        raise PlacementError(
            f"device {name!r}: torch sees no CUDA device in this process. On a machine without one, pass "
            "device=placement.testing.SimulatedDevice(capacity_bytes=...), which behaves the same in host memory."
        )
    from placement.devices.cuda.device import CHUNK_BYTES, TIGHT_CHUNK_BYTES, CudaDevice

    index = match.group(1) if match is not None else None
    chunk_bytes = TIGHT_CHUNK_BYTES if is_tight else CHUNK_BYTES
    return CudaDevice(torch.cuda.current_device() if index is None else int(index), chunk_bytes=chunk_bytes)
