"""Rollout engines as handles."""

from placement.engines.base import Engine, TorchEngine

__all__ = ["Engine", "TorchEngine"]
