"""How values look that were computed from poison: NaN in every type that has it, else a few
numbers."""

from __future__ import annotations

import torch

from placement.devices.base import POISON_WORD

_PARTS = [
    POISON_WORD[start : start + width]
    for width in (1, 2, 4, 8)
    for start in range(0, len(POISON_WORD), width)
]
_NUMBERS = sorted({int.from_bytes(part, "little", signed=True) for part in _PARTS})
"""The signed integers that poison reads as, in every width, and as which they come out of a
conversion (to a narrower type: -1)."""


def is_poison(tensor: torch.Tensor) -> bool:
    """Whether a tensor of a type that has no NaN, or one byte, has the numbers of poison and no
    others."""
    if (
        not tensor.numel()
        or (tensor.is_floating_point() and tensor.dtype.itemsize != 1)
        or tensor.is_complex()
    ):
        return False
    numbers = tensor.reshape(-1).contiguous().view(getattr(torch, f"int{8 * tensor.itemsize}"))
    found = torch.zeros_like(numbers, dtype=torch.bool)
    for number in _NUMBERS:
        if number >= torch.iinfo(numbers.dtype).min:
            found |= numbers == number
    return bool(found.all().item())


def has_nan(tensor: torch.Tensor, *, throughout: bool) -> bool:
    """Whether any element is NaN; with `throughout`, whether all are, but for one in eight, as in
    float8 poison (see `POISON_WORD`). None is in a type without NaN."""
    if (
        not tensor.numel()
        or not (tensor.is_floating_point() or tensor.is_complex())
        or tensor.dtype is torch.float4_e2m1fn_x2
    ):
        return False
    wide = tensor.float() if tensor.dtype.itemsize == 1 else tensor
    num_nan, count = int(wide.isnan().sum().item()), tensor.numel()
    return count - num_nan <= (count + 1) // 8 if throughout else num_nan > 0
