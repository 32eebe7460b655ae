"""When each shipped alert fires and when it does not: samples of one worker, and moments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

WORKER = 'job="placement",run="r",node="node0",rank="3",instance="node0/rank3"'
HANDLE = f'{WORKER},handle="actor",kind="module"'
GIB = 1 << 30


@dataclass(frozen=True)
class Case:
    """Samples (promtool's notation: "0x5" is six zeros, "_" is none, "stale" the end), and when the
    alert fires."""

    alert: str
    what: str
    series: Mapping[str, str]
    fires: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    every: str = "1m"


def of_worker(name: str, values: str, labels: str = "") -> dict[str, str]:
    return {f"{name}{{{WORKER}{labels}}}": values}


def of_handle(name: str, values: str, labels: str = "") -> dict[str, str]:
    return {f"{name}{{{HANDLE}{labels}}}": values}


def holding(values: str, up: str = "1x60", budget: str = "_x60") -> dict[str, str]:
    """A worker with one handle that holds `values` bytes of a budget on the device."""
    return {
        **of_worker("placement_budget_bytes", budget),
        **of_handle("placement_resident_bytes", values, ',memory="device"'),
        **of_handle("placement_resident_bytes", "99x60", ',memory="host"'),
        **of_worker("up", up),
    }


def budgeted(
    what: str, values: str, budget: str = "10x60", policy: str = "colocated", **moments: Any
) -> Case:
    info = of_worker("placement_worker_info", "1x60", f',policy="{policy}"')
    return Case(
        "PlacementBudgetNearlyFull", what, {**holding(values, budget=budget), **info}, **moments
    )


def counted(alert: str, name: str, series: Mapping[str, str]) -> list[Case]:
    """A counter that rises at minute 20, one that a new worker brings along, one that rose long
    ago, and one that never did."""

    def at(values: str) -> dict[str, str]:
        return {key.replace("COUNTER", name): values for key in series}

    return [
        Case(alert, "rises", at("0x19 1x60"), fires=("21m", "33m"), silent=("19m", "40m")),
        Case(alert, "is new", at("_x10 2x60"), fires=("12m", "20m"), silent=("5m", "40m")),
        Case(
            alert,
            "rises with a restart",
            at("5x19 0x5 1x30"),
            fires=("30m",),
            silent=("19m", "50m"),
        ),
        Case(alert, "stays", at("0x60"), silent=("5m", "20m", "59m")),
    ]


def gone(what: str, held: str, up: str, budget: str = "10x9 stale", **more: Any) -> Case:
    """A worker that holds these bytes, is up and has a budget at these times."""
    return Case("PlacementWorkerGone", what, holding(held, up, budget), **more)


def growing(what: str, values: str, **moments: Any) -> Case:
    return Case(
        "PlacementUnaccountedGrowing",
        what,
        of_worker("placement_unaccounted_bytes", values),
        **moments,
    )


CASES = [
    Case(
        "PlacementLeftResident",
        "stays",
        of_worker("placement_unpaired_bytes", "0x9 7x30"),
        fires=("13m", "30m"),
        silent=("9m", "11m"),
    ),
    Case(
        "PlacementLeftResident",
        "is over soon",
        of_worker("placement_unpaired_bytes", "0x9 7x1 0x30"),
        silent=("10m", "11m", "13m"),
    ),
    Case(
        "PlacementHandleBroken",
        "breaks",
        of_handle("placement_broken", "0x9 1x30"),
        fires=("10m", "30m"),
        silent=("9m",),
    ),
    Case(
        "PlacementHandleBroken", "is sound", of_handle("placement_broken", "0x30"), silent=("10m",)
    ),
    Case(
        "PlacementDrift",
        "drifts",
        of_handle("placement_drift_bytes", "0x9 5x9 0x9"),
        fires=("10m",),
        silent=("9m", "20m"),
    ),
    Case("PlacementDrift", "does not", of_handle("placement_drift_bytes", "0x30"), silent=("10m",)),
    *counted(
        "PlacementPairingViolated",
        "placement_pairing_violations_total",
        {f"COUNTER{{{WORKER}}}": ""},
    ),
    *counted("PlacementWrongWrites", "placement_wrong_writes_total", {f"COUNTER{{{WORKER}}}": ""}),
    *counted(
        "PlacementIntegrityFailing",
        "placement_transition_failures_total",
        {f'COUNTER{{{HANDLE},reason="integrity"}}': ""},
    ),
    *counted(
        "PlacementTransitionsFailing",
        "placement_transition_failures_total",
        {f'COUNTER{{{HANDLE},reason="device_memory"}}': ""},
    ),
    Case(
        "PlacementTransitionsFailing",
        "is interrupted or another alert's",
        {
            **of_handle("placement_transition_failures_total", "0x9 1x30", ',reason="interrupted"'),
            **of_handle("placement_transition_failures_total", "0x9 1x30", ',reason="integrity"'),
        },
        silent=("10m", "15m"),
    ),
    *counted(
        "PlacementPlanRefused",
        "placement_policy_decisions_total",
        {f'COUNTER{{{WORKER},policy="p",decision="refuse"}}': ""},
    ),
    Case(
        "PlacementPlanRefused",
        "decides otherwise",
        of_worker("placement_policy_decisions_total", "0+5x30", ',policy="p",decision="load"'),
        silent=("10m", "20m"),
    ),
    Case(
        "PlacementStallShareHigh",
        "waits a third of the time",
        {
            **of_worker("placement_phase_stall_seconds_total", "0+10x60", ',phase="train"'),
            **of_worker("placement_phase_stall_seconds_total", "0+10x60", ',phase="rollout"'),
            **of_worker("placement_phase_seconds_total", "0+30x60", ',phase="train"'),
            **of_worker("placement_phase_seconds_total", "0+30x60", ',phase="idle"'),
        },
        fires=("30m",),
        silent=("5m",),
    ),
    Case(
        "PlacementStallShareHigh",
        "waits a tenth, or does nothing",
        {
            **of_worker("placement_phase_stall_seconds_total", "0+6x60", ',phase="train"'),
            **of_worker("placement_phase_seconds_total", "0+60x60", ',phase="train"'),
            'placement_phase_stall_seconds_total{run="r",instance="idle",phase="idle"}': "0x60",
            'placement_phase_seconds_total{run="r",instance="idle",phase="idle"}': "0+60x60",
        },
        silent=("30m", "50m"),
    ),
    # 9.6 of 10 for one sample in ten: a sampled peak counts for ten minutes.
    budgeted("peaks", "5x9 9.6 5x40", fires=("11m", "19m"), silent=("9m", "25m")),
    budgeted("leaves room", "9x60", silent=("11m", "40m")),
    budgeted("is meant to", "10x60", policy="resident", silent=("11m",)),
    budgeted("has none", "0x60", budget="0x60", silent=("11m",)),
    # Killed in a phase, the target stays listed: `up` is 0 and every other series ends.
    gone(
        *("is down", "4x9 stale", "1x9 0x40"),
        fires=("12m", "18m"),
        silent=("9m", "25m"),
        labels={"severity": "critical", "run": "r", "instance": "node0/rank3"},
    ),
    # Off the list after a while: nobody expects it any more.
    gone(
        "is down then off the list",
        "4x9 stale",
        "1x9 0x5 stale",
        fires=("12m", "14m"),
        silent=("9m", "17m", "25m"),
    ),
    # The last scrape still saw a phase.
    gone("ends in order", "4x9 stale", "1x9 stale", silent=("10m", "11m", "12m", "15m")),
    # The last scrape fell between two phases.
    gone(
        "held bytes half a minute before",
        "4x19 0 stale",
        "1x20 0x40",
        "10x20 stale",
        fires=("12m",),
        silent=("10m", "25m"),
        every="30s",
    ),
    gone(
        "held bytes two minutes before",
        "4x9 0x1 stale",
        "1x11 0x40",
        "10x11 stale",
        silent=("13m", "20m"),
    ),
    gone(
        "unregisters everything, then is down",
        "4x9 stale",
        "1x13 0x40",
        "10x13 stale",
        silent=("15m", "18m"),
    ),
    gone(
        "is back after three minutes",
        "4x9 stale _x2 0x40",
        "1x9 0x2 1x40",
        fires=("12m",),
        silent=("14m", "20m"),
    ),
    gone(
        "misses one scrape",
        "4x9 _ 4x40",
        "1x9 0 1x40",
        "10x60",
        silent=("10m", "11m", "12m", "20m"),
    ),
    growing("leaks in every step", f"0+{GIB // 32}x120", fires=("60m", "100m"), silent=("30m",)),
    growing("creeps", f"{GIB}+{GIB // 256}x120", silent=("40m", "60m", "100m")),
    growing(
        "rises once",
        f"{GIB}x40 {5 * GIB}x80",
        silent=tuple(f"{minute}m" for minute in range(41, 90, 4)),
    ),
    growing(
        "swings with the phases",
        f"{GIB}x11 {4 * GIB}x11 " * 6,
        silent=tuple(f"{minute}m" for minute in range(31, 120, 4)),
    ),
]
