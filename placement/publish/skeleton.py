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
        fields = vars(copy)
        fields.update(vars(torch.nn.Module()))
        self._copies[id(module)] = copy
        self.originals[id(copy)] = module
        parameters = self.shown.parameters(module)
        # FSDP1 leaves views of gathered parameters as plain attributes under the parameters' names.
        # They would hide the parameters.
        hidden = {*fields, *(name for name, _ in parameters)}
        for name, value in vars(module).items():
            if name in hidden:
                continue
            # A method replaced on the object (by placement's guards or a patch) is bound to the
            # original, so it must not be copied.
            is_method = callable(value) and callable(getattr(type(module), name, None))
            if not is_method:
                fields[name] = self.attribute(value)
        fields.update(
            training=module.training,
            _non_persistent_buffers_set=set(module._non_persistent_buffers_set),
        )
        for name, weight in parameters:
            copy._parameters[name] = None if weight is None else self._parameter(weight)
        for name, buffer in module._buffers.items():
            copy._buffers[name] = buffer
            if buffer is not None:
                copy._buffers[name] = self.stand_in(self.shown.weight(buffer))
        for name, child in module._modules.items():
            copy._modules[name] = None if child is None else self.copy(child)
        return copy

    def _parameter(self, weight: Weight) -> torch.nn.Parameter:
        """The parameter for a weight: tied parameters are one object in the copy, too."""
        if id(weight) not in self._parameters:
            stand_in = self.stand_in(weight)
            self._parameters[id(weight)] = torch.nn.Parameter(stand_in, requires_grad=False)
        return self._parameters[id(weight)]


class Shown:
    """The weights behind the tensors that a module tree shows, one object for each."""

    def __init__(self, root: torch.nn.Module, frameworks: Sequence[Framework]) -> None:
        self._wrappers = wrappers()
        self._own_tensors: dict[int, torch.Tensor] = {}
        by_frameworks: dict[int, Mapping[str, Weight | None]] = {}
        for framework in frameworks:
            self._own_tensors.update(framework.own_tensors())
            by_frameworks.update(framework.weights())
        self._weights: dict[int, Weight] = {}
        self._of_module: dict[int, list[tuple[str, Weight | None]]] = {}
        for part in root.modules():
            by_framework = by_frameworks.get(id(part), {})
            weights: dict[str, Weight | None] = {}
            for name, tensor in part._parameters.items():
                if name in by_framework:
                    weights[name] = by_framework[name]
                else:
                    weights[name] = None if tensor is None else self.weight(tensor)
            hidden = {name: weight for name, weight in by_framework.items() if weight is not None}
            self._of_module[id(part)] = list((weights | hidden).items())

    def weight(self, tensor: torch.Tensor) -> Weight:
        tensor = self._own_tensors.get(id(tensor), tensor)
        if id(tensor) not in self._weights:
            self._weights[id(tensor)] = weight_of(tensor)
        return self._weights[id(tensor)]

    def parameters(
        self,
        module: torch.nn.Module,
    ) -> list[tuple[str, Weight | None]]:
        """A module's own parameters by name, including those that a framework hides at the
        moment."""
        return self._of_module[id(module)]

    def unwrapped(self, module: torch.nn.Module) -> torch.nn.Module:
        """The module that wrappers are around."""
        inner = self._inner_name(module)
        while inner is not None:
            module = module._modules[inner]  # type: ignore[assignment]
            inner = self._inner_name(module)
        return module

    def _inner_name(self, module: torch.nn.Module) -> str | None:
        """The name in a wrapper of the module inside; None if it is no wrapper."""
        for cls, name in self._wrappers:
            if isinstance(module, cls):
                return name
        return None

    def named(
        self,
        root: torch.nn.Module,
    ) -> Iterator[tuple[str, Weight, bool]]:
        """Name and weight of each parameter, then of each persistent buffer, as `named_places`
        finds them in a copy; and whether it is a buffer."""
        modules = []
        waiting = [("", root)]
        while waiting:
            prefix, module = waiting.pop()
            part = self.unwrapped(module)
            modules.append((prefix, part))
            for name, child in reversed(part._modules.items()):
                if child is not None:
                    waiting.append((f"{prefix}{name}.", child))
        for prefix, part in modules:
            for name, weight in self.parameters(part):
                if weight is not None:
                    yield prefix + name, weight, False
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
            self._places[id(weight)] = place
            self.weights[key_of(place)] = weight
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
