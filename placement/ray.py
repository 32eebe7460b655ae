"""The short name of `placement.integrations.ray`: `placement.ray.Fleet`, `placement.ray.Worker`."""

from __future__ import annotations

from placement.integrations.ray import Fleet, FleetPhase, Worker

__all__ = ["Fleet", "FleetPhase", "Worker"]
