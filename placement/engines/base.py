"""The interface of rollout engines, and an engine that lives in this process."""

from __future__ import annotations

import abc
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from placement.core.call_guard import wait_for_calls
from placement.core.errors import EngineError, RegistrationError
from placement.core.torch_modes import without_modes
from placement.frameworks.known import frameworks_of
from placement.frameworks.weights import Weight
from placement.ownership.adapter import Adapter, Seen
from placement.ownership.module import ModuleAdapter
from placement.publish.buckets import WeightInfo, writable
from placement.storage.managed import ManagedStorage
from placement.storage.range import RANGES
from placement.tensors.plain import Owned, plain_parts


class Engine(abc.ABC):
    """A rollout engine whose memory lies in this process.

    The manager calls `modules()` at registration and at every offload. The modules that it names move with the engine, byte for byte.
    The user calls `update_weights` during a weight sync, with the engine on the device.
    """

    @abc.abstractmethod
    def modules(self) -> Sequence[torch.nn.Module]:
        """The modules that hold the engine's device memory."""

    @abc.abstractmethod
    def update_weights(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Copy published weights into the engine. The tensors belong to the publisher; nothing of them is kept after the return.

        Raises:
            EngineError: the engine does not have a name or shape. Nothing of the bucket has been copied.
        """


class TorchEngine(Engine):
    """A plain module that generates: the default engine where no other project's engine is used.

    Args:
        module: The model, with the names and shapes that are published to it: plain, compiled, with adapters, under DDP, FSDP1, FSDP2
            or tensor parallelism. The manager holds a registered engine, and with it the module.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        if not isinstance(module, torch.nn.Module):
            raise TypeError(
                f"TorchEngine takes a torch.nn.Module, not a {type(module).__name__}; placement.engines has the engines for vLLM and SGLang"
            )
        self.module = module
        self._sync: tuple[torch.nn.Module, Mapping[str, Weight]] | None = None
        """The module and the weights that the sync under way fills; None outside one."""

    def modules(self) -> Sequence[torch.nn.Module]:
        return (self.module,)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The module's state dict, readable in every state."""
        return dict(self.module.state_dict())

    def update_weights(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Copy published weights into the module, cast to its dtypes. Each rank of a sharded module takes its own part.

        A name is one under which the module is published, or the module's own. Calls no collective. Waits, if the engine is registered,
        for calls of the module that other threads are in. Raises PhaseError where one does not end (`call_deadline_seconds`).

        Nothing is copied before all weights of the bucket are known to fit; before the first of `Handle.weights`, those of all buckets.
        """
        wait_for_calls(self.module)
        number = getattr(bucket, "number", None)
        with without_modes():
            self._require_resident()
            if self._sync is None or not number or self._sync[0] is not self.module:
                weights = self._writable()
                for info in getattr(bucket, "announced", ()):
                    _weight(weights, info.name, info)
                self._sync = self.module, weights
            _write(bucket, self._sync[1])
        if number is None or getattr(bucket, "is_last", False):
            self._sync = None

    def _writable(self) -> Mapping[str, Weight]:
        """The weights. What frameworks have gathered for computing is released first: values written there would be lost."""
        frameworks = frameworks_of(self.module)
        if frameworks and torch.accelerator.is_available():
            torch.accelerator.synchronize()
        with torch.inference_mode(False), torch.no_grad():
            for framework in frameworks:
                framework.ready()
        try:
            return writable(self.module, frameworks)
        except ValueError as error:
            raise EngineError(f"weights cannot be published to {type(self.module).__qualname__}: {error}") from error

    def _require_resident(self) -> None:
        parts = (part for parameter in self.module.parameters() for _, part in plain_parts(parameter, ""))
        owners = (RANGES.owner_of(part.untyped_storage().data_ptr()) for part in parts)
        holding = next((owner for owner in owners if isinstance(owner, ManagedStorage)), None)
        if holding is not None and not holding.on_device:
            raise EngineError(f"the weights of {holding.name!r} are offloaded: update them inside manager.phase('weight_sync')")


def _write(bucket: Sequence[tuple[str, torch.Tensor]], weights: Mapping[str, Weight]) -> None:
    writes: list[tuple[str, Callable[[], object]]] = []
    name = ""
    try:
        with torch.inference_mode(False), torch.no_grad():
            for name, value in bucket:
                writes.append((name, _weight(weights, name, value).writer(value)))
            for name, write in writes:  # noqa: B007  # the name is for the error below
                write()
    except (ValueError, RuntimeError, TypeError) as error:
        raise EngineError(f"published weight {name!r} cannot be written into the engine's weight: it {error}") from error


def _weight(weights: Mapping[str, Weight], name: str, value: torch.Tensor | WeightInfo) -> Weight:
    """The weight of this name, which can take a value of such a shape and dtype."""
    weight, dtype = weights.get(name), value.dtype
    if weight is None:
        raise EngineError(f"published weight {name!r} is not a weight of the engine's module")
    if weight.shape != value.shape:
        raise EngineError(f"published weight {name!r} has shape {tuple(value.shape)}, the engine's has {tuple(weight.shape)}")
    if weight.problem is not None:
        raise EngineError(f"published weight {name!r} cannot be written into the engine's weight: it {weight.problem}")
    if len({(each.is_floating_point, each.is_complex, each.itemsize == 1 and each) for each in (dtype, weight.dtype)}) > 1:
        what = f"published weight {name!r} has dtype {dtype}, the engine's has {weight.dtype}"
        raise EngineError(f"{what}: a cast would change what the values mean; publish from a module that is quantised in the same way")
    return weight


class EngineAdapter(Adapter):
    """The adapter for an engine: it covers the tensors of the modules that the engine names now, which it may have replaced. Raises
    RegistrationError: a module is not supported, or a framework moves some of the modules but not the others."""

    kind = "engine"

    def __init__(self, engine: Engine, *, name: str, compute_device: torch.device, external: bool = False) -> None:
        self._name = name
        self._engine = weakref.ref(engine)
        self._adapt = functools.partial(ModuleAdapter, name=name, compute_device=compute_device, external=external)
        self._shares = False  # whether a tensor was found in more than one of the modules
        self._take([self._adapt(module) for module in engine.modules()])

    def _take(self, adapters: list[ModuleAdapter]) -> None:
        self._adapters = adapters
        self.frameworks = [framework for adapter in adapters for framework in adapter.frameworks]
        reasons = [adapter.external for adapter in adapters]
        self.external = next(filter(None, reasons), None)
        if any(reasons) and not all(reasons):
            raise RegistrationError(
                f"{self._name!r}: a framework moves {sum(map(bool, reasons))} of its {len(reasons)} modules itself "
                f"({self.external}), but not the others. What to do: register these two kinds as separate engines, or with "
                "external=True, so that all of them are tracked and never moved"
            )

    def _others(self) -> Sequence[torch.nn.Module] | None:
        """The modules that the engine names now; None if they are those of the adapters, or the engine is gone."""
        engine = self._engine()
        modules = None if engine is None else engine.modules()
        keys = [{id(key) for key in adapter.key_objects()} for adapter in self._adapters]
        if modules is None or (len(keys) == len(modules) and all(id(each) in of for of, each in zip(keys, modules, strict=True))):
            return None
        return modules

    def module_adapters(self) -> Sequence[ModuleAdapter]:
        return tuple(self._adapters)

    def owned(self) -> Iterator[Owned]:
        """The tensors of the modules. While the engine is handed back, of those known already: a new one may be refused, and has no place.
        Raises RegistrationError: a module cannot be moved, or only the old or the new modules are external."""
        if not self.hands_back and (modules := self._others()) is not None:
            was_external = self.external
            known = {id(key): adapter for adapter in self._adapters for key in adapter.key_objects()}
            self._take([known.get(id(module)) or self._adapt(module) for module in modules])
            if self._adapters and (self.external is None) is not (was_external is None):
                raise RegistrationError(
                    f"{self._name!r} has other modules than when it was registered, and only the old or only the new ones are external "
                    f"({self.external or was_external}). What to do: unregister it, and register it again"
                )
        for adapter in self._adapters:
            adapter.hands_back = self.hands_back
        found = [owned for adapter in self._adapters for owned in adapter.owned()]
        distinct = {id(owned.tensor): owned for owned in reversed(found)}
        self._shares = len(distinct) < len(found)
        return reversed(distinct.values()) if self._shares else iter(found)

    def unchanged(self) -> Seen | None:
        seen = [] if self._shares or self._others() is not None else [adapter.unchanged() for adapter in self._adapters]
        known = [each for each in seen if each is not None]
        if not known or len(known) < len(seen):
            return None
        return Seen(*(list(itertools.chain.from_iterable(column)) for column in zip(*known, strict=True)))

    def standing(self) -> object | None:
        if self._shares or self._others() is not None:
            return None
        found = [adapter.standing() for adapter in self._adapters]
        return None if None in found else found

    def key_objects(self) -> Sequence[Any]:
        engine = self._engine()
        return [*(key for adapter in self._adapters for key in adapter.key_objects()), *([] if engine is None else [engine])]

    def with_gradients(self) -> Iterator[torch.Tensor]:
        return iter({id(tensor): tensor for adapter in self._adapters for tensor in adapter.with_gradients()}.values())

    def kept_by_framework(self) -> Iterator[tuple[str, int]]:
        return (each for adapter in self._adapters for each in adapter.kept_by_framework())

    def sparse(self) -> Iterator[torch.Tensor]:
        return iter({id(tensor): tensor for adapter in self._adapters for tensor in adapter.sparse()}.values())

    def immovable(self) -> Iterator[tuple[str, str]]:
        return (each for adapter in self._adapters for each in adapter.immovable())

    def other_names(self) -> Mapping[str, str]:
        return {other: name for adapter in self._adapters for other, name in adapter.other_names().items()}
