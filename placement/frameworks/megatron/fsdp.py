"""Megatron-FSDP: the data-parallel buffers behind a module. Supports the package megatron_fsdp and the copy in megatron-core.

The module shows one of two sets of parameters at a time: sharded ones (DTensors over the shard buffers), which optimizers step, and raw
ones, whose data is gathered for computing. Both exist as long as the module. Gathered data is freed before a move.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from placement.core.loaded_classes import loaded_class
from placement.frameworks.base import Framework, Named, Wrapper
from placement.frameworks.megatron.ddp import drop_global_buffer
from placement.tensors.owned import Owned

_MODULES = ("megatron_fsdp.megatron_fsdp", "megatron.core.distributed.fsdp.src.megatron_fsdp.megatron_fsdp")
_ALLOCATORS = ("weight_alloc", "transpose_weight_alloc", "main_grad_alloc", "hsdp_grad_comm_alloc")


class MegatronFSDPShards(Framework):
    """All MegatronFSDP modules of a module tree."""

    wrappers = tuple(Wrapper(Named(module, "MegatronFSDP"), "module") for module in _MODULES)
    with_own_export = tuple(Named(module, "MegatronFSDP") for module in _MODULES)

    def __init__(self, root: torch.nn.Module) -> None:
        self._root = weakref.ref(root)

    @classmethod
    def find(cls, root: torch.nn.Module) -> MegatronFSDPShards | None:
        found = cls(root)
        return found if any(found._models()) else None

    def refusal(self, compute_device: torch.device) -> str | None:
        for path, model in self._models():
            if getattr(getattr(model, "ddp_config", None), "nccl_ub", False):
                return (
                    f"the buffers of {path or 'the root'} are in memory that NCCL allocated and registered by its address (nccl_ub), "
                    "which must not move; shard with nccl_ub=False, or register it with external=True"
                )
        return None

    def ready(self) -> None:
        """Wait for communication, and release gathered parameters. The next forward pass gathers them again."""
        for _, model in self._models():
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
        for _, model in self._models():
            sharded = dict(model.param_and_grad_buffer.optimizer_named_parameters)
            found.update({id(raw): sharded[name] for name, raw in model.raw_param.items() if name in sharded})
        return found

    def tensors(self) -> Iterator[Owned]:
        for path, model in self._models():
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
        for _, model in self._models():
            for group in model.param_and_grad_buffer.parameter_groups:
                yield from (buffer.data for _, buffer in _buffers(group) if _is_of_gradients(group, buffer))

    def kept_by_framework(self) -> Iterator[tuple[str, int]]:
        """Buckets that the framework keeps between two uses (double buffers), in its own memory."""
        for path, model in self._models():
            for name in _ALLOCATORS:
                buckets = getattr(getattr(model.param_and_grad_buffer, name, None), "buckets", None) or {}
                nbytes = sum(bucket.data.untyped_storage().nbytes() for bucket in buckets.values() if isinstance(bucket.data, torch.Tensor))
                if nbytes:
                    yield f"{path}{name}", nbytes

    def drop_caches(self) -> None:
        drop_global_buffer()

    def _models(self) -> Iterator[tuple[str, Any]]:
        """Path prefix and module of every MegatronFSDP in the tree."""
        root = self._root()
        classes = tuple(cls for module in _MODULES if (cls := loaded_class(module, "MegatronFSDP")) is not None)
        if root is not None and classes:
            yield from ((f"{path}." if path else "", part) for path, part in root.named_modules() if isinstance(part, classes))


def _buffers(group: Any) -> Iterator[tuple[str, Any]]:
    """Name and buffer, for each buffer of the group that has data on this rank."""
    for name, value in vars(group).items():
        if hasattr(value, "bucket_index") and isinstance(getattr(value, "data", None), torch.Tensor):
            yield name, value


def _is_of_gradients(group: Any, buffer: Any) -> bool:
    return any(buffer is getattr(group, name, None) for name in ("main_grad_buffer", "hfsdp_helper_gbuf", "hsdp_gbuf"))
