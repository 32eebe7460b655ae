"""Megatron's HybridDeviceOptimizer: what it holds, and its state for a checkpoint and back.

It steps a part of the parameters on the CPU and places everything itself, so it is external. Its own `load_state_dict` builds all inner
optimizers and copies anew, fails on a parameter without state (and on float32 ones among others), and its own state comes in the order of
the inner optimizers, which differs between ranks. Here state goes in the order of its parameters, a parameter without state says so, and
what is restored is written into the tensors that are there. Nothing here calls a collective.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from placement.frameworks.base import Named, OwnState
from placement.tensors.owned import Owned
from placement.tensors.plain import is_wrapper, parts_of, plain_parts, rewrapped

MASTER = "master_param"
_COPIES = ("param_to_fp32_param", "gpu_params_map_cpu_copy")


HYBRID = Named("megatron.core.optimizer.cpu_offloading.hybrid_optimizer", "HybridDeviceOptimizer")


class HybridState(OwnState):
    """The state of one HybridDeviceOptimizer."""

    def __init__(self, hybrid: Any) -> None:
        self._hybrid = hybrid

    def tensors(self, path: str) -> Iterator[Owned]:
        return tensors(self._hybrid, path)

    def exported(self) -> dict[torch.Tensor, dict[str, Any]]:
        return exported(self._hybrid)

    def settings(self, group: Mapping[str, Any]) -> dict[str, Any]:
        return settings(group)

    def problems(self, given: Mapping[Any, Mapping[str, Any]]) -> Iterator[tuple[torch.Tensor, str]]:
        return problems(self._hybrid, given)

    def restore(self, given: Mapping[Any, Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> None:
        restore(self._hybrid, given, groups)


def tensors(hybrid: Any, name: str) -> Iterator[Owned]:
    """What it holds beside its state now: main parameters, copies on the CPU and their gradients. All of them are new after a load."""
    seen: set[int] = set()
    for index, parameter in enumerate(_parameters(hybrid)):
        for field in _COPIES:
            copy = getattr(hybrid, field).get(parameter)
            if copy is None or id(copy) in seen:
                continue
            seen.add(id(copy))
            yield from (Owned(path, part) for path, part in plain_parts(copy, f"{name}{field}.{index}"))
            if (gradient := copy.grad) is not None:
                yield from (Owned(path, part, True) for path, part in plain_parts(gradient, f"{name}{field}.{index}.grad"))


def exported(hybrid: Any) -> dict[torch.Tensor, dict[str, Any]]:
    """The state by parameter, in the order of its groups: the same on every rank. Empty for a parameter that has none here.

    Values alias what it holds. Those of a sharded parameter are sharded as it is. A `step` that is counted by group is there too.
    """
    groups = [group for optimizer in hybrid.sub_optimizers for group in optimizer.param_groups if "step" in group]
    counts = {id(inner): group["step"] for group in groups for inner in group["params"]}
    found = {}
    for parameter in _parameters(hybrid):
        entry = dict(hybrid.state.get(parameter) or {})
        inner = hybrid.param_to_inner_param[parameter]
        if entry and "step" not in entry and id(inner) in counts:
            entry["step"] = counts[id(inner)]
        found[parameter] = {key: _as_sharded(value, parameter) for key, value in entry.items()}
    return found


def settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """What of a group belongs into a checkpoint: without classes, which say how this run was built, and without a `step` (state has it)."""
    return {key: value for key, value in group.items() if key not in ("params", "step") and not isinstance(value, type)}


def problems(hybrid: Any, given: Mapping[torch.Tensor, Mapping[str, Any]]) -> Iterator[tuple[torch.Tensor, str]]:
    """Parameters whose given state does not fit, and why."""
    for parameter in _parameters(hybrid):
        nbytes = _local(parameter).numel()
        for key, value in given.get(parameter, {}).items():
            if isinstance(value, torch.Tensor) and value.dim() and _local(value).numel() != nbytes:
                yield parameter, f"{key!r} has {_local(value).numel()} elements here, the parameter {nbytes}"


@torch.no_grad()
def restore(hybrid: Any, given: Mapping[torch.Tensor, Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> None:
    """Put state back, as `exported` gave it, and the settings of each group. The model's parameters are those of the checkpoint already.

    Inner optimizers, copies and streams stay; state tensors that are there are written in place. A main parameter that was not saved is
    the model's own value again.
    """
    for group, saved in zip(hybrid.param_groups, groups, strict=True):
        group.pop("step", None)  # a stale one would go into the inner optimizers at every step
        group.update(settings(saved))
    for optimizer in hybrid.sub_optimizers:
        counts_by_state = getattr(type(optimizer).step, "__module__", "").startswith("torch.optim.")
        for group in optimizer.param_groups:
            for inner in group["params"]:
                parameter = hybrid.inner_param_to_orig_param[inner]
                entry = dict(given.get(parameter, {}))
                master = entry.pop(MASTER, None)
                if master is not None or inner is not parameter:
                    _local(inner).copy_(_local(parameter if master is None else master).view_as(_local(inner)))
                if inner is not parameter:  # it steps whatever gradient was left there, where a parameter has none
                    inner.grad = None
                    hybrid.cpu_copy_map_grad.pop(inner, None)
                step = entry.pop("step", None)
                if step is not None and counts_by_state:
                    entry["step"] = torch.as_tensor(step, dtype=torch.float32, device="cpu")
                elif step is not None:
                    group["step"] = int(step)
                _write(optimizer.state, inner, entry, group)
    hybrid._sync_sub_optimizers_state_to_hdo()


def _write(state: dict[Any, dict[str, Any]], inner: torch.Tensor, entry: Mapping[str, Any], group: Mapping[str, Any]) -> None:
    if not entry:
        state.pop(inner, None)
        return
    live, here = state.get(inner, {}), _local(inner)
    placed: dict[str, Any] = {}
    for key, value in entry.items():
        present = live.get(key)
        if not isinstance(value, torch.Tensor):
            placed[key] = value
        elif isinstance(present, torch.Tensor) and present.dtype == value.dtype and _local(present).numel() == _local(value).numel():
            _local(present).copy_(_local(value).view_as(_local(present)))
            placed[key] = present
        else:
            counts = key == "step" and not (group.get("fused") or group.get("capturable"))
            shape = () if value.dim() == 0 else here.shape
            placed[key] = _local(value).detach().to("cpu" if counts else here.device, copy=True).view(shape)
    live.clear()
    live.update(placed)
    state[inner] = live


def _parameters(hybrid: Any) -> Iterator[torch.Tensor]:
    return (parameter for group in hybrid.param_groups for parameter in group["params"])


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """What holds a tensor's bytes on this rank: a DTensor's number of elements is that of all ranks."""
    if not is_wrapper(tensor):
        return tensor
    (part,) = (part for _, part in parts_of(tensor, ""))
    return part


def _as_sharded(value: Any, parameter: torch.Tensor) -> Any:
    """State of a sharded parameter, which is kept as a plain local tensor, in a wrapper like the parameter's."""
    if not is_wrapper(parameter) or not isinstance(value, torch.Tensor) or is_wrapper(value) or value.dim() == 0:
        return value
    local = _local(parameter)
    if value.numel() != local.numel():
        return value
    inner = value.view(local.shape)
    for name in ("__create_chunk_list__", "__create_write_items__"):  # how Megatron-FSDP tells a checkpoint of shards that are uneven
        if name in vars(local):
            setattr(inner, name, vars(local)[name])
    like = torch.empty_like(parameter, dtype=value.dtype, device="meta")  # a wrapper says the type of what it wraps
    return rewrapped(like, lambda _: inner)
