"""Dtypes that may be given by name."""

from __future__ import annotations

import torch

_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def is_scaled(dtype: torch.dtype) -> bool:
    """Whether values mean nothing without scales: the dtypes of one byte and less, other than bool and the integers of one byte."""
    return (dtype.itemsize == 1 and dtype not in (torch.bool, torch.int8, torch.uint8)) or dtype is torch.bits16


def dtype_of(given: object) -> torch.dtype | None:
    """A dtype, or the one of this name: "bfloat16", "torch.bfloat16" or "bf16". None stays None.

    Raises:
        ValueError: it is neither a dtype nor the name of one.
    """
    if given is None or isinstance(given, torch.dtype):
        return given
    name = str(given).removeprefix("torch.")
    found = getattr(torch, _SHORT.get(name, name), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f'{given!r} is no dtype of torch; write torch.bfloat16 or "bfloat16"')  # noqa: TRY004  # the text is wrong
    return found
