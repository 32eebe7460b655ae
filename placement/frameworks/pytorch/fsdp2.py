"""FSDP2: what `torch.distributed.fsdp.fully_shard` made of a module.

A sharded parameter is a DTensor whose local tensor is cut from a padded storage; the group keeps a flat view of all of that
storage, and gathers from it. So the storage is what has a place, and nothing is rebound: a new local tensor without
`reset_sharded_param()` would leave the group gathering old values for ever, and `parameter.data =` does nothing at all.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from placement.core.loaded_classes import is_a
from placement.frameworks.base import Framework
from placement.tensors.owned import Owned
from placement.tensors.plain import parts_of

_MODULE = "torch.distributed.fsdp"


class FSDP2(Framework):
    """Every part of a module tree that `fully_shard` was applied to.

    Between phases all of them are sharded. Torch leaves the root unsharded after a forward, so `parameters()` shows tensors then
    that are gone at the next reshard, which is not recursive either: each part is told.
    """

    @classmethod
    def places_state_of(cls, parameters: Sequence[torch.Tensor], compute_device: torch.device) -> str | None:
        """Parameters whose local part lies on the CPU beside an accelerator are under CPUOffloadPolicy."""
        local = [getattr(parameter, "_local_tensor", None) for parameter in parameters]
        if compute_device.type != "cpu" and local and all(part is not None and part.device.type == "cpu" for part in local):
            return "FSDP2's CPUOffloadPolicy keeps its parameters on the CPU"
        return None

    def __init__(self, root: torch.nn.Module) -> None:
        self._root = weakref.ref(root)

    @classmethod
    def find(cls, root: torch.nn.Module) -> FSDP2 | None:
        return cls(root) if any(is_a(part, _MODULE, "FSDPModule") for part in root.modules()) else None

    def refusal(self, compute_device: torch.device) -> str | None:
        offloaded = [path for path, group in self._groups() if _is_on_cpu(group)]
        others = [path for path, group in self._groups() if not _is_on_cpu(group)]
        if not offloaded or not others:
            return None
        return (
            f"FSDP2 keeps some of its parts on the CPU (CPUOffloadPolicy at {_listed(offloaded)}) and others not ({_listed(others)}), so "
            "it can be neither moved nor left alone. What to do: fully_shard every part with the same offload_policy"
        )

    @property
    def external(self) -> str | None:
        policies = [_is_on_cpu(group) for _, group in self._groups()]
        return "FSDP2's CPUOffloadPolicy keeps its parameters on the CPU" if policies and all(policies) else None

    @property
    def external_state(self) -> str | None:
        return self.external

    def ready(self) -> None:
        if any(state._state_ctx.post_backward_final_callback_queued for state in self._states()):
            self.drop_unreduced()  # of a backward that broke off: incomplete, and where `zero_grad()` does not reach
        for state in self._states():
            _end_iteration(state)
            for group in _groups_of(state):
                _give_up(group)
                for each in group.fsdp_params:
                    if _is_replaced(each):
                        with torch.no_grad():
                            each.reset_sharded_param()

    def follow_parameters(self) -> None:
        for _, group in self._groups():
            for each in group.fsdp_params:
                with torch.no_grad():
                    _follow(each)

    def own_tensors(self) -> Mapping[int, torch.Tensor]:
        found: dict[int, torch.Tensor] = {}
        for _, group in self._groups():
            for each in group.fsdp_params:
                for name in ("_unsharded_param", "_sharded_post_forward_param"):
                    if (shown := getattr(each, name, None)) is not None:
                        found[id(shown)] = each.sharded_param
        return found

    def tensors(self) -> Iterator[Owned]:
        """The padded storages, and gradients that no reduction has brought to their parameters yet."""
        for label, each in self._parameters():
            yield Owned(f"{label}.padded", each._sharded_param_data)
            for gradient in _unreduced(each):
                yield Owned(f"{label}.unsharded.grad", gradient, transient=True)
        for path, group in self._groups():
            if (partial := getattr(group, "_partial_reduce_output", None)) is not None:
                yield Owned(f"{path}.partly_reduced.grad".lstrip("."), partial, transient=True)

    def unreduced_gradients(self) -> Iterator[torch.Tensor]:
        return (owned.tensor for owned in self.tensors() if owned.transient)

    def drop_unreduced(self) -> None:
        for _, group in self._groups():
            group._partial_reduce_output = None
            for each in group.fsdp_params:
                each.unsharded_accumulated_grad = None
                if (unsharded := getattr(each, "_unsharded_param", None)) is not None:
                    unsharded.grad = None

    def replaced(self) -> Iterator[tuple[str, int]]:
        return ((label, each._sharded_param_data.nbytes) for label, each in self._parameters() if _is_replaced(each))

    # --- what torch keeps

    def _parameters(self) -> Iterator[tuple[str, Any]]:
        """Name and record of every sharded parameter."""
        paths = self._paths()
        for path, group in self._groups():
            for each in group.fsdp_params:
                yield f"{paths.get(id(each._module_info.module), path)}.{each._module_info.param_name}".lstrip("."), each

    def _paths(self) -> dict[int, str]:
        root = self._root()
        return {} if root is None else {id(part): path for path, part in root.named_modules()}

    def _sharded(self) -> Iterator[tuple[str, Any]]:
        """Path and state of every part, each state once: several modules may share one."""
        root = self._root()
        seen: set[int] = set()
        part: Any
        for path, part in root.named_modules() if root is not None else ():
            if is_a(part, _MODULE, "FSDPModule") and id(state := part._get_fsdp_state()) not in seen:
                seen.add(id(state))
                yield path, state

    def _states(self) -> Iterator[Any]:
        return (state for _, state in self._sharded())

    def _groups(self) -> Iterator[tuple[str, Any]]:
        return ((path, group) for path, state in self._sharded() for group in _groups_of(state))


def _groups_of(state: Any) -> list[Any]:
    """A part's parameter groups. Torch had at most one a part, later several, and then the singular name raises."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    return list(groups)


def _is_on_cpu(group: Any) -> bool:
    return is_a(group.offload_policy, _MODULE, "CPUOffloadPolicy")


def _listed(paths: list[str]) -> str:
    return ", ".join(path or "the root" for path in dict.fromkeys(paths[:3]))


def _unreduced(parameter: Any) -> Iterator[torch.Tensor]:
    """Gradients of the unsharded parameter: accumulated by a backward that was told not to communicate."""
    if parameter.unsharded_accumulated_grad is not None:
        yield parameter.unsharded_accumulated_grad
    unsharded = getattr(parameter, "_unsharded_param", None)
    if unsharded is not None and unsharded.grad is not None:
        yield unsharded.grad


def _follow(parameter: Any) -> None:
    """Take over what the module shows, as torch does after `_apply`; but of an empty shard torch would make new padding."""
    shown, padded = parameter._module_info.module._parameters[parameter._module_info.param_name], parameter._sharded_param_data
    if shown._local_tensor.numel():
        parameter.reset_sharded_param()
        return
    if shown._local_tensor.untyped_storage()._cdata != padded.untyped_storage()._cdata:
        shown._local_tensor = padded.view(parameter.padded_sharded_param_size).narrow(parameter.fsdp_placement.dim, 0, 0)
    parameter.sharded_param, parameter._sharding_spec = shown, shown._spec


def _is_replaced(parameter: Any) -> bool:
    """Whether the module's parameter is not the one any more that the group gathers from."""
    shown = parameter._module_info.module._parameters.get(parameter._module_info.param_name)
    if shown is getattr(parameter, "_unsharded_param", None) or shown is getattr(parameter, "_sharded_post_forward_param", None):
        shown = parameter.sharded_param
    if not is_a(shown, "torch.distributed.tensor", "DTensor"):
        return False
    mine, theirs = list(parts_of(shown, "")), list(parts_of(parameter._sharded_param_data, ""))
    return any(
        part.numel() and part.untyped_storage()._cdata != other.untyped_storage()._cdata
        for (_, part), (_, other) in zip(mine, theirs, strict=False)
    )


def _end_iteration(state: Any) -> None:
    """A forward or backward that an exception broke off is over: nothing computes across a phase transition.

    Torch goes on from where it was otherwise: in state FORWARD `reshard()` leaves a part unsharded, and after PRE_BACKWARD the next
    step trains nothing. Its own `reset_iter_state()` drops gradients that the user accumulates; they stay here.
    """
    state._training_state = type(state._training_state).IDLE
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False
    if (waiting := getattr(state, "_modules_to_run_forward", None)) is not None:
        waiting.clear()
    context, stream = state._comm_ctx, state._device_handle.current_stream()
    if not hasattr(context, "all_gather_state"):
        return  # nothing has run yet
    # Memory that torch holds until other streams are through with it: of one reduction in earlier versions, later of several.
    reductions = getattr(context, "reduce_scatter_states", None)
    for each in (context.all_gather_state, *([context.reduce_scatter_state] if reductions is None else reductions)):
        if each is not None and each.event is not None:
            stream.wait_event(each.event)
    context.all_gather_state = None
    if reductions is None:
        context.reduce_scatter_state = None
    else:
        reductions.clear()


def _give_up(group: Any) -> None:
    """What a group gathered goes, and what it still waits for; the next forward gathers again."""
    stream = group.device_handle.current_stream()
    if (pending := group._all_gather_result) is not None:  # prefetched and not used
        if pending.all_gather_event is not None:
            stream.wait_event(pending.all_gather_event)
        if hasattr(pending.all_gather_work, "wait"):
            pending.all_gather_work.wait()
        group._all_gather_result = None
    if (reduced := group._all_reduce_state) is not None and reduced.event is not None:
        stream.wait_event(reduced.event)
    group._all_reduce_state = None
    group._training_state = type(group._training_state).IDLE
    group.reshard()
    for each in group.fsdp_params:  # of a reshard to a smaller mesh; torch keeps it until the next one
        each._sharded_post_forward_param = each._sharded_post_forward_param_data = None
