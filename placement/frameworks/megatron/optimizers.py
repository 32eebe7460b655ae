"""Megatron-Core's optimizers: wrappers around torch's, which step main parameters and shards in place of the model's parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from placement.frameworks.base import Advised, Framework, Named, OwnState
from placement.frameworks.megatron.hybrid import HYBRID, HybridState

_OPTIMIZER = Named("megatron.core.optimizer.optimizer", "MegatronOptimizer")
_MODULE = Named("megatron.core.transformer.module", "MegatronModule")
_STEPPED = (
    ("shard_fp32_from_float16_groups", "model_float16_groups"),
    ("shard_float16_groups", "model_float16_groups"),
    ("shard_fp32_groups", "model_fp32_groups"),
    ("fp32_from_float16_groups", "float16_groups"),
)
"""Pairs of attributes: the stepped tensors, and the model's parameters in the same order."""
_READING = (
    "sharded_state_dict",
    "save_parameter_state",
    "load_parameter_state",
    "reload_model_params",
    "offload_to_cpu",
    "restore_from_cpu",
)


class MegatronOptimizers(Framework):
    """The part of `Megatron` that is about optimizers."""

    external_optimizers = (Advised(HYBRID, "Megatron's HybridDeviceOptimizer places its state itself"),)

    @classmethod
    def holds_optimizers(cls, obj: object) -> bool:
        """Whether an object is a Megatron optimizer. It holds no optimizer on a rank that has nothing to step."""
        return _OPTIMIZER.is_of(obj)

    @classmethod
    def own_state(cls, optimizer: object) -> OwnState | None:
        return HybridState(optimizer) if HYBRID.is_of(optimizer) else None

    @classmethod
    def stepped_for(cls, objects: Sequence[object]) -> Mapping[int, torch.Tensor]:
        found: dict[int, torch.Tensor] = {}
        for obj in filter(_OPTIMIZER.is_of, objects):
            for stepped, models in _STEPPED:
                for ours, theirs in zip(getattr(obj, stepped, ()), getattr(obj, models, ()), strict=False):
                    # `own` is None if the inner optimizer itself keeps the main parameter.
                    found.update({id(own): model for own, model in zip(ours, theirs, strict=False) if own is not None})
        return found

    @classmethod
    def further_parameters(cls, objects: Sequence[object]) -> Iterator[torch.Tensor]:
        for obj in filter(_OPTIMIZER.is_of, objects):
            for chunk in getattr(obj, "model_chunks", ()):
                yield from chunk.parameters()

    @classmethod
    def optimizer_scalars(cls, objects: Sequence[object]) -> Iterator[tuple[str, torch.Tensor]]:
        """Loss scales and overflow flags: a few bytes, which stay on the device because forward and backward passes read them."""
        for obj in filter(_OPTIMIZER.is_of, objects):
            for owner in (obj, getattr(obj, "grad_scaler", None)):
                for name, value in getattr(owner, "__dict__", {}).items():
                    if isinstance(value, torch.Tensor):
                        yield f"{type(owner).__name__}.{name}", value

    @classmethod
    def reading_methods(cls, obj: object) -> Sequence[str]:
        if _OPTIMIZER.is_of(obj):
            return [name for name in _READING if callable(getattr(type(obj), name, None))]
        return ["sharded_state_dict"] if _MODULE.is_of(obj) else []
