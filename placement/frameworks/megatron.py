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


def _refused_for_nccl_ub(subject: str) -> str:
    return (
        f"{subject} in memory that NCCL allocated and registered by its address (nccl_ub), which "
        "must not move; build it with nccl_ub=False, or register it with external=True"
    )


def _has_nccl_ub(owner: Any) -> bool:
    config = getattr(owner, "ddp_config", None)
    return bool(getattr(config, "nccl_ub", False))


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
        models: dict[int, torch.Tensor] = {}
        for obj in filter(_OPTIMIZER.is_of, objects):
            for stepped_field, model_field in _STEPPED:
                stepped_groups = getattr(obj, stepped_field, ())
                model_groups = getattr(obj, model_field, ())
                for stepped_group, model_group in zip(stepped_groups, model_groups, strict=False):
                    for stepped, model in zip(stepped_group, model_group, strict=False):
                        # None if the inner optimizer itself keeps the main parameter
                        if stepped is not None:
                            models[id(stepped)] = model
        return models

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
        for parameter in root.parameters():
            if isinstance(getattr(parameter, "main_grad", None), torch.Tensor):
                return cls(root)
        return super().find(root)

    def refusal(self, compute_device: torch.device) -> str | None:
        for path, buffer in self._buffers():
            if getattr(buffer, "nccl_ub", False) or _has_nccl_ub(buffer):
                return _refused_for_nccl_ub(f"{path} is")
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
            is_apart = getattr(buffer, "shared_buffer", None) is None
            transient = {"param_data": False, "shared_buffer": False, "grad_data": is_apart}
            yield from _fields(buffer, path, **transient)
            for index, bucket in enumerate(buffer.buckets):
                yield from _fields(bucket, f"{path}.buckets.{index}", **transient)
        for name, parameter in root.named_parameters():
            yield from _fields(parameter, name, main_grad=True)
        for index, group in enumerate(self._bucket_groups()):
            for field, is_transient in (
                ("cached_param_buffer_shard_list", False),
                ("cached_grad_buffer_shard_list", True),
            ):
                for shards in getattr(group, field, ()):
                    for shard in shards or ():
                        yield Owned(f"bucket_groups.{index}.{field}", shard, is_transient)

    def gradient_buffers(self) -> Iterator[torch.Tensor]:
        for _, buffer in self._buffers():
            if buffer.grad_data is not None and getattr(buffer, "shared_buffer", None) is None:
                yield buffer.grad_data
        root = self.root()
        if root is None or any(self.parts(_DDP)):
            return
        for parameter in root.parameters():
            gradient = getattr(parameter, "main_grad", None)
            if isinstance(gradient, torch.Tensor):
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
    """The tensors in these attributes of an object; each keyword says whether they are
    transient."""
    for name, is_transient in transient.items():
        tensor = getattr(obj, name, None)
        if isinstance(tensor, torch.Tensor):
            yield Owned(f"{path}.{name}", tensor, is_transient)


def drop_global_buffer() -> None:
    """Empty Megatron's global memory buffer, which it fills again when needed. Not done if a
    captured CUDA graph may use that memory."""
    for module, name, field in (
        ("megatron.core.transformer.cuda_graphs", "_CudagraphGlobalRecord", "cudagraph_created"),
        ("megatron.core.full_cuda_graph", "FullCudaGraphWrapper", "cuda_graph"),
    ):
        captured = getattr(loaded_class(module, name), field, None)
        if isinstance(captured, dict):
            captured = any(captured.values())
        if captured:
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
        seen = set()
        for index, parameter in enumerate(self._parameters()):
            for field in _COPIES:
                copy = getattr(self._hybrid, field).get(parameter)
                if copy is None or id(copy) in seen:
                    continue
                seen.add(id(copy))
                copy_path = f"{path}{field}.{index}"
                for name, part in plain_parts(copy, copy_path):
                    yield Owned(name, part)
                if copy.grad is not None:
                    for name, part in plain_parts(copy.grad, f"{copy_path}.grad"):
                        yield Owned(name, part, True)

    def exported(self) -> dict[torch.Tensor, dict[str, Any]]:
        """See `OwnState`. In the order of the groups; {} without state. Of a sharded parameter it
        is sharded, too. A `step` that is counted by group is added to each parameter's state."""
        counts: dict[int, Any] = {}
        for optimizer in self._hybrid.sub_optimizers:
            for group in optimizer.param_groups:
                if "step" in group:
                    counts.update({id(inner): group["step"] for inner in group["params"]})
        states = {}
        for parameter in self._parameters():
            entry = dict(self._hybrid.state.get(parameter) or {})
            inner = self._hybrid.param_to_inner_param[parameter]
            if entry and "step" not in entry and id(inner) in counts:
                entry["step"] = counts[id(inner)]
            states[parameter] = {key: _as_sharded(value, parameter) for key, value in entry.items()}
        return states

    def settings(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Without classes, which are of this run, and `step`, which is in the state."""
        settings = {key: value for key, value in group.items() if not isinstance(value, type)}
        settings.pop("params", None)
        settings.pop("step", None)
        return settings

    def problems(
        self, states: Mapping[Any, Mapping[str, Any]]
    ) -> Iterator[tuple[torch.Tensor, str]]:
        for parameter in self._parameters():
            count = _local(parameter).numel()
            for key, value in states.get(parameter, {}).items():
                if not isinstance(value, torch.Tensor) or not value.dim():
                    continue
                saved_count = _local(value).numel()
                if saved_count != count:
                    problem = (
                        f"{key!r} has {saved_count} elements, but the parameter has {count} on "
                        "this rank"
                    )
                    yield parameter, problem

    @torch.no_grad()
    def restore(
        self,
        states: Mapping[Any, Mapping[str, Any]],
        groups: Sequence[Mapping[str, Any]],
    ) -> None:
        """See `OwnState`. The model's parameters must have been loaded before: a main parameter
        that was not saved gets their value."""
        for group, saved in zip(self._hybrid.param_groups, groups, strict=True):
            # an old value would be copied into the inner optimizers at every step
            group.pop("step", None)
            group.update(self.settings(saved))
        for optimizer in self._hybrid.sub_optimizers:
            for group in optimizer.param_groups:
                for inner in group["params"]:
                    parameter = self._hybrid.inner_param_to_orig_param[inner]
                    entry = dict(states.get(parameter, {}))
                    self._restore_main(inner, parameter, entry.pop(MASTER, None))
                    _restore_entry(optimizer, group, inner, entry)
        self._hybrid._sync_sub_optimizers_state_to_hdo()

    def _restore_main(
        self, inner: torch.Tensor, parameter: torch.Tensor, master: torch.Tensor | None
    ) -> None:
        """Restore the stepped copy of a parameter, if it has one."""
        if master is not None or inner is not parameter:
            value = _local(parameter if master is None else master)
            _local(inner).copy_(value.view_as(_local(inner)))
        # drop the copy's old gradient: it would be stepped if the parameter itself has none
        if inner is not parameter:
            inner.grad = None
            self._hybrid.cpu_copy_map_grad.pop(inner, None)

    def _parameters(self) -> Iterator[torch.Tensor]:
        for group in self._hybrid.param_groups:
            yield from group["params"]


def _restore_entry(
    optimizer: Any,
    group: dict[str, Any],
    inner: torch.Tensor,
    entry: dict[str, Any],
) -> None:
    """Load the state of one stepped parameter, its tensors in place where they fit."""
    step = entry.pop("step", None)
    if step is not None:
        # torch's optimizers count in the state, others in the group
        if getattr(type(optimizer).step, "__module__", "").startswith("torch.optim."):
            entry["step"] = torch.as_tensor(step, dtype=torch.float32, device="cpu")
        else:
            group["step"] = int(step)
    if not entry:
        optimizer.state.pop(inner, None)
        return
    live = optimizer.state.get(inner, {})
    restored: dict[str, Any] = {}
    for key, value in entry.items():
        present = live.get(key)
        if not isinstance(value, torch.Tensor):
            restored[key] = value
        elif _fits(present, value):
            _local(present).copy_(_local(value).view_as(_local(present)))
            restored[key] = present
        else:
            is_counter = key == "step" and not (group.get("fused") or group.get("capturable"))
            device = "cpu" if is_counter else _local(inner).device
            shape = () if value.dim() == 0 else _local(inner).shape
            copy = _local(value).detach().to(device, copy=True)
            restored[key] = copy.view(shape)
    live.clear()
    live.update(restored)
    optimizer.state[inner] = live


def _fits(present: Any, value: torch.Tensor) -> bool:
    """Whether a value can be copied into the present tensor of a state."""
    if not isinstance(present, torch.Tensor) or present.dtype != value.dtype:
        return False
    return _local(present).numel() == _local(value).numel()


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
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    if not is_wrapper(parameter) or is_wrapper(value):
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
            if _has_nccl_ub(model):
                return _refused_for_nccl_ub(f"the buffers of {path or 'the root'} are")
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
                    key = pipeline.get_bucket_key(number, backward)
                    if pipeline.bucket_status[key].name != "EMPTY":
                        pipeline.release_bucket(number, backward)

    def own_tensors(self) -> Mapping[int, torch.Tensor]:
        own_tensors: dict[int, torch.Tensor] = {}
        for _, model in self.parts(*_FSDP):
            sharded = dict(model.param_and_grad_buffer.optimizer_named_parameters)
            for name, raw in model.raw_param.items():
                if name in sharded:
                    own_tensors[id(raw)] = sharded[name]
        return own_tensors

    def tensors(self) -> Iterator[Owned]:
        for path, model in self.parts(*_FSDP):
            for number, group in enumerate(model.param_and_grad_buffer.parameter_groups):
                for name, buffer in _buffers(group):
                    is_transient = _is_of_gradients(group, buffer)
                    buffer_path = f"{path}parameter_groups.{number}.{name}.data"
                    yield Owned(buffer_path, buffer.data, is_transient)
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
                for _, buffer in _buffers(group):
                    if _is_of_gradients(group, buffer):
                        yield buffer.data

    def kept_by_framework(self) -> Iterator[tuple[str, int]]:
        """Buckets that the framework keeps between two uses (double buffers), in its own memory."""
        for path, model in self.parts(*_FSDP):
            for name in _ALLOCATORS:
                allocator = getattr(model.param_and_grad_buffer, name, None)
                buckets = getattr(allocator, "buckets", None) or {}
                nbytes = 0
                for bucket in buckets.values():
                    if isinstance(bucket.data, torch.Tensor):
                        nbytes += bucket.data.untyped_storage().nbytes()
                if nbytes:
                    yield f"{path}{name}", nbytes

    def drop_caches(self) -> None:
        drop_global_buffer()


def _buffers(group: Any) -> Iterator[tuple[str, Any]]:
    """Name and buffer, for each buffer of the group that has data on this rank."""
    for name, value in vars(group).items():
        has_data = isinstance(getattr(value, "data", None), torch.Tensor)
        if has_data and hasattr(value, "bucket_index"):
            yield name, value


def _is_of_gradients(group: Any, buffer: Any) -> bool:
    names = ("main_grad_buffer", "hfsdp_helper_gbuf", "hsdp_gbuf")
    return any(buffer is getattr(group, name, None) for name in names)
