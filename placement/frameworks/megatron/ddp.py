"""Megatron-Core: the contiguous buffers of its DistributedDataParallel.

Parameters and gradients of a model are views of a few large buffers. The shards that the distributed optimizer steps are views of them,
too, if they have the model's dtype. placement moves each storage once, so that all these views stay valid.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from placement.core.loaded_classes import loaded_class
from placement.frameworks.base import Named, Wrapper
from placement.frameworks.megatron.optimizers import MegatronOptimizers
from placement.tensors.owned import Owned


class Megatron(MegatronOptimizers):
    """The buffers behind Megatron's DistributedDataParallel, gradients that are kept in `main_grad`, and Megatron's optimizers."""

    wrappers = (
        Wrapper(Named("megatron.core.distributed.data_parallel_base", "_BaseDataParallel"), "module"),
        Wrapper(Named("megatron.core.transformer.module", "Float16Module"), "module"),
    )

    def __init__(self, root: torch.nn.Module) -> None:
        self._root = weakref.ref(root)

    @classmethod
    def find(cls, root: torch.nn.Module) -> Megatron | None:
        if any(_ddps(root)) or any(isinstance(getattr(each, "main_grad", None), torch.Tensor) for each in root.parameters()):
            return cls(root)
        return None

    def refusal(self, compute_device: torch.device) -> str | None:
        for path, _, buffer in self._buffers():
            if getattr(buffer, "nccl_ub", False) or getattr(getattr(buffer, "ddp_config", None), "nccl_ub", False):
                return (
                    f"{path} is in memory that NCCL allocated and registered by its address (nccl_ub), which must not move; "
                    "build DistributedDataParallelConfig with nccl_ub=False, or register it with external=True"
                )
        return None

    def ready(self) -> None:
        """Wait for communication in the background. Its work handles stay, because the next forward pass asks them again."""
        for group in self._bucket_groups():
            for handle in (getattr(group, "param_gather_handle", None), getattr(group, "grad_reduce_handle", None)):
                if handle is not None:
                    handle.wait()

    @property
    def lost_by_conversion(self) -> str | None:
        root = self._root()
        if root is None or not any(_ddps(root)):
            return None
        return (
            "Megatron's DistributedDataParallel no longer sees its gradients, because torch drops its hooks when a parameter changes dtype "
            "or device: wrap the module again, and register it again"
        )

    def tensors(self) -> Iterator[Owned]:
        """Buffers, their buckets' views, `main_grad` of every parameter, and the shards that bucket groups cache."""
        root = self._root()
        if root is None:
            return
        for path, _, buffer in self._buffers():
            # With a shared buffer (parameters in MXFP8), gradients lie in the memory of the parameters, so it is not transient.
            is_loose = getattr(buffer, "shared_buffer", None) is None
            yield from _fields(buffer, path, ("param_data", "shared_buffer"), transient=False)
            yield from _fields(buffer, path, ("grad_data",), transient=is_loose)
            for index, bucket in enumerate(buffer.buckets):
                yield from _fields(bucket, f"{path}.buckets.{index}", ("param_data",), transient=False)
                yield from _fields(bucket, f"{path}.buckets.{index}", ("grad_data",), transient=is_loose)
        for name, parameter in root.named_parameters():
            yield from _fields(parameter, name, ("main_grad",), transient=True)
        for index, group in enumerate(self._bucket_groups()):
            for field, transient in (("cached_param_buffer_shard_list", False), ("cached_grad_buffer_shard_list", True)):
                for shards in getattr(group, field, ()):
                    yield from (Owned(f"bucket_groups.{index}.{field}", shard, transient) for shard in shards or ())

    def gradient_buffers(self) -> Iterator[torch.Tensor]:
        root = self._root()
        if root is None:
            return
        for _, _, buffer in self._buffers():
            if buffer.grad_data is not None and getattr(buffer, "shared_buffer", None) is None:
                yield buffer.grad_data
        with_buffers = any(_ddps(root))
        for parameter in () if with_buffers else root.parameters():
            if isinstance(gradient := getattr(parameter, "main_grad", None), torch.Tensor):
                yield gradient

    def drop_caches(self) -> None:
        drop_global_buffer()

    def _buffers(self) -> Iterator[tuple[str, Any, Any]]:
        """Name, DistributedDataParallel module and buffer, for each of its buffers."""
        root = self._root()
        for path, ddp in () if root is None else _ddps(root):
            for field in ("buffers", "expert_parallel_buffers"):
                for index, buffer in enumerate(ddp.__dict__.get(field, ())):
                    yield f"{path}{field}.{index}", ddp, buffer

    def _bucket_groups(self) -> Iterator[Any]:
        root = self._root()
        for _, ddp in () if root is None else _ddps(root):
            for field in ("bucket_groups", "expert_parallel_bucket_groups"):
                yield from ddp.__dict__.get(field, ())


def _ddps(root: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Path prefix and module of every Megatron DistributedDataParallel in the tree."""
    cls = loaded_class("megatron.core.distributed.distributed_data_parallel", "DistributedDataParallel")
    if cls is not None:
        yield from ((f"{path}." if path else "", part) for path, part in root.named_modules() if isinstance(part, cls))


def _fields(obj: Any, path: str, names: Iterable[str], *, transient: bool) -> Iterator[Owned]:
    for name in names:
        if isinstance(tensor := getattr(obj, name, None), torch.Tensor):
            yield Owned(f"{path}.{name}", tensor, transient)


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
