"""Megatron's HybridDeviceOptimizer: its tensors, and saving and loading its state in checkpoints.

The optimizer steps a part of the parameters on the CPU and moves everything itself, so it is external. Its own `load_state_dict` makes
new inner optimizers and copies, and fails on parameters without state (and on float32 parameters among others). Its own state is in the
order of the inner optimizers, which differs between ranks. Here the state is in the order of the parameters, a parameter may have no
state, and loading writes into the existing tensors. Nothing here calls a collective.
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
    """The optimizer's tensors outside its state: main parameters, copies on the CPU, and their gradients. Its own load replaces them."""
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
    """The state by parameter, in the order of the parameter groups, which is the same on every rank. Parameters without state have {}.

    Tensors are the optimizer's own, not copies. State of a sharded parameter is sharded like it. A `step` that the optimizer counts by
    group is added to each parameter's state.
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
    """The entries of a group to save in a checkpoint. Left out: classes, which belong to this run, and `step`, which is in the state."""
    return {key: value for key, value in group.items() if key not in ("params", "step") and not isinstance(value, type)}


def problems(hybrid: Any, given: Mapping[torch.Tensor, Mapping[str, Any]]) -> Iterator[tuple[torch.Tensor, str]]:
    """Each parameter whose given state does not fit, with the reason."""
    for parameter in _parameters(hybrid):
        nbytes = _local(parameter).numel()
        for key, value in given.get(parameter, {}).items():
            if isinstance(value, torch.Tensor) and value.dim() and _local(value).numel() != nbytes:
                yield parameter, f"{key!r} has {_local(value).numel()} elements, but the parameter has {nbytes} on this rank"


@torch.no_grad()
def restore(hybrid: Any, given: Mapping[torch.Tensor, Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> None:
    """Load state in the form of `exported`, and the settings of each group. The model's parameters must have been loaded before.

    Inner optimizers, copies and streams stay, and existing state tensors are written in place. A main parameter that was not saved gets
    the value of the model's parameter.
    """
    for group, saved in zip(hybrid.param_groups, groups, strict=True):
        group.pop("step", None)  # an old value would be copied into the inner optimizers at every step
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
                if inner is not parameter:  # drop the copy's old gradient: it would be stepped if the parameter itself has none
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
    """The plain tensor with this rank's bytes. (A DTensor itself has the number of elements of all ranks.)"""
    if not is_wrapper(tensor):
        return tensor
    (part,) = (part for _, part in parts_of(tensor, ""))
    return part


def _as_sharded(value: Any, parameter: torch.Tensor) -> Any:
    """Wrap state of a sharded parameter, which the optimizer keeps as a plain local tensor, in a wrapper like the parameter's."""
    if not is_wrapper(parameter) or not isinstance(value, torch.Tensor) or is_wrapper(value) or value.dim() == 0:
        return value
    local = _local(parameter)
    if value.numel() != local.numel():
        return value
    inner = value.view(local.shape)
    for name in ("__create_chunk_list__", "__create_write_items__"):  # with these, Megatron-FSDP tells checkpoints about uneven shards
        if name in vars(local):
            setattr(inner, name, vars(local)[name])
    like = torch.empty_like(parameter, dtype=value.dtype, device="meta")  # the wrapper must have the state's dtype
    return rewrapped(like, lambda _: inner)
