"""Libraries for low precision: bitsandbytes, torchao and TransformerEngine.

torchao's quantised weights need no code here, because they are wrappers that list their tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from placement.frameworks.base import Advised, Framework, Named
from placement.tensors.plain import Owned, has_bytes, is_a, nested_tensors

_WEIGHTS = "bitsandbytes.nn.modules"
_MODULE = Named("torch.nn", "Module")
_OPTIMIZER = Named("bitsandbytes.optim.optimizer", "Optimizer8bit")


class Bitsandbytes(Framework):
    """The parameters of classes `Params4bit` and `Int8Params` in one module tree.

    Two small tensors of a doubly quantised weight stay on the device: `offset`, and the code of its
    statistics. bitsandbytes' `state_dict()` computes with both (`item()`, `clone()`), and must work
    while the module is offloaded.
    """

    packages = ("bitsandbytes",)
    carriers = (Named(_WEIGHTS, "Params4bit"), Named(_WEIGHTS, "Int8Params"))

    @classmethod
    def refuse_optimizer(cls, optimizer: Any) -> tuple[str, str] | None:
        if not _OPTIMIZER.is_of(optimizer) or not getattr(optimizer, "is_paged", False):
            return None
        problem = (
            " with is_paged, whose state lies in managed memory that the driver pages between host "
            "and device,"
        )
        return problem, "use the variant that is not paged: placement offloads it"

    @classmethod
    def optimizer_tables(cls, optimizer: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """The quantisation tables that an 8-bit optimizer shares among its parameters' state. A
        loaded state has tables of its own."""
        if _OPTIMIZER.is_of(optimizer):
            for name, table in optimizer.name2qmap.items():
                yield f"name2qmap.{name}", table

    @classmethod
    def find(cls, root: torch.nn.Module) -> Framework | None:
        if _WEIGHTS not in sys.modules or next(_weights(root), None) is None:
            return None
        return cls(root)

    def refusal(self, compute_device: torch.device) -> str | None:
        for path, weight in _weights(self.root()):
            if not _is_quantized(weight):
                return (
                    f"{path!r} is a weight for bitsandbytes that is not quantised yet; its first "
                    "move to a device quantises it. What to do: call model.to(device) before "
                    "registering"
                )
            if weight.device != compute_device:
                return (
                    f"{path!r} was quantised by bitsandbytes and is on {weight.device}, where its "
                    f"format may differ. What to do: call model.to({str(compute_device)!r}) before "
                    "registering"
                )
        return None

    def tensors(self) -> Iterator[Owned]:
        for path, weight in _weights(self.root()):
            state = getattr(weight, "quant_state", None)
            if state is not None:
                statistics = {"absmax": state.absmax, "quant_map": state.code}
                nested = _nested(state)
                if nested is not None:
                    statistics["nested_absmax"] = nested.absmax
            else:
                statistics = {name: getattr(weight, name, None) for name in ("CB", "SCB")}
            yield from _with_bytes(path, statistics)
        for path, module in self.parts(_MODULE):
            # The first forward pass of an 8-bit layer moves the statistics from the weight into
            # this object.
            state = vars(module).get("state")
            if is_a(state, "bitsandbytes.autograd._functions", "MatmulLtState"):
                yield from _with_bytes(f"{path}state", vars(state))

    def kept_by_framework(self) -> Iterator[tuple[str, int]]:
        counted = set()
        for path, weight in _weights(self.root()):
            state = getattr(weight, "quant_state", None)
            if state is None:
                continue
            for name, tensor in (
                ("nested_offset", state.offset),
                ("nested_quant_map", getattr(_nested(state), "code", None)),
            ):
                if tensor is not None and id(tensor) not in counted:
                    counted.add(id(tensor))
                    yield f"{path}.{name}", tensor.untyped_storage().nbytes()


def _weights(root: torch.nn.Module | None) -> Iterator[tuple[str, Any]]:
    if root is None:
        return
    for path, parameter in root.named_parameters():
        if is_a(parameter, _WEIGHTS, "Params4bit") or is_a(parameter, _WEIGHTS, "Int8Params"):
            yield path, parameter


def _nested(state: Any) -> Any:
    """The statistics of a doubly quantised weight's statistics; None if it has none. Packing a
    weight for a kernel of the CPU deletes the attribute."""
    return getattr(state, "state2", None)


def _is_quantized(weight: Any) -> bool:
    if is_a(weight, _WEIGHTS, "Params4bit"):
        return weight.quant_state is not None
    return bool(weight.has_fp16_weights) or weight.dtype is torch.int8


def _with_bytes(path: str, fields: dict[str, Any]) -> Iterator[Owned]:
    """The tensors among the values of an object's fields."""
    for name, value in fields.items():
        if isinstance(value, torch.Tensor) and has_bytes(value):
            yield Owned(f"{path}.{name}", value)


_OFFLOADED = Named("torchao.optim.cpu_offload", "CPUOffloadOptimizer")


class TorchAO(Framework):
    """torchao's `CPUOffloadOptimizer`, which steps copies of the parameters on the CPU."""

    packages = ("torchao",)
    external_optimizers = (
        Advised(_OFFLOADED, "torchao's CPUOffloadOptimizer keeps its state on the CPU"),
    )

    @classmethod
    def stepped_for(cls, objects: Sequence[object]) -> Mapping[int, torch.Tensor]:
        models: dict[int, torch.Tensor] = {}
        optimizer: Any
        for optimizer in filter(_OFFLOADED.is_of, objects):
            for model, copy in optimizer.param_d2h_map.items():
                models[id(copy)] = model
        return models


_TE = Named("transformer_engine.pytorch.module.base", "TransformerEngineBaseModule")


class TransformerEngine(Framework):
    """The caches of TransformerEngine's modules in one module tree. The modules make them again if
    they are dropped."""

    packages = (_TE.module,)
    recognised_by = (_TE,)

    def caches(self) -> Iterator[torch.Tensor]:
        for _, module in self.parts(_TE):
            workspaces = module.__dict__.get("_fp8_workspaces")
            yield from (tensor for _, tensor in nested_tensors(workspaces, ""))

    def drop_caches(self) -> None:
        for _, module in self.parts(_TE):
            workspaces = module.__dict__.get("_fp8_workspaces")
            if isinstance(workspaces, dict):
                workspaces.clear()
        for name in (_TE.module, "transformer_engine.pytorch.module._common"):
            gradients = getattr(sys.modules.get(name), "_dummy_wgrads", None)
            if isinstance(gradients, dict):
                gradients.clear()
