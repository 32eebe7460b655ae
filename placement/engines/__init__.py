"""Rollout engines as handles. `placement.engines.vllm` and `placement.engines.sglang` have the
engines of those projects."""

from placement.engines.base import Engine, TorchEngine
from placement.engines.tagged import Follower, TaggedEngine

__all__ = ["Engine", "Follower", "TaggedEngine", "TorchEngine"]
