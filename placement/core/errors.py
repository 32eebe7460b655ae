"""The exceptions that placement raises.

All are a `PlacementError`, and `EngineLost` is an `EngineError`. A caller's plain mistake is a
`ValueError` or a `TypeError`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class PlacementError(Exception):
    """The base class of every error that placement raises itself."""


class RegistrationError(PlacementError):
    """An object cannot be registered, or tensors of a registered one cannot be moved or
    published."""


class PolicyError(PlacementError):
    """A policy raised, returned something that is not a total plan, or does not know the phase."""


class PhaseError(PlacementError):
    """A call that the present phase does not allow: a phase left without being entered, or held by
    two threads; a step outside of training; a handle that the manager does not know."""


class NotResidentError(PlacementError):
    """An offloaded handle was used for something that needs its bytes on the device."""


class DeviceMemoryError(PlacementError):
    """The handles that a phase needs together do not fit on the device, or the driver refused the
    memory, or another process did not give the device up in time.

    Attributes:
        wanted_bytes: the device bytes that the handles need together, where the budget is too small
            for them; else None.
    """

    wanted_bytes: int | None = None


class HostMemoryError(PlacementError):
    """The host copy of a handle cannot be reserved. The handle stays where it is."""


class IntegrityError(PlacementError):
    """The measured state contradicts the declared state. The message names the tensors or the
    bytes."""

    is_change = False
    """Whether it tells of changes to an offloaded handle. Then no move has failed."""


class BrokenHandleError(PlacementError):
    """A move of the handle failed half-way and could not be undone (a sticky device error). The
    handle cannot be used any more."""


class CheckpointError(PlacementError):
    """A checkpoint does not fit its handles, or it cannot be read or written. Every handle is as it
    was before the call."""


class EngineError(PlacementError):
    """A rollout engine refused or failed an operation. The message has the request, the answer, and
    advice."""


class EngineLost(EngineError):
    """A rollout engine did not answer, or failed half-way. Its condition is unknown, and placement
    sends it nothing more."""


class GroupError(PlacementError):
    """A rank failed, so every rank went back. A new phase can succeed, unless the message asks for
    a new group (`Manager.rejoin`).

    Attributes:
        failures: the reasons by rank: that of the rank that failed first, and on a rank that
            failed, too, its own. Ranks that were missing, or did something else, are all named.
    """

    def __init__(self, message: str, failures: Mapping[int, str]) -> None:
        super().__init__(message)
        self.failures = dict(failures)

    def __reduce__(self) -> tuple[Any, ...]:
        # Ray and multiprocessing pickle exceptions. The default would rebuild this one without its
        # reasons.
        return type(self), (str(self), self.failures), self.__dict__


class CoordinatorLost(PlacementError):
    """The group's decision cannot be read. The rank keeps its prepared moves. A new group helps:
    see `Manager.rejoin`."""


def listed(names: Sequence[str]) -> str:
    """The first names of many, and the number of the others, for a message."""
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + more
