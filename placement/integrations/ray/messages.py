"""What the driver, the workers and the coordinator of a fleet tell each other: small JSON with a closed schema, as between ranks."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from placement.group.messages import Message

MAX_MESSAGE_BYTES = 64 << 20
"""The status of ten thousand workers."""


class Order(Message):
    """The driver to every worker: change phase."""

    change: Literal["begin", "enter", "switch", "leave", "give_up"]
    """begin: a membership; give_up: leave because something failed elsewhere."""
    generation: int = Field(ge=0)
    """The membership that this belongs to."""
    phases: tuple[str, ...] = ()
    """The fleet's open phases now, outermost first."""
    phase: str = ""
    only: tuple[str, ...] | None = None
    reason: str = ""


class WorkerStatus(Message):
    """One worker, in short. Byte counts end in `_bytes`, ages in `_seconds`."""

    instance: str
    """`10.0.0.7/rank3`."""
    rank: int
    address: str
    """host:port of its metrics."""
    labels: dict[str, str]
    """Of its target in Prometheus."""
    process: str
    """Of this process: another one after a restart."""
    generation: int
    phases: tuple[str, ...]
    """Open in its manager, outermost first."""
    resident_bytes: int
    host_bytes: int
    budget_bytes: int
    device_total_bytes: int
    unpaired_bytes: int
    broken: tuple[str, ...]
    """Handles that can go neither forward nor back."""
    taken_timestamp_seconds: float
    age_seconds: float = 0.0
    """Since the coordinator last heard of it. A worker that was killed only gets older."""


class Reply(Message):
    """A worker to an order."""

    status: WorkerStatus
    error: str = ""
    """The exception's class; empty when the order was carried out."""
    reason: str = ""
    failures: dict[int, str] = Field(default_factory=dict)
    """Of a `GroupError`, by rank in the fleet."""
    together: tuple[int, ...] = ()
    """To begin: the ranks that this one changes together with."""


class NextReport(Message):
    """The coordinator to a report."""

    seconds: float
    """Until the next one is wanted."""


class Fleetwide(Message):
    """The status of every worker that the coordinator has heard of."""

    workers: tuple[WorkerStatus, ...]
