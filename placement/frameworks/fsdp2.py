"""FSDP2: modules that `torch.distributed.fsdp.fully_shard` was applied to; VeOmni's split by
experts around it.

A sharded parameter is a DTensor whose local tensor is a view of a padded storage. FSDP2's parameter
group has a flat view of the same storage, and gathers from it. So placement moves the storage, and
does not replace any tensor: after a new local tensor without `reset_sharded_param()` the group
would go on gathering the old values, and `parameter.data =` has no effect at all.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from placement.frameworks.base import Framework, Named
from placement.frameworks.weights import Reader, Weight, weight_of
from placement.tensors.plain import Owned, is_a, parts_of

_SHARDED = Named("torch.distributed.fsdp", "FSDPModule")


class FSDP2(Framework):
    """All parts of a module tree that `fully_shard` was applied to. `ready` reshards each of them:
    a reshard is not recursive. torch leaves the root unsharded after a forward pass, and
    `parameters()` shows tensors that disappear at the next reshard."""

    packages = ("torch.distributed.fsdp",)
    hangs_tensors = True
    recognised_by = (_SHARDED,)

    @classmethod
    def places_state_of(
        cls, parameters: Sequence[torch.Tensor], compute_device: torch.device
    ) -> str | None:
        if compute_device.type == "cpu" or not parameters:
            return None
        for parameter in parameters:
            local = getattr(parameter, "_local_tensor", None)
            if local is None or local.device.type != "cpu":
                return None
        return "FSDP2's CPUOffloadPolicy keeps its parameters on the CPU"

    def refusal(self, compute_device: torch.device) -> str | None:
        offloaded = [path for path, group in self._groups() if _is_on_cpu(group)]
        resident = [path for path, group in self._groups() if not _is_on_cpu(group)]
        if not offloaded or not resident:
            return None
        return (
            "FSDP2 keeps some of its parts on the CPU (CPUOffloadPolicy at "
            f"{offloaded[0] or 'the root'}) and others not ({resident[0] or 'the root'}), so "
            "neither FSDP2 nor placement moves all of it. What to do: fully_shard every part with "
            "the same offload_policy"
        )

    @property
    def external(self) -> str | None:
        are_on_cpu = [_is_on_cpu(group) for _, group in self._groups()]
        if are_on_cpu and all(are_on_cpu):
            return "FSDP2's CPUOffloadPolicy keeps its parameters on the CPU"
        return None

    def ready(self) -> None:
        states = [state for _, state in self._sharded()]
        if any(state._state_ctx.post_backward_final_callback_queued for state in states):
            # a backward pass was interrupted: its gradients are incomplete, and `zero_grad()` does
            # not reach them
            self.drop_unreduced()
        for state in states:
            _end_iteration(state)
            for group in _groups_of(state):
                _give_up(group)
                for record in group.fsdp_params:
                    if _is_replaced(record):
                        with torch.no_grad():
                            record.reset_sharded_param()

    def own_tensors(self) -> Mapping[int, torch.Tensor]:
        own_tensors = {}
        for _, group in self._groups():
            for record in group.fsdp_params:
                for gathered in _gathered(record):
                    own_tensors[id(gathered)] = record.sharded_param
        return own_tensors

    def tensors(self) -> Iterator[Owned]:
        """The padded storages, and gradients that are not reduced yet: backward passes accumulate
        them while communication is off."""
        for name, record in self._parameters():
            yield Owned(f"{name}.padded", record._sharded_param_data)
            unsharded = getattr(record, "_unsharded_param", None)
            for gradient in (
                record.unsharded_accumulated_grad,
                None if unsharded is None else unsharded.grad,
            ):
                if gradient is not None:
                    yield Owned(f"{name}.unsharded.grad", gradient, transient=True)
        for path, group in self._groups():
            partial = getattr(group, "_partial_reduce_output", None)
            if partial is not None:
                yield Owned(f"{path}.partly_reduced.grad".lstrip("."), partial, transient=True)

    def unreduced_gradients(self) -> Iterator[torch.Tensor]:
        return (owned.tensor for owned in self.tensors() if owned.transient)

    def drop_unreduced(self) -> None:
        for _, group in self._groups():
            group._partial_reduce_output = None
            for record in group.fsdp_params:
                record.unsharded_accumulated_grad = None
                unsharded = getattr(record, "_unsharded_param", None)
                if unsharded is not None:
                    unsharded.grad = None

    def replaced(self) -> Iterator[tuple[str, int]]:
        for name, record in self._parameters():
            if _is_replaced(record):
                yield name, record._sharded_param_data.nbytes

    # --- torch's own records

    def _parameters(self) -> Iterator[tuple[str, Any]]:
        """Name and `FSDPParam` (torch's record) of every sharded parameter."""
        root = self.root()
        if root is None:
            return
        paths = {id(part): path for path, part in root.named_modules()}
        for path, group in self._groups():
            for record in group.fsdp_params:
                info = record._module_info
                owner = paths.get(id(info.module), path)
                yield f"{owner}.{info.param_name}".lstrip("."), record

    def _sharded(self) -> Iterator[tuple[str, Any]]:
        """Path and FSDP2 state of every part. Modules that share a state appear once."""
        seen = set()
        for path, part in self.parts(_SHARDED):
            state = part._get_fsdp_state()
            if id(state) not in seen:
                seen.add(id(state))
                yield path.rstrip("."), state

    def _groups(self) -> Iterator[tuple[str, Any]]:
        for path, state in self._sharded():
            for group in _groups_of(state):
                yield path, group


def _groups_of(state: Any) -> list[Any]:
    """A part's parameter groups. Earlier versions of torch have at most one; in later ones, which
    have several, the old name raises."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    return list(groups)


def _is_on_cpu(group: Any) -> bool:
    return is_a(group.offload_policy, "torch.distributed.fsdp", "CPUOffloadPolicy")


def _gathered(record: Any) -> Iterator[torch.Tensor]:
    """The parameters that a module shows in place of a sharded one while it is gathered."""
    for name in ("_unsharded_param", "_sharded_post_forward_param"):
        tensor = getattr(record, name, None)
        if tensor is not None:
            yield tensor


def _is_replaced(record: Any) -> bool:
    """Whether the module's parameter has other memory than that from which the group gathers."""
    info = record._module_info
    parameter = info.module._parameters.get(info.param_name)
    if parameter is None or any(parameter is gathered for gathered in _gathered(record)):
        parameter = record.sharded_param
    if not is_a(parameter, "torch.distributed.tensor", "DTensor"):
        return False
    of_module = parts_of(parameter, "")
    of_group = parts_of(record._sharded_param_data, "")
    for (_, part), (_, other) in zip(of_module, of_group, strict=False):
        if part.numel() and part.untyped_storage()._cdata != other.untyped_storage()._cdata:
            return True
    return False


def _end_iteration(state: Any) -> None:
    """End a forward or backward pass that an exception interrupted, from which torch would go on:
    in FORWARD, `reshard()` leaves a part unsharded, and after PRE_BACKWARD, the next step trains
    nothing. torch's own `reset_iter_state()` drops gradients that the user accumulates."""
    state._training_state = type(state._training_state).IDLE
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False
    waiting = getattr(state, "_modules_to_run_forward", None)
    if waiting is not None:
        waiting.clear()
    context = state._comm_ctx
    stream = state._device_handle.current_stream()
    if not hasattr(context, "all_gather_state"):
        return  # nothing has run yet
    # Torch holds memory until other streams have finished with it: for one reduction in earlier
    # versions, for several in later ones.
    reductions = getattr(context, "reduce_scatter_states", None)
    pending = [context.all_gather_state]
    pending += [context.reduce_scatter_state] if reductions is None else reductions
    for communication in pending:
        if communication is not None and communication.event is not None:
            stream.wait_event(communication.event)
    context.all_gather_state = None
    if reductions is None:
        context.reduce_scatter_state = None
    else:
        reductions.clear()


def _give_up(group: Any) -> None:
    """Free the tensors that a group has gathered, after waiting for its communication. The next
    forward pass gathers again."""
    stream = group.device_handle.current_stream()
    prefetched = group._all_gather_result
    if prefetched is not None:  # and not used
        if prefetched.all_gather_event is not None:
            stream.wait_event(prefetched.all_gather_event)
        if hasattr(prefetched.all_gather_work, "wait"):
            prefetched.all_gather_work.wait()
        group._all_gather_result = None
    reduced = group._all_reduce_state
    if reduced is not None and reduced.event is not None:
        stream.wait_event(reduced.event)
    group._all_reduce_state = None
    group._training_state = type(group._training_state).IDLE
    group.reshard()
    # from a reshard to a smaller mesh, which torch keeps until the next reshard
    for record in group.fsdp_params:
        record._sharded_post_forward_param = None
        record._sharded_post_forward_param_data = None


# --- VeOmni's expert parallelism
#
# VeOmni splits a parameter along a mesh of experts before `fully_shard` shards it further, and
# records that only in its notes (`_fqn2spec_info`). This does not matter to moves. A published
# weight contains the experts of every rank.

_NOTES = "veomni.distributed.parallel_plan"


class ExpertWeight(Weight):
    """A weight that is split evenly along a further mesh, that of the experts."""

    def __init__(self, part: Weight, mesh: Any, placement: Any) -> None:
        shape = list(part.shape)
        shape[placement.dim] *= mesh.size()
        self.shape = torch.Size(shape)
        self.dtype = part.dtype
        self._part = part
        self._mesh = mesh
        self._placement = placement

    @property
    def is_collective(self) -> bool:
        return self._mesh.size() > 1 or self._part.is_collective

    @property
    def problem(self) -> str | None:
        return self._part.problem

    def targets(
        self, reader: Reader, dtype: torch.dtype
    ) -> Iterator[tuple[torch.Tensor, Callable[[], torch.Tensor]]]:
        return self._part.targets(reader, dtype)

    def whole(self, reader: Reader, dtype: torch.dtype) -> torch.Tensor:
        from torch.distributed.tensor import DTensor

        local = self._part.whole(reader, dtype).contiguous()
        full: torch.Tensor = DTensor.from_local(
            local, self._mesh, [self._placement], run_check=False
        ).full_tensor()
        return full


class VeOmni(Framework):
    """All models of a module tree that VeOmni split by experts."""

    packages = ("veomni",)

    @classmethod
    def find(cls, root: torch.nn.Module) -> VeOmni | None:
        if _NOTES not in sys.modules:
            return None
        return cls(root) if any(_notes(part) for part in root.modules()) else None

    def weights(self) -> Mapping[int, Mapping[str, Weight | None]]:
        root = self.root()
        if root is None:
            return {}
        weights: dict[int, dict[str, Weight | None]] = {}
        fsdp2 = FSDP2.find(root)
        own_tensors = {} if fsdp2 is None else fsdp2.own_tensors()
        for model in root.modules():
            for path, note in _notes(model).items():
                if note.para_mesh is None or not note.placement.is_shard():
                    continue
                module_path, _, name = path.rpartition(".")
                module = model.get_submodule(module_path)
                parameter = module._parameters.get(name)
                if parameter is not None:
                    part = weight_of(own_tensors.get(id(parameter), parameter))
                    weight = ExpertWeight(part, note.para_mesh, note.placement)
                    weights.setdefault(id(module), {})[name] = weight
        return weights


def _notes(model: torch.nn.Module) -> dict[str, Any]:
    """VeOmni's notes on a model's parameters, by the parameter's name."""
    notes = vars(model).get("_fqn2spec_info")
    if not isinstance(notes, dict):
        return {}
    return {name: note for name, note in notes.items() if is_a(note, _NOTES, "SpecInfo")}
