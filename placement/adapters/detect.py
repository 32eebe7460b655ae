"""What we refuse, and what a framework places itself.

Frameworks are recognised by the classes that an object is made of (`__module__` and name), so none of them is imported here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from placement.errors import RegistrationError

TRACK = "or register it with external=True to have it tracked and never moved"


class _Known(NamedTuple):
    """A class of a framework."""

    package: str
    """The class's module is this one or lies below it."""
    name: str | None
    """None: every class of the package."""
    advice: str


_REFUSED_MODULES = (
    _Known("torch.nn.parallel", "DistributedDataParallel", f"register a module that is not wrapped, {TRACK}"),
    _Known("torch.nn.parallel", "DataParallel", "register the plain module: one process drives one device"),
    _Known("torch.distributed.fsdp", "FullyShardedDataParallel", f"register a module that is not wrapped, {TRACK}"),
    _Known("torch.jit", "ScriptModule", "register the eager module, or use torch.compile instead of TorchScript"),
    _Known("deepspeed", "DeepSpeedEngine", f"let DeepSpeed offload it (offload_states), {TRACK}"),
    _Known("deepspeed", "PipelineEngine", f"let DeepSpeed offload it (offload_states), {TRACK}"),
    _Known("megatron", "DistributedDataParallel", f"register a module that is not wrapped, {TRACK}"),
    _Known("megatron", "FullyShardedDataParallel", f"register a module that is not wrapped, {TRACK}"),
    _Known("megatron_fsdp", None, f"register a module that is not wrapped, {TRACK}"),
    _Known("bitsandbytes", None, f"load the model without quantisation, {TRACK}"),
    _Known("torchao", None, f"load the model without quantisation, {TRACK}"),
)
_FSDP2 = _Known("torch.distributed.fsdp", "FSDPModule", "")
_EXTERNAL_OPTIMIZERS = (
    _Known("megatron", "HybridDeviceOptimizer", "Megatron's HybridDeviceOptimizer places its state itself"),
    _Known("deepspeed", "DeepSpeedCPUAdam", "DeepSpeed's CPU Adam keeps its state on the CPU"),
    _Known("deepspeed", "DeepSpeedCPUAdagrad", "DeepSpeed's CPU Adagrad keeps its state on the CPU"),
    _Known("deepspeed", "DeepSpeedCPULion", "DeepSpeed's CPU Lion keeps its state on the CPU"),
    _Known("torchao", "CPUOffloadOptimizer", "torchao's CPUOffloadOptimizer keeps its state on the CPU"),
)
_REFUSED_OPTIMIZERS = (
    _Known("torch.distributed", None, f"use an optimizer that is not sharded over ranks, {TRACK}"),
    _Known("megatron", "DistributedOptimizer", f"use Megatron's HybridDeviceOptimizer, {TRACK}"),
    _Known("megatron", "MixedPrecisionOptimizer", f"use Megatron's HybridDeviceOptimizer, {TRACK}"),
    _Known("deepspeed", None, f"let DeepSpeed offload it (offload_states), {TRACK}"),
    _Known("bitsandbytes", None, f"use an optimizer of torch.optim (paged and 8-bit state cannot be moved), {TRACK}"),
    _Known("torchao", None, f"use an optimizer of torch.optim, {TRACK}"),
)


def _match(cls: type, table: Iterable[_Known]) -> _Known | None:
    for base in cls.__mro__:
        for known in table:
            if known.name in (None, base.__name__) and (base.__module__ + ".").startswith(known.package + "."):
                return known
    return None


def _refusal(name: str, where: str, found: str, supported: str, advice: str) -> RegistrationError:
    return RegistrationError(f"{name!r}{where}: {found} is not supported now. Supported: {supported}. What to do: {advice}.")


_PLAIN_MODULES = "plain torch.nn.Module objects, compiled ones too, and FSDP2 under CPUOffloadPolicy (tracked, not moved)"
_PLAIN_OPTIMIZERS = "the optimizers of torch.optim and their like, and wrappers that hold them"


def refuse_module(name: str, module: torch.nn.Module) -> None:
    """Refuse a module that a framework shards, wraps, moves or quantises.

    Raises:
        RegistrationError: what was found and where, what is supported now, what to do.
    """
    answers: dict[type, _Known | None] = {}
    for path, part in module.named_modules():
        where = f" (submodule {path!r})" if path else ""
        cls = type(part)
        if cls not in answers:
            answers[cls] = _match(cls, _REFUSED_MODULES)
        if (known := answers[cls]) is not None:
            raise _refusal(name, where, f"{cls.__module__}.{cls.__qualname__}", _PLAIN_MODULES, known.advice)
        if part.__dict__.get("_hf_hook") is not None:
            found = f"a module that accelerate moves at every forward ({type(part._hf_hook).__name__})"
            raise _refusal(name, where, found, _PLAIN_MODULES, f"remove_hook_from_submodules(model), or load without device_map, {TRACK}")
        device_map = part.__dict__.get("hf_device_map")
        if isinstance(device_map, dict) and len({str(device) for device in device_map.values()}) > 1:
            raise _refusal(name, where, f"a device map over {len(device_map)} places", _PLAIN_MODULES, f"load without device_map, {TRACK}")
    without = [path or "the root" for path, policies in _fsdp2_policies(module) if not _all_on_cpu(policies)]
    if without:
        advice = f"fully_shard every part with offload_policy=CPUOffloadPolicy(), {TRACK}"
        raise _refusal(name, "", f"FSDP2 without CPUOffloadPolicy (at {', '.join(without[:3])})", _PLAIN_MODULES, advice)


def _fsdp2_policies(module: torch.nn.Module) -> list[tuple[str, Sequence[Any]]]:
    """Path and offload policies of every part that `fully_shard` was applied to."""
    found: list[tuple[str, Sequence[Any]]] = []
    part: Any
    for path, part in module.named_modules():
        if _match(type(part), (_FSDP2,)) is not None:
            state = part._get_fsdp_state()
            # torch has had one group a module, later several; the singular name raises where there are several.
            groups = getattr(state, "_fsdp_param_groups", None)
            if groups is None:
                groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
            found.append((path, [group.offload_policy for group in groups]))
    return found


def _all_on_cpu(policies: Sequence[Any]) -> bool:
    return all(any(base.__name__ == "CPUOffloadPolicy" for base in type(policy).__mro__) for policy in policies)


def external_module(module: torch.nn.Module) -> str | None:
    """Why torch itself places a module's bytes: every FSDP2 part is under CPUOffloadPolicy. None when it does not."""
    sharded = _fsdp2_policies(module)
    if sharded and any(policies for _, policies in sharded) and all(_all_on_cpu(policies) for _, policies in sharded):
        return "FSDP2's CPUOffloadPolicy keeps its parameters on the CPU"
    return None


def refuse_optimizer(name: str, objects: Iterable[object]) -> None:
    """Refuse an optimizer when it, or one that it wraps, keeps state where no adapter finds it.

    Raises:
        RegistrationError: what was found, what is supported now, what to do.
    """
    for obj in objects:
        if (known := _match(type(obj), _REFUSED_OPTIMIZERS)) is not None:
            found = f"{type(obj).__module__}.{type(obj).__qualname__}"
            raise _refusal(name, "", found, _PLAIN_OPTIMIZERS, known.advice)


def external_optimizer(objects: Iterable[object], parameters: Sequence[torch.Tensor], compute_device: torch.device) -> str | None:
    """Why a framework itself places an optimizer's state; None when it does not.

    Parameters sharded by FSDP2 whose local part lies on the CPU beside an accelerator are under CPUOffloadPolicy.
    """
    for obj in objects:
        if (known := _match(type(obj), _EXTERNAL_OPTIMIZERS)) is not None:
            return known.advice
    local = [getattr(parameter, "_local_tensor", None) for parameter in parameters]
    if compute_device.type != "cpu" and local and all(part is not None and part.device.type == "cpu" for part in local):
        return "FSDP2's CPUOffloadPolicy keeps its parameters on the CPU"
    return None
