"""What a rollout engine is to placement, and the engine that lives in this process."""

from __future__ import annotations

import abc
import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from placement.core.torch_modes import without_modes
from placement.engines.taker import WeightTaker
from placement.ownership.composite import CompositeAdapter
from placement.ownership.module import ModuleAdapter


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
        module: The model, with the names and shapes that are published to it: plain, compiled, with adapters, under DDP, FSDP1,
            FSDP2 or tensor parallelism. Who registers the engine makes the manager hold it, and with it the module.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self._taker: WeightTaker | None = None
        """Of the sync that is under way."""

    def modules(self) -> Sequence[torch.nn.Module]:
        return (self.module,)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The module's, readable in every state."""
        return dict(self.module.state_dict())

    def update_weights(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Copy published weights into the module, cast to its types; of a sharded module each rank takes its part.

        A name is one that the module is published under, or the module's own. Calls no collective.
        """
        number = getattr(bucket, "number", None)
        with without_modes():
            taker = self._taker
            if taker is None or not number or taker.module is not self.module:
                taker = self._taker = WeightTaker(self.module)
            taker.take(bucket)
        if number is None or getattr(bucket, "is_last", False):
            self._taker = None


class EngineAdapter(CompositeAdapter):
    """The tensors of an engine's modules."""

    kind = "engine"

    def __init__(self, engine: Engine, *, name: str, compute_device: torch.device, external: bool = False) -> None:
        self._engine = weakref.ref(engine)
        adapt = functools.partial(ModuleAdapter, name=name, compute_device=compute_device, external=external)
        super().__init__(name, adapt, engine.modules())

    def current_modules(self) -> Sequence[torch.nn.Module] | None:
        """Those that the engine names now: it may have made itself another model since."""
        engine = self._engine()
        return None if engine is None else engine.modules()

    def key_objects(self) -> Sequence[Any]:
        """The modules and the engine."""
        engine, keys = self._engine(), super().key_objects()
        return keys if engine is None else [*keys, engine]
