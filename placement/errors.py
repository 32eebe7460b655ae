"""The exceptions that placement raises, by their short name; `placement.core.errors` says when each is raised."""

from __future__ import annotations

from placement.core.errors import (
    BrokenHandleError,
    CheckpointError,
    CoordinatorLost,
    DeviceMemoryError,
    EngineError,
    EngineLost,
    GroupError,
    HostMemoryError,
    IntegrityError,
    NotResidentError,
    PhaseError,
    PlacementError,
    PolicyError,
    RegistrationError,
)

__all__ = [
    "BrokenHandleError",
    "CheckpointError",
    "CoordinatorLost",
    "DeviceMemoryError",
    "EngineError",
    "EngineLost",
    "GroupError",
    "HostMemoryError",
    "IntegrityError",
    "NotResidentError",
    "PhaseError",
    "PlacementError",
    "PolicyError",
    "RegistrationError",
]
