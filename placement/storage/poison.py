"""Poison as a program reads it: NaN in every type that has it, else a few numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from placement.devices.base import POISON_WORD

SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NUMBERS = sorted(
    {
        int.from_bytes(POISON_WORD[start : start + width], "little", signed=True)
        for width in SIGNED
        for start in range(0, len(POISON_WORD), width)
    }
)
"""The signed integers that poison reads as, in every width, and as which they come out of a conversion (to a narrower type: -1)."""


def is_poison(tensor: torch.Tensor) -> bool:
    """Whether a tensor of a type that has no NaN, or one byte, has the numbers of poison and no others."""
    if not tensor.numel() or (tensor.is_floating_point() and tensor.dtype.itemsize != 1) or tensor.is_complex():
        return False
    numbers = tensor.reshape(-1).contiguous().view(torch.uint8).view(SIGNED[tensor.dtype.itemsize])
    return bool(are_poison(numbers).all().item())


def are_poison(numbers: torch.Tensor) -> torch.Tensor:
    """Whether each of these signed integers is one of those that poison reads as."""
    found = torch.zeros_like(numbers, dtype=torch.bool)
    for number in _NUMBERS:
        if number >= torch.iinfo(numbers.dtype).min:
            found |= numbers == number
    return found


def has_nan(tensor: torch.Tensor, *, throughout: bool) -> bool:
    """Whether any element of a tensor is NaN (`throughout`: whether all are). False for a type without NaN.

    With `throughout`, one element in eight may be a number. float8 poison, and values computed from it, read so: see `POISON_WORD`.
    """
    if not tensor.numel():
        return False
    nan = are_nan(tensor)
    if throughout:
        return tensor.numel() - int(nan.sum().item()) <= (tensor.numel() + 1) // 8
    return bool(nan.any().item())


def are_nan(tensor: torch.Tensor) -> torch.Tensor:
    """Whether each element is NaN; none is in a type without NaN."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.dtype is torch.float4_e2m1fn_x2:
        return torch.zeros_like(tensor, dtype=torch.bool)
    return (tensor.float() if tensor.dtype.itemsize == 1 else tensor).isnan()


def listed(names: Sequence[str]) -> str:
    """The first names of a list, and how many more there are."""
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
