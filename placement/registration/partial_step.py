"""A step of an optimizer that is made for some of its parameters, or for a slice of one.

`PartialStep` calls the innermost step function with an object that has other parameter groups and
the optimizer's state, or for a slice that slice of the state. So the groups of the optimizer itself
are always the user's.

The step functions of torch.optim compute an element from the same element of the parameter, its
gradient and its state, and from counters of the parameter. So a parameter whose state is larger
than a bucket can be stepped slice by slice, and comes out with the same bits. Muon is the
exception, because it multiplies whole matrices.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import _default_to_fused_or_foreach

from placement.registration.streamable import multiplies_matrices
from placement.tensors.plain import PLAIN_TYPES, is_a


class ParameterSlice(NamedTuple):
    """Elements `start` up to `stop` (not included) of a parameter's part on this rank, in memory's
    order."""

    parameter: torch.Tensor
    start: int
    stop: int

    def of(self, tensor: Any) -> torch.Tensor:
        """The slice's elements of the parameter, of its gradient, or of a tensor of its state. A
        view of one dimension."""
        flat = _elements(tensor, self.parameter)
        assert flat is not None
        return flat[self.start : self.stop]

    @property
    def is_last(self) -> bool:
        flat = _elements(self.parameter, self.parameter)
        return flat is None or self.stop == flat.numel()


def sliceable_state(optimizer: Any, parameter: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of a parameter's state that have an element for each of its own, flat, on this
    rank; empty if it cannot be sliced."""
    entry = optimizer.state.get(parameter)
    flat = _elements(parameter, parameter)
    if not entry or flat is None or multiplies_matrices(optimizer):
        return []
    gradient = parameter.grad
    if gradient is not None and (
        gradient.dtype != parameter.dtype or _elements(gradient, parameter) is None
    ):
        return []
    state = []
    for value in entry.values():
        if value is None or is_counter(value):
            continue
        elements = _elements(value, parameter) if isinstance(value, torch.Tensor) else None
        if elements is None or elements.numel() != flat.numel():
            return []
        state.append(elements)
    return state


def is_counter(value: object) -> bool:
    """Whether a value of a parameter's state is a number for the whole parameter, which every step
    updates once."""
    return isinstance(value, torch.Tensor) and value.dim() == 0


def _elements(tensor: Any, parameter: Any) -> torch.Tensor | None:
    """The elements of a tensor on this rank, in one dimension; None if they are not the
    parameter's, one by one and in order."""
    if tensor.shape != parameter.shape:
        return None
    if is_a(parameter, "torch.distributed.tensor", "DTensor"):
        if not is_a(tensor, "torch.distributed.tensor", "DTensor"):
            return None
        if tensor.device_mesh != parameter.device_mesh:
            return None
        if tensor.placements != parameter.placements:
            return None
        if any(placement.is_partial() for placement in tensor.placements):
            return None
        tensor = tensor._local_tensor  # to_local() would record it for autograd
    if type(tensor) not in PLAIN_TYPES or not tensor.is_contiguous():
        return None
    flat: torch.Tensor = tensor.detach().view(-1)
    return flat


class PartialStep:
    """One step of an optimizer, made for a few parameters at a time, or for slices of one. It runs
    in the implementation (for-loop, foreach, fused) that torch would choose for all parameters of a
    group together, because another one may round differently. `parameters` have a gradient."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        # without the wrappers of torch's constructor (hooks, gradient mode)
        self._step = inspect.unwrap(type(optimizer).step)
        self._chosen = [_implementation(group) for group in optimizer.param_groups]
        self._group_of: dict[int, int] = {}  # the index of a parameter's group, by its identity
        self.parameters: list[torch.Tensor] = []
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._group_of[id(parameter)] = index
                    self.parameters.append(parameter)

    def run(self, parts: Sequence[torch.Tensor | ParameterSlice]) -> None:
        """Step these parameters, and slices of parameters."""
        by_group: dict[int, list[torch.Tensor]] = {}
        for part in parts:
            if isinstance(part, ParameterSlice):
                self._step_slice(part)
            else:
                by_group.setdefault(self._group_of[id(part)], []).append(part)
        if by_group:
            self._call(by_group, self._optimizer.state)

    def _step_slice(self, part: ParameterSlice) -> None:
        """Step a slice with the same slice of the state. The counters themselves count once, with
        the last slice."""
        stepped = part.of(part.parameter)
        stepped.grad = part.of(part.parameter.grad)
        state: dict[str, Any] = {}
        for key, value in self._optimizer.state[part.parameter].items():
            if is_counter(value):
                state[key] = value if part.is_last else value.clone()
            else:
                state[key] = None if value is None else part.of(value)
        group = self._group_of[id(part.parameter)]
        self._call({group: [stepped]}, {stepped: state})

    def _call(
        self,
        parameters: Mapping[int, list[torch.Tensor]],
        state: Mapping[torch.Tensor, Any],
    ) -> None:
        """Call the step function with these parameters alone, by the index of their group."""
        groups = []
        for index, params in parameters.items():
            group = self._optimizer.param_groups[index]
            groups.append({**group, **self._chosen[index], "params": params})
        part = object.__new__(type(self._optimizer))
        vars(part).update(vars(self._optimizer), param_groups=groups, state=state)
        self._step(part)


def _implementation(group: dict[str, Any]) -> dict[str, bool]:
    """The option that a part of a group needs so that torch chooses the same implementation as for
    the whole group."""
    if "foreach" not in group or group["foreach"] is not None or group.get("fused"):
        return {}
    stepped = [parameter for parameter in group["params"] if parameter.grad is not None]
    _, foreach = _default_to_fused_or_foreach(stepped, differentiable=False, use_fused=False)
    return {} if foreach else {"foreach": False}
