"""PromQL that both pages ask, over a `selector` of workers and `by` them together ("") or each alone (BY_WORKER).

A value of which a sound worker has none is 0 there, by the series of its budget, which is there as long as the worker is. So an
idle worker shows zeros, and one that is gone shows nothing.
"""

from __future__ import annotations

BY_WORKER = "by (instance) "


def or_zero(expr: str, selector: str, by: str) -> str:
    """The expression, and 0 for workers that it says nothing about."""
    return f"({expr}) or 0 * max {by}(placement_budget_bytes{{{selector}}})"


def held_bytes(selector: str, by: str = "") -> str:
    """Device bytes of all handles."""
    return or_zero(f'sum {by}(placement_resident_bytes{{{selector},memory="device"}})', selector, by)


def budget_share(selector: str, by: str = "") -> str:
    """Of the budget; 0 where there is no budget at all."""
    return f"({held_bytes(selector, by)}) / clamp_min(max {by}(placement_budget_bytes{{{selector}}}), 1)"


def stall_share(selector: str, by: str = "", window: str = "$__range") -> str:
    """Of the wall time, spent waiting for moves. The seconds in all phases, idle too, are the wall time."""
    waited = f"sum {by}(increase(placement_phase_stall_seconds_total{{{selector}}}[{window}]))"
    return f"{waited} / sum {by}(increase(placement_phase_seconds_total{{{selector}}}[{window}]))"


def failures(selector: str, by: str = "") -> str:
    """Failed transitions, refused plans and wrong writes in the time shown; what a user interrupted is no failure."""
    transitions = f'placement_transition_failures_total{{{selector},reason!="interrupted"}}'
    counted = [
        or_zero(f"sum {by}(increase({transitions}[$__range]))", selector, by),
        f'sum {by}(increase(placement_policy_decisions_total{{{selector},decision="refuse"}}[$__range]))',
        f"sum {by}(increase(placement_wrong_writes_total{{{selector}}}[$__range]))",
    ]
    return " + ".join(f"({each})" for each in counted)


def findings(selector: str, by: str = "") -> str:
    """Handles that are broken, have drifted, or whose offloaded storages others hold."""
    gauges = ("placement_broken", "placement_drift_bytes", "placement_stray_references")
    wrong = " or ".join(f"{name}{{{selector}}} > 0" for name in gauges)
    return or_zero(f"count {by}({wrong})", selector, by)
