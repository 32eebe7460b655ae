"""Optimizers whose step treats each parameter by itself, so that it can be made for some of the parameters and then for the others.

These are classes of torch.optim whose update of a parameter depends on nothing but its gradient, its own state and the options of its
group. `PartialStep` makes such a step for a part of the parameters. It calls the innermost step function with an object that shares the
optimizer's state and has other parameter groups. So nobody ever sees the optimizer itself with groups that are not the user's.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import _default_to_fused_or_foreach

from placement.core.loaded_classes import is_a
from placement.frameworks.known import stepped_for
from placement.ownership.leaves import find

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
    if any(p.grad is not None and p.grad.layout is not torch.strided for group in optimizer.param_groups for p in group["params"]):
        return "it has sparse gradients, whose state changes its size: use optimizer_in='train'"
    if torch.is_inference_mode_enabled():
        return "it is called in inference mode, in which no state can be made: call it outside"
    return None


def replaced_step(optimizer: Any) -> str | None:
    """Why the optimizer's own method may do more than a step, and what to do; None if it does nothing else.

    A learning rate scheduler replaces the method by one that tells it that there was a step.
    """
    theirs = vars(optimizer).get("step")
    if theirs is None or (hasattr(theirs, "_wrapped_by_lr_sched") and inspect.unwrap(theirs) is step_function(optimizer)):
        return None
    return f"something has replaced its step() by {getattr(theirs, '__qualname__', theirs)!r}, which may do more than a step: undo that"


def _name(optimizer: Any) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


class _Entry(NamedTuple):
    group: int
    parameter: torch.Tensor


class PartialStep:
    """One step of an optimizer, made for a few parameters at a time.

    The implementation (for-loop, foreach, fused) is the one that torch would choose for all parameters of a group together, because
    another one may round differently.

    Attributes:
        parameters: those that have a gradient, in the order in which the step takes them. The others are left alone by a step.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._step = step_function(optimizer)
        self._entries = [
            _Entry(index, p) for index, group in enumerate(optimizer.param_groups) for p in group["params"] if p.grad is not None
        ]
        self._chosen = [_implementation(group) for group in optimizer.param_groups]
        self.parameters: Sequence[torch.Tensor] = [entry.parameter for entry in self._entries]

    def run(self, first: int, last: int) -> None:
        """Step the parameters `first` up to `last` (not included)."""
        groups = []
        for index, entries in itertools.groupby(self._entries[first:last], key=lambda entry: entry.group):
            group = self._optimizer.param_groups[index]
            groups.append({**group, **self._chosen[index], "params": [entry.parameter for entry in entries]})
        part = object.__new__(type(self._optimizer))
        vars(part).update(vars(self._optimizer), param_groups=groups)
        self._step(part)


def _implementation(group: dict[str, Any]) -> dict[str, bool]:
    """The option that a part of a group needs so that torch chooses the same implementation as for the whole group."""
    if "foreach" not in group or group["foreach"] is not None or group.get("fused"):
        return {}
    stepped = [p for p in group["params"] if p.grad is not None]
    _, foreach = _default_to_fused_or_foreach(stepped, differentiable=False, use_fused=False)
    return {} if foreach else {"foreach": False}
