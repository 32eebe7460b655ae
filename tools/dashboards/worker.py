"""The dashboard of one worker: what its handles did and hold, what moved and what that cost. Needs
grafana-foundation-sdk."""

from __future__ import annotations

from typing import Any

from grafana_foundation_sdk.builders import barchart, dashboard, statetimeline, timeseries
from grafana_foundation_sdk.models import common as options
from grafana_foundation_sdk.models import dashboard as model

from placement.core.states import State
from tools.dashboards import panels
from tools.dashboards.panels import BYTES, COUNT, FLEET_UID, NONE_STEPS, SHARE, WORKER_UID
from tools.dashboards.queries import (
    budget_share,
    failures,
    findings,
    held_bytes,
    or_zero,
    stall_share,
)

WORKER = 'run="$run",instance="$instance"'
COLOURS = {
    State.CPU_OFFLOADED: "#6e7681",
    State.GPU_RESIDENT: "#3fb950",
    State.SYNCING: "#39c5cf",
    State.TRAINING: "#e3b341",
}
"""The colours of `placement demo` in a terminal: grey, green, cyan, yellow."""
_BROKEN = len(COLOURS)
_BUDGET = "budget"
_MOVES = ("load", "offload")


def page() -> model.Dashboard:
    """The whole dashboard: 22 rows of the grid, which fit on a screen of 1080 lines without
    scrolling."""
    to_fleet = ("All workers", FLEET_UID, "All workers of this run")
    text = (
        "One worker: the state of every handle, the bytes on the GPU, the bytes moved, and the "
        "time spent waiting."
    )
    made = panels.page(WORKER_UID, "Placement: worker", text, many=False, to=to_fleet)
    panels.add_row(made, 3, *((3, each) for each in _numbers()))
    panels.add_row(made, 7, (16, _timeline()), (8, _state_shares()))
    panels.add_row(made, 6, (12, _resident()), (12, _phases()))
    panels.add_row(made, 6, (8, _moved()), (8, _durations()), (8, _speed()))
    return panels.finished(made)


def _numbers() -> list[Any]:
    current = {"{{phase}}": f"placement_phase{{{WORKER}}} == 1"}
    phase = panels.number("Phase", "The innermost open phase; idle outside every phase.", current)
    phase.text_mode(options.BigValueTextMode.NAME)
    return [
        phase,
        panels.number(
            "On the GPU", "Device bytes that the handles hold now.", held_bytes(WORKER), BYTES
        ),
        panels.number(
            "Of the budget",
            "Device bytes of the handles as a fraction of the budget, the bytes that they may hold "
            "together.",
            budget_share(WORKER),
            SHARE,
            panels.BUDGET_STEPS,
        ),
        panels.number(
            "Unpaired",
            "Device bytes that handles still hold although the phase that loaded them has ended. "
            "Should be 0.",
            f"max(placement_unpaired_bytes{{{WORKER}}})",
            BYTES,
            NONE_STEPS,
        ),
        panels.number(
            "Unaccounted",
            "GPU memory in use that neither torch, nor placement, nor a visible process explains, "
            "at the last phase transition.",
            f"max(placement_unaccounted_bytes{{{WORKER}}})",
            BYTES,
            panels.UNACCOUNTED_STEPS,
        ),
        panels.number(
            "Stall share",
            "Fraction of the wall time in which the worker waited for moves, over the time shown.",
            stall_share(WORKER),
            SHARE,
            panels.STALL_STEPS,
        ),
        panels.number(
            "Failures",
            "State transitions that failed, plans refused because they did not fit, and writes "
            "into offloaded memory, in the time shown.",
            failures(WORKER),
            COUNT,
            NONE_STEPS,
        ),
        panels.number(
            "Handles with findings",
            "Handles that are broken, that have tensors outside their ranges, or whose offloaded "
            "memory is still referenced.",
            findings(WORKER),
            COUNT,
            NONE_STEPS,
        ),
    ]


def _timeline() -> statetimeline.Panel:
    codes = " or ".join(
        f'placement_state{{{WORKER},state="{state}"}} * {code}'
        for code, state in enumerate(COLOURS)
    )
    # A broken handle still has a state; the largest code hides it.
    expr = (
        f"clamp_max(sum without (state) ({codes}) + {_BROKEN} * placement_broken{{{WORKER}}}, "
        f"{_BROKEN})"
    )
    shown = {
        float(code): (str(state), colour) for code, (state, colour) in enumerate(COLOURS.items())
    }
    made = (
        statetimeline.Panel()
        .title("State of every handle")
        .with_target(panels.query(expr, "{{handle}}"))
    )
    made.description(
        "The state at each scrape. States shorter than the scrape interval can be missing here; "
        "the shares on the right are exact, and `placement trace` shows every change."
    )
    made.mappings(panels.value_mappings({**shown, float(_BROKEN): ("BROKEN", "#f85149")}))
    made.color_scheme(dashboard.FieldColor().mode(model.FieldColorModeId.THRESHOLDS)).thresholds(
        panels.thresholds(panels.PLAIN_STEPS)
    )
    # Values are not carried over a gap, because the state between scrapes is unknown.
    made.merge_values(True).span_nulls(False).insert_nulls(False)
    made.show_value(options.VisibilityMode.NEVER).row_height(0.8).line_width(0).fill_opacity(90)
    return made.legend(panels.legend_below()).tooltip(panels.tooltip(zeros=True))


def _state_shares() -> barchart.Panel:
    seconds = (
        f"sum by (handle, state) (increase(placement_state_seconds_total{{{WORKER}}}[$__range]))"
    )
    made = panels.bars(
        "Time in each state",
        "Share of each state in the time shown, for every handle. The worker itself measures it, "
        "so short states are included.",
        SHARE,
        f"{seconds} / on (handle) group_left () sum by (handle) "
        f"(increase(placement_state_seconds_total{{{WORKER}}}[$__range]))",
        rows="handle",
        columns="state",
        named="Handle",
    ).max(1)
    for state, colour in COLOURS.items():
        made.override_by_name(state.value, [panels.fixed(colour)])
    return made


def _resident() -> timeseries.Panel:
    per_handle = f'sum by (handle) (placement_resident_bytes{{{WORKER},memory="device"}})'
    nothing = (
        "label_replace(0 * "
        f"max(placement_budget_bytes{{{WORKER}}}), "
        '"handle", '
        '"nothing '
        'registered", "", "")'
    )
    made = panels.lines(
        "On the GPU, against the budget",
        "Device bytes of each handle, stacked. The dashed line is the budget, the bytes that they "
        "may hold together.",
        BYTES,
        [
            (f"{per_handle} or on () {nothing}", "{{handle}}"),
            (f"max(placement_budget_bytes{{{WORKER}}})", _BUDGET),
        ],
        stacked=True,
    ).line_interpolation(options.LineInterpolation.STEP_AFTER)
    made.override_by_name(
        _BUDGET,
        [
            panels.fixed("red"),
            model.DynamicConfigValue(id_val="custom.fillOpacity", value=0),
            model.DynamicConfigValue(
                id_val="custom.stacking", value={"mode": "none", "group": "A"}
            ),
            model.DynamicConfigValue(
                id_val="custom.lineStyle", value={"fill": "dash", "dash": [10, 6]}
            ),
            model.DynamicConfigValue(id_val="custom.lineWidth", value=2),
        ],
    )
    return made


def _phases() -> timeseries.Panel:
    made = panels.lines(
        "Share of each phase",
        "Share of each phase in the wall time; the innermost open one counts. 'waiting for moves' "
        "is the stalled part of all phases.",
        SHARE,
        [
            (
                (
                    "sum by (phase) "
                    f"(rate(placement_phase_seconds_total{{{WORKER}}}[$__rate_interval])) > 0"
                ),
                "{{phase}}",
            ),
            (
                f"sum(rate(placement_phase_stall_seconds_total{{{WORKER}}}[$__rate_interval]))",
                "waiting for moves",
            ),
        ],
        stacked=True,
    )
    made.override_by_name(
        "waiting for moves",
        [
            panels.fixed("red"),
            model.DynamicConfigValue(id_val="custom.fillOpacity", value=0),
            model.DynamicConfigValue(
                id_val="custom.stacking", value={"mode": "none", "group": "A"}
            ),
            model.DynamicConfigValue(id_val="custom.lineWidth", value=2),
        ],
    )
    return made.max(1).legend(panels.legend_below("mean"))


def _moved() -> timeseries.Panel:
    moved = {
        "loaded": "placement_loaded_bytes_total",
        "offloaded": "placement_offloaded_bytes_total",
    }
    skipped = ("not copied: unchanged", "placement_skipped_bytes_total")
    return panels.lines(
        "Bytes moved and skipped",
        "Bytes copied to the GPU, back to the host, and offloaded without a copy because they were "
        "unchanged; per second of wall time.",
        panels.BYTES_A_SECOND,
        [
            (or_zero(f"sum(rate({name}{{{WORKER}}}[$__rate_interval]))", WORKER, ""), legend)
            for legend, name in (*moved.items(), skipped)
        ],
    ).fill_opacity(15)


def _durations() -> timeseries.Panel:
    buckets = (
        "sum by (le) "
        f'(rate(placement_transition_duration_seconds_bucket{{{WORKER},operation="%s"}}[$__rate_interval]))'
    )
    return panels.lines(
        "Time of one move",
        "Half of the moves took less than p50, one in twenty more than p95. Handles of one phase "
        "transition move together, and each counts the whole time. Empty while nothing moves.",
        panels.SECONDS,
        [
            (
                (f"histogram_quantile({quantile}, {buckets % operation})"),
                (f"{operation} p{quantile * 100:.0f}"),
            )
            for operation in _MOVES
            for quantile in (0.5, 0.95)
        ],
    ).span_nulls(True)


def _speed() -> timeseries.Panel:
    copied = " + ".join(
        f"sum(rate(placement_{verb}_bytes_total{{{WORKER}}}[$__rate_interval]))"
        for verb in ("loaded", "offloaded")
    )
    waited = f"sum(rate(placement_phase_stall_seconds_total{{{WORKER}}}[$__rate_interval]))"
    return panels.lines(
        "Speed of moves",
        "Bytes copied, both ways together, per second that the worker waited. If far below the "
        "link's speed, look for host memory that is not pinned. Empty while nothing moves.",
        panels.BYTES_A_SECOND,
        [(f"({copied}) / {waited}", "loaded and offloaded")],
    ).span_nulls(True)
