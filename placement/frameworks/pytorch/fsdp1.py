"""torch's FSDP1: flat parameters, each rank's shard of them, and the memory gathered from all ranks for computing.

The module shows a flat parameter, or views of it under the original names. Both are in the memory of the local shard, which moves.
Gathered memory is freed before a move: the root keeps its own after a forward pass, and under SHARD_GRAD_OP every unit does.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from placement.core.errors import PhaseError
from placement.core.loaded_classes import loaded_class
from placement.frameworks.base import Framework, Named, Wrapper
from placement.frameworks.pytorch.fsdp1_weights import flat_weights
from placement.frameworks.weights import Weight
from placement.tensors.owned import Owned

_GATHERED = ("_full_param_padded", "_full_prec_full_param_padded", "_mp_shard")
"""Fields of a flat parameter whose storages are allocated for computing only."""


class FSDP1(Framework):
    """All `FullyShardedDataParallel` modules (units) of a module tree. A unit without parameters of its own has no FSDP1 handle."""

    wrappers = (Wrapper(Named("torch.distributed.fsdp", "FullyShardedDataParallel"), "_fsdp_wrapped_module"),)

    def __init__(self, parts: dict[str, Any]) -> None:
        # Found once, because walking a large model takes as long as all other work here. Wrapping comes before registering.
        self._parts = [(f"{path}." if path else "", weakref.ref(part)) for path, part in parts.items()]

    @classmethod
    def find(cls, root: torch.nn.Module) -> FSDP1 | None:
        wrapper = loaded_class("torch.distributed.fsdp", "FullyShardedDataParallel")
        if wrapper is None:
            return None
        parts = {path: part for path, part in root.named_modules() if isinstance(part, wrapper)}
        return cls(parts) if any(getattr(part, "_handle", None) is not None for part in parts.values()) else None

    def refusal(self, compute_device: torch.device) -> str | None:
        if any(handle._offload_params for _, handle in self._handles()):
            return (
                "some of its FSDP1 units are under CPUOffload(offload_params=True) and some are not, so neither torch nor placement moves "
                "all of it; wrap all units alike, or register it with external=True to have it tracked and never moved"
            )
        summoned = self._summoned()
        return f"the full parameters of {summoned} are summoned; register it outside FSDP.summon_full_params" if summoned else None

    @property
    def external(self) -> str | None:
        offloaded = [handle._offload_params for _, handle in self._handles()]
        if offloaded and all(offloaded):
            return "FSDP1's CPUOffload keeps its parameters on the CPU"
        return None

    @property
    def external_state(self) -> str | None:
        return self.external

    def ready(self) -> None:
        """Reshard every unit.

        Raises:
            PhaseError: full parameters are summoned; values written to them would be lost.
        """
        if summoned := self._summoned():
            raise PhaseError(
                f"the full parameters of {summoned} are summoned, and values written to them are not in the shards yet: leave "
                "FSDP.summon_full_params before the phase ends, and enter it inside one phase"
            )
        wrappers = [part for _, alive in self._parts if (part := alive()) is not None]
        is_broken = any(part.training_state.name != "IDLE" for part in wrappers)
        for _, handle in self._handles() if is_broken else ():
            _end_iteration(handle)
        for part in wrappers if is_broken else ():
            part.training_state = type(part.training_state).IDLE
            part._post_backward_callback_queued = False
            part._exec_order_data.next_iter()
        for _, handle in self._handles():
            flat = handle.flat_param
            if handle._use_orig_params and all(parameter.grad is None for parameter in flat._params):
                flat.grad = None  # as the next forward pass would do, because zero_grad() reaches only the views
            if _is_gathered(handle):
                handle.reshard(handle.uses_sharded_strategy)
                handle.post_reshard()
                handle._prefetched = False

    def follow_parameters(self) -> None:
        """Give empty parameters the flat parameter's dtype. FSDP1 shows parameters that are on other ranks as empty tensors."""
        for _, handle in self._handles():
            flat = handle.flat_param
            for parameter in (*flat._params, *flat._shared_params) if handle._use_orig_params else ():
                if parameter.numel() == 0 and parameter.dtype is not flat.dtype:
                    parameter.data = torch.empty(0, dtype=flat.dtype, device=flat.device)

    @property
    def gathers(self) -> str | None:
        return "FSDP1 gathers every parameter on the device for it"

    def own_tensors(self) -> dict[int, torch.Tensor]:
        """The original parameter for each view of gathered memory; without original parameters, the flat parameter for every view."""
        found: dict[int, torch.Tensor] = {}
        for _, handle in self._handles():
            flat = handle.flat_param
            infos = [*flat._param_infos, *flat._shared_param_infos]
            own = [*flat._params, *flat._shared_params] if handle._use_orig_params else [flat] * len(infos)
            for (name, module, *_), parameter in zip(infos, own, strict=True):
                shown = module._parameters.get(name, module.__dict__.get(name))
                if isinstance(shown, torch.Tensor) and shown is not parameter and (parameter is flat or _shows(shown, handle)):
                    found[id(shown)] = parameter
        return found

    def tensors(self) -> Iterator[Owned]:
        """Flat parameters, which the module may hide, the tensors in their fields, and the views of the last forward pass."""
        for path, handle in self._handles():
            flat = handle.flat_param
            yield Owned(f"{path}_flat_param", flat)
            for field, transient in (("_local_shard", False), ("_saved_grad_shard", True), ("_cpu_grad", True)):
                if isinstance(tensor := getattr(flat, field, None), torch.Tensor):
                    yield Owned(f"{path}_flat_param.{field}", tensor, transient)
            for index, parameter in enumerate(flat._params or ()):
                # Under no_sync() FSDP1 sets the `.data` of a view of the last gradient to another one; the view still keeps its base alive.
                if parameter.grad is not None and (base := parameter.grad._base) is not None:
                    yield Owned(f"{path}_flat_param._params.{index}.grad._base", base, True)
            for index, view in enumerate(getattr(flat, "_tensors", None) or ()):
                if view is not None:  # `.data`, because autograd refuses any use of such views after a step has written to their base
                    yield Owned(f"{path}_flat_param._tensors.{index}", view.data)

    def weights(self) -> Mapping[int, Mapping[str, Weight | None]]:
        return flat_weights(handle for _, handle in self._handles())

    def unreduced_gradients(self) -> Iterator[torch.Tensor]:
        """This rank's shards of gradients that FSDP1 keeps apart in a backward pass without synchronisation (`no_sync()`)."""
        for _, handle in self._handles():
            if isinstance(saved := getattr(handle.flat_param, "_saved_grad_shard", None), torch.Tensor):
                yield saved

    def drop_unreduced(self) -> None:
        for _, handle in self._handles():
            vars(handle.flat_param).pop("_saved_grad_shard", None)

    def _handles(self) -> Iterator[tuple[str, Any]]:
        """Path prefix and FSDP1 handle of every unit."""
        for path, alive in self._parts:
            part = alive()
            if part is not None and part._handle is not None:
                yield path, part._handle

    def _summoned(self) -> str:
        return ", ".join(
            path.rstrip(".") or "the root" for path, handle in self._handles() if handle._training_state.name == "SUMMON_FULL_PARAMS"
        )


def _end_iteration(handle: Any) -> None:
    """End a forward or backward pass that an exception interrupted. Else torch would compute with memory that is no longer gathered.

    Gradients that were not reduced yet are dropped: they are incomplete, and `zero_grad()` does not reach them. Gradients of shards stay.
    """
    flat, states = handle.flat_param, type(handle._training_state)
    if handle.uses_sharded_strategy and flat.grad is not None and flat.grad.size() != flat._local_shard.size():
        flat.grad = None
    saved = flat.__dict__.pop("_saved_grad_shard", None)
    hooked = flat.__dict__.pop("_post_backward_hook_state", None)
    if hooked is not None:
        hooked[-1].remove()
    handle._training_state = states.IDLE
    handle._ran_pre_backward_hook = handle._needs_pre_backward_unshard = handle._prefetched = flat._post_backward_called = False
    handle._post_forward_index = None
    if _is_gathered(handle):
        handle.reshard(handle.uses_sharded_strategy)
        handle.post_reshard()
    if saved is not None:
        flat.grad = saved
    if handle._use_orig_params:
        handle._use_sharded_grad_views()


def _is_gathered(handle: Any) -> bool:
    """Whether memory that exists only for computing is allocated, or is shown by the module."""
    flat = handle.flat_param
    shard = getattr(flat, "_local_shard", None)
    if shard is None:
        return False  # nothing is gathered before the first forward pass
    return handle._skipped_use_sharded_views or flat.data_ptr() != shard.data_ptr() or any(storage.nbytes() for storage in _gathered(flat))


def _gathered(flat: Any) -> Iterator[torch.UntypedStorage]:
    for field in _GATHERED:
        if isinstance(tensor := getattr(flat, field, None), torch.Tensor):
            yield tensor.untyped_storage()


def _shows(tensor: torch.Tensor, handle: Any) -> bool:
    """Whether a tensor that a module has in a parameter's place is a view of gathered memory."""
    return tensor.untyped_storage()._cdata in {storage._cdata for storage in _gathered(handle.flat_param)}
