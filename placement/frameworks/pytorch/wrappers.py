"""torch's own wrappers around modules and optimizers, except data parallelism and sharding."""

from __future__ import annotations

from typing import Any

import torch

from placement.core.loaded_classes import is_a
from placement.frameworks.base import Advised, Framework, Named, Wrapper


class TorchWrappers(Framework):
    """Compiled and checkpointed modules, which may be registered; TorchScript and DataParallel, which may not."""

    wrappers = (
        Wrapper(Named("torch._dynamo.eval_frame", "OptimizedModule"), "_orig_mod"),
        Wrapper(Named("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "ActivationWrapper"), "_checkpoint_wrapped_module"),
    )
    refused_modules = (
        Advised(Named("torch.nn.parallel.data_parallel", "DataParallel"), "register the plain module: one process drives one device"),
        Advised(Named("torch.jit", "ScriptModule"), "register the eager module, or use torch.compile instead of TorchScript"),
    )

    @classmethod
    def refuse_part(cls, part: torch.nn.Module) -> tuple[str, str] | None:
        """Refuse fake quantisation by channel before its first forward pass, which would resize buffers. Adopted tensors cannot grow."""
        if not is_a(part, "torch.ao.quantization.fake_quantize", "FakeQuantize"):
            return None
        seen = getattr(getattr(part, "activation_post_process", None), "min_val", None)
        if not getattr(part, "is_per_channel", False) or not isinstance(seen, torch.Tensor) or seen.numel():
            return None
        found = "fake quantisation by channel that has seen no data yet, whose first forward pass resizes its buffers,"
        return found, "run one forward pass before registering"

    @classmethod
    def refuse_optimizer(cls, optimizer: Any) -> tuple[str, str] | None:
        if not is_a(optimizer, "torch.distributed.optim.zero_redundancy_optimizer", "ZeroRedundancyOptimizer"):
            return None
        if not optimizer._overlap_with_ddp:
            return None
        found = " with overlap_with_ddp=True, which steps inside the backward pass and moves parameters into buckets on the way,"
        return found, "leave overlap_with_ddp out"
