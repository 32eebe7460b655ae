"""Immutable data about a manager: `Snapshot` for metrics, pages and logs, `Audit` to compare
declared with measured state.

`LinkRates` and `TransitionSeconds` are what `placement doctor` measures and forecasts count with.
Every class is a frozen pydantic model; `model_dump_json()` gives its JSON. Byte counts end in
`_bytes`, durations in `_seconds`, points in time in `_timestamp_seconds` (Unix time).
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from placement.core.states import State, Trigger


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class HandleSnapshot(Frozen):
    """One handle at one moment, and its counters since registration."""

    name: str
    kind: str
    role: str | None
    owners: tuple[str, ...]
    adapter: str
    """The class name of the adapter that found the handle's tensors."""
    state: State
    readonly: bool
    external: str | None
    """Why the framework itself places the bytes; None when placement moves them."""
    broken: str | None
    """Why a failed move could not be undone; None while the handle can be used."""
    built: bool
    kept: bool
    num_bytes: int
    """Device bytes that the handle needs while resident. For an optimizer this includes state that
    its steps have still to create."""
    resident_bytes: int
    """Device bytes that the handle holds now."""
    prefetched_bytes: int = 0
    """The part of `resident_bytes` that arrived early: of an offloaded handle (`Plan.prefetch`), or
    for a step that streams its state."""
    foreign_bytes: int = 0
    """Device bytes that a framework keeps for the handle even while it is offloaded. They are not
    part of `resident_bytes`."""
    host_bytes: int
    """Bytes of host memory of its host copy; for a rollout engine that keeps its weights by itself,
    of the engine's mirror."""
    mirror_bytes: int = 0
    """The part of `host_bytes` that is an engine's mirror: the copy of its weights that it keeps
    while they are off the device."""
    disk_bytes: int = 0
    """Bytes of its host copy that are in files (`Settings.disk_directory`). They are not part of
    `host_bytes`."""
    host_pageable_bytes: int
    """The part of `host_bytes` that could not be pinned."""
    state_seconds: dict[State, float]
    """Seconds in each state, including the present one."""
    transitions: dict[Trigger, int]
    """Number of finished state transitions by trigger."""
    failures: dict[str, int]
    """Number of failed attempts by reason (`placement.core.journal.REASONS`)."""
    loaded_bytes: int
    offloaded_bytes: int
    skipped_bytes: int
    """Bytes that offloads proved clean and did not copy."""
    prefetch_used_bytes: int = 0
    """The part of `loaded_bytes` that had arrived before the load."""
    last_transition_timestamp_seconds: float
    drift_bytes: int
    """Bytes of tensors that the last audit found outside the handle's ranges."""
    stray_references: int
    """References to offloaded storages beyond those that existed at adoption, counted at the last
    offload."""
    resident_tags: tuple[str, ...] = ()
    """The tags that are on the device, for an engine that places its own memory."""
    offloaded_tags: tuple[str, ...] = ()
    """The engine's tags that are not on the device."""
    registered_timestamp_seconds: float = 0.0
    """The time of registration. It tells apart two objects that were registered under one name, one
    after the other."""
    stale: str | None = None
    """Why the weights are invalid until a weight sync fills them; None while they are valid."""
    moved_by: str | None = None
    """The mover of the bytes of an engine that places its own memory, as the engine says:
    "placement" (a plug-in in the engine's process), "cumem" (vLLM's own), "torch_memory_saver"
    (SGLang's); None: it does not say."""


class DurationHistogram(Frozen):
    """A histogram of the durations of one operation, in Prometheus' classic form."""

    operation: str  # the operation: "load", "offload" or "sync"
    upper_bounds_seconds: tuple[float, ...]
    # counts per bucket, not cumulative. There is one more than bounds; the last is +Inf.
    counts: tuple[int, ...]
    sum_seconds: float


@dataclass(frozen=True, slots=True)
class Communicator:
    """A communicator of this process, whose device memory is neither torch's allocator's nor
    placement's."""

    name: str  # the name of its process group, unique in this process
    ranks: tuple[int, ...]  # the ranks of the group, as the default group numbers them
    nbytes: int | None  # device bytes that it holds; None where the library does not say
    suspendable_bytes: int  # the part of `nbytes` that its own `suspend()` would free
    unknown_because: str | None = None  # why `nbytes` is None; None where it is known


class Snapshot(Frozen):
    """The state of a manager at one moment. Neither taking it nor reading it takes a lock."""

    taken_timestamp_seconds: float
    policy: str
    worker_role: str
    device: str
    phases: tuple[str, ...]
    """The open phases, outermost first; empty outside every phase."""
    handles: tuple[HandleSnapshot, ...]
    phase_seconds: dict[str, float]
    """Seconds in each phase, including the open one. Only the innermost open phase counts; a phase
    transition counts for the phase that it goes to."""
    phase_stall_seconds: dict[str, float]
    """Seconds that the worker waited for moves in the phase transitions to each phase, without the
    time for its own kernels. Leaving the outermost phase goes to "idle"."""
    durations: tuple[DurationHistogram, ...]
    policy_decisions: dict[str, int]
    """Number of policy decisions: load, offload, keep, refuse."""
    pairing_violations: int
    unpaired_bytes: int
    """Bytes held by handles that should have been offloaded when their phase ended."""
    unaccounted_bytes: int
    """At the last phase transition: device used − torch reserved − our chunks and poison − others'
    use then, where visible."""
    other_processes_bytes: int | None = None
    """Device bytes of other processes according to NVML; None where NVML is not installed, not
    asked, or gives no answer."""
    communicators: tuple[Communicator, ...] = ()
    """The communicators of this process on the device, as of the last phase transition that moved
    something."""
    communicator_bytes: int | None = None
    """Their device bytes, which are part of `unaccounted_bytes`; None where one of them does not
    say how many it holds."""
    ipc_collected_bytes: int = 0
    """Bytes of tensors shared with other processes that came back because those had dropped
    them."""
    prefetch_discarded_bytes: int = 0
    """Bytes that arrived early and were given up unused."""
    wrong_writes: int
    kept_bytes: int
    expired_keeps: int
    budget_bytes: int
    device_used_bytes: int
    device_total_bytes: int
    peak_bytes: int
    """The largest number of bytes that the handles have held together."""
    phase_peak_bytes: dict[str, int] = {}
    """The same for each phase, its entry included."""
    suspended: bool = False
    suspended_seconds: float = 0.0
    """Seconds for which phases have waited because the manager was suspended."""


class SuspensionRequest(Frozen, strict=True):
    """The arguments of `Manager.suspend`, also over HTTP and between ranks."""

    deadline_seconds: float = Field(default=60.0, gt=0, allow_inf_nan=False)
    resume_after_seconds: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    epoch: int | None = Field(default=None, ge=1, lt=1 << 63)
    drop: tuple[str, ...] = ()


class SuspensionStatus(Frozen):
    """The answer to `Manager.suspend` and `Manager.resume`."""

    epoch: int  # the number of the last suspension; 0 before the first
    suspended: bool
    resident_bytes: int
    """Device bytes that the handles hold. While suspended, only an external handle has any."""
    snapshot: Snapshot


class LinkRates(Frozen):
    """How fast page-locked memory is copied between the host and the device, in bytes a second."""

    to_device_bytes_per_second: float
    to_host_bytes_per_second: float
    both_bytes_per_second: float  # both directions at once, added up


class TransitionSeconds(Frozen):
    """The seconds that a phase transition takes beside the copies of its bytes."""

    alone: float  # a phase transition that moves nothing
    moving: float  # one that moves hardly any bytes
    loaded_byte: float  # more for each byte that is loaded: memory is mapped behind addresses
    # more for each byte that is copied to the host: fingerprints are computed, and memory goes back
    # to the driver
    offloaded_byte: float
    # the same, for each byte that leaves without a copy because it is proved unchanged
    skipped_byte: float
    # for each byte that a streamed step of an optimizer copies, either way
    streamed_byte: float = 0.0


class Finding(Frozen):
    """One difference between the declared and the measured state."""

    handle: str | None
    what: str
    """The kind: "drift", "leak", "stray_reference", "broken", "unaccounted", "wrong_write",
    "unregistered_optimizer", "needs_weights", "turn"."""
    detail: str


class Audit(Frozen):
    """The result of `Manager.audit()`."""

    ok: bool
    findings: tuple[Finding, ...]
    resident_bytes: int
    """Measured device bytes of all handles."""
    foreign_bytes: int = 0
    """Device bytes that frameworks keep for handles in every state (a reducer's buckets). The
    report names them; they are no finding."""
    unaccounted_bytes: int = 0
    """Device bytes that are neither torch's, nor placement's, nor of a visible process. The report
    names likely owners; no finding."""
    report: str
    """The audit as text, one line for each handle."""


# --- as text

WORDS = {
    State.CPU_OFFLOADED: "off",
    State.GPU_RESIDENT: "gpu",
    State.SYNCING: "sync",
    State.TRAINING: "train",
}


def summary(snapshot: Snapshot) -> str:
    """One line a handle: share of time in each state, transitions, failures, bytes each way. The
    last line has the worker's totals."""
    shares = "".join(f"{word:>7}" for word in WORDS.values())
    lines = [
        f"{'handle':<24}{shares}{'moves':>8}{'failed':>8}{'loaded':>12}{'offloaded':>12}{'skipped':>12}"
    ]
    for handle in snapshot.handles:
        total = sum(handle.state_seconds.values()) or 1.0
        share = "".join(f"{handle.state_seconds.get(state, 0.0) / total:>7.1%}" for state in WORDS)
        counts = f"{sum(handle.transitions.values()):>8}{sum(handle.failures.values()):>8}"
        sizes = "".join(
            f"{readable(nbytes):>12}"
            for nbytes in (handle.loaded_bytes, handle.offloaded_bytes, handle.skipped_bytes)
        )
        lines.append(f"{handle.name:<24}{share}{counts}{sizes}")
    seconds, stalled = (
        sum(snapshot.phase_seconds.values()),
        sum(snapshot.phase_stall_seconds.values()),
    )
    lines.append(
        f"{seconds:.1f} s, {stalled:.2f} s of it waiting for moves; at most "
        f"{readable(snapshot.peak_bytes)} on {snapshot.device} together; "
        f"{snapshot.pairing_violations} pairing violations, {snapshot.wrong_writes} wrong writes"
    )
    return "\n".join(lines)


def readable(nbytes: int) -> str:
    """Format a size with three digits in a suitable unit: "0", "1.50 GiB", "-4.00 KiB"."""
    value, units = float(nbytes), ["TiB", "GiB", "MiB", "KiB", "B"]
    while abs(value) >= 1024 and len(units) > 1:
        value /= 1024
        units.pop()
    return str(nbytes) if units[-1] == "B" else f"{value:.3g} {units[-1]}"


def mib(nbytes: int) -> str:
    """Format a size in MiB, and exactly: "1.5 MiB (1,572,864 bytes)"."""
    return f"{nbytes / 2**20:,.1f} MiB ({nbytes:,} bytes)"
