"""Megatron-Core: the buffers of its DistributedDataParallel, its optimizers, and Megatron-FSDP.

Parameters and gradients of a DistributedDataParallel are views of a few large buffers. The shards
that the distributed optimizer steps are views of them, too, if they have the model's dtype.
placement moves each storage once, so that all these views stay valid.

A MegatronFSDP module (of the package megatron_fsdp, or of the copy in megatron-core) shows one of
two sets of parameters at a time: sharded ones (DTensors over the shard buffers), which optimizers
step, and raw ones, whose data is gathered for computing. Both exist as long as the module. Gathered
data is freed before a move.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from placement.frameworks.base import Advised, Framework, Named, OwnState, Wrapper
from placement.tensors.plain import (
    Owned,
    is_wrapper,
    loaded_class,
    parts_of,
    plain_parts,
    rewrapped,
)

HYBRID = Named("megatron.core.optimizer.cpu_offloading.hybrid_optimizer", "HybridDeviceOptimizer")
MASTER = "master_param"
_COPIES = ("param_to_fp32_param", "gpu_params_map_cpu_copy")
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
_DDP = Named("megatron.core.distributed.distributed_data_parallel", "DistributedDataParallel")
_FSDP = tuple(
    Named(f"{package}.megatron_fsdp", "MegatronFSDP")
    for package in ("megatron_fsdp", "megatron.core.distributed.fsdp.src.megatron_fsdp")
)


def _nccl_ub(what: str) -> str:
    return (
        f"{what} in memory that NCCL allocated and registered by its address (nccl_ub), which must "
        "not move; build it with nccl_ub=False, or register it with external=True"
    )


_ALLOCATORS = ("weight_alloc", "transpose_weight_alloc", "main_grad_alloc", "hsdp_grad_comm_alloc")


class Megatron(Framework):
    """The buffers behind Megatron's DistributedDataParallel, gradients that are kept in
    `main_grad`, and Megatron's optimizers."""

    packages = ("megatron.core",)
    hangs_tensors = True
    recognised_by = (_DDP,)
    wrappers = (
        Wrapper(
            Named("megatron.core.distributed.data_parallel_base", "_BaseDataParallel"), "module"
        ),
        Wrapper(Named("megatron.core.transformer.module", "Float16Module"), "module"),
    )

    external_optimizers = (
        Advised(HYBRID, "Megatron's HybridDeviceOptimizer places its state itself"),
    )

    @classmethod
    def holds_optimizers(cls, obj: object) -> bool:
        return _OPTIMIZER.is_of(obj)

    @classmethod
    def own_state(cls, optimizer: object) -> OwnState | None:
        return HybridState(optimizer) if HYBRID.is_of(optimizer) else None

    @classmethod
    def stepped_for(cls, objects: Sequence[object]) -> Mapping[int, torch.Tensor]:
        found: dict[int, torch.Tensor] = {}
        for obj in filter(_OPTIMIZER.is_of, objects):
            for stepped, models in _STEPPED:
                for ours, theirs in zip(
                    getattr(obj, stepped, ()), getattr(obj, models, ()), strict=False
                ):
                    # `own` is None if the inner optimizer itself keeps the main parameter.
                    found.update(
                        {
                            id(own): model
                            for own, model in zip(ours, theirs, strict=False)
                            if own is not None
                        }
                    )
        return found

    @classmethod
    def further_parameters(cls, objects: Sequence[object]) -> Iterator[torch.Tensor]:
        for obj in filter(_OPTIMIZER.is_of, objects):
            for chunk in getattr(obj, "model_chunks", ()):
                yield from chunk.parameters()

    @classmethod
    def optimizer_scalars(cls, objects: Sequence[object]) -> Iterator[tuple[str, torch.Tensor]]:
        """Loss scales and overflow flags: a few bytes, which stay on the device because forward and
        backward passes read them."""
        for obj in filter(_OPTIMIZER.is_of, objects):
            for owner in (obj, getattr(obj, "grad_scaler", None)):
                for name, value in getattr(owner, "__dict__", {}).items():
                    if isinstance(value, torch.Tensor):
                        yield f"{type(owner).__name__}.{name}", value

    @classmethod
    def reading_methods(cls, obj: object) -> Sequence[str]:
        if _OPTIMIZER.is_of(obj):
            return _READING
        return ["sharded_state_dict"] if _MODULE.is_of(obj) else []

    @classmethod
    def find(cls, root: torch.nn.Module) -> Framework | None:
        has_gradients = any(
            isinstance(getattr(each, "main_grad", None), torch.Tensor) for each in root.parameters()
        )
        return cls(root) if has_gradients else super().find(root)

    def refusal(self, compute_device: torch.device) -> str | None:
        for path, buffer in self._buffers():
            if getattr(buffer, "nccl_ub", False) or getattr(
                getattr(buffer, "ddp_config", None), "nccl_ub", False
            ):
                return _nccl_ub(f"{path} is")
        return None

    def ready(self) -> None:
        """Wait for communication in the background. Its work handles stay, because the next forward
        pass asks them again."""
        for group in self._bucket_groups():
            for handle in (
                getattr(group, "param_gather_handle", None),
                getattr(group, "grad_reduce_handle", None),
            ):
                if handle is not None:
                    handle.wait()

    def tensors(self) -> Iterator[Owned]:
        """Buffers, their buckets' views, `main_grad` of every parameter, and the shards that bucket
        groups cache."""
        root = self.root()
        if root is None:
            return
        for path, buffer in self._buffers():
            # With a shared buffer (parameters in MXFP8), gradients lie in the memory of the
            # parameters, so it is not transient.
            is_loose = getattr(buffer, "shared_buffer", None) is None
            for place, each in (
                (path, buffer),
                *(
                    (f"{path}.buckets.{index}", bucket)
                    for index, bucket in enumerate(buffer.buckets)
                ),
            ):
                yield from _fields(
                    each, place, param_data=False, shared_buffer=False, grad_data=is_loose
                )
        for name, parameter in root.named_parameters():
            yield from _fields(parameter, name, main_grad=True)
        for index, group in enumerate(self._bucket_groups()):
            for field, transient in (
                ("cached_param_buffer_shard_list", False),
                ("cached_grad_buffer_shard_list", True),
            ):
                for shards in getattr(group, field, ()):
                    yield from (
                        Owned(f"bucket_groups.{index}.{field}", shard, transient)
                        for shard in shards or ()
                    )

    def gradient_buffers(self) -> Iterator[torch.Tensor]:
        for _, buffer in self._buffers():
            if buffer.grad_data is not None and getattr(buffer, "shared_buffer", None) is None:
                yield buffer.grad_data
        root = self.root()
        for parameter in () if root is None or any(self.parts(_DDP)) else root.parameters():
            if isinstance(gradient := getattr(parameter, "main_grad", None), torch.Tensor):
                yield gradient

    def drop_caches(self) -> None:
        drop_global_buffer()

    def _buffers(self) -> Iterator[tuple[str, Any]]:
        """Name and buffer, for each buffer of a DistributedDataParallel."""
        for path, ddp in self.parts(_DDP):
            for field in ("buffers", "expert_parallel_buffers"):
                for index, buffer in enumerate(ddp.__dict__.get(field, ())):
                    yield f"{path}{field}.{index}", buffer

    def _bucket_groups(self) -> Iterator[Any]:
        for _, ddp in self.parts(_DDP):
            for field in ("bucket_groups", "expert_parallel_bucket_groups"):
                yield from ddp.__dict__.get(field, ())


def _fields(obj: Any, path: str, **transient: bool) -> Iterator[Owned]:
    """The tensors in attributes of an object, which say whether they are transient."""
    for name, comes_and_goes in transient.items():
        if isinstance(tensor := getattr(obj, name, None), torch.Tensor):
            yield Owned(f"{path}.{name}", tensor, comes_and_goes)


def drop_global_buffer() -> None:
    """Empty Megatron's global memory buffer, which it fills again when needed. Not done if a
    captured CUDA graph may use that memory."""
    for module, name, field in (
        ("megatron.core.transformer.cuda_graphs", "_CudagraphGlobalRecord", "cudagraph_created"),
        ("megatron.core.full_cuda_graph", "FullCudaGraphWrapper", "cuda_graph"),
    ):
        found = getattr(loaded_class(module, name), field, None)
        if any(found.values()) if isinstance(found, dict) else found:
            return
    state = sys.modules.get("megatron.core.parallel_state")
    buffer = getattr(getattr(state, "_GLOBAL_MEMORY_BUFFER", None), "buffer", None)
    if isinstance(buffer, dict):
        buffer.clear()


class HybridState(OwnState):
    """The state of one HybridDeviceOptimizer, and how it is saved and loaded in checkpoints.

    The optimizer steps a part of the parameters on the CPU and moves everything itself, so it is
    external. Its own `load_state_dict` makes new inner optimizers and copies, and fails on
    parameters without state (and on float32 parameters among others). Its own state is in the order
    of the inner optimizers, which differs between ranks. Here it is in the order of the parameters,
    and loading writes in place. Nothing here calls a collective.
    """

    def __init__(self, hybrid: Any) -> None:
        self._hybrid = hybrid

    def tensors(self, path: str) -> Iterator[Owned]:
        """The optimizer's tensors outside its state: main parameters, copies on the CPU, their
        gradients. Its own load replaces them."""
        seen: set[int] = set()
        for index, parameter in enumerate(self._parameters()):
            for field in _COPIES:
                copy = getattr(self._hybrid, field).get(parameter)
                if copy is None or id(copy) in seen:
                    continue
                seen.add(id(copy))
                yield from (
                    Owned(name, part) for name, part in plain_parts(copy, f"{path}{field}.{index}")
                )
                if (gradient := copy.grad) is not None:
                    yield from (
                        Owned(name, part, True)
                        for name, part in plain_parts(gradient, f"{path}{field}.{index}.grad")
                    )

    def exported(self) -> dict[torch.Tensor, dict[str, Any]]:
        """See `OwnState`. In the order of the groups; {} without state. Of a sharded parameter it
        is sharded, too. A `step` that is counted by group is added to each parameter's state."""
        groups = [
            group
            for optimizer in self._hybrid.sub_optimizers
            for group in optimizer.param_groups
            if "step" in group
        ]
        counts = {id(inner): group["step"] for group in groups for inner in group["params"]}
        found = {}
        for parameter in self._parameters():
            entry = dict(self._hybrid.state.get(parameter) or {})
            inner = self._hybrid.param_to_inner_param[parameter]
            if entry and "step" not in entry and id(inner) in counts:
                entry["step"] = counts[id(inner)]
            found[parameter] = {key: _as_sharded(value, parameter) for key, value in entry.items()}
        return found

    def settings(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Without classes, which are of this run, and `step`, which is in the state."""
        return {
            key: value
            for key, value in group.items()
            if key not in ("params", "step") and not isinstance(value, type)
        }

    def problems(
        self, given: Mapping[Any, Mapping[str, Any]]
    ) -> Iterator[tuple[torch.Tensor, str]]:
        for parameter in self._parameters():
            count = _local(parameter).numel()
            for key, value in given.get(parameter, {}).items():
                if (
                    isinstance(value, torch.Tensor)
                    and value.dim()
                    and _local(value).numel() != count
                ):
                    yield (
                        parameter,
                        (
                            f"{key!r} has {_local(value).numel()} elements, but the parameter has "
                            f"{count} on this rank"
                        ),
                    )

    @torch.no_grad()
    def restore(
        self, given: Mapping[Any, Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]
    ) -> None:
        """See `OwnState`. The model's parameters must have been loaded before: a main parameter
        that was not saved gets their value."""
        for group, saved in zip(self._hybrid.param_groups, groups, strict=True):
            # an old value would be copied into the inner optimizers at every step
            group.pop("step", None)
            group.update(self.settings(saved))
        for optimizer in self._hybrid.sub_optimizers:
            counts_by_state = getattr(type(optimizer).step, "__module__", "").startswith(
                "torch.optim."
            )
            for group in optimizer.param_groups:
                for inner in group["params"]:
                    parameter = self._hybrid.inner_param_to_orig_param[inner]
                    entry = dict(given.get(parameter, {}))
                    master = entry.pop(MASTER, None)
                    if master is not None or inner is not parameter:
                        _local(inner).copy_(
                            _local(parameter if master is None else master).view_as(_local(inner))
                        )
                    # drop the copy's old gradient: it would be stepped if the parameter itself has
                    # none
                    if inner is not parameter:
                        inner.grad = None
                        self._hybrid.cpu_copy_map_grad.pop(inner, None)
                    step = entry.pop("step", None)
                    if step is not None and counts_by_state:
                        entry["step"] = torch.as_tensor(step, dtype=torch.float32, device="cpu")
                    elif step is not None:
                        group["step"] = int(step)
                    _write(optimizer.state, inner, entry, group)
        self._hybrid._sync_sub_optimizers_state_to_hdo()

    def _parameters(self) -> Iterator[torch.Tensor]:
        return (parameter for group in self._hybrid.param_groups for parameter in group["params"])


def _write(
    state: dict[Any, dict[str, Any]],
    inner: torch.Tensor,
    entry: Mapping[str, Any],
    group: Mapping[str, Any],
) -> None:
    if not entry:
        state.pop(inner, None)
        return
    live, here = state.get(inner, {}), _local(inner)
    placed: dict[str, Any] = {}
    for key, value in entry.items():
        present = live.get(key)
        if not isinstance(value, torch.Tensor):
            placed[key] = value
        elif (
            isinstance(present, torch.Tensor)
            and present.dtype == value.dtype
            and _local(present).numel() == _local(value).numel()
        ):
            _local(present).copy_(_local(value).view_as(_local(present)))
            placed[key] = present
        else:
            counts = key == "step" and not (group.get("fused") or group.get("capturable"))
            shape = () if value.dim() == 0 else here.shape
            placed[key] = (
                _local(value).detach().to("cpu" if counts else here.device, copy=True).view(shape)
            )
    live.clear()
    live.update(placed)
    state[inner] = live


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor with this rank's bytes. (A DTensor itself has the number of elements of all
    ranks.)"""
    if not is_wrapper(tensor):
        return tensor
    (part,) = (part for _, part in parts_of(tensor, ""))
    return part


def _as_sharded(value: Any, parameter: torch.Tensor) -> Any:
    """Wrap state of a sharded parameter, which the optimizer keeps as a plain local tensor, in a
    wrapper like the parameter's."""
    if (
        not is_wrapper(parameter)
        or not isinstance(value, torch.Tensor)
        or is_wrapper(value)
        or value.dim() == 0
    ):
        return value
    local = _local(parameter)
    if value.numel() != local.numel():
        return value
    inner = value.view(local.shape)
    # with these, Megatron-FSDP tells checkpoints about uneven shards
    for name in ("__create_chunk_list__", "__create_write_items__"):
        if name in vars(local):
            setattr(inner, name, vars(local)[name])
    # the wrapper must have the state's dtype
    like = torch.empty_like(parameter, dtype=value.dtype, device="meta")
    return rewrapped(like, lambda _: inner)


class MegatronFSDPShards(Framework):
    """All MegatronFSDP modules of a module tree."""

    packages = ("megatron.core", "megatron_fsdp")
    hangs_tensors = True
    recognised_by = _FSDP
    wrappers = tuple(Wrapper(named, "module") for named in _FSDP)
    with_own_export = _FSDP

    def refusal(self, compute_device: torch.device) -> str | None:
        for path, model in self.parts(*_FSDP):
            if getattr(getattr(model, "ddp_config", None), "nccl_ub", False):
                return _nccl_ub(f"the buffers of {path or 'the root'} are")
        return None

    def ready(self) -> None:
        """Wait for communication, and release gathered parameters. The next forward pass gathers
        them again."""
        for _, model in self.parts(*_FSDP):
            model.grad_reduce_pipeline.wait_for_previous_grad_reduce(0)
            pipeline = model.all_gather_pipeline
            for number, group in enumerate(model.param_and_grad_buffer.parameter_groups):
                buffer = group.model_weight_buffer
                if buffer is None or not buffer.is_data_distributed:
                    continue  # it is not sharded, so nothing was gathered
                for backward in (False, True):
                    if (
                        pipeline.bucket_status[pipeline.get_bucket_key(number, backward)].name
                        != "EMPTY"
                    ):
                        pipeline.release_bucket(number, backward)

    def own_tensors(self) -> Mapping[int, torch.Tensor]:
        found: dict[int, torch.Tensor] = {}
        for _, model in self.parts(*_FSDP):
            sharded = dict(model.param_and_grad_buffer.optimizer_named_parameters)
            found.update(
                {id(raw): sharded[name] for name, raw in model.raw_param.items() if name in sharded}
            )
        return found

    def tensors(self) -> Iterator[Owned]:
        for path, model in self.parts(*_FSDP):
            for number, group in enumerate(model.param_and_grad_buffer.parameter_groups):
                for name, buffer in _buffers(group):
                    yield Owned(
                        f"{path}parameter_groups.{number}.{name}.data",
                        buffer.data,
                        _is_of_gradients(group, buffer),
                    )
            for name, parameter in model.param_and_grad_buffer.optimizer_named_parameters:
                yield Owned(f"{path}{name}", parameter)
                yield from _fields(parameter, f"{path}{name}", decoupled_grad=True)
            for name, raw in model.raw_param.items():
                # Detached, because `own_tensors` would replace the parameter itself by the sharded
                # one.
                yield Owned(f"{path}{name}.raw", raw.detach())
                yield from _fields(raw, f"{path}{name}", main_grad=True)
                yield from _fields(raw, f"{path}{name}.raw", grad=True)
            for name, gradient in model.param_and_grad_buffer.dist_main_grad.items():
                if isinstance(gradient._local_tensor, torch.Tensor):
                    yield Owned(f"{path}{name}.dist_main_grad", gradient, True)

    def gradient_buffers(self) -> Iterator[torch.Tensor]:
        for _, model in self.parts(*_FSDP):
            for group in model.param_and_grad_buffer.parameter_groups:
                yield from (
                    buffer.data for _, buffer in _buffers(group) if _is_of_gradients(group, buffer)
                )

    def kept_by_framework(self) -> Iterator[tuple[str, int]]:
        """Buckets that the framework keeps between two uses (double buffers), in its own memory."""
        for path, model in self.parts(*_FSDP):
            for name in _ALLOCATORS:
                buckets = (
                    getattr(getattr(model.param_and_grad_buffer, name, None), "buckets", None) or {}
                )
                nbytes = sum(
                    bucket.data.untyped_storage().nbytes()
                    for bucket in buckets.values()
                    if isinstance(bucket.data, torch.Tensor)
                )
                if nbytes:
                    yield f"{path}{name}", nbytes

    def drop_caches(self) -> None:
        drop_global_buffer()


def _buffers(group: Any) -> Iterator[tuple[str, Any]]:
    """Name and buffer, for each buffer of the group that has data on this rank."""
    for name, value in vars(group).items():
        if hasattr(value, "bucket_index") and isinstance(
            getattr(value, "data", None), torch.Tensor
        ):
            yield name, value


def _is_of_gradients(group: Any, buffer: Any) -> bool:
    return any(
        buffer is getattr(group, name, None)
        for name in ("main_grad_buffer", "hfsdp_helper_gbuf", "hsdp_gbuf")
    )
