"""The interface of rollout engines, and an engine that lives in this process."""

from __future__ import annotations

import abc
import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from placement.core.call_guard import wait_for_calls
from placement.core.torch_modes import without_modes
from placement.engines.taker import WeightTaker
from placement.ownership.module import CompositeAdapter, ModuleAdapter


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
        self._taker: WeightTaker | None = None
        """The weight taker of the sync that is under way; None outside one."""

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
            taker = self._taker
            if taker is None or not number or taker.module is not self.module:
                taker = self._taker = WeightTaker(self.module)
            taker.take(bucket)
        if number is None or getattr(bucket, "is_last", False):
            self._taker = None


class EngineAdapter(CompositeAdapter):
    """The adapter for an engine: it covers the tensors of the engine's modules."""

    kind = "engine"

    def __init__(self, engine: Engine, *, name: str, compute_device: torch.device, external: bool = False) -> None:
        self._engine = weakref.ref(engine)
        adapt = functools.partial(ModuleAdapter, name=name, compute_device=compute_device, external=external)
        super().__init__(name, adapt, engine.modules())

    def current_modules(self) -> Sequence[torch.nn.Module] | None:
        """The modules that the engine names now, which may differ from those at registration; None when the engine is gone."""
        engine = self._engine()
        return None if engine is None else engine.modules()

    def key_objects(self) -> Sequence[Any]:
        """The modules and the engine itself."""
        engine, keys = self._engine(), super().key_objects()
        return keys if engine is None else [*keys, engine]
