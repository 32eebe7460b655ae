"""How values look that were computed from poison: NaN in every type that has it."""

from __future__ import annotations

import torch


def has_nan(tensor: torch.Tensor) -> bool:
    """Whether any element is NaN. None is in a type without NaN."""
    if (
        not tensor.numel()
        or not (tensor.is_floating_point() or tensor.is_complex())
        or tensor.dtype is torch.float4_e2m1fn_x2
    ):
        return False
    wide = tensor.float() if tensor.dtype.itemsize == 1 else tensor
    return bool(wide.isnan().any().item())
