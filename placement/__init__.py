"""placement decides what sits on the GPU in RL post-training: one explicit state machine instead of
hand-placed offload calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from placement.core import __version__ as __version__
from placement.core import on_demand as _on_demand
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
from placement.core.states import (
    PHASES,
    TRANSITIONS,
    HandleView,
    Plan,
    Policy,
    State,
    Trigger,
    View,
)

if TYPE_CHECKING:
    from placement import (
        checkpoint,
        engines,
        errors,
        forecasting,
        group,
        integrations,
        policies,
        publish,
        testing,
    )
    from placement.core.settings import Settings
    from placement.core.snapshot import Audit, Finding, HandleSnapshot, Snapshot, SuspensionStatus
    from placement.engines.base import Engine, TorchEngine
    from placement.forecasting.description import Forecast
    from placement.forecasting.job import forecast
    from placement.manager import Manager
    from placement.observe.trace import write_trace as trace
    from placement.phases.hold import Hold
    from placement.phases.phase import Phase
    from placement.publish.buckets import WeightInfo
    from placement.registration.handle import Handle, Lazy

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
    "Forecast",
    "GroupError",
    "Handle",
    "HandleSnapshot",
    "HandleView",
    "Hold",
    "HostMemoryError",
    "IntegrityError",
    "Lazy",
    "Manager",
    "NotResidentError",
    "Phase",
    "PhaseError",
    "PlacementError",
    "Plan",
    "Policy",
    "PolicyError",
    "RegistrationError",
    "Settings",
    "Snapshot",
    "State",
    "SuspensionStatus",
    "TorchEngine",
    "Trigger",
    "View",
    "WeightInfo",
    "checkpoint",
    "engines",
    "errors",
    "forecast",
    "forecasting",
    "group",
    "integrations",
    "policies",
    "publish",
    "testing",
    "trace",
]


_ROOMS = (
    "checkpoint",
    "engines",
    "errors",
    "forecasting",
    "group",
    "integrations",
    "policies",
    "publish",
    "ray",
    "testing",
)

__getattr__ = _on_demand(
    __name__,
    {
        **{room: room for room in _ROOMS},
        **dict.fromkeys(("Engine", "TorchEngine"), "engines.base"),
        **dict.fromkeys(("Handle", "Lazy"), "registration.handle"),
        **dict.fromkeys(("Audit", "Finding", "HandleSnapshot", "Snapshot"), "core.snapshot"),
        "SuspensionStatus": "core.snapshot",
        "Manager": "manager",
        "Hold": "phases.hold",
        "Phase": "phases.phase",
        "Settings": "core.settings",
        "WeightInfo": "publish.buckets",
        "Forecast": "forecasting.description",
        "forecast": "forecasting.job",
        "trace": "observe.trace:write_trace",
    },
)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
