"""torch's own wrappers: DistributedDataParallel, compiled and checkpointed modules, and those that
placement refuses. Accelerate's hooks.

DistributedDataParallel's reducer averages gradients in buckets. With `gradient_as_bucket_view=True`
gradients are views of the buckets. A bucket's storage then moves with them, and stays valid for the
reducer, which has the same storage. placement can find a bucket only through a gradient, so it
knows a bucket once a gradient is a view of it. Other buckets, and those of a reducer with gradients
of their own, stay on the device and are reported.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch

from placement.frameworks.base import Advised, Framework, Named, Wrapper
from placement.tensors.plain import Owned, attributes_of, is_a, nested_tensors

_DDP = Named("torch.nn.parallel.distributed", "DistributedDataParallel")


class DDP(Framework):
    """All `DistributedDataParallel` modules of a module tree."""

    recognised_by = (_DDP,)
    wrappers = (Wrapper(_DDP, "module"),)

    def __init__(self, root: torch.nn.Module) -> None:
        super().__init__(root)
        self._reducers = [_Reducer(path, part) for path, part in self.parts(_DDP)]

    def refusal(self, compute_device: torch.device) -> str | None:
        for reducer in self._reducers:
            if getattr(reducer.part(), "mixed_precision", None) is not None:
                return (
                    "DistributedDataParallel(mixed_precision=...) replaces its parameters by "
                    "copies between a forward pass and its backward pass; use torch.autocast, or "
                    "FSDP2 with a MixedPrecisionPolicy, or register it with external=True to have "
                    "it tracked and never moved"
                )
        return None

    def tensors(self) -> Iterator[Owned]:
        """The known buckets, and tensors that communication hooks keep from step to step
        (PowerSGD's errors are training state)."""
        for reducer in self._reducers:
            for index, bucket in enumerate(reducer.buckets()):
                yield Owned(f"{reducer.path}reducer.bucket.{index}", bucket, True)
            hooks = getattr(reducer.part(), "_comm_hooks", ())
            for index, (_, state) in enumerate(hooks):
                path = f"{reducer.path}comm_hook.{index}"
                for name, tensor in nested_tensors(attributes_of(state), path):
                    yield Owned(name, tensor)

    def gradient_buffers(self) -> Iterator[torch.Tensor]:
        for reducer in self._reducers:
            yield from reducer.buckets()

    def before_step(self) -> None:
        for reducer in self._reducers:
            reducer.buckets()  # which keeps references to them

    def kept_by_framework(self) -> Iterator[tuple[str, int]]:
        for reducer in self._reducers:
            yield from reducer.kept_by_framework()


class _Reducer:
    """The reducer of one `DistributedDataParallel`, as far as Python code can see it."""

    def __init__(self, path: str, part: Any) -> None:
        self.path = path
        self.part = weakref.ref(part)
        self._nbytes = int(part._get_ddp_logging_data()["total_parameter_size_bytes"])
        self._seen: list[weakref.ref[torch.Tensor]] = []
        """The buckets found through gradients so far, in the parameters' order. The reducer
        replaces them after its first iteration."""

    def buckets(self) -> list[torch.Tensor]:
        """The buckets of which gradients are views now, and those found earlier that still
        exist."""
        part = self.part()
        if part is None or not part.gradient_as_bucket_view:
            return []
        buckets = [alive() for alive in self._seen]
        for parameter in part._module_parameters:
            gradient = parameter.grad
            if gradient is not None and gradient._is_view():
                buckets.append(gradient._base)
        distinct = {id(bucket): bucket for bucket in buckets if bucket is not None}
        self._seen = [weakref.ref(bucket) for bucket in distinct.values()]
        return list(distinct.values())

    def kept_by_framework(self) -> Iterator[tuple[str, int]]:
        part = self.part()
        if part is None:
            return
        nbytes = self._nbytes - sum(bucket.nbytes for bucket in self.buckets())
        if nbytes > 0:
            reason = "gradient_as_bucket_view=False"
            if part.gradient_as_bucket_view:
                reason = "no gradient is a view of them yet"
            yield f"{self.path}reducer's buckets ({reason})", nbytes
        used = part.reducer._get_local_used_map()
        if used is not None:
            name = "reducer's map of used parameters (find_unused_parameters=True)"
            yield f"{self.path}{name}", used.nbytes


def _has_seen_nothing(part: Any) -> bool:
    """Whether fake quantisation is by channel and has seen no data yet."""
    if not getattr(part, "is_per_channel", False):
        return False
    minimum = getattr(getattr(part, "activation_post_process", None), "min_val", None)
    return isinstance(minimum, torch.Tensor) and not minimum.numel()


class TorchWrappers(Framework):
    """Compiled and checkpointed modules, which may be registered; TorchScript and DataParallel,
    which may not."""

    wrappers = (
        Wrapper(Named("torch._dynamo.eval_frame", "OptimizedModule"), "_orig_mod"),
        Wrapper(
            Named(
                "torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "ActivationWrapper"
            ),
            "_checkpoint_wrapped_module",
        ),
    )
    refused_modules = (
        Advised(
            Named("torch.nn.parallel.data_parallel", "DataParallel"),
            "register the plain module: one process drives one device",
        ),
        Advised(
            Named("torch.jit", "ScriptModule"),
            "register the eager module, or use torch.compile instead of TorchScript",
        ),
        Advised(
            Named("torch.ao.quantization.fake_quantize", "FakeQuantize"),
            "run one forward pass before registering, because by channel the first one resizes its "
            "buffers, or register with external=True",
            _has_seen_nothing,
        ),
    )

    @classmethod
    def refuse_optimizer(cls, optimizer: Any) -> tuple[str, str] | None:
        is_zero = is_a(
            optimizer,
            "torch.distributed.optim.zero_redundancy_optimizer",
            "ZeroRedundancyOptimizer",
        )
        if not is_zero or not optimizer._overlap_with_ddp:
            return None
        problem = (
            " with overlap_with_ddp=True, which steps inside the backward pass and moves "
            "parameters into buckets on the way,"
        )
        return problem, "leave overlap_with_ddp out"


class Accelerate(Framework):
    """accelerate's hooks on modules, and the device maps that transformers passes to it."""

    packages = ("accelerate",)

    @classmethod
    def refuse_part(cls, part: torch.nn.Module) -> tuple[str, str] | None:
        hook = part.__dict__.get("_hf_hook")
        if hook is not None and _moves_weights(hook):
            problem = f"a module that accelerate moves at every forward ({type(hook).__name__})"
            return problem, "call remove_hook_from_submodules(model), or load without device_map"
        device_map = part.__dict__.get("hf_device_map")
        if not isinstance(device_map, dict):
            return None
        devices = {*map(str, device_map.values())}
        if len(devices) <= 1:
            return None
        problem = f"a device map with {len(device_map)} entries on several devices"
        return problem, "load without device_map"


def _moves_weights(hook: Any) -> bool:
    """Whether a hook of accelerate may move weights at a forward pass. With a device map of one
    device it moves only the inputs."""
    if is_a(hook, "accelerate.hooks", "SequentialHook"):
        return any(map(_moves_weights, hook.hooks))
    return not is_a(hook, "accelerate.hooks", "AlignDevicesHook") or bool(hook.offload)
