"""Find the device for a device name."""

from __future__ import annotations

import re

import torch

from placement.core.errors import PlacementError
from placement.devices.base import Device
from placement.devices.cuda.driver import refuse_rocm

_CUDA = re.compile(r"cuda(?::(\d+))?")


def select_device(name: str, *, is_tight: bool = False) -> Device:
    """Make the device called "auto", "cuda" or "cuda:N".

    Args:
        is_tight: whether this process has only a share of the device's memory, so that a swap needs smaller chunks.

    Raises:
        ValueError: the name is unknown.
        PlacementError: this process has no accelerator, an unsupported one, or one without virtual memory management.
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
