"""Figures for a trainer's own log, in gigabytes (`_gb`) and seconds. A phase has its keys once it
has run or failed to begin."""

from __future__ import annotations

from placement.core.journal import Journal
from placement.core.snapshot import Snapshot

_GB = 10**9


def figures_of(snapshot: Snapshot, journal: Journal, *, totals: bool) -> dict[str, float]:
    """See `Manager.metrics`. The last call is the last one for this journal."""
    resident_bytes = sum(handle.resident_bytes for handle in snapshot.handles)
    journal.note_held(journal.phase, resident_bytes)  # nothing may have moved as it began
    peaks, journal.recent_peak_bytes = journal.recent_peak_bytes, {journal.phase: resident_bytes}
    counted = _counters(snapshot, journal)
    before, journal.logged = journal.logged, counted

    figures = {"host_gb": sum(handle.host_bytes for handle in snapshot.handles) / _GB}
    disk_bytes = sum(handle.disk_bytes for handle in snapshot.handles)
    if disk_bytes:
        figures["disk_gb"] = disk_bytes / _GB
    for phase in snapshot.phase_peak_bytes | snapshot.phase_stall_seconds:
        figures[f"peak_device_gb/{phase}"] = peaks.get(phase, 0) / _GB
        if totals:
            figures[f"total/peak_device_gb/{phase}"] = snapshot.phase_peak_bytes.get(phase, 0) / _GB
    for name, value in counted.items():
        figures[name] = value - before.get(name, 0)
        if totals:
            figures[f"total/{name}"] = value
    return {f"placement/{name}": value for name, value in figures.items()}


def _counters(snapshot: Snapshot, journal: Journal) -> dict[str, float]:
    """The figures that only grow; a feature's from its first use on."""

    def gigabytes(name: str) -> float:
        nbytes: int = journal.gone[name] + sum(getattr(handle, name) for handle in snapshot.handles)
        return nbytes / _GB

    stalls = snapshot.phase_stall_seconds
    counted = {
        "stall_seconds": sum(stalls.values()),
        "to_device_gb": gigabytes("loaded_bytes"),
        "to_host_gb": gigabytes("offloaded_bytes"),
        "skipped_gb": gigabytes("skipped_bytes"),
    }
    for phase in snapshot.phase_peak_bytes | stalls:
        counted[f"stall_seconds/{phase}"] = stalls.get(phase, 0.0)
    early = gigabytes("prefetch_used_bytes")
    return counted | ({"prefetch_used_gb": early} if early else {})
