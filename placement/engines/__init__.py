"""Rollout engines as handles. `placement.engines.vllm` and `placement.engines.sglang` have the
engines of those projects."""

from typing import TYPE_CHECKING

from placement.core import on_demand as _on_demand
from placement.engines.base import Engine, TorchEngine
from placement.engines.tagged import Follower, TaggedEngine

if TYPE_CHECKING:
    from placement.engines import sglang, vllm

__all__ = ["Engine", "Follower", "TaggedEngine", "TorchEngine", "sglang", "vllm"]

__getattr__ = _on_demand(__name__, {"sglang": "sglang", "vllm": "vllm"})
