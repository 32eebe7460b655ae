"""Figures for a trainer's own log: the bytes and seconds of a manager since the last call.

Names that end in `_gb` are gigabytes (10**9 bytes), those with `seconds` are seconds.
"""

from __future__ import annotations

from collections.abc import Callable

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
        self._counted: dict[str, float] = {}

    def read(self, *, totals: bool) -> dict[str, float]:
        """The figures since the last call. `totals`: also those since the manager was made."""
        snapshot = self._take_snapshot()
        journal = self._journal
        phase = journal.phase
        resident_bytes = sum(handle.resident_bytes for handle in snapshot.handles)
        journal.note_held(phase, resident_bytes)
        peaks, journal.recent_peak_bytes = journal.recent_peak_bytes, {phase: resident_bytes}
        counted = self._counters(snapshot)
        before, self._counted = self._counted, counted

        figures = {"host_gb": sum(handle.host_bytes for handle in snapshot.handles) / _GB}
        disk_bytes = sum(handle.disk_bytes for handle in snapshot.handles)
        if disk_bytes:
            figures["disk_gb"] = disk_bytes / _GB
        for name in _phases(snapshot):
            figures[f"peak_device_gb/{name}"] = peaks.get(name, 0) / _GB
        for name, value in counted.items():
            figures[name] = value - before.get(name, 0)
            if totals:
                figures[f"total/{name}"] = value
        if totals:
            for name, nbytes in snapshot.phase_peak_bytes.items():
                figures[f"total/peak_device_gb/{name}"] = nbytes / _GB
        return {f"placement/{name}": value for name, value in figures.items()}

    def _counters(self, snapshot: Snapshot) -> dict[str, float]:
        """The figures that only grow. A feature's figures are there from its first use on."""

        def gigabytes(name: str) -> float:
            nbytes: int = self._journal.gone[name]
            for handle in snapshot.handles:
                nbytes += getattr(handle, name)
            return nbytes / _GB

        failures = sum(sum(handle.failures.values()) for handle in snapshot.handles)
        stalls = snapshot.phase_stall_seconds
        counted = {
            "stall_seconds": sum(stalls.values()),
            "to_device_gb": gigabytes("loaded_bytes"),
            "to_host_gb": gigabytes("offloaded_bytes"),
            "skipped_gb": gigabytes("skipped_bytes"),
        }
        for phase in _phases(snapshot):
            counted[f"stall_seconds/{phase}"] = stalls.get(phase, 0.0)
        of_features = {
            "prefetch_used_gb": gigabytes("prefetch_used_bytes"),
            "prefetch_discarded_gb": snapshot.prefetch_discarded_bytes / _GB,
            "failures": failures + self._journal.gone["failures"],
            "pairing_violations": snapshot.pairing_violations,
            "wrong_writes": snapshot.wrong_writes,
        }
        return counted | {name: value for name, value in of_features.items() if value}


def _phases(snapshot: Snapshot) -> list[str]:
    """The phases that have run, or failed to begin. Each has its keys from then on."""
    return sorted({*snapshot.phase_peak_bytes, *snapshot.phase_stall_seconds})
