"""The journal: one record for each state transition, and the counters that the metrics export.

`Journal.record` is the only place that counts a state transition, so the journal and the metrics
cannot disagree on these. What moves between state transitions (streamed steps) is counted where it
moves.
"""

from __future__ import annotations

import bisect
import logging
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from placement.core.errors import DeviceMemoryError, HostMemoryError, IntegrityError
from placement.core.snapshot import DurationHistogram
from placement.core.states import IDLE, State, Trigger

logger = logging.getLogger("placement")

_REASONS = {
    DeviceMemoryError: "device_memory",
    HostMemoryError: "host_memory",
    IntegrityError: "integrity",
    Exception: "error",
}
# the reasons for which a transition can fail: the values of the metric's `reason` label
REASONS = (*_REASONS.values(), "interrupted")

# the buckets of the histograms of seconds
_BOUNDS_SECONDS = (
    *(0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0),
)
_OPERATIONS = ("load", "offload", "sync")
_LENGTH = 4096  # the number of records that the journal keeps


def reason_of(error: BaseException) -> str:
    for kind, reason in _REASONS.items():
        if isinstance(error, kind):
            return reason
    return "interrupted"


@dataclass(frozen=True, slots=True)
class Record:
    """One finished state transition."""

    at_seconds: float  # the value of `time.monotonic()` when the transition was complete
    timestamp_seconds: float  # the same moment as Unix time
    handle: str
    kind: str
    trigger: Trigger
    source: State
    target: State
    # the phase to which the phase transition goes that caused this; "idle" outside every phase
    phase: str
    nbytes: int  # bytes copied
    skipped_bytes: int  # bytes that were proved clean and not copied
    seconds: float  # time that the calling thread spent in the transition
    resident_bytes: int = 0  # device bytes that the handle holds after the transition
    prefetched_bytes: int = 0  # bytes that had arrived before a load, and were not copied by it


@dataclass(frozen=True, slots=True)
class PhaseSpan:
    """A span of time in which one phase was the innermost open one ("idle" outside every phase).
    It begins with the phase transition to it."""

    phase: str
    begin_seconds: float  # the value of `time.monotonic()` when the span began
    end_seconds: float
    # the handles that the phase was for, as in `manager.phase(name, only=...)`; None: all
    only: tuple[str, ...] | None = None
    arrival_seconds: float = 0.0  # see `Journal`; as far as they were counted when the span ended


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed attempt at a state transition. The handle stayed in the source state."""

    timestamp_seconds: float
    handle: str
    trigger: Trigger
    reason: str  # one of `REASONS`


@dataclass(slots=True)
class HandleCounters:
    """The counters of one handle. They only grow."""

    state: State = State.CPU_OFFLOADED  # the last recorded one
    since_seconds: float = field(default_factory=time.monotonic)
    state_seconds: dict[State, float] = field(default_factory=dict.fromkeys(State, 0.0).copy)
    transitions: Counter[Trigger] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    loaded_bytes: int = 0
    offloaded_bytes: int = 0
    skipped_bytes: int = 0
    prefetch_used_bytes: int = 0
    registered_timestamp_seconds: float = field(default_factory=time.time)
    last_transition_timestamp_seconds: float = field(default_factory=time.time)

    def seconds_by_state(self, at_seconds: float) -> dict[State, float]:
        """Seconds in each state up to a moment of `time.monotonic()`, including the present
        state."""
        state, since_seconds = self.state, self.since_seconds  # both, before they change
        totals = dict(self.state_seconds)
        totals[state] += at_seconds - since_seconds
        return totals


class Journal:
    """The recent state transitions, oldest first, and counters since the manager was made."""

    def __init__(self) -> None:
        self._records: deque[Record] = deque(maxlen=_LENGTH)
        self.failures: deque[Failure] = deque(maxlen=_LENGTH)  # the recent failures, oldest first
        self._durations = {name: [0] * (len(_BOUNDS_SECONDS) + 1) for name in _OPERATIONS}
        self._duration_sums = dict.fromkeys(_OPERATIONS, 0.0)
        self.phase = IDLE  # the phase for which time is being counted
        self._only: tuple[str, ...] | None = None
        self.num_spans = 0  # the number of spans that have ended
        self._phase_since = time.monotonic()
        self._phase_seconds: dict[str, float] = {}
        self._phase_spans: deque[PhaseSpan] = deque(maxlen=_LENGTH)
        self.stall_seconds: defaultdict[str, float] = defaultdict(float)
        # the part of all stalls in which the device's own work waited for bytes, and not the host.
        # It is counted at the next phase transition.
        self.arrival_seconds = 0.0
        # the most device bytes that the handles have held together, by phase: since the start, and
        # since `observe.figures` was asked, with the counters at that time
        self.peak_bytes: dict[str, int] = {}
        self.recent_peak_bytes: dict[str, int] = {}
        self.logged: dict[str, float] = {}
        self.gone: Counter[str] = Counter()  # the sums of handles that are no longer registered
        self.decisions: Counter[str] = Counter()
        # the number of loads and offloads since the start. Two equal values mean that nothing moved
        # in between.
        self.num_moves = 0
        self.pairing_violations = 0
        self.wrong_writes = 0
        self.expired_keeps = 0

    def __iter__(self) -> Iterator[Record]:
        # not tuple(): it may trigger a garbage collection that drops a phase, which writes here
        return iter([*self._records])

    def __len__(self) -> int:
        return len(self._records)

    def record(self, counters: HandleCounters, record: Record) -> None:
        """Append the record of one state transition and count it."""
        counters.state_seconds[counters.state] += record.at_seconds - counters.since_seconds
        counters.state, counters.since_seconds = record.target, record.at_seconds
        # equal states: a part of an engine was loaded or offloaded
        if record.source is not record.target:
            counters.transitions[record.trigger] += 1
        counters.last_transition_timestamp_seconds = record.timestamp_seconds
        counters.skipped_bytes += record.skipped_bytes
        counters.prefetch_used_bytes += record.prefetched_bytes
        if record.trigger is Trigger.LOAD:
            counters.loaded_bytes += record.nbytes + record.prefetched_bytes
        elif record.trigger is Trigger.OFFLOAD:
            counters.offloaded_bytes += record.nbytes
        moves = record.trigger is Trigger.LOAD or record.trigger is Trigger.OFFLOAD
        self.num_moves += moves
        operation = record.trigger.value if moves else "sync"
        self._durations[operation][bisect.bisect_left(_BOUNDS_SECONDS, record.seconds)] += 1
        self._duration_sums[operation] += record.seconds
        self._records.append(record)
        logger.info(
            "%s: %s, %s -> %s",
            record.handle,
            record.trigger,
            record.source,
            record.target,
            extra={"placement": record},
        )

    def note_held(self, phase: str, nbytes: int) -> None:
        """The handles hold these device bytes together in this phase."""
        for peaks in (self.peak_bytes, self.recent_peak_bytes):
            peaks[phase] = max(peaks.get(phase, 0), nbytes)

    def forget(self, counters: HandleCounters) -> None:
        """Keep the counts of a handle that is unregistered."""
        for name in ("loaded_bytes", "offloaded_bytes", "skipped_bytes", "prefetch_used_bytes"):
            self.gone[name] += getattr(counters, name)

    def failed(
        self, counters: HandleCounters, handle: str, trigger: Trigger, error: BaseException
    ) -> None:
        counters.failures[reason_of(error)] += 1
        self.failures.append(Failure(time.time(), handle, trigger, reason_of(error)))
        # Log text, not the exception: a handler that keeps records would keep the traceback, and
        # with it the phase and the model.
        logger.warning("%s: %s failed: %s", handle, trigger, str(error) or type(error).__name__)

    def enter_phase(self, phase: str, only: tuple[str, ...] | None = None) -> None:
        """Count the time from now on for `phase`."""
        span = self._open_span()
        seconds = span.end_seconds - span.begin_seconds
        self._phase_seconds[span.phase] = self._phase_seconds.get(span.phase, 0.0) + seconds
        self._phase_spans.append(span)
        self.num_spans += 1
        self.phase = phase
        self._phase_since = span.end_seconds
        self._only = only

    def _open_span(self) -> PhaseSpan:
        """The span of the present phase, up to now."""
        now = time.monotonic()
        return PhaseSpan(self.phase, self._phase_since, now, self._only, self.arrival_seconds)

    def phase_spans(self) -> tuple[PhaseSpan, ...]:
        """The recent spans, oldest first. The open span is closed at the present moment."""
        return (*self._phase_spans, self._open_span())

    def phase_seconds(self) -> dict[str, float]:
        """Seconds in each phase, including the open one."""
        totals = dict(self._phase_seconds)
        span = self._open_span()
        seconds = span.end_seconds - span.begin_seconds
        totals[span.phase] = totals.get(span.phase, 0.0) + seconds
        return totals

    def histograms(self) -> tuple[DurationHistogram, ...]:
        return tuple(
            DurationHistogram(
                operation=name,
                upper_bounds_seconds=_BOUNDS_SECONDS,
                counts=tuple(self._durations[name]),
                sum_seconds=self._duration_sums[name],
            )
            for name in _OPERATIONS
        )
