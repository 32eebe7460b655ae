"""The exceptions that placement raises.

    PlacementError
    ├── RegistrationError     the object cannot be registered; it was left as it was
    ├── PolicyError           the policy failed, or its plan is not a plan
    ├── PhaseError            phases used out of order, or from two places at once
    ├── NotResidentError      an offloaded handle was used
    ├── DeviceMemoryError     the bytes do not fit on the device, or the driver refused them
    ├── HostMemoryError       the host copy cannot be reserved
    ├── IntegrityError        declared and measured disagree, or a byte changed that must not
    ├── BrokenHandleError     a handle can go neither forward nor back
    ├── CheckpointError       a checkpoint does not fit, or cannot be read or written; no handle was changed
    ├── EngineError           a rollout engine refused or failed
    │   └── EngineLost        it did not answer: what it did is not known
    ├── GroupError            a rank of the group failed; every rank went back
    └── CoordinatorLost       the group's decision cannot be read

A caller's plain mistake is a `ValueError` or a `TypeError`.
"""

from __future__ import annotations

from collections.abc import Mapping


class PlacementError(Exception):
    """Root of every error that placement raises on its own account."""


class RegistrationError(PlacementError):
    """An object cannot be registered. It and the manager are as they were before the call."""


class PolicyError(PlacementError):
    """A policy raised, returned something that is not a total plan, or does not know the phase."""


class PhaseError(PlacementError):
    """Phases were used out of order: left without being entered, or held by two threads or tasks at once."""


class NotResidentError(PlacementError):
    """An offloaded handle was used for something that needs its bytes on the device."""


class DeviceMemoryError(PlacementError):
    """What a phase needs together does not fit, or the driver refused the memory."""


class HostMemoryError(PlacementError):
    """The host copy of a handle cannot be reserved. The handle stays where it is."""


class IntegrityError(PlacementError):
    """What is declared and what is measured disagree; the message holds the numbers."""


class BrokenHandleError(PlacementError):
    """A handle can go neither forward nor back (a sticky device error in the middle of a move)."""


class CheckpointError(PlacementError):
    """A checkpoint does not fit its handles, or it cannot be read or written. Every handle is as it was."""


class EngineError(PlacementError):
    """A rollout engine refused or failed an operation. What was sent, what came back, and what to do are in the message."""


class EngineLost(EngineError):
    """A rollout engine did not answer, or failed half-way: what it did is not known, and nothing more is sent to it."""


class GroupError(PlacementError):
    """A rank of the group failed, so that every rank went back to where it was. The next phase can succeed, unless the message says
    that the group has to be made anew (`Manager.rejoin`).

    Attributes:
        failures: by rank, each with its own reason; the same on all ranks, but for one that failed later than the others waited.
    """

    def __init__(self, message: str, failures: Mapping[int, str]) -> None:
        super().__init__(message)
        self.failures = dict(failures)

    def __reduce__(self) -> tuple[type[GroupError], tuple[str, dict[int, str]], dict[str, object]]:
        # Ray and multiprocessing carry exceptions to other processes, and by default would make this one anew without its reasons.
        return type(self), (str(self), self.failures), self.__dict__


class CoordinatorLost(PlacementError):
    """The group's decision cannot be read; what was prepared is kept. A group that is made anew helps: see `Manager.rejoin`."""
