"""One worker as JSON for people: the snapshot, the last minutes of the journal, the last failures.

The status page and `placement status` show it. A worker serves its own view at `/workers`; the discovery server serves all views.
"""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

from placement.core.journal import Journal
from placement.core.snapshot import Snapshot

HISTORY_SECONDS = 300.0
_LAST = 20
"""The number of state transitions and failures shown."""
_MOST_SPANS = 500
"""The limit for each track. More spans than a page has pixels only make it slow."""


def worker_view(snapshot: Snapshot, journal: Journal, *, name: str, labels: dict[str, str]) -> dict[str, Any]:
    """The view of one worker.

    Returns:
        `name`, `labels` and `snapshot` (as JSON). `timeline`: for each handle its states in the last `HISTORY_SECONDS` as
        [state, begin, end]. `phases`: [phase, begin, end]. `transitions` and `failures`: the last ones, newest first. Times are Unix time
        in seconds.
    """
    now = time.monotonic()
    offset, start = time.time() - now, now - HISTORY_SECONDS
    records = list(journal)
    since: dict[str, tuple[str, float]] = {}
    timeline: defaultdict[str, list[list[Any]]] = defaultdict(list)

    def add(handle: str, state: str, begin: float, end: float) -> None:
        if end >= start:
            timeline[handle].append([state, round(max(begin, start) + offset, 3), round(end + offset, 3)])

    born = {handle.name: now - sum(handle.state_seconds.values()) for handle in snapshot.handles}
    for record in records:
        state, begin = since.get(record.handle, (record.source.value, born.get(record.handle, start)))
        add(record.handle, state, begin, record.at_seconds)
        since[record.handle] = record.target.value, record.at_seconds
    for handle in snapshot.handles:
        state, begin = since.get(handle.name, (handle.state.value, born[handle.name]))
        add(handle.name, state, begin, now)
    shown = {handle.name: timeline[handle.name][-_MOST_SPANS:] for handle in snapshot.handles}
    phases = [
        [span.phase, round(max(span.begin_seconds, start) + offset, 3), round(span.end_seconds + offset, 3)]
        for span in journal.phase_spans()
        if span.end_seconds >= start
    ]
    return {
        "name": name,
        "labels": labels,
        "snapshot": snapshot.model_dump(mode="json"),
        "timeline": shown,
        "phases": phases[-_MOST_SPANS:],
        "transitions": [
            {
                "timestamp_seconds": record.timestamp_seconds,
                "handle": record.handle,
                "trigger": record.trigger.value,
                "phase": record.phase,
                "bytes": record.nbytes,
                "skipped_bytes": record.skipped_bytes,
                "seconds": record.seconds,
            }
            for record in records[: -_LAST - 1 : -1]
        ],
        "failures": [
            {"timestamp_seconds": f.timestamp_seconds, "handle": f.handle, "trigger": f.trigger.value, "reason": f.reason}
            for f in list(journal.failures)[: -_LAST - 1 : -1]
        ],
    }
