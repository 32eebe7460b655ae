"""Marks around moves for profilers: torch's, or NVTX for Nsight Systems. Off by default: a mark costs microseconds at each phase
transition."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Literal, get_args

import torch

Annotate = Literal["off", "profiler", "nvtx"]
"""`profiler`: torch.profiler.record_function; `nvtx`: an NVTX range on the calling thread."""

Mark = Callable[[str], AbstractContextManager[object]]


def marker(annotate: Annotate) -> Mark:
    """What puts a mark of the given text around a `with` block.

    Raises:
        ValueError: another word, or NVTX in a torch that was built without it.
    """
    if annotate == "off":
        return contextlib.nullcontext
    if annotate == "profiler":
        return torch.profiler.record_function
    if annotate != "nvtx":
        raise ValueError(f"annotate {annotate!r} is none of {', '.join(get_args(Annotate))}")
    try:
        torch.cuda.nvtx.mark("placement")
    except RuntimeError as error:
        raise ValueError("annotate 'nvtx' needs a CUDA build of torch; use 'profiler'") from error
    return torch.cuda.nvtx.range
