"""The optimizers inside a registered object, and the tensors of their state."""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from placement.frameworks.known import optimizer_tables, own_state
from placement.tensors.plain import nested_tensors

WRAPPING = ("optimizer", "chained_optimizers", "sub_optimizers", "optimizers_dict", "optim_dict")


@dataclass(frozen=True, slots=True)
class Leaf:
    """An optimizer with a state of its own."""

    path: str
    """The path from the registered object to the optimizer: "" or "chained_optimizers.1."."""
    optimizer: Any
    wraps: bool
    """Whether it holds further optimizers, so that its step steps them, too."""


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
    if isinstance(state, Mapping) and isinstance(fields.get("param_groups"), list) and id(state) not in states:
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
        if name in WRAPPING:
            yield from _objects_in(value, name)
        elif isinstance(value, torch.optim.Optimizer):
            yield name, value


def _objects_in(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (list, tuple, Mapping)):
        for key, part in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _objects_in(part, f"{name}.{key}")
    elif value is not None:
        yield name, value


def parameters_of(leaves: Sequence[Leaf]) -> list[torch.Tensor]:
    """The distinct parameters that the optimizers step, in the order of the optimizers and their groups."""
    distinct: dict[int, torch.Tensor] = {}
    for leaf in leaves:
        for group in leaf.optimizer.param_groups:
            for parameter in group["params"]:
                distinct.setdefault(id(parameter), parameter)
    return list(distinct.values())


def state_of(leaf: Leaf) -> Iterator[tuple[str, str, Mapping[str, Any], torch.Tensor]]:
    """The state's tensors: name, key within the parameter's state, parameter group, tensor. Those without a parameter come last."""
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
            yield from ((name, str(owner), group, tensor) for name, tensor in nested_tensors(entry, label))
            continue
        for key, value in entry.items():
            if isinstance(value, torch.Tensor):
                yield f"{label}.{key}", str(key), group, value
            elif isinstance(value, (list, tuple, Mapping)):
                yield from ((name, str(key), group, tensor) for name, tensor in nested_tensors(value, f"{label}.{key}"))
    yield from ((leaf.path + name, name, last[1], tensor) for name, tensor in optimizer_tables(leaf.optimizer))


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
