"""Whether the steps of an optimizer can be streamed: its step must treat each parameter by itself,
so that it can be made for some of the parameters and then for the others.

These are classes of torch.optim whose update of a parameter depends on nothing but its gradient,
its own state and the options of its group.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from placement.frameworks.base import stepped_for
from placement.ownership.optimizer_state import optimizers_in
from placement.tensors.plain import PLAIN_TYPES, is_a

_NAMES = (
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Muon",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
)
_CLASSES: tuple[type, ...] = tuple(
    getattr(torch.optim, name) for name in _NAMES if hasattr(torch.optim, name)
)
KNOWN = ", ".join(cls.__name__ for cls in _CLASSES)


def _own(cls: Any) -> tuple[Any, Any]:
    """The functions that make a class's step, without wrappers: torch's constructor and
    torch.compile put them around."""
    return inspect.unwrap(cls.step), inspect.unwrap(cls._init_group)


_STEPS = {_own(cls) for cls in _CLASSES}
_OF_MATRICES = {_own(cls) for cls in _CLASSES if cls.__name__ == "Muon"}


def allow(cls: type) -> type:
    """Take a class as one whose step treats each parameter by itself, too. A decorator."""
    _STEPS.add(_own(cls))
    return cls


def multiplies_matrices(optimizer: Any) -> bool:
    """Whether a step computes an element from other elements of its parameter, too."""
    return _own(type(optimizer)) in _OF_MATRICES


def refusal(root: Any) -> str | None:
    """Why the step of a registered optimizer cannot be made in parts, with advice; None if it
    can."""
    objects, leaves = optimizers_in(root)
    inner = leaves[0].optimizer if len(leaves) == 1 else None
    instead = "use optimizer_in='train' or 'optimizer_step' for it"
    wrappers = [wrapper for wrapper in objects if wrapper is not inner]
    if inner is None or not all(map(is_of_accelerate, wrappers)) or stepped_for(objects):
        return (
            f"{_name(root)} steps other optimizers by code of its own, which may need all their "
            f"state at once; {instead}"
        )
    if not hasattr(type(inner), "_init_group") or _own(type(inner)) not in _STEPS:
        return (
            f"{_name(inner)} is not known to treat each parameter by itself (known: {KNOWN}); "
            f"{instead}"
        )
    if any(group.get("differentiable") for group in inner.param_groups):
        return f"differentiable=True keeps what a step computes for autograd; {instead}"
    return None


def is_of_accelerate(obj: object) -> bool:
    return is_a(obj, "accelerate.optimizer", "AcceleratedOptimizer")


def refusal_now(optimizer: Any) -> str | None:
    """Why the next step cannot be made in parts although the optimizer's can, with advice; None if
    it can."""
    stepped = list[Any]()
    for group in optimizer.param_groups:
        stepped += [parameter for parameter in group["params"] if parameter.grad is not None]
    if len(stepped) > len({id(parameter) for parameter in stepped}):
        return (
            "a parameter stands twice in its groups, and would be stepped twice: give each "
            "parameter once, or use optimizer_in='train'"
        )
    if any(parameter.grad.layout is not torch.strided for parameter in stepped):
        return "it has sparse gradients, whose state changes its size: use optimizer_in='train'"
    if any(type(parameter) not in PLAIN_TYPES and _reduces(parameter) for parameter in stepped):
        return (
            "gradients have still to be summed over ranks (Partial), or are sharded otherwise than "
            "their parameters, so the step itself calls collectives, which ranks with other "
            "buckets would call in another order: redistribute them before the step, p.grad = "
            "p.grad.redistribute(placements=p.placements), or use optimizer_in='train'"
        )
    if torch.is_inference_mode_enabled():
        return "it is called in inference mode, in which no state can be made: call it outside"
    return None


def _reduces(parameter: Any) -> bool:
    """Whether a step of a sharded parameter calls collectives for its gradient. Of one that every
    rank has whole, it takes a part."""
    placements = getattr(parameter, "placements", ())
    of_gradient = getattr(parameter.grad, "placements", placements)
    for placement, placement_of_gradient in zip(placements, of_gradient, strict=True):
        if placement != placement_of_gradient and not placement_of_gradient.is_replicate():
            return True
    return False


def replaced_step(optimizer: Any) -> str | None:
    """Why the optimizer's own method may do more than a step, with advice; None if it makes a step
    alone. A learning rate scheduler replaces the method by one that tells it of the step, and
    accelerate by the method itself."""
    step = vars(optimizer).get("step")
    step_of_class = type(optimizer).step
    if step is None or getattr(step, "__func__", None) is step_of_class:
        return None
    is_scheduled = hasattr(step, "_wrapped_by_lr_sched")
    if is_scheduled and inspect.unwrap(step) is inspect.unwrap(step_of_class):
        return None
    return (
        f"something has replaced its step() by {getattr(step, '__qualname__', step)!r}, which may "
        "do more than a step: undo that"
    )


def _name(optimizer: Any) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
