"""What we refuse, and what a framework places itself.

Frameworks are recognised by the classes that an object is made of, which are looked up where they are loaded: none is imported here.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from placement.core.errors import RegistrationError
from placement.core.loaded_classes import is_a

TRACK = "or register it with external=True to have it tracked and never moved"


class _Known(NamedTuple):
    """A class of a framework, and what is to be said about its instances."""

    module: str
    """Where the class can be had once the framework is loaded."""
    name: str
    advice: str


_REFUSED_MODULES = (
    _Known("torch.nn.parallel.data_parallel", "DataParallel", "register the plain module: one process drives one device"),
    _Known("torch.jit", "ScriptModule", "register the eager module, or use torch.compile instead of TorchScript"),
)
_EXTERNAL_OPTIMIZERS = (
    _Known(
        "megatron.core.optimizer.cpu_offloading.hybrid_optimizer",
        "HybridDeviceOptimizer",
        "Megatron's HybridDeviceOptimizer places its state itself",
    ),
    _Known("deepspeed.ops.adam.cpu_adam", "DeepSpeedCPUAdam", "DeepSpeed's CPU Adam keeps its state on the CPU"),
    _Known("deepspeed.ops.adagrad.cpu_adagrad", "DeepSpeedCPUAdagrad", "DeepSpeed's CPU Adagrad keeps its state on the CPU"),
    _Known("deepspeed.ops.lion.cpu_lion", "DeepSpeedCPULion", "DeepSpeed's CPU Lion keeps its state on the CPU"),
    _Known("deepspeed.runtime.base_optimizer", "DeepSpeedOptimizer", "DeepSpeed moves its state itself (offload_states, reload_states)"),
    _Known("torchao.optim.cpu_offload", "CPUOffloadOptimizer", "torchao's CPUOffloadOptimizer keeps its state on the CPU"),
)
_REFUSED_OPTIMIZERS: tuple[_Known, ...] = ()


def _match(obj: object, table: Iterable[_Known]) -> _Known | None:
    return next((known for known in table if is_a(obj, known.module, known.name)), None)


def _refusal(name: str, where: str, found: str, supported: str, advice: str) -> RegistrationError:
    return RegistrationError(f"{name!r}{where}: {found} is not supported now. Supported: {supported}. What to do: {advice}.")


_PLAIN_MODULES = "torch.nn.Module objects, also compiled, quantised, with adapters, under DDP, FSDP1, FSDP2, tensor parallel, DeepSpeed"
_PLAIN_OPTIMIZERS = "the optimizers of torch.optim and their like, and wrappers that hold them"


def refuse_module(name: str, module: torch.nn.Module) -> None:
    """Refuse a module that a framework shards, wraps or moves, in a way that no adapter knows.

    Raises:
        RegistrationError: what was found and where, what is supported now, what to do.
    """
    answers: dict[type, _Known | None] = {}
    for path, part in module.named_modules():
        where = f" (submodule {path!r})" if path else ""
        cls = type(part)
        if cls not in answers:
            answers[cls] = _match(part, _REFUSED_MODULES)
        if (known := answers[cls]) is not None:
            raise _refusal(name, where, f"{cls.__module__}.{cls.__qualname__}", _PLAIN_MODULES, known.advice)
        if _has_yet_to_resize(part):
            found = "fake quantisation by channel that has seen no data yet, whose first forward pass resizes its buffers,"
            raise _refusal(name, where, found, _PLAIN_MODULES, f"run one forward pass before registering, {TRACK}")
        if (hook := part.__dict__.get("_hf_hook")) is not None and _moves_weights(hook):
            found = f"a module that accelerate moves at every forward ({type(hook).__name__})"
            raise _refusal(name, where, found, _PLAIN_MODULES, f"remove_hook_from_submodules(model), or load without device_map, {TRACK}")
        device_map = part.__dict__.get("hf_device_map")
        if isinstance(device_map, dict) and len({str(device) for device in device_map.values()}) > 1:
            raise _refusal(name, where, f"a device map over {len(device_map)} places", _PLAIN_MODULES, f"load without device_map, {TRACK}")


def _has_yet_to_resize(part: torch.nn.Module) -> bool:
    """Whether the first forward pass of a module resizes its buffers, whose places have a size of their own."""
    if not is_a(part, "torch.ao.quantization.fake_quantize", "FakeQuantize"):
        return False
    seen = getattr(getattr(part, "activation_post_process", None), "min_val", None)
    return bool(getattr(part, "is_per_channel", False)) and isinstance(seen, torch.Tensor) and seen.numel() == 0


def _moves_weights(hook: Any) -> bool:
    """Whether a hook of accelerate may move weights at a forward. Where a device map has one place it only moves inputs there."""
    if is_a(hook, "accelerate.hooks", "SequentialHook"):
        return any(_moves_weights(each) for each in hook.hooks)
    return not is_a(hook, "accelerate.hooks", "AlignDevicesHook") or bool(hook.offload)


def captured_collectives() -> str | None:
    """Why CUDA graphs with collectives in them may hang after a handle has moved, and what to do; None where they cannot.

    NCCL registers the buffers of a captured collective by the physical memory behind them, unless it is told not to. What a graph has
    captured cannot be seen from here: it is said wherever NCCL is in use.
    """
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized() or os.environ.get("NCCL_GRAPH_REGISTER") == "0":
        return None
    if "nccl" not in str(distributed.get_backend_config()).lower():
        return None
    return (
        "NCCL is in use and NCCL_GRAPH_REGISTER is not 0: a CUDA graph that captures a collective over registered memory may hang when "
        "it is replayed after that memory was offloaded and loaded. If you capture any, set NCCL_GRAPH_REGISTER=0 before NCCL starts."
    )


def refuse_optimizer(name: str, objects: Iterable[object]) -> None:
    """Refuse an optimizer when it, or one that it wraps, keeps state where no adapter finds it, or where nobody may touch it.

    Raises:
        RegistrationError: what was found, what is supported now, what to do.
    """
    for obj in objects:
        found = f"{type(obj).__module__}.{type(obj).__qualname__}"
        if (known := _match(obj, _REFUSED_OPTIMIZERS)) is not None:
            raise _refusal(name, "", found, _PLAIN_OPTIMIZERS, known.advice)
        if is_a(obj, "torch.distributed.optim.zero_redundancy_optimizer", "ZeroRedundancyOptimizer") and obj._overlap_with_ddp:  # type: ignore[attr-defined]
            found += " with overlap_with_ddp=True, which steps inside the backward pass and moves parameters into buckets on the way,"
            raise _refusal(name, "", found, _PLAIN_OPTIMIZERS, f"leave overlap_with_ddp out, {TRACK}")
        if is_a(obj, "bitsandbytes.optim.optimizer", "Optimizer8bit") and getattr(obj, "is_paged", False):
            found += " with is_paged, whose state lies in managed memory that the driver pages between host and device,"
            raise _refusal(name, "", found, _PLAIN_OPTIMIZERS, f"use the optimizer that is not paged: placement offloads it, {TRACK}")


def external_optimizer(objects: Iterable[object], parameters: Sequence[torch.Tensor], compute_device: torch.device) -> str | None:
    """Why a framework itself places an optimizer's state; None when it does not.

    Parameters sharded by FSDP2 whose local part lies on the CPU beside an accelerator are under CPUOffloadPolicy.
    """
    for obj in objects:
        if (known := _match(obj, _EXTERNAL_OPTIMIZERS)) is not None:
            return known.advice
    local = [getattr(parameter, "_local_tensor", None) for parameter in parameters]
    if compute_device.type != "cpu" and local and all(part is not None and part.device.type == "cpu" for part in local):
        return "FSDP2's CPUOffloadPolicy keeps its parameters on the CPU"
    return None
