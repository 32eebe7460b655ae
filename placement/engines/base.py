"""What a rollout engine is to placement, and the engine that lives in this process."""

from __future__ import annotations

import abc
import functools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from placement.adapters.base import Adapter, Owned
from placement.adapters.module import ModuleAdapter
from placement.errors import EngineError
from placement.modes import without_modes


class Engine(abc.ABC):
    """A rollout engine whose memory lies in this process.

    `modules()` is asked at registration and at every offload; what it names moves with the engine, byte for byte, as a
    module would. `update_weights` is called by the user during a weight sync, with the engine on the device.
    """

    @abc.abstractmethod
    def modules(self) -> Sequence[torch.nn.Module]:
        """The modules that hold the engine's device memory."""

    @abc.abstractmethod
    def update_weights(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Take over published weights. The tensors are the publisher's; nothing of them is kept after the return.

        Raises:
            EngineError: a name or shape that the engine does not have; what came before it in the bucket has been taken over.
        """


class TorchEngine(Engine):
    """A plain module that generates: the default where no engine of another project is used.

    Args:
        module: The model, with the names and shapes that are published to it.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module

    def modules(self) -> Sequence[torch.nn.Module]:
        return (self.module,)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The module's, readable in every state."""
        return dict(self.module.state_dict())

    def update_weights(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Copy published weights into the module, cast to its types."""
        own: dict[str, torch.Tensor] = dict(self.module.named_parameters(remove_duplicate=False))
        own.update(self.module.named_buffers(remove_duplicate=False))
        with without_modes(), torch.no_grad():
            for name, tensor in bucket:
                target = own.get(name)
                if target is None:
                    raise EngineError(f"published weight {name!r} is not in the engine's module")
                if target.shape != tensor.shape:
                    raise EngineError(f"published weight {name!r} has shape {tuple(tensor.shape)}, the engine's has {tuple(target.shape)}")
                target.copy_(tensor)


class EngineAdapter(Adapter):
    """The tensors of an engine's modules."""

    kind = "engine"

    def __init__(self, engine: Engine, *, name: str, compute_device: torch.device) -> None:
        self._adapt = functools.partial(ModuleAdapter, name=name, compute_device=compute_device)
        self._modules = [self._adapt(module) for module in engine.modules()]
        self._engine = weakref.ref(engine)

    def owned(self) -> Iterator[Owned]:
        """Of the modules that the engine has now: it may have made itself another model since.

        Raises:
            RegistrationError: one of them cannot be moved.
        """
        if (engine := self._engine()) is not None:
            known = {id(key): adapter for adapter in self._modules for key in adapter.key_objects()}
            self._modules = [known.get(id(module)) or self._adapt(module) for module in engine.modules()]
        for adapter in self._modules:
            yield from adapter.owned()

    def ready(self) -> None:
        for adapter in self._modules:
            adapter.ready()

    def foreign(self) -> Iterator[tuple[str, int]]:
        for adapter in self._modules:
            yield from adapter.foreign()

    def drop_caches(self) -> None:
        for adapter in self._modules:
            adapter.drop_caches()

    def key_objects(self) -> Sequence[Any]:
        """The modules and the engine."""
        engine = self._engine()
        keys = [key for adapter in self._modules for key in adapter.key_objects()]
        return keys if engine is None else [*keys, engine]
