"""DeepSpeed's engines and ZeRO optimizers. DeepSpeed itself moves their bytes; placement tracks and
guards them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from placement.core.weak import reference
from placement.frameworks.base import Advised, Framework, Named, Wrapper
from placement.frameworks.weights import Reader, Weight
from placement.tensors.plain import Owned, loaded_class, nested_tensors

_GROUPS = ("bit16_groups", "fp16_groups", "bf16_groups")
"""Attributes of DeepSpeed's optimizers with the model's own parameters. The optimizers step
flattened copies of these."""
_FLAT = (
    "bit16_groups_flat",
    "fp16_groups_flat",
    "bf16_groups_flat",
    "fp16_partitioned_groups_flat",
    "averaged_gradients",
)
_ZERO = Named("deepspeed.runtime.base_optimizer", "DeepSpeedOptimizer")
"""The base class of DeepSpeed's own optimizers, which flatten the parameters that they step (ZeRO 1
to 3, bf16, fp16)."""


class PartitionedWeight(Weight):
    """A weight under ZeRO 3. Each rank has a part; DeepSpeed gathers it for `whole`, and frees the
    gathered value afterwards."""

    is_collective = True

    def __init__(self, parameter: Any) -> None:
        self.shape = parameter.ds_shape
        self.dtype = parameter.dtype
        self._parameter = parameter

    def whole(self, reader: Reader, dtype: torch.dtype) -> torch.Tensor:
        deepspeed: Any = sys.modules["deepspeed"]
        with deepspeed.zero.GatheredParameters([self._parameter]):
            return reader.read(self._parameter.data, dtype)


class DeepSpeed(Framework):
    """An engine whose optimizer is DeepSpeed's own. An engine without one (ZeRO stage 0 in float32)
    is treated as a plain module."""

    packages = ("deepspeed",)
    external = "DeepSpeed moves its states itself (engine.offload_states, engine.reload_states)"
    wrappers = (Wrapper(Named("deepspeed.runtime.engine", "DeepSpeedEngine"), "module"),)
    external_optimizers = (
        Advised(
            Named("deepspeed.ops.adam.cpu_adam", "DeepSpeedCPUAdam"),
            "DeepSpeed's CPU Adam keeps its state on the CPU",
        ),
        Advised(
            Named("deepspeed.ops.adagrad.cpu_adagrad", "DeepSpeedCPUAdagrad"),
            "DeepSpeed's CPU Adagrad keeps its state on the CPU",
        ),
        Advised(
            Named("deepspeed.ops.lion.cpu_lion", "DeepSpeedCPULion"),
            "DeepSpeed's CPU Lion keeps its state on the CPU",
        ),
        Advised(_ZERO, "DeepSpeed moves its state itself (offload_states, reload_states)"),
    )

    @classmethod
    def flattened_parameters(cls, objects: Sequence[object]) -> Sequence[torch.Tensor]:
        parameters: dict[int, torch.Tensor] = {}
        for obj in filter(_ZERO.is_of, objects):
            for name in _GROUPS:
                for _, parameter in nested_tensors(vars(obj).get(name), name):
                    parameters[id(parameter)] = parameter
        return list(parameters.values())

    @classmethod
    def optimizer_away(cls, optimizer: object) -> str | None:
        names = _offloaded(optimizer)
        return _advice(names) if names else None

    def __init__(self, engine: Any) -> None:
        self._engine: Callable[[], Any] = reference(engine)

    @classmethod
    def find(cls, root: torch.nn.Module) -> Framework | None:
        engine_class = loaded_class("deepspeed.runtime.engine", "DeepSpeedEngine")
        if engine_class is None:
            return None
        engines = (part for part in root.modules() if isinstance(part, engine_class))
        engine: Any = next(engines, None)
        if engine is None:
            return None
        is_own = _ZERO.is_of(engine.optimizer) or engine.zero_optimization_stage() > 0
        return cls(engine) if is_own else None

    def away(self) -> str | None:
        engine = self._engine()
        if engine is None:
            return None
        offloaded = _offloaded(engine.optimizer)
        return _advice(offloaded) if "lp_params" in offloaded else None

    def weights(self) -> Mapping[int, Mapping[str, Weight | None]]:
        engine = self._engine()
        if engine is None:
            return {}
        by_module: dict[int, dict[str, Weight | None]] = {}
        by_parameter: dict[int, Weight] = {}  # one for all names of a parameter
        for part in engine.module.modules():
            for name, parameter in part._parameters.items():
                if parameter is None or not hasattr(parameter, "ds_tensor"):
                    continue
                weight = by_parameter.setdefault(id(parameter), PartitionedWeight(parameter))
                by_module.setdefault(id(part), {})[name] = weight
        return by_module

    def tensors(self) -> Iterator[Owned]:
        """The flat buffers behind the parameters, and under ZeRO 3 this rank's parts of parameters.
        Several may share one storage."""
        engine = self._engine()
        if engine is None:
            return
        fields = vars(engine.optimizer)
        for field in _FLAT:
            for name, tensor in nested_tensors(fields.get(field), f"optimizer.{field}"):
                yield Owned(name, tensor)
        for name, parameter in engine.module.named_parameters():
            part = vars(parameter).get("ds_tensor")
            if isinstance(part, torch.Tensor):
                yield Owned(f"{name}.ds_tensor", part)


def _offloaded(optimizer: object) -> frozenset[str]:
    """The kinds of state that DeepSpeed has offloaded for an optimizer and its model ("lp_params",
    "hp_params", "optim_states", ...)."""
    if not _ZERO.is_of(optimizer):
        return frozenset()
    states = getattr(optimizer, "offloaded_states", ())
    return frozenset(str(getattr(state, "value", state)) for state in states)


def _advice(names: Iterable[str]) -> str:
    return f"DeepSpeed has offloaded {', '.join(sorted(names))}; call engine.reload_states() first"
