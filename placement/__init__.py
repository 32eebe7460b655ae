"""placement decides what sits on the GPU in RL post-training: one explicit state machine instead of hand-placed offload calls."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from placement.engines.base import Engine, TorchEngine
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
from placement.handle import Handle, Lazy
from placement.manager import Manager
from placement.phases import Phase
from placement.settings import Settings
from placement.snapshot import Audit, Finding, HandleSnapshot, Snapshot
from placement.states import PHASES, TRANSITIONS, HandleView, Plan, State, Trigger, View
from placement.sync import WeightInfo

if TYPE_CHECKING:
    from placement import checkpoint, group, policies, testing
    from placement.observe.trace import write_trace as trace

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


def __getattr__(name: str) -> Any:
    """What loads when it is first used: nothing here imports a policy, a server or a checkpoint's writer."""
    if name in ("checkpoint", "group", "policies", "testing"):
        return importlib.import_module(f"placement.{name}")
    if name == "trace":
        return importlib.import_module("placement.observe.trace").write_trace
    raise AttributeError(f"module 'placement' has no attribute {name!r}")
