"""PromQL expressions of both dashboards. They take a `selector` of workers, and are grouped `by`
worker (BY_WORKER) or not ("").

An error count is 0 for a worker without errors. The zero comes from the series of the worker's
budget, which exists as long as the worker does. So an idle worker shows zeros, and a worker that is
gone shows nothing.
"""

from __future__ import annotations

BY_WORKER = "by (instance) "


def or_zero(expr: str, selector: str, by: str) -> str:
    """The expression, or 0 for workers for which it has no value."""
    return f"({expr}) or 0 * max {by}(placement_budget_bytes{{{selector}}})"


def held_bytes(selector: str, by: str = "") -> str:
    """Device bytes of all handles together."""
    return or_zero(
        f'sum {by}(placement_resident_bytes{{{selector},memory="device"}})', selector, by
    )


def budget_share(selector: str, by: str = "") -> str:
    """Device bytes of the handles as a fraction of the budget; 0 where the budget is 0."""
    return (
        f"({held_bytes(selector, by)}) / clamp_min(max {by}(placement_budget_bytes{{{selector}}}), "
        "1)"
    )


def stall_share(selector: str, by: str = "", window: str = "$__range") -> str:
    """The fraction of the wall time spent waiting for moves. The wall time is the time in all
    phases, including idle."""
    waited = f"sum {by}(increase(placement_phase_stall_seconds_total{{{selector}}}[{window}]))"
    return f"{waited} / sum {by}(increase(placement_phase_seconds_total{{{selector}}}[{window}]))"


def failures(selector: str, by: str = "") -> str:
    """Failed state transitions, refused plans and wrong writes in the time shown. Interruptions by
    the user do not count."""
    transitions = f'placement_transition_failures_total{{{selector},reason!="interrupted"}}'
    counted = [
        or_zero(f"sum {by}(increase({transitions}[$__range]))", selector, by),
        (
            "sum "
            f'{by}(increase(placement_policy_decisions_total{{{selector},decision="refuse"}}[$__range]))'
        ),
        f"sum {by}(increase(placement_wrong_writes_total{{{selector}}}[$__range]))",
    ]
    return " + ".join(f"({each})" for each in counted)


def findings(selector: str, by: str = "") -> str:
    """Handles that are broken, have drifted, or have offloaded storages that are still
    referenced."""
    gauges = ("placement_broken", "placement_drift_bytes", "placement_stray_references")
    wrong = " or ".join(f"{name}{{{selector}}} > 0" for name in gauges)
    return or_zero(f"count {by}({wrong})", selector, by)
