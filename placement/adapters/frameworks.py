"""The frameworks that are known, one file each."""

from __future__ import annotations

import torch

from placement.adapters.ddp import DDP
from placement.adapters.deepspeed import DeepSpeed
from placement.adapters.framework import Framework
from placement.adapters.fsdp1 import FSDP1
from placement.adapters.fsdp2 import FSDP2
from placement.adapters.megatron import MegatronDDP
from placement.adapters.megatron_fsdp import MegatronFSDPShards
from placement.adapters.quantized import Bitsandbytes
from placement.adapters.transformer_engine import TransformerEngine
from placement.adapters.veomni import VeOmni

FRAMEWORKS: tuple[type[Framework], ...] = (
    FSDP2,
    MegatronDDP,
    MegatronFSDPShards,
    DDP,
    FSDP1,
    DeepSpeed,
    Bitsandbytes,
    VeOmni,
    TransformerEngine,
)


def frameworks_of(root: torch.nn.Module) -> list[Framework]:
    """The frameworks that had a hand in a module tree."""
    return [found for found in (cls.find(root) for cls in FRAMEWORKS) if found is not None]
