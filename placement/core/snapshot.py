"""Immutable pictures of a manager: `Snapshot` for metrics, pages and logs, `Audit` for declared against measured.

Everything is a frozen pydantic model, JSON-able by `model_dump_json()`. Byte counts end in `_bytes`, durations in `_seconds`,
points in time in `_timestamp_seconds` (Unix time).
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from placement.core.states import State, Trigger


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class HandleSnapshot(_Frozen):
    """One handle at one moment, and its counters since registration."""

    name: str
    kind: str
    role: str | None
    owners: tuple[str, ...]
    adapter: str
    """The adapter's class name."""
    state: State
    readonly: bool
    external: str | None
    """Why the framework places the bytes itself; None when we move them."""
    broken: str | None
    """Why the handle can go neither forward nor back; None when it is sound."""
    built: bool
    kept: bool
    num_bytes: int
    """Device bytes it needs while resident; of an optimizer with what its steps have still to create."""
    resident_bytes: int
    """Device bytes it holds now."""
    foreign_bytes: int = 0
    """Device bytes that a framework keeps for it and that stay there when it is offloaded; not among `resident_bytes`."""
    host_bytes: int
    host_pageable_bytes: int
    """Of those, bytes that could not be pinned."""
    state_seconds: dict[State, float]
    """Time in each state, the open interval included."""
    transitions: dict[Trigger, int]
    """Finished, by trigger."""
    failures: dict[str, int]
    """Failed attempts, by reason (`Journal.REASONS`)."""
    loaded_bytes: int
    offloaded_bytes: int
    skipped_bytes: int
    """Proved clean at an offload and not copied."""
    last_transition_timestamp_seconds: float
    drift_bytes: int
    """Bytes whose tensors were found outside the handle's ranges at the last audit."""
    stray_references: int
    """References to offloaded storages beyond those of adoption, at the last offload."""
    resident_tags: tuple[str, ...] = ()
    """Of an engine that places its own memory: the tags that are on the device."""
    offloaded_tags: tuple[str, ...] = ()
    """The tags that are not."""
    stale: str | None = None
    """Why its weights mean nothing until a sync has filled them; None while they are valid."""


class DurationHistogram(_Frozen):
    """Durations of one operation, in Prometheus' classic form."""

    operation: str
    """"load", "offload" or "sync"."""
    upper_bounds_seconds: tuple[float, ...]
    counts: tuple[int, ...]
    """Not cumulative; one more than the bounds (the last is +Inf)."""
    sum_seconds: float


class LeaseHolder(_Frozen):
    """One process that shares the GPU under leases."""

    name: str
    """"?" where its note is damaged."""
    pid: int
    held_bytes: int
    wanted_bytes: int
    """What it waits for; 0: nothing."""
    waiting_seconds: float
    priority: int
    is_mine: bool


class LeaseSnapshot(_Frozen):
    """What this process may use of a GPU that it shares, and who has the rest."""

    gpu: str
    capacity_bytes: int
    """What all processes may use together."""
    held_bytes: int
    wanted_bytes: int
    """What this process waits for now; 0: nothing."""
    waited_seconds: float
    """Since the beginning, the present wait included."""
    holders: tuple[LeaseHolder, ...]
    """All of them, this process too."""

    @property
    def others_bytes(self) -> int:
        """Leased by other processes."""
        return sum(each.held_bytes for each in self.holders if not each.is_mine)


class Snapshot(_Frozen):
    """A manager at one moment. Taken under the manager's lock for microseconds; reading it takes no lock."""

    taken_timestamp_seconds: float
    policy: str
    worker_role: str
    device: str
    phases: tuple[str, ...]
    """The open phases, outermost first; empty outside every phase."""
    handles: tuple[HandleSnapshot, ...]
    phase_seconds: dict[str, float]
    """Time inside each phase (the innermost open phase counts), the open interval included."""
    phase_stall_seconds: dict[str, float]
    """Time the worker waited for moves at the phase transitions of each phase."""
    durations: tuple[DurationHistogram, ...]
    policy_decisions: dict[str, int]
    """By decision: load, offload, keep, refuse."""
    pairing_violations: int
    unpaired_bytes: int
    """Held by handles that their closed phases should have offloaded."""
    unaccounted_bytes: int
    """Device used − torch reserved − our chunks and poison − others' use where it is visible; as measured at the last phase transition."""
    other_processes_bytes: int | None = None
    """Device bytes of other processes, as NVML says; None where it is not installed, not asked, or does not say."""
    wrong_writes: int
    kept_bytes: int
    expired_keeps: int
    budget_bytes: int
    device_used_bytes: int
    device_total_bytes: int
    peak_bytes: int
    """The most that the handles have held together."""
    lease: LeaseSnapshot | None = None
    """None where the GPU is not shared under leases."""


class Finding(_Frozen):
    """One difference between what is declared and what is measured."""

    handle: str | None
    what: str
    """"drift", "leak", "stray_reference", "broken", "unaccounted", "wrong_write", "unregistered_optimizer"."""
    detail: str


class Audit(_Frozen):
    """The result of `Manager.audit()`."""

    ok: bool
    findings: tuple[Finding, ...]
    resident_bytes: int
    """Measured, all handles."""
    foreign_bytes: int = 0
    """What frameworks keep for the handles on the device whatever happens (a reducer's buckets). Named in the report; no finding."""
    report: str
    """The same for a person to read, one line a handle."""
