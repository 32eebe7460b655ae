"""The interface of rollout engines, and an engine that lives in this process."""

from __future__ import annotations

import abc
import functools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from placement.core.errors import EngineError, RegistrationError
from placement.core.modes import without_modes
from placement.core.weak import reference
from placement.frameworks.base import frameworks_of
from placement.frameworks.weights import Weight
from placement.ownership.adapter import Seen
from placement.ownership.module import ModuleAdapter
from placement.publish.buckets import WeightInfo, writable
from placement.storage.managed import ManagedStorage
from placement.storage.owners import RANGES
from placement.tensors.plain import Owned, plain_parts

UNPUBLISHED = "the actor was loaded from a checkpoint, and has not been published since"
"""Why an engine needs weights, if it was not given those of a checkpoint."""
HALF = "a sync has begun and was not finished"
# the base is complete: adapters alone can fill the weights
HALF_OF_ADAPTERS = "a sync of adapters has begun and was not finished"


class Engine(abc.ABC):
    """A rollout engine whose memory lies in this process.

    The manager calls `modules()` at registration and at every offload. The modules that it names
    move with the engine, byte for byte. The user calls `update_weights` during a weight sync, with
    the engine on the device.

    Example:
        ::

            class GraphedEngine(Engine):
                def __init__(self, module):
                    self.module = module

                def modules(self):
                    return [self.module]

                def update_weights(self, bucket):
                    self.module.load_weights(bucket)  # raises EngineError for an unknown name
    """

    stale: str | None = None
    """Why the weights must be published before the engine can generate; None if they need not."""

    @property
    def needs_weights(self) -> bool:
        """Whether a weight sync must come before the engine can generate: its weights were
        discarded, a sync was cut off, or the actor was loaded from a checkpoint."""
        return self.stale is not None

    def weights_filled(self) -> None:
        """Record that the weights are complete and new. Call it for weights that came another way
        (a broadcast, a reload from disk)."""
        self.stale = None

    @abc.abstractmethod
    def modules(self) -> Sequence[torch.nn.Module]:
        """The modules that hold the engine's device memory."""

    @abc.abstractmethod
    def update_weights(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Copy published weights into the engine. The tensors belong to the publisher; nothing of
        them is kept after the return.

        Raises:
            EngineError: the engine does not have a name or shape. Nothing of the bucket has been
                copied.
        """


class TorchEngine(Engine):
    """A plain module that generates: the default engine where no other project's engine is used.

    Args:
        module: The model, with the names and shapes that are published to it: plain, compiled, with
            adapters, under DDP, FSDP1, FSDP2 or tensor parallelism. The manager holds a registered
            engine, and with it the module.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        if not isinstance(module, torch.nn.Module):
            raise TypeError(
                f"TorchEngine takes a torch.nn.Module, not a {type(module).__name__}; "
                "placement.engines has the engines for vLLM and SGLang"
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
        """Copy published weights into the module, cast to its dtypes. Each rank of a sharded module
        takes its own part.

        A name is one under which the module is published, or the module's own. Calls no collective.
        A call of the module that another thread is in may read old and new weights.

        Nothing is copied before all weights of the bucket are known to fit; before the first of
        `Handle.weights`, those of all buckets. Until the last of these the weights are invalid.
        """
        number = getattr(bucket, "number", None)
        is_adapters = getattr(bucket, "adapters", "merged") == "separate"
        half = HALF_OF_ADAPTERS if is_adapters else HALF
        with without_modes():
            self._require_resident()
            if self._sync is None or not number or self._sync[0] is not self.module:
                weights = self._writable()
                for info in getattr(bucket, "announced", ()):
                    _fitting_weight(weights, info.name, info)
                self._sync = self.module, weights
            if number == 0 and self.stale in (None, HALF_OF_ADAPTERS):
                self.stale = half
            _write_all(bucket, self._sync[1])
        is_last = getattr(bucket, "is_last", False)
        if number is None or is_last:
            self._sync = None
        if is_last and self.stale == half:
            self.weights_filled()

    def _writable(self) -> Mapping[str, Weight]:
        """The weights. Tensors that frameworks have gathered for computing are released first:
        values written there would be lost."""
        frameworks = frameworks_of(self.module)
        if frameworks and torch.accelerator.is_available():
            torch.accelerator.synchronize()
        with torch.inference_mode(False), torch.no_grad():
            for framework in frameworks:
                framework.ready()
        try:
            return writable(self.module, frameworks)
        except ValueError as error:
            raise EngineError(
                f"weights cannot be published to {type(self.module).__qualname__}: {error}"
            ) from error

    def _require_resident(self) -> None:
        """Raise EngineError if the weights are offloaded. All of them move together, so the first
        that is managed decides."""
        for parameter in self.module.parameters():
            for _, tensor in plain_parts(parameter, ""):
                storage = RANGES.owner_of(tensor.untyped_storage().data_ptr())
                if not isinstance(storage, ManagedStorage):
                    continue
                if storage.on_device:
                    return
                raise EngineError(
                    f"the weights of {storage.name!r} are offloaded: update them inside "
                    "manager.phase('weight_sync')"
                )


def _write_all(
    bucket: Sequence[tuple[str, torch.Tensor]],
    weights: Mapping[str, Weight],
) -> None:
    """Write a bucket into these weights. Raises EngineError: one does not fit, and nothing was
    written."""
    writes = []
    name = ""
    try:
        with torch.inference_mode(False), torch.no_grad():
            for name, value in bucket:
                weight = _fitting_weight(weights, name, value)
                writes.append((name, weight.writer(value)))
            for name, write in writes:  # noqa: B007  # the name is for the error below
                write()
    except (ValueError, RuntimeError, TypeError) as error:
        raise EngineError(
            f"published weight {name!r} cannot be written into the engine's weight: it {error}"
        ) from error


def _fitting_weight(
    weights: Mapping[str, Weight], name: str, value: torch.Tensor | WeightInfo
) -> Weight:
    """The weight of this name, which can take a value of such a shape and dtype. Raises
    EngineError: there is none."""
    weight = weights.get(name)
    if weight is None:
        raise EngineError(f"published weight {name!r} is not a weight of the engine's module")
    if weight.shape != value.shape:
        raise EngineError(
            f"published weight {name!r} has shape {tuple(value.shape)}, the engine's has "
            f"{tuple(weight.shape)}"
        )
    if weight.problem is not None:
        raise EngineError(
            f"published weight {name!r} cannot be written into the engine's weight: it "
            f"{weight.problem}"
        )
    if _number_format(value.dtype) != _number_format(weight.dtype):
        raise EngineError(
            f"published weight {name!r} has dtype {value.dtype}, the engine's has {weight.dtype}: "
            "a cast would change what the values mean; publish from a module that is quantised in "
            "the same way"
        )
    return weight


def _number_format(dtype: torch.dtype) -> object:
    """The dtypes between which a cast keeps the meaning of a value have the same. A dtype of one
    byte is its own: its values may be codes."""
    if dtype.itemsize == 1:
        return dtype
    return dtype.is_floating_point, dtype.is_complex


class EngineAdapter(ModuleAdapter):
    """The adapter for an engine: that of the module which the engine names now. Several modules are
    the parts of one. The engine may replace its modules.

    Raises:
        RegistrationError: a module is not supported, or a framework moves only the old or only the
            new modules.
    """

    kind = "engine"

    def __init__(
        self, engine: Engine, *, name: str, compute_device: torch.device, external: bool = False
    ) -> None:
        self._engine = weakref.ref(engine)
        self._adapt = functools.partial(
            ModuleAdapter, name=name, compute_device=compute_device, external=external
        )
        self._take(engine.modules())

    def _take(self, modules: Sequence[torch.nn.Module]) -> None:
        combined = modules[0] if len(modules) == 1 else torch.nn.ModuleList(modules)
        adapter = self._adapt(combined)
        adapter.check(adapter.owned())
        vars(self).update(vars(adapter))  # at once, so that an error leaves everything as it was
        self._modules = [reference(module) for module in modules]
        # kept alive here: the adapter has only a weak reference
        self._list = None if len(modules) == 1 else combined

    def _has_replaced(self) -> bool:
        """Whether the engine names other modules than at the last scan. While it is handed back
        that does not count: a new one may be refused, and has no place."""
        engine = self._engine()
        if engine is None or self.hands_back:
            return False
        modules = engine.modules()
        if len(modules) != len(self._modules):
            return True
        for module, at_last_scan in zip(modules, self._modules, strict=True):
            if module is not at_last_scan():
                return True
        return False

    def owned(self) -> Iterator[Owned]:
        engine = self._engine()
        if engine is not None and self._has_replaced():
            before = self.external
            self._take(engine.modules())
            if (self.external is None) is not (before is None):
                raise RegistrationError(
                    f"{self._name!r} has other modules than when it was registered, and only the "
                    f"old or only the new ones are external ({self.external or before}). What to "
                    "do: unregister it, and register it again"
                )
        return super().owned()

    def unchanged(self) -> Seen | None:
        return None if self._has_replaced() else super().unchanged()

    def record_if_current(self) -> object | None:
        return None if self._has_replaced() else super().record_if_current()

    def key_objects(self) -> Sequence[Any]:
        if self._list is None:
            objects = [self._engine(), *super().key_objects()]
        else:
            objects = [self._engine(), *(module() for module in self._modules)]
        return [alive for alive in objects if alive is not None]
