"""CUDA streams that torch's pools do not make: asked for the first of its own, torch makes the
pools of all priorities, which take 70 MiB of device memory (H200, torch 2.11)."""

from __future__ import annotations

import functools
import importlib

import torch


@functools.cache
def own_stream(index: int, purpose: str) -> torch.cuda.Stream:
    """The stream of a device for one purpose, for all managers of the process. It stays until the
    process ends. `index`: the device's index in torch. Raises RuntimeError: the driver refused."""
    driver = importlib.import_module("cuda.bindings.driver")
    with torch.cuda.device(index):
        torch.cuda.current_stream().synchronize()  # the driver needs a context on this thread
        flag = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        error, handle = driver.cuStreamCreate(flag)
        if error != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"cuStreamCreate for {purpose!r}: {error.name}")
        return torch.cuda.ExternalStream(int(handle), device=index)
