"""Optimizers whose step treats each parameter by itself, so that it can be made for some of the parameters and then for the others.

These are classes of torch.optim whose update of a parameter depends on nothing but its gradient, its own state and the options of its
group. `PartialStep` makes such a step for a part of the parameters. It calls the innermost step function with an object that has other
parameter groups, and shares the optimizer's state, or for a slice has that slice of it. So nobody ever sees the optimizer itself with
groups that are not the user's.

The step functions of torch.optim compute each element from the same element of the parameter, of its gradient and of its state, and from
counters of the whole parameter. So a parameter whose state is larger than a bucket can be stepped slice by slice, and comes out with the
same bits. Muon is the exception, because it multiplies whole matrices.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import _default_to_fused_or_foreach

from placement.core import is_a
from placement.frameworks.known import stepped_for
from placement.ownership.optimizer_state import find
from placement.tensors.plain import PLAIN_TYPES


class ParameterSlice(NamedTuple):
    """Elements `start` up to `stop` (not included) of a parameter's part on this rank, in memory's order."""

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
    if not entry or flat is None or _own(type(optimizer)) in _OF_MATRICES:
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


_NAMES = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
_CLASSES: tuple[type, ...] = tuple(getattr(torch.optim, name) for name in _NAMES if hasattr(torch.optim, name))
KNOWN = ", ".join(cls.__name__ for cls in _CLASSES)


def step_function(optimizer: Any) -> Callable[..., Any]:
    """The innermost step function, without the wrappers that torch's constructor puts around it (hooks, gradient mode)."""
    step: Callable[..., Any] = inspect.unwrap(type(optimizer).step)
    return step


def _own(cls: Any) -> tuple[Any, Any]:
    """The functions that make a class's step, without wrappers: torch's constructor and torch.compile put them around."""
    return inspect.unwrap(cls.step), inspect.unwrap(cls._init_group)


_STEPS = {_own(cls) for cls in _CLASSES}
_OF_MATRICES = {_own(cls) for cls in _CLASSES if cls.__name__ == "Muon"}


def allow(cls: type) -> type:
    """Take a class as one whose step treats each parameter by itself, too. A decorator."""
    _STEPS.add(_own(cls))
    return cls


def refusal(root: Any) -> str | None:
    """Why the step of a registered optimizer cannot be made in parts, and what to do; None if it can."""
    objects, leaves = find(root)
    inner = leaves[0].optimizer if len(leaves) == 1 else None
    instead = "use optimizer_in='train' or 'optimizer_step' for it"
    around = [each for each in objects if each is not inner]
    if inner is None or any(not is_a(each, "accelerate.optimizer", "AcceleratedOptimizer") for each in around) or stepped_for(objects):
        return f"{_name(root)} steps other optimizers by code of its own, which may need all their state at once; {instead}"
    if not hasattr(type(inner), "_init_group") or _own(type(inner)) not in _STEPS:
        return f"{_name(inner)} is not known to treat each parameter by itself (known: {KNOWN}); {instead}"
    if any(group.get("differentiable") for group in inner.param_groups):
        return f"differentiable=True keeps what a step computes for autograd; {instead}"
    return None


def refusal_now(optimizer: Any) -> str | None:
    """Why the next step cannot be made in parts although the optimizer's can, and what to do; None if it can."""
    stepped = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if len(stepped) > len({id(p) for p in stepped}):
        return "a parameter stands twice in its groups, and would be stepped twice: give each parameter once, or use optimizer_in='train'"
    if any(p.grad.layout is not torch.strided for p in stepped):
        return "it has sparse gradients, whose state changes its size: use optimizer_in='train'"
    if any(type(p) not in PLAIN_TYPES and _reduces(p) for p in stepped):
        return (
            "gradients have still to be summed over ranks (Partial), or are sharded otherwise than their parameters, so the step itself "
            "calls collectives, which ranks with other buckets would call in another order: redistribute them before the step, "
            "p.grad = p.grad.redistribute(placements=p.placements), or use optimizer_in='train'"
        )
    if torch.is_inference_mode_enabled():
        return "it is called in inference mode, in which no state can be made: call it outside"
    return None


def _reduces(parameter: Any) -> bool:
    """Whether a step of a sharded parameter calls collectives for its gradient. Of one that every rank has whole, it takes a part."""
    mine = getattr(parameter, "placements", ())
    theirs = getattr(parameter.grad, "placements", mine)
    return any(own != given and not given.is_replicate() for own, given in zip(mine, theirs, strict=True))


def replaced_step(optimizer: Any) -> str | None:
    """Why the optimizer's own method may do more than a step, and what to do; None if it does nothing else. A learning rate scheduler
    replaces the method by one that tells it that there was a step."""
    theirs = vars(optimizer).get("step")
    if theirs is None or (hasattr(theirs, "_wrapped_by_lr_sched") and inspect.unwrap(theirs) is step_function(optimizer)):
        return None
    return f"something has replaced its step() by {getattr(theirs, '__qualname__', theirs)!r}, which may do more than a step: undo that"


def _name(optimizer: Any) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


class PartialStep:
    """One step of an optimizer, made for a few parameters at a time, or for slices of one, in the implementation (for-loop, foreach, fused)
    that torch would choose for all parameters of a group together: another one may round differently. `parameters` have a gradient."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._step = step_function(optimizer)
        self._chosen = [_implementation(group) for group in optimizer.param_groups]
        entries = [(index, p) for index, group in enumerate(optimizer.param_groups) for p in group["params"] if p.grad is not None]
        self._group_of = {id(p): index for index, p in entries}
        self.parameters: Sequence[torch.Tensor] = [p for _, p in entries]

    def run(self, parts: Sequence[torch.Tensor | ParameterSlice]) -> None:
        """Step these parameters, and slices of parameters."""
        slices = [each for each in parts if isinstance(each, ParameterSlice)]
        whole = [each for each in parts if not isinstance(each, ParameterSlice)]
        for each in slices:
            self._step_slice(each)
        if whole:
            by_group = itertools.groupby(whole, key=lambda each: self._group_of[id(each)])
            self._call([(index, [*those]) for index, those in by_group], self._optimizer.state)

    def _step_slice(self, part: ParameterSlice) -> None:
        """Step a slice with the same slice of the state. The counters themselves count once, with the last slice."""
        stepped = part.of(part.parameter)
        stepped.grad = part.of(part.parameter.grad)
        state: dict[str, Any] = {}
        for key, value in self._optimizer.state[part.parameter].items():
            if is_counter(value):
                state[key] = value if part.is_last else value.clone()
            else:
                state[key] = None if value is None else part.of(value)
        self._call([(self._group_of[id(part.parameter)], [stepped])], {stepped: state})

    def _call(self, parameters: Sequence[tuple[int, list[torch.Tensor]]], state: Mapping[torch.Tensor, Any]) -> None:
        """Call the step function with parameters of these groups alone."""
        groups = [{**self._optimizer.param_groups[index], **self._chosen[index], "params": those} for index, those in parameters]
        part = object.__new__(type(self._optimizer))
        vars(part).update(vars(self._optimizer), param_groups=groups, state=state)
        self._step(part)


def _implementation(group: dict[str, Any]) -> dict[str, bool]:
    """The option that a part of a group needs so that torch chooses the same implementation as for the whole group."""
    if "foreach" not in group or group["foreach"] is not None or group.get("fused"):
        return {}
    stepped = [p for p in group["params"] if p.grad is not None]
    _, foreach = _default_to_fused_or_foreach(stepped, differentiable=False, use_fused=False)
    return {} if foreach else {"foreach": False}
