"""torchao: its CPU-offloaded optimizer. Its quantised weights need no code here, because they are wrappers that list their tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from placement.frameworks.base import Advised, Framework, Named

_OFFLOADED = Named("torchao.optim.cpu_offload", "CPUOffloadOptimizer")


class TorchAO(Framework):
    """torchao's `CPUOffloadOptimizer`, which steps copies of the parameters on the CPU."""

    packages = ("torchao",)
    external_optimizers = (Advised(_OFFLOADED, "torchao's CPUOffloadOptimizer keeps its state on the CPU"),)

    @classmethod
    def stepped_for(cls, objects: Sequence[object]) -> Mapping[int, torch.Tensor]:
        found: dict[int, torch.Tensor] = {}
        optimizer: Any
        for optimizer in objects:
            if _OFFLOADED.is_of(optimizer):
                found |= {id(copy): own for own, copy in optimizer.param_d2h_map.items()}
        return found
