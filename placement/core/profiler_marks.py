"""Marks around moves for profilers: torch's own, or NVTX for Nsight Systems. They are off by default, because a mark costs
microseconds at each phase transition."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import get_args

import torch

from placement.core.settings import Annotate

Mark = Callable[[str], AbstractContextManager[object]]


def marker(annotate: Annotate) -> Mark:
    """Return a function that takes a text and gives a context manager, which puts a mark with that text around its block.

    Raises:
        ValueError: `annotate` is unknown, or it is "nvtx" and torch was built without NVTX.
    """
    if annotate == "off":
        return contextlib.nullcontext
    if annotate == "profiler":
        return torch.profiler.record_function
    if annotate != "nvtx":
        raise ValueError(f"annotate {annotate!r} is unknown; choose one of {', '.join(get_args(Annotate))}")
    try:
        torch.cuda.nvtx.mark("placement")
    except RuntimeError as error:
        raise ValueError("annotate 'nvtx' needs a CUDA build of torch; use 'profiler'") from error
    return torch.cuda.nvtx.range
