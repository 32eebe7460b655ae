"""placement decides what sits on the GPU in RL post-training: one explicit state machine instead of hand-placed offload calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from placement.errors import (
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
from placement.on_demand import on_demand as _on_demand
from placement.states import PHASES, TRANSITIONS, HandleView, Plan, State, Trigger, View

if TYPE_CHECKING:
    from placement import checkpoint, group, policies, testing
    from placement.engines.base import Engine, TorchEngine
    from placement.handle import Handle, Lazy
    from placement.manager import Manager
    from placement.observe.trace import write_trace as trace
    from placement.phases import Phase
    from placement.settings import Settings
    from placement.snapshot import Audit, Finding, HandleSnapshot, Snapshot
    from placement.sync import WeightInfo

__version__ = "0.1.0"

__all__ = [
    "PHASES",
    "TRANSITIONS",
    "Audit",
    "BrokenHandleError",
    "CheckpointError",
    "CoordinatorLost",
    "DeviceMemoryError",
    "Engine",
    "EngineError",
    "EngineLost",
    "Finding",
    "GroupError",
    "Handle",
    "HandleSnapshot",
    "HandleView",
    "HostMemoryError",
    "IntegrityError",
    "Lazy",
    "Manager",
    "NotResidentError",
    "Phase",
    "PhaseError",
    "PlacementError",
    "Plan",
    "PolicyError",
    "RegistrationError",
    "Settings",
    "Snapshot",
    "State",
    "TorchEngine",
    "Trigger",
    "View",
    "WeightInfo",
    "checkpoint",
    "group",
    "policies",
    "testing",
    "trace",
]


__getattr__ = _on_demand(
    __name__,
    {
        **dict.fromkeys(("Engine", "TorchEngine"), "engines.base"),
        **dict.fromkeys(("Handle", "Lazy"), "handle"),
        **dict.fromkeys(("Audit", "Finding", "HandleSnapshot", "Snapshot"), "snapshot"),
        "Manager": "manager",
        "Phase": "phases",
        "Settings": "settings",
        "WeightInfo": "sync",
        "checkpoint": "checkpoint",
        "group": "group",
        "policies": "policies",
        "testing": "testing",
        "trace": "observe.trace:write_trace",
    },
)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
