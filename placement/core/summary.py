"""A summary of a manager's life as a table for the log."""

from __future__ import annotations

from placement.core.snapshot import Snapshot
from placement.core.states import State

_WORDS = {State.CPU_OFFLOADED: "off", State.GPU_RESIDENT: "gpu", State.SYNCING: "sync", State.TRAINING: "train"}


def summary(snapshot: Snapshot) -> str:
    """One line a handle: share of time in each state, transitions, failures, bytes each way. The last line has the worker's totals."""
    shares = "".join(f"{word:>7}" for word in _WORDS.values())
    lines = [f"{'handle':<24}{shares}{'moves':>8}{'failed':>8}{'loaded':>12}{'offloaded':>12}{'skipped':>12}"]
    for handle in snapshot.handles:
        total = sum(handle.state_seconds.values()) or 1.0
        share = "".join(f"{handle.state_seconds.get(state, 0.0) / total:>7.1%}" for state in _WORDS)
        counts = f"{sum(handle.transitions.values()):>8}{sum(handle.failures.values()):>8}"
        sizes = "".join(f"{readable(nbytes):>12}" for nbytes in (handle.loaded_bytes, handle.offloaded_bytes, handle.skipped_bytes))
        lines.append(f"{handle.name:<24}{share}{counts}{sizes}")
    seconds, stalled = sum(snapshot.phase_seconds.values()), sum(snapshot.phase_stall_seconds.values())
    lines.append(
        f"{seconds:.1f} s, {stalled:.2f} s of it waiting for moves; at most {readable(snapshot.peak_bytes)} on {snapshot.device} "
        f"together; {snapshot.pairing_violations} pairing violations, {snapshot.wrong_writes} wrong writes"
    )
    return "\n".join(lines)


def readable(nbytes: int) -> str:
    """Format a size with three digits in a suitable unit: "0", "1.50 GiB", "-4.00 KiB"."""
    value, units = float(nbytes), ["TiB", "GiB", "MiB", "KiB", "B"]
    while abs(value) >= 1024 and len(units) > 1:
        value /= 1024
        units.pop()
    return str(nbytes) if units[-1] == "B" else f"{value:.3g} {units[-1]}"
