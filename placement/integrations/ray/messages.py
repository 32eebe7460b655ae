"""The messages between the driver, the workers and the coordinator of a fleet: small JSON with a closed schema, as between ranks."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from placement.group.messages import Message

MAX_MESSAGE_BYTES = 64 << 20
"""Room for the status of ten thousand workers."""


class Order(Message):
    """The driver's order to every worker."""

    change: Literal["begin", "enter", "switch", "leave", "give_up"]
    """"begin" starts a membership. "give_up" leaves a phase because something failed elsewhere. The others are phase transitions."""
    generation: int = Field(ge=0)
    """The membership to which the order belongs."""
    phases: tuple[str, ...] = ()
    """The fleet's open phases, outermost first."""
    phase: str = ""
    only: tuple[str, ...] | None = None
    reason: str = ""


class WorkerStatus(Message):
    """A short status of one worker. Byte counts end in `_bytes`, ages in `_seconds`."""

    instance: str
    """The worker's name in Prometheus: `10.0.0.7/rank3`."""
    rank: int
    address: str
    """The host:port of its metrics."""
    labels: dict[str, str]
    """The labels of its target in Prometheus."""
    process: str
    """Identifies the process; another one after a restart."""
    generation: int
    phases: tuple[str, ...]
    """The open phases of its manager, outermost first."""
    resident_bytes: int
    host_bytes: int
    budget_bytes: int
    device_total_bytes: int
    unpaired_bytes: int
    broken: tuple[str, ...]
    """Handles that cannot be used because a failed move could not be undone."""
    taken_timestamp_seconds: float
    age_seconds: float = 0.0
    """Time since the coordinator last heard of the worker. It keeps growing when the worker was killed."""


class Reply(Message):
    """A worker's reply to an order."""

    status: WorkerStatus
    error: str = ""
    """The exception's class name; empty when the order was carried out."""
    reason: str = ""
    failures: dict[int, str] = Field(default_factory=dict)
    """The reasons of a `GroupError`, by rank in the fleet."""
    together: tuple[int, ...] = ()
    """In a reply to "begin": the ranks with which this worker changes phase."""


class NextReport(Message):
    """The coordinator's answer to a report."""

    seconds: float
    """Seconds until the next report is wanted."""


class Fleetwide(Message):
    """The status of every worker that the coordinator has heard of."""

    workers: tuple[WorkerStatus, ...]
