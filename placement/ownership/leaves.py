"""The optimizers inside a registered object, and the tensors of their state."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from placement.frameworks.known import optimizer_tables, own_state
from placement.tensors.plain import nested_tensors

WRAPPING = ("optimizer", "chained_optimizers", "sub_optimizers", "optimizers_dict", "optim_dict")
"""Attributes whose objects are looked into, of whatever class they are. In others, optimizers are found by what they are."""
_OF_THE_OPTIMIZER = frozenset({"state", "param_groups", "defaults"})
"""Attributes of every optimizer. They have as many entries as there are parameters, and no optimizers."""


_NUMBERS = (int, float, str, type(None))
"""Most values in a state or a group that are no tensors."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """An optimizer with a state of its own."""

    path: str
    """The path from the registered object to the optimizer: "" or "chained_optimizers.1."."""
    optimizer: Any
    wraps: bool
    """Whether it holds further optimizers, so that its step steps them, too."""

    @property
    def is_hollow(self) -> bool:
        """Whether it has no state beside that of the optimizers that it holds. Its groups may then list stand-ins for parameters."""
        return self.wraps and not self.optimizer.state


def find(root: Any) -> tuple[list[Any], list[Leaf]]:
    """Find the optimizers in an object. Returns all objects on the way, and each optimizer with a state of its own, inner ones first."""
    objects: list[Any] = []
    leaves: list[Leaf] = []
    _visit(root, "", objects, leaves, set(), set())
    return objects, leaves


def _visit(obj: Any, path: str, objects: list[Any], leaves: list[Leaf], visited: set[int], states: set[int]) -> None:
    """Add an object and what it wraps. Not a closure that calls itself: such a cycle would keep the optimizer until the next collection."""
    if id(obj) in visited:
        return
    visited.add(id(obj))
    objects.append(obj)
    found_before = len(leaves)
    for name, inner in _wrapped(obj):
        _visit(inner, f"{path}{name}.", objects, leaves, visited, states)
    fields = getattr(obj, "__dict__", {})
    state = fields.get("state")
    # A wrapper may hand through the state of what it wraps; then it is counted there, where a twin can be made of it.
    if isinstance(state, Mapping) and id(state) not in states and isinstance(getattr(obj, "param_groups", None), list):
        states.add(id(state))
        leaves.append(Leaf(path, obj, wraps=len(leaves) > found_before))


def _wrapped(obj: Any) -> Iterator[tuple[str, Any]]:
    if own_state(obj) is not None:  # its framework class knows its state; the inner optimizers are replaced at every load
        return
    fields = dict(getattr(obj, "__dict__", {}))
    for name in WRAPPING:
        # Some wrappers offer the optimizer inside as a property.
        if name not in fields and isinstance(getattr(type(obj), name, None), property):
            with contextlib.suppress(Exception):  # Megatron's property asserts that its chain has exactly one optimizer
                fields[name] = getattr(obj, name)
    for name, value in fields.items():
        if name not in _OF_THE_OPTIMIZER:
            yield from _objects_in(value, name, of_any_class=name in WRAPPING)


@functools.cache
def _is_optimizer(cls: Any) -> bool:
    """Whether objects of a class are optimizers, or wrap some: they step and drop gradients. A module is none, nor is an engine."""
    if issubclass(cls, torch.optim.Optimizer):
        return True
    return not issubclass(cls, torch.nn.Module) and all(callable(getattr(cls, name, None)) for name in ("step", "zero_grad"))


def _may_hold(value: Any) -> bool:
    """Whether a container has optimizers, or containers that may have some. It may have a million numbers, so C looks at their types."""
    parts = value.values() if isinstance(value, Mapping) else value
    kinds: set[Any] = {*map(type, parts)}
    return any(_is_optimizer(kind) or issubclass(kind, (list, tuple, Mapping)) for kind in kinds)


def _objects_in(value: Any, name: str, *, of_any_class: bool, depth: int = 3) -> Iterator[tuple[str, Any]]:
    """The optimizers in an attribute, through containers in containers."""
    kind: Any = type(value)
    if isinstance(value, (list, tuple, Mapping)):
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
        for index, (key, part) in enumerate(pairs if depth and (of_any_class or _may_hold(value)) else ()):
            # A key may be a parameter, whose text shows all its values: it must not be read.
            path = f"{name}.{key if isinstance(key, (str, int)) else index}"
            yield from _objects_in(part, path, of_any_class=of_any_class, depth=depth - 1)
    elif value is not None and (of_any_class or _is_optimizer(kind)):
        yield name, value


def parameters_of(leaves: Sequence[Leaf]) -> list[torch.Tensor]:
    """The distinct parameters that the optimizers step, in the order of the optimizers and their groups."""
    distinct: dict[int, torch.Tensor] = {}
    for leaf in leaves:
        for group in leaf.optimizer.param_groups:
            for parameter in group["params"]:
                distinct.setdefault(id(parameter), parameter)
    return list(distinct.values())


def state_of(leaf: Leaf, levels: int = 1) -> Iterator[tuple[str, str, Mapping[str, Any], torch.Tensor]]:
    """The state's tensors: name, key within the parameter's state, parameter group, tensor. Those without a parameter come last.

    Args:
        levels: how many objects deep tensors are looked for (`nested_tensors`).
    """
    state: Mapping[Any, Any] = leaf.optimizer.state
    if not state:
        return
    order: dict[int, tuple[int, Mapping[str, Any]]] = {}
    for group in leaf.optimizer.param_groups:
        for parameter in group["params"]:
            order.setdefault(id(parameter), (len(order), group))
    last: tuple[int, Mapping[str, Any]] = (len(order), {})
    for owner, entry in sorted(state.items(), key=lambda item: order.get(id(item[0]), last)[0]):
        index, group = order.get(id(owner), last)
        label = f"{leaf.path}state.{index if id(owner) in order else _label(owner)}"
        if not isinstance(entry, Mapping):
            yield from ((name, str(owner), group, tensor) for name, tensor in nested_tensors(entry, label, levels))
            continue
        for key, value in entry.items():
            if isinstance(value, torch.Tensor):
                yield f"{label}.{key}", str(key), group, value
            elif not isinstance(value, _NUMBERS):
                yield from ((name, str(key), group, tensor) for name, tensor in nested_tensors(value, f"{label}.{key}", levels))
    yield from ((leaf.path + name, name, last[1], tensor) for name, tensor in optimizer_tables(leaf.optimizer))


def tensors_in_groups(leaves: Sequence[Leaf]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors among the settings of parameter groups (a learning rate), which never move: schedulers use them outside phases."""
    for leaf in leaves:
        for index, group in enumerate(leaf.optimizer.param_groups):
            for key, value in group.items():
                if key != "params" and not isinstance(value, _NUMBERS):
                    yield from nested_tensors(value, f"{leaf.path}param_groups.{index}.{key}", levels=1)


def tensors_beside(leaves: Sequence[Leaf], objects: Sequence[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that no walk of the state finds: deeper in its objects, in other attributes of these objects, in parameter groups."""
    for leaf in leaves:
        found = {id(tensor) for *_, tensor in state_of(leaf)}
        yield from ((name, tensor) for name, *_, tensor in state_of(leaf, levels=4) if id(tensor) not in found)
    for obj in objects:
        others = {name: value for name, value in getattr(obj, "__dict__", {}).items() if name not in _OF_THE_OPTIMIZER}
        yield from nested_tensors(others, type(obj).__name__, levels=1)
    yield from tensors_in_groups(leaves)


def wrapper_of(tensor: torch.Tensor, part: torch.Tensor) -> torch.Tensor | None:
    """The tensor that wraps `part`; None if `tensor` is the part itself."""
    return None if part is tensor else tensor


def _label(owner: Any) -> str:
    return "unlisted" if isinstance(owner, torch.Tensor) else str(owner)


def is_born(optimizer: Any) -> bool:
    """Whether an optimizer has state for any parameter."""
    return any(map(has_state, optimizer.state.values()))


def is_all_born(optimizer: Any, given: Container[int]) -> bool:
    """Whether an optimizer has state for every parameter that may get a gradient.

    Args:
        given: identities of parameters that get a gradient without autograd (main parameters).
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return all(has_state(optimizer.state.get(each, {})) for each in parameters if each.requires_grad or id(each) in given)


def has_state(entry: Any) -> bool:
    """Whether an entry of an optimizer's state contains anything."""
    return bool(entry) if isinstance(entry, Mapping) else True
