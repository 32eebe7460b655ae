"""The short name of `placement.integrations.ray`: `placement.ray.Fleet`, `placement.ray.Worker`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from placement.integrations import ray

if TYPE_CHECKING:
    from placement.integrations.ray import Fleet, FleetPhase, Worker, WorkerStatus, in_phase

__all__ = ["Fleet", "FleetPhase", "Worker", "WorkerStatus", "in_phase"]


def __getattr__(name: str) -> Any:
    return getattr(ray, name)
