"""The bytes of the state that an optimizer creates at its first steps: by a twin of its class, or by a rule where torch has none."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from placement.ownership.optimizer_state import unborn_state

Rule = Callable[[torch.nn.Parameter], Sequence[int]]
"""Bytes of each storage of one parameter's state."""


def _fp32(count: int) -> Rule:
    return lambda parameter: [4 * parameter.numel()] * count


_CLASSES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {}),
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "sgd-momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
}
_RULES: dict[str, Rule] = {"adamw-fp32": _fp32(2), "adamw-master": _fp32(3)}
OPTIMIZERS = {
    "adamw": "torch.optim.AdamW: two moments in the dtype of the weights",
    "adamw-fp32": "two moments in fp32, whatever the weights are",
    "adamw-master": "two moments in fp32, and fp32 main weights beside those of the model",
    "sgd": "no state",
    "sgd-momentum": "a momentum in the dtype of the weights",
}
"""Names of optimizers, and what each keeps for a parameter. A class of torch.optim's form, or "package.module:Class", works too."""


def state_sizes(
    optimizer: str | type[torch.optim.Optimizer], parameters: Sequence[torch.nn.Parameter], options: Mapping[str, Any] | None = None
) -> list[int]:
    """Bytes of each storage of the state that an optimizer creates on the device for these parameters.

    Args:
        optimizer: a name of `OPTIMIZERS`, a class, or "package.module:Class".
        parameters: on the meta device, in this rank's shapes.
        options: arguments of the class. `fused=True` puts the counters on the device, too.

    Raises:
        ValueError: the name is unknown, the class cannot be constructed, or its state cannot be told without values.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if isinstance(optimizer, str) and optimizer in _RULES:
        if options:
            raise ValueError(f"optimizer {optimizer!r} takes no options; give a class for them")
        return [size for parameter in trained for size in _RULES[optimizer](parameter)]
    cls, given = _class_of(optimizer)
    given = {**given, **(options or {})}
    fused = given.pop("fused", False)
    if not trained:
        return []
    try:
        made = cls(trained, **given)
    except Exception as error:
        raise ValueError(f"optimizer {cls.__qualname__} cannot be made with options {given}: {error}") from error
    for group in made.param_groups if fused else ():
        group["fused"] = True  # only now: its constructor refuses parameters on the meta device
    unborn = unborn_state(made, torch.device("cpu"))
    if unborn is None:
        raise ValueError(f"the state of {cls.__qualname__} cannot be told without values; choose one of {', '.join(OPTIMIZERS)}")
    return unborn.sizes()


def _class_of(optimizer: str | type[torch.optim.Optimizer]) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    if isinstance(optimizer, type):
        return optimizer, {}
    if optimizer in _CLASSES:
        return _CLASSES[optimizer]
    module, colon, name = optimizer.partition(":")
    if not colon:
        near = difflib.get_close_matches(optimizer, OPTIMIZERS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"no optimizer {optimizer!r}.{hint} Known: {', '.join(OPTIMIZERS)}; or write 'package.module:Class'")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"optimizer {optimizer!r} cannot be imported: {error}") from error
    if not isinstance(found, type):
        raise ValueError(f"optimizer {optimizer!r} is a {type(found).__name__}, not a class")  # noqa: TRY004  # the text is wrong
    return found, {}
