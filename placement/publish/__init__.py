"""Publish weights to a rollout engine: under the names that it knows, in buckets of bounded
size."""

from typing import TYPE_CHECKING

from placement.core import on_demand as _on_demand

if TYPE_CHECKING:
    from placement.publish.vllm import VllmWeightSource

__all__ = ["VllmWeightSource"]

__getattr__ = _on_demand(__name__, {"VllmWeightSource": "vllm"})
