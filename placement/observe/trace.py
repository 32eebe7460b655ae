"""Write the journal as a Chrome trace, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

Each handle has a track with its states, and within them its moves with bytes and rate. The phases
have a track. The device bytes of each handle are a counter. Times are Unix time in microseconds
minus `base_nanoseconds`, as in the files of `torch.profiler` (`baseTimeNanoseconds`), so that both
traces can be shown together: see `write_trace`.

Format: "Trace Event Format", Google, 2016: complete events ("X") of one track must nest, times are
in microseconds.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from placement.core.errors import PlacementError
from placement.core.journal import Journal, Record
from placement.core.states import State, Trigger

Event = dict[str, Any]

_PHASES_TRACK = 1
# the number of events encoded at a time, which bounds the memory that writing a trace takes
_PIECE_EVENTS = 512


@dataclass(frozen=True)
class _Process:
    """Makes the events of this process."""

    pid: int
    offset_seconds: float  # from the monotonic clock to the trace's time

    def micros(self, seconds: float) -> float:
        return round((seconds + self.offset_seconds) * 1e6, 3)

    def span(
        self, name: str, category: str, begin: float, end: float, track: int, **details: Any
    ) -> Event:
        return {
            "ph": "X",
            "name": name,
            "cat": category,
            "ts": self.micros(begin),
            "dur": round((max(end, begin) - begin) * 1e6, 3),
            "pid": self.pid,
            "tid": track,
            "args": details,
        }

    def name(self, kind: str, track: int, name: str) -> Event:
        arguments = {"name": name}
        return {"ph": "M", "name": kind, "pid": self.pid, "tid": track, "args": arguments}

    def counter(self, name: str, at: float, **values: int) -> Event:
        return {"ph": "C", "name": name, "ts": self.micros(at), "pid": self.pid, "args": values}


def _events(journal: Journal, last_seconds: float, base_nanoseconds: int) -> Iterator[Event]:
    """The events of this process, track by track, not sorted by time. See `encoded_trace`."""
    last = time.monotonic()
    first = last - last_seconds
    process = _Process(os.getpid(), time.time() - last - base_nanoseconds / 1e9)
    yield process.name("process_name", 0, f"placement {process.pid}")
    yield process.name("thread_name", _PHASES_TRACK, "phases")
    for phase in journal.phase_spans():
        if phase.end_seconds >= first:
            begin, end = phase.begin_seconds, phase.end_seconds
            details = {} if phase.only is None else {"only": list(phase.only)}
            yield process.span(phase.phase, "phase", begin, end, _PHASES_TRACK, **details)
    tracks: dict[str, int] = {}
    since: dict[str, tuple[State, float]] = {}
    for record in [record for record in journal if record.at_seconds >= first]:
        handle = record.handle
        end = record.at_seconds
        if handle not in tracks:
            tracks[handle] = _PHASES_TRACK + 1 + len(tracks)
            yield process.name("thread_name", tracks[handle], handle)
        state, began = since.get(handle, (record.source, end - record.seconds))
        yield process.span(state.value, "state", began, end, tracks[handle])
        if record.trigger in (Trigger.LOAD, Trigger.OFFLOAD):
            yield _move(process, record, began, tracks[handle])
        yield process.counter(f"{handle} bytes", end, device=record.resident_bytes)
        since[handle] = record.target, end
    for handle, (state, began) in since.items():
        yield process.span(state.value, "state", began, last, tracks[handle])


def _move(process: _Process, record: Record, began: float, track: int) -> Event:
    """A move lies at the end of its source state, which began at `began`. Handles that move
    together each show the time of all."""
    end = record.at_seconds
    details: dict[str, Any] = {
        "phase": record.phase,
        "bytes": record.nbytes,
        "skipped_bytes": record.skipped_bytes,
    }
    if record.prefetched_bytes:
        details["prefetched_bytes"] = record.prefetched_bytes
    if record.seconds > 0:
        details["GB/s"] = round(record.nbytes / record.seconds / 1e9, 3)
    begin = max(began, end - record.seconds)
    return process.span(record.trigger.value, "move", begin, end, track, **details)


def encoded_trace(
    journal: Journal,
    *,
    last_seconds: float = math.inf,
    base_nanoseconds: int = 0,
    after: Iterable[Event] = (),
) -> Iterator[bytes]:
    """A trace file in pieces that are made on demand, so a long journal is never held as text.
    `last_seconds`: leave out events that ended longer ago. `base_nanoseconds`: the Unix time at
    which the trace's time begins. `after`: further events, put after placement's own."""
    events = itertools.chain(_events(journal, last_seconds, base_nanoseconds), after)
    return encoded(events, base_nanoseconds)


def encoded(events: Iterator[Event], base_nanoseconds: int = 0) -> Iterator[bytes]:
    """Events as a trace file, in pieces."""
    head = f'{{"displayTimeUnit":"ms","baseTimeNanoseconds":{base_nanoseconds},"traceEvents":[\n'
    yield head.encode()
    separator = ""
    while piece := list(itertools.islice(events, _PIECE_EVENTS)):
        texts = [json.dumps(event, separators=(",", ":")) for event in piece]
        yield (separator + ",\n".join(texts)).encode()
        separator = ",\n"
    yield b"\n]}\n"


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file to write, which takes the place of `path` once it is complete. Until then its name
    matches no `*.json`."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with partial.open("wb") as file:
            yield file
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_trace(
    journal: Journal,
    path: str | os.PathLike[str],
    *,
    beside: str | os.PathLike[str] | None = None,
) -> None:
    """Write a manager's journal as a Chrome trace: `placement.trace(manager.journal,
    "trace.json")`.

    Args:
        path: the file to write; it is replaced atomically.
        beside: a trace that `torch.profiler` exported in the same process. Its events go into the
            same file, on the same time axis.

    Raises:
        PlacementError: `beside` is not a trace file.
        OSError: a file cannot be read or written.
    """
    base, events = (0, []) if beside is None else read_trace(Path(beside))
    with replacing(Path(path)) as file:
        file.writelines(encoded_trace(journal, base_nanoseconds=base, after=events))


def read_trace(path: Path) -> tuple[int, list[Event]]:
    """Read a Chrome trace. Returns the Unix time at which its time begins (nanoseconds), and its
    events."""
    try:
        trace = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no trace {path}") from None
    except ValueError as error:
        raise PlacementError(f"{path} is no Chrome trace: {error}") from error
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise PlacementError(f"{path} is no Chrome trace: it has no list of traceEvents")
    return int(trace.get("baseTimeNanoseconds", 0)), trace["traceEvents"]
