"""Draw a run as text: a table of phases, and a timeline of the handles' states. Pure functions over recorded data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TextIO

from placement.core.states import State

MARKS = {State.CPU_OFFLOADED: "·", State.GPU_RESIDENT: "▒", State.SYNCING: "▓", State.TRAINING: "█"}
ASCII_MARKS = {State.CPU_OFFLOADED: ".", State.GPU_RESIDENT: "=", State.SYNCING: "+", State.TRAINING: "#"}
WORDS = {State.CPU_OFFLOADED: "off", State.GPU_RESIDENT: "gpu", State.SYNCING: "sync", State.TRAINING: "train"}
_COLOURS = {State.CPU_OFFLOADED: "2", State.GPU_RESIDENT: "32", State.SYNCING: "36", State.TRAINING: "33"}
_SHORT = {"rollout": "roll", "log_prob": "logp", "ref_log_prob": "refp", "weight_sync": "sync"}
_SMALLEST_SPAN = 6  # columns: enough for a short phase name and a gap


class Change(Protocol):
    """The fields of a journal record that the timeline reads."""

    @property
    def at_seconds(self) -> float: ...
    @property
    def handle(self) -> str: ...
    @property
    def source(self) -> State: ...
    @property
    def target(self) -> State: ...


@dataclass(frozen=True, kw_only=True)
class Span:
    """One phase, from the worker's request for it to the request for the next phase. Times are monotonic."""

    step: int
    phase: str
    begin_seconds: float
    end_seconds: float


@dataclass(frozen=True, kw_only=True)
class PhaseRow:
    """One row of the phase table: the effects of the phase transition at the beginning of the phase."""

    phase: str
    states: Mapping[str, State]
    before_bytes: int
    """Bytes on the device when the phase was requested."""
    peak_bytes: int
    """The most bytes on the device during the phase transition."""
    after_bytes: int
    """Bytes on the device when the phase began."""
    loaded_bytes: int
    offloaded_bytes: int
    skipped_bytes: int
    stall_seconds: float


@dataclass(frozen=True, kw_only=True)
class Style:
    """The capabilities of the terminal."""

    unicode: bool
    colour: bool

    @classmethod
    def of(cls, stream: TextIO) -> Style:
        """Unicode if the stream's encoding has the marks; colour if the stream is a terminal."""
        try:
            "".join(MARKS.values()).encode(stream.encoding or "ascii")
        except (UnicodeEncodeError, LookupError):
            return cls(unicode=False, colour=stream.isatty())
        return cls(unicode=True, colour=stream.isatty())

    def paint(self, text: str, state: State) -> str:
        return f"\x1b[{_COLOURS[state]}m{text}\x1b[0m" if self.colour else text

    def mark(self, state: State, width: int = 1) -> str:
        return self.paint((MARKS if self.unicode else ASCII_MARKS)[state] * width, state)

    def legend(self) -> str:
        return "   ".join(f"{self.mark(state)} {state.value}" for state in State)


def phase_table(rows: Sequence[PhaseRow], style: Style) -> str:
    """The rows below a header line. Bytes are in MiB, stall is in milliseconds."""
    if not rows:
        return ""
    names = list(rows[0].states)
    widths = [max(len(name), 5) for name in names]
    numbers = ("before", "peak", "after", "in", "out", "skipped", "stall ms")
    head = [f"{'phase':<12}", *(f"{name:<{w}}" for name, w in zip(names, widths, strict=True)), *(f"{n:>8}" for n in numbers)]
    lines = ["  ".join(head)]
    for row in rows:
        cells = [f"{row.phase:<12}"]
        cells += [style.paint(f"{WORDS[row.states[name]]:<{w}}", row.states[name]) for name, w in zip(names, widths, strict=True)]
        sizes = (row.before_bytes, row.peak_bytes, row.after_bytes, row.loaded_bytes, row.offloaded_bytes, row.skipped_bytes)
        cells += [f"{mebibytes(size):>8}" for size in sizes]
        cells.append(f"{row.stall_seconds * 1e3:>8.1f}")
        lines.append("  ".join(cells))
    return "\n".join(lines)


def mebibytes(nbytes: int) -> str:
    """A size in MiB. Only an exact zero is "0"."""
    return "0" if nbytes == 0 else f"{nbytes / (1 << 20):.1f}"


def timeline(spans: Sequence[Span], changes: Iterable[Change], initial: Mapping[str, State], style: Style, columns: int = 120) -> str:
    """One row for each handle, time from left to right. A cell shows the state that the handle had for the longest time in it.

    Every phase gets a minimum of columns, and a share of the rest by its duration. A bar separates steps. Of a long run the last steps
    are shown, as many as fit.

    Args:
        spans: the phases in order.
        changes: journal records of the same time, in order.
        initial: every handle's state at the beginning.
        columns: the width; the last step is shown whole even if it needs more.
    """
    if not spans:
        return ""
    history = {name: [(float("-inf"), state)] for name, state in initial.items()}
    for change in changes:
        history.setdefault(change.handle, [(float("-inf"), change.source)]).append((change.at_seconds, change.target))
    left = max(len(name) for name in history) + 1
    spans = _last_steps(spans, columns - left)
    widths = _span_widths(spans, columns - left)
    bar = "│" if style.unicode else "|"
    breaks = [i > 0 and span.step != spans[i - 1].step for i, span in enumerate(spans)]

    lines = [" " * left + _ruler(spans, widths, breaks, bar)]
    for name, states in history.items():
        line = f"{name:<{left}}"
        for span, width, new_step in zip(spans, widths, breaks, strict=True):
            cell = (span.end_seconds - span.begin_seconds) / width
            line += bar if new_step else ""
            line += "".join(
                style.mark(_longest(states, span.begin_seconds + i * cell, span.begin_seconds + (i + 1) * cell)) for i in range(width)
            )
        lines.append(line)
    return "\n".join([*lines, " " * left + style.legend()])


def _last_steps(spans: Sequence[Span], columns: int) -> Sequence[Span]:
    """The spans of the last steps that fit at their minimum width; at least the last step."""
    steps = sorted({span.step for span in spans})
    for first in steps:
        shown = [span for span in spans if span.step >= first]
        if first == steps[-1] or len(shown) * _SMALLEST_SPAN + steps[-1] - first <= columns:
            return shown
    return spans


def _span_widths(spans: Sequence[Span], columns: int) -> list[int]:
    """The columns of each span: the minimum width, plus a share of the remaining columns by duration."""
    total = sum(span.end_seconds - span.begin_seconds for span in spans) or 1.0
    steps = len({span.step for span in spans})
    spare = max(columns - _SMALLEST_SPAN * len(spans) - (steps - 1), 0)
    return [_SMALLEST_SPAN + int(spare * (span.end_seconds - span.begin_seconds) / total) for span in spans]


def _ruler(spans: Sequence[Span], widths: Sequence[int], breaks: Sequence[bool], bar: str) -> str:
    """The names of the phases, shortened to their widths."""
    text = ""
    for span, width, new_step in zip(spans, widths, breaks, strict=True):
        name = span.phase if len(span.phase) < width else _SHORT.get(span.phase, span.phase)
        text += (bar if new_step else "") + f"{name[:width]:<{width}}"
    return text


def _longest(states: Sequence[tuple[float, State]], begin: float, end: float) -> State:
    """The state held longest within `[begin, end)`. `states` are (since, state) pairs in order."""
    held: dict[State, float] = {}
    untils = [since for since, _ in states[1:]] + [float("inf")]
    for (since, state), until in zip(states, untils, strict=True):
        held[state] = held.get(state, 0.0) + max(min(until, end) - max(since, begin), 0.0)
    return max(held, key=lambda state: held[state])
