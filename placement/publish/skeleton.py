"""Skeletons: copies of a module tree's structure without wrappers, from which the names of its
weights are taken.

A skeleton has a placeholder, a tensor without bytes, for each weight. It is the same whether the
module is offloaded or loaded, sharded or unsharded, and it is the same on every rank.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from placement.frameworks.base import Framework, wrappers
from placement.frameworks.weights import Weight, weight_of


class Copier(abc.ABC):
    """Copies the structure of modules: same classes and attributes, without wrappers and hooks. A
    subclass chooses the tensors. It is not `copy.deepcopy`, which modules under `fully_shard` and
    placement's guards refuse, and which would copy bytes."""

    def __init__(self, shown: Shown) -> None:
        self.shown = shown
        self._copies: dict[int, torch.nn.Module] = {}
        self._parameters: dict[int, torch.nn.Parameter] = {}
        # the original of each copied module, by the copy's identity
        self.originals: dict[int, torch.nn.Module] = {}

    @abc.abstractmethod
    def stand_in(self, weight: Weight) -> torch.Tensor:
        """The tensor to put in a weight's place in a copy. Must be the same object for the same
        weight."""

    def attribute(self, value: Any) -> Any:
        """The value to put in the place of a plain attribute's value."""
        return value

    def copy(self, module: torch.nn.Module) -> torch.nn.Module:
        """A copy of a module and its submodules, without wrappers; the same one for the same
        module."""
        module = self.shown.unwrapped(module)
        if id(module) in self._copies:
            return self._copies[id(module)]
        copy: torch.nn.Module = object.__new__(type(module))
        fields, own = vars(copy), vars(module)
        fields.update(vars(torch.nn.Module()))
        self._copies[id(module)], self.originals[id(copy)] = copy, module
        parameters = self.shown.parameters(module)
        # FSDP1 leaves views of gathered parameters as plain attributes under the parameters' names.
        # They would hide the parameters.
        hidden = {*fields, *(name for name, _ in parameters)}
        for name, value in own.items():
            # A method replaced on the object (by placement's guards or a patch) is bound to the
            # original, so it must not be copied.
            if name not in hidden and not (
                callable(value) and callable(getattr(type(module), name, None))
            ):
                fields[name] = self.attribute(value)
        fields.update(
            training=module.training,
            _non_persistent_buffers_set=set(module._non_persistent_buffers_set),
        )
        for name, weight in parameters:
            # tied parameters are one object in the copy, too
            if weight is not None and id(weight) not in self._parameters:
                self._parameters[id(weight)] = torch.nn.Parameter(
                    self.stand_in(weight), requires_grad=False
                )
            copy._parameters[name] = None if weight is None else self._parameters[id(weight)]
        for name, buffer in module._buffers.items():
            copy._buffers[name] = (
                None if buffer is None else self.stand_in(self.shown.weight(buffer))
            )
        for name, child in module._modules.items():
            copy._modules[name] = None if child is None else self.copy(child)
        return copy


class Shown:
    """The weights behind the tensors that a module tree shows, one object for each."""

    def __init__(self, root: torch.nn.Module, frameworks: Sequence[Framework]) -> None:
        self._wrappers = wrappers()
        self._instead = {
            shown: own for each in frameworks for shown, own in each.own_tensors().items()
        }
        instead_of: dict[int, Mapping[str, Weight | None]] = {}
        for each in frameworks:
            instead_of.update(each.weights())
        self._weights: dict[int, Weight] = {}
        self._of: dict[int, list[tuple[str, Weight | None]]] = {}
        for part in root.modules():
            given = instead_of.get(id(part), {})
            found: dict[str, Weight | None] = {}
            for name, tensor in part._parameters.items():
                found[name] = (
                    given[name]
                    if name in given
                    else None
                    if tensor is None
                    else self.weight(tensor)
                )
            found |= {name: weight for name, weight in given.items() if weight is not None}
            self._of[id(part)] = list(found.items())

    def weight(self, tensor: torch.Tensor) -> Weight:
        tensor = self._instead.get(id(tensor), tensor)
        if id(tensor) not in self._weights:
            self._weights[id(tensor)] = weight_of(tensor)
        return self._weights[id(tensor)]

    def parameters(self, module: torch.nn.Module) -> list[tuple[str, Weight | None]]:
        """A module's own parameters by name, including those that a framework hides at the
        moment."""
        return self._of[id(module)]

    def unwrapped(self, module: torch.nn.Module) -> torch.nn.Module:
        """The module that wrappers are around."""
        while (
            inner := next((name for cls, name in self._wrappers if isinstance(module, cls)), None)
        ) is not None:
            module = module._modules[inner]  # type: ignore[assignment]
        return module

    def named(self, root: torch.nn.Module) -> Iterator[tuple[str, Weight, bool]]:
        """Name and weight of each parameter, then of each persistent buffer, as `named_places`
        finds them in a copy; and whether it is a buffer."""
        modules, waiting = list[tuple[str, torch.nn.Module]](), [("", root)]
        while waiting:
            prefix, module = waiting.pop()
            part = self.unwrapped(module)
            modules.append((prefix, part))
            waiting += [
                (f"{prefix}{name}.", child)
                for name, child in reversed(part._modules.items())
                if child is not None
            ]
        for prefix, part in modules:
            yield from (
                (prefix + name, weight, False)
                for name, weight in self.parameters(part)
                if weight is not None
            )
        for prefix, part in modules:
            for name, buffer in part._buffers.items():
                if buffer is not None and name not in part._non_persistent_buffers_set:
                    yield prefix + name, self.weight(buffer), True


class Skeleton(Copier):
    """Copies a module tree with a tensor on the meta device as placeholder for each weight. Its
    storage identifies the weight."""

    def __init__(self, shown: Shown) -> None:
        super().__init__(shown)
        # the weights, by the key of their placeholder (see `key_of`)
        self.weights: dict[int, Weight] = {}
        self._places: dict[int, torch.Tensor] = {}

    def stand_in(self, weight: Weight) -> torch.Tensor:
        if id(weight) not in self._places:
            place = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
            self._places[id(weight)], self.weights[key_of(place)] = place, weight
        return self._places[id(weight)]


def key_of(place: torch.Tensor) -> int:
    """The key that identifies a placeholder. It stays the same if a library puts the tensor into a
    new parameter."""
    key: int = place.untyped_storage()._cdata
    return key


def named_places(root: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and placeholder of each parameter and persistent buffer of a skeleton, as in its state
    dict. Tied ones have several names."""
    yield from torch.nn.Module.named_parameters(root, remove_duplicate=False)
    for prefix, part in torch.nn.Module.named_modules(root, remove_duplicate=False):
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer
