"""The frameworks that are known, one file each."""

from __future__ import annotations

import torch

from placement.frameworks.base import Framework
from placement.frameworks.bitsandbytes import Bitsandbytes
from placement.frameworks.ddp import DDP
from placement.frameworks.deepspeed import DeepSpeed
from placement.frameworks.fsdp1 import FSDP1
from placement.frameworks.fsdp2 import FSDP2
from placement.frameworks.megatron import MegatronDDP
from placement.frameworks.megatron_fsdp import MegatronFSDPShards
from placement.frameworks.transformer_engine import TransformerEngine
from placement.frameworks.veomni import VeOmni

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
