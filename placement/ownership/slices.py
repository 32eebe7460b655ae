"""Slices of a parameter: neighbouring elements that a step can take without the others.

The step functions of torch.optim compute each element from the same element of the parameter, of its gradient and of its state, and from
counters of the whole parameter. So a parameter whose state is larger than a bucket can be stepped slice by slice, and comes out with the
same bits. Muon is the exception, because it multiplies whole matrices (see `independent.is_elementwise`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from placement.core.loaded_classes import is_a
from placement.tensors.plain import PLAIN_TYPES


class ParameterSlice(NamedTuple):
    """Elements `start` up to `stop` (not included) of a parameter's part on this rank, in the order in which they lie in memory."""

    parameter: torch.Tensor
    start: int
    stop: int

    def of(self, tensor: Any) -> torch.Tensor:
        """The same elements of the parameter, of its gradient, or of a tensor of its state. A view of one dimension."""
        flat = _elements(tensor, self.parameter)
        assert flat is not None
        return flat[self.start : self.stop]

    @property
    def is_last(self) -> bool:
        flat = _elements(self.parameter, self.parameter)
        return flat is None or self.stop == flat.numel()


def sliceable_state(optimizer: Any, parameter: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of a parameter's state that have an element for each of its own, flat, on this rank; empty if it cannot be sliced."""
    entry = optimizer.state.get(parameter)
    flat, gradient = _elements(parameter, parameter), parameter.grad
    if not entry or flat is None:
        return []
    if gradient is not None and (gradient.dtype != parameter.dtype or _elements(gradient, parameter) is None):
        return []
    found = []
    for value in entry.values():
        if value is None or is_counter(value):
            continue
        state = _elements(value, parameter) if isinstance(value, torch.Tensor) else None
        if state is None or state.numel() != flat.numel():
            return []
        found.append(state)
    return found


def is_counter(value: object) -> bool:
    """Whether a value of a parameter's state is a number for the whole parameter, which every step updates once."""
    return isinstance(value, torch.Tensor) and value.dim() == 0


def _elements(tensor: Any, parameter: Any) -> torch.Tensor | None:
    """The elements of a tensor on this rank, in one dimension; None if they are not the parameter's, one by one and in order."""
    if tensor.shape != parameter.shape:
        return None
    if is_a(parameter, "torch.distributed.tensor", "DTensor"):
        if not is_a(tensor, "torch.distributed.tensor", "DTensor") or tensor.device_mesh != parameter.device_mesh:
            return None
        if tensor.placements != parameter.placements or any(each.is_partial() for each in tensor.placements):
            return None
        tensor = tensor._local_tensor  # to_local() would record it for autograd
    if type(tensor) not in PLAIN_TYPES or not tensor.is_contiguous():
        return None
    flat: torch.Tensor = tensor.detach().view(-1)
    return flat
