"""Megatron-Core: the buffers of its DistributedDataParallel, its optimizers, and Megatron-FSDP.

Parameters and gradients of a DistributedDataParallel are views of a few large buffers. The shards that the distributed optimizer steps
are views of them, too, if they have the model's dtype. placement moves each storage once, so that all these views stay valid.

A MegatronFSDP module (of the package megatron_fsdp, or of the copy in megatron-core) shows one of two sets of parameters at a time:
sharded ones (DTensors over the shard buffers), which optimizers step, and raw ones, whose data is gathered for computing. Both exist as
long as the module. Gathered data is freed before a move.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from placement.core import loaded_class
from placement.frameworks.base import Advised, Framework, Named, Wrapper
from placement.tensors.plain import Owned, plain_parts

HYBRID = Named("megatron.core.optimizer.cpu_offloading.hybrid_optimizer", "HybridDeviceOptimizer")
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
    Named(f"{package}.megatron_fsdp", "MegatronFSDP") for package in ("megatron_fsdp", "megatron.core.distributed.fsdp.src.megatron_fsdp")
)


def _nccl_ub(what: str) -> str:
    return (
        f"{what} in memory that NCCL allocated and registered by its address (nccl_ub), which must not move; "
        "build it with nccl_ub=False, or register it with external=True"
    )


_ALLOCATORS = ("weight_alloc", "transpose_weight_alloc", "main_grad_alloc", "hsdp_grad_comm_alloc")


class Megatron(Framework):
    """The buffers behind Megatron's DistributedDataParallel, gradients that are kept in `main_grad`, and Megatron's optimizers."""

    packages = ("megatron.core",)
    recognised_by = (_DDP,)
    wrappers = (
        Wrapper(Named("megatron.core.distributed.data_parallel_base", "_BaseDataParallel"), "module"),
        Wrapper(Named("megatron.core.transformer.module", "Float16Module"), "module"),
    )

    external_optimizers = (Advised(HYBRID, "Megatron's HybridDeviceOptimizer places its state itself"),)

    @classmethod
    def holds_optimizers(cls, obj: object) -> bool:
        return _OPTIMIZER.is_of(obj)

    @classmethod
    def hidden_tensors(cls, optimizer: object, path: str) -> Iterator[Owned] | None:
        return _tensors_of_hybrid(optimizer, path) if HYBRID.is_of(optimizer) else None

    @classmethod
    def stepped_for(cls, objects: Sequence[object]) -> Mapping[int, torch.Tensor]:
        found: dict[int, torch.Tensor] = {}
        for obj in filter(_OPTIMIZER.is_of, objects):
            for stepped, models in _STEPPED:
                for ours, theirs in zip(getattr(obj, stepped, ()), getattr(obj, models, ()), strict=False):
                    # `own` is None if the inner optimizer itself keeps the main parameter.
                    found.update({id(own): model for own, model in zip(ours, theirs, strict=False) if own is not None})
        return found

    @classmethod
    def further_parameters(cls, objects: Sequence[object]) -> Iterator[torch.Tensor]:
        for obj in filter(_OPTIMIZER.is_of, objects):
            for chunk in getattr(obj, "model_chunks", ()):
                yield from chunk.parameters()

    @classmethod
    def optimizer_scalars(cls, objects: Sequence[object]) -> Iterator[tuple[str, torch.Tensor]]:
        """Loss scales and overflow flags: a few bytes, which stay on the device because forward and backward passes read them."""
        for obj in filter(_OPTIMIZER.is_of, objects):
            for owner in (obj, getattr(obj, "grad_scaler", None)):
                for name, value in getattr(owner, "__dict__", {}).items():
                    if isinstance(value, torch.Tensor):
                        yield f"{type(owner).__name__}.{name}", value

    @classmethod
    def reading_methods(cls, obj: object) -> Sequence[str]:
        if _OPTIMIZER.is_of(obj):
            return [name for name in _READING if callable(getattr(type(obj), name, None))]
        return ["sharded_state_dict"] if _MODULE.is_of(obj) else []

    @classmethod
    def find(cls, root: torch.nn.Module) -> Framework | None:
        has_gradients = any(isinstance(getattr(each, "main_grad", None), torch.Tensor) for each in root.parameters())
        return cls(root) if has_gradients else super().find(root)

    def refusal(self, compute_device: torch.device) -> str | None:
        for path, buffer in self._buffers():
            if getattr(buffer, "nccl_ub", False) or getattr(getattr(buffer, "ddp_config", None), "nccl_ub", False):
                return _nccl_ub(f"{path} is")
        return None

    def ready(self) -> None:
        """Wait for communication in the background. Its work handles stay, because the next forward pass asks them again."""
        for group in self._bucket_groups():
            for handle in (getattr(group, "param_gather_handle", None), getattr(group, "grad_reduce_handle", None)):
                if handle is not None:
                    handle.wait()

    @property
    def lost_by_conversion(self) -> str | None:
        if not any(self.parts(_DDP)):
            return None
        return (
            "Megatron's DistributedDataParallel no longer sees its gradients, because torch drops its hooks when a parameter changes dtype "
            "or device: wrap the module again, and register it again"
        )

    def tensors(self) -> Iterator[Owned]:
        """Buffers, their buckets' views, `main_grad` of every parameter, and the shards that bucket groups cache."""
        root = self.root()
        if root is None:
            return
        for path, buffer in self._buffers():
            # With a shared buffer (parameters in MXFP8), gradients lie in the memory of the parameters, so it is not transient.
            is_loose = getattr(buffer, "shared_buffer", None) is None
            for place, each in ((path, buffer), *((f"{path}.buckets.{index}", bucket) for index, bucket in enumerate(buffer.buckets))):
                yield from _fields(each, place, param_data=False, shared_buffer=False, grad_data=is_loose)
        for name, parameter in root.named_parameters():
            yield from _fields(parameter, name, main_grad=True)
        for index, group in enumerate(self._bucket_groups()):
            for field, transient in (("cached_param_buffer_shard_list", False), ("cached_grad_buffer_shard_list", True)):
                for shards in getattr(group, field, ()):
                    yield from (Owned(f"bucket_groups.{index}.{field}", shard, transient) for shard in shards or ())

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
    """Empty Megatron's global memory buffer, which it fills again when needed. Not done if a captured CUDA graph may use that memory."""
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


def _tensors_of_hybrid(hybrid: Any, path: str) -> Iterator[Owned]:
    """The tensors of a HybridDeviceOptimizer outside its state: main parameters, copies on the CPU, their gradients. It steps a part of
    the parameters on the CPU and moves everything itself, and its load replaces the inner optimizers and all of these."""
    seen: set[int] = set()
    for index, parameter in enumerate(parameter for group in hybrid.param_groups for parameter in group["params"]):
        for field in _COPIES:
            copy = getattr(hybrid, field).get(parameter)
            if copy is None or id(copy) in seen:
                continue
            seen.add(id(copy))
            yield from (Owned(name, part) for name, part in plain_parts(copy, f"{path}{field}.{index}"))
            if (gradient := copy.grad) is not None:
                yield from (Owned(name, part, True) for name, part in plain_parts(gradient, f"{path}{field}.{index}.grad"))


class MegatronFSDPShards(Framework):
    """All MegatronFSDP modules of a module tree."""

    packages = ("megatron.core", "megatron_fsdp")
    recognised_by = _FSDP
    wrappers = tuple(Wrapper(named, "module") for named in _FSDP)
    with_own_export = _FSDP

    def refusal(self, compute_device: torch.device) -> str | None:
        for path, model in self.parts(*_FSDP):
            if getattr(getattr(model, "ddp_config", None), "nccl_ub", False):
                return _nccl_ub(f"the buffers of {path or 'the root'} are")
        return None

    def ready(self) -> None:
        """Wait for communication, and release gathered parameters. The next forward pass gathers them again."""
        for _, model in self.parts(*_FSDP):
            model.grad_reduce_pipeline.wait_for_previous_grad_reduce(0)
            pipeline = model.all_gather_pipeline
            for number, group in enumerate(model.param_and_grad_buffer.parameter_groups):
                buffer = group.model_weight_buffer
                if buffer is None or not buffer.is_data_distributed:
                    continue  # it is not sharded, so nothing was gathered
                for backward in (False, True):
                    if pipeline.bucket_status[pipeline.get_bucket_key(number, backward)].name != "EMPTY":
                        pipeline.release_bucket(number, backward)

    def own_tensors(self) -> Mapping[int, torch.Tensor]:
        found: dict[int, torch.Tensor] = {}
        for _, model in self.parts(*_FSDP):
            sharded = dict(model.param_and_grad_buffer.optimizer_named_parameters)
            found.update({id(raw): sharded[name] for name, raw in model.raw_param.items() if name in sharded})
        return found

    def tensors(self) -> Iterator[Owned]:
        for path, model in self.parts(*_FSDP):
            for number, group in enumerate(model.param_and_grad_buffer.parameter_groups):
                for name, buffer in _buffers(group):
                    yield Owned(f"{path}parameter_groups.{number}.{name}.data", buffer.data, _is_of_gradients(group, buffer))
            for name, parameter in model.param_and_grad_buffer.optimizer_named_parameters:
                yield Owned(f"{path}{name}", parameter)
                if isinstance(gradient := getattr(parameter, "decoupled_grad", None), torch.Tensor):
                    yield Owned(f"{path}{name}.decoupled_grad", gradient, True)
            for name, raw in model.raw_param.items():
                # Detached, because `own_tensors` would replace the parameter itself by the sharded one.
                yield Owned(f"{path}{name}.raw", raw.detach())
                if isinstance(gradient := getattr(raw, "main_grad", None), torch.Tensor):
                    yield Owned(f"{path}{name}.main_grad", gradient, True)
                if isinstance(raw.grad, torch.Tensor):
                    yield Owned(f"{path}{name}.raw.grad", raw.grad, True)
            for name, gradient in model.param_and_grad_buffer.dist_main_grad.items():
                if isinstance(gradient._local_tensor, torch.Tensor):
                    yield Owned(f"{path}{name}.dist_main_grad", gradient, True)

    def gradient_buffers(self) -> Iterator[torch.Tensor]:
        for _, model in self.parts(*_FSDP):
            for group in model.param_and_grad_buffer.parameter_groups:
                yield from (buffer.data for _, buffer in _buffers(group) if _is_of_gradients(group, buffer))

    def kept_by_framework(self) -> Iterator[tuple[str, int]]:
        """Buckets that the framework keeps between two uses (double buffers), in its own memory."""
        for path, model in self.parts(*_FSDP):
            for name in _ALLOCATORS:
                buckets = getattr(getattr(model.param_and_grad_buffer, name, None), "buckets", None) or {}
                nbytes = sum(bucket.data.untyped_storage().nbytes() for bucket in buckets.values() if isinstance(bucket.data, torch.Tensor))
                if nbytes:
                    yield f"{path}{name}", nbytes

    def drop_caches(self) -> None:
        drop_global_buffer()


def _buffers(group: Any) -> Iterator[tuple[str, Any]]:
    """Name and buffer, for each buffer of the group that has data on this rank."""
    for name, value in vars(group).items():
        if hasattr(value, "bucket_index") and isinstance(getattr(value, "data", None), torch.Tensor):
            yield name, value


def _is_of_gradients(group: Any, buffer: Any) -> bool:
    return any(buffer is getattr(group, name, None) for name in ("main_grad_buffer", "hfsdp_helper_gbuf", "hsdp_gbuf"))
