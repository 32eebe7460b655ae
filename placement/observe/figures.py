"""Figures for a trainer's own log: the bytes and seconds of a manager since the last call.

Names that end in `_gb` are gigabytes (10**9 bytes), those with `seconds` are seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from placement.core.journal import Journal
from placement.core.snapshot import Snapshot

_GB = 10**9


class Figures:
    """The figures of one manager. `Manager.metrics` explains them.

    Bytes of a handle stay counted when it is unregistered.
    """

    def __init__(self, journal: Journal, take_snapshot: Callable[[], Snapshot]) -> None:
        self._journal = journal
        self._take_snapshot = take_snapshot
        self._counted: Mapping[str, float] = {}

    def read(self, *, totals: bool) -> dict[str, float]:
        """The figures since the last call. `totals`: also those since the manager was made."""
        snapshot = self._take_snapshot()
        journal = self._journal
        phase = journal.phase
        resident = sum(handle.resident_bytes for handle in snapshot.handles)
        journal.note_held(phase, resident)
        counted = self._counters(snapshot)
        before, self._counted = self._counted, counted
        peaks = journal.recent_peak_bytes
        journal.recent_peak_bytes = {phase: resident}

        figures: dict[str, float] = {}
        for name, value in counted.items():
            figures[name] = value - before.get(name, 0)
        figures["host_gb"] = sum(handle.host_bytes for handle in snapshot.handles)
        disk_bytes = sum(handle.disk_bytes for handle in snapshot.handles)
        if disk_bytes:
            figures["disk_gb"] = disk_bytes
        for name in _phases(snapshot):
            figures[f"peak_device_gb/{name}"] = peaks.get(name, 0)
        if totals:
            for name, value in counted.items():
                figures[f"total/{name}"] = value
            for name, nbytes in snapshot.phase_peak_bytes.items():
                figures[f"total/peak_device_gb/{name}"] = nbytes
        for name in figures:
            is_bytes = name.removeprefix("total/").partition("/")[0].endswith("_gb")
            figures[name] /= _GB if is_bytes else 1
        return {f"placement/{name}": value for name, value in figures.items()}

    def _counters(self, snapshot: Snapshot) -> dict[str, float]:
        """The figures that only grow, in bytes and seconds. A feature's figures are there from its
        first use on."""
        stalls = snapshot.phase_stall_seconds
        counters: list[Any] = [self._journal.gone, *snapshot.handles]

        def total(name: str) -> int:
            return sum(getattr(counter, name) for counter in counters)

        counted: dict[str, float] = {
            "stall_seconds": sum(stalls.values()),
            "to_device_gb": total("loaded_bytes"),
            "to_host_gb": total("offloaded_bytes"),
            "skipped_gb": total("skipped_bytes"),
        }
        for phase in _phases(snapshot):
            counted[f"stall_seconds/{phase}"] = stalls.get(phase, 0.0)
        of_features = {
            "prefetch_used_gb": total("prefetch_used_bytes"),
            "prefetch_discarded_gb": snapshot.prefetch_discarded_bytes,
            "failures": sum(sum(counter.failures.values()) for counter in counters),
            "pairing_violations": snapshot.pairing_violations,
            "wrong_writes": snapshot.wrong_writes,
        }
        return counted | {name: value for name, value in of_features.items() if value}


def _phases(snapshot: Snapshot) -> list[str]:
    """The phases that have run, or failed to begin. Each has its keys from then on."""
    return sorted({*snapshot.phase_peak_bytes, *snapshot.phase_stall_seconds})
