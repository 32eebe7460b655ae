"""The dashboard of all workers of a run: what each GPU holds, what moves cost, and the worst ranks.
Needs grafana-foundation-sdk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grafana_foundation_sdk.builders import barchart, common, table, timeseries
from grafana_foundation_sdk.models import common as options
from grafana_foundation_sdk.models import dashboard as model

from tools.dashboards import panels
from tools.dashboards.panels import BYTES, COUNT, FLEET_UID, NONE_STEPS, SHARE, WORKER_UID, Steps
from tools.dashboards.queries import (
    BY_WORKER,
    budget_share,
    failures,
    findings,
    held_bytes,
    stall_share,
)

WORKERS = 'run="$run",instance=~"$instance"'
REST = "everything else"
"""The name of device memory that handles do not hold: activations, torch's cache, CUDA's context,
other processes."""

_COLUMNS: tuple[tuple[str, str, str, Steps, int], ...] = (
    ("On the GPU", held_bytes(WORKERS, BY_WORKER), BYTES, panels.PLAIN_STEPS, 110),
    ("Of the budget", budget_share(WORKERS, BY_WORKER), SHARE, panels.BUDGET_STEPS, 150),
    (
        "GPU in use",
        (
            f"max {BY_WORKER}(placement_device_used_bytes{{{WORKERS}}}) / max "
            f"{BY_WORKER}(placement_device_total_bytes{{{WORKERS}}})"
        ),
        SHARE,
        panels.BUDGET_STEPS,
        150,
    ),
    ("Unpaired", f"max {BY_WORKER}(placement_unpaired_bytes{{{WORKERS}}})", BYTES, NONE_STEPS, 110),
    (
        "Unaccounted",
        (f"max {BY_WORKER}(placement_unaccounted_bytes{{{WORKERS}}})"),
        BYTES,
        panels.UNACCOUNTED_STEPS,
        120,
    ),
    ("Stall share", stall_share(WORKERS, BY_WORKER), SHARE, panels.STALL_STEPS, 120),
    ("Failures", failures(WORKERS, BY_WORKER), COUNT, NONE_STEPS, 90),
    ("Findings", findings(WORKERS, BY_WORKER), COUNT, NONE_STEPS, 90),
)
"""The columns of the table: title, expression, unit, thresholds, width in pixels."""
_GAUGES = {"Of the budget", "GPU in use"}


def page() -> model.Dashboard:
    """The whole dashboard: 22 rows of the grid, which fit on a screen of 1080 lines without
    scrolling."""
    to_worker = ("One worker", WORKER_UID, "One worker in detail: states, bytes, moves")
    text = "Which GPUs of a run hold what, what moving costs, and which ranks are worst."
    made = panels.page(FLEET_UID, "Placement: fleet", text, many=True, to=to_worker)
    panels.add_row(made, 3, *((3, each) for each in _numbers()))
    panels.add_row(made, 10, (12, _holdings()), (6, _worst_stalls()), (6, _worst_unaccounted()))
    panels.add_row(made, 9, (24, _workers()))
    return panels.finished(made)


def _numbers() -> list[Any]:
    workers = panels.number(
        "Workers",
        "Number of workers that Prometheus scrapes, and number of targets of the run that do not "
        "answer.",
        {
            "up": f"count(placement_worker_info{{{WORKERS}}}) or vector(0)",
            "down": f"count(up{{{WORKERS}}} == 0) or vector(0)",
        },
    )
    workers.override_by_name(
        "down",
        [
            model.DynamicConfigValue(
                id_val="thresholds", value=panels.thresholds(NONE_STEPS).build()
            )
        ],
    )
    alerts = f'count(ALERTS{{alertname=~"Placement.*",alertstate="firing",{WORKERS}}}) or vector(0)'
    unaccounted = (
        "The most GPU memory on one worker that neither torch, nor placement, nor a visible "
        "process explains."
    )
    return [
        workers,
        panels.number(
            "On the GPUs",
            "Device bytes that the handles of all workers hold now.",
            held_bytes(WORKERS),
            BYTES,
        ),
        panels.number(
            "Unpaired",
            "Device bytes that handles still hold although the phase that loaded them has ended. "
            "Should be 0.",
            f"sum(placement_unpaired_bytes{{{WORKERS}}})",
            BYTES,
            NONE_STEPS,
        ),
        panels.number(
            "Unaccounted, worst",
            unaccounted,
            f"max(placement_unaccounted_bytes{{{WORKERS}}})",
            BYTES,
            panels.UNACCOUNTED_STEPS,
        ),
        panels.number(
            "Stall share",
            "Fraction of the wall time in which workers waited for moves, over the time shown. "
            "This is the cost of placement.",
            stall_share(WORKERS),
            SHARE,
            panels.STALL_STEPS,
        ),
        panels.number(
            "Failures",
            "State transitions that failed, plans refused because they did not fit, and writes "
            "into offloaded memory, in the time shown.",
            failures(WORKERS),
            COUNT,
            NONE_STEPS,
        ),
        panels.number(
            "Handles with findings",
            "Handles that are broken, that have tensors outside their ranges, or whose offloaded "
            "memory is still referenced.",
            findings(WORKERS),
            COUNT,
            NONE_STEPS,
        ),
        panels.number(
            "Alerts",
            "Number of placement's alerts that fire now. Needs the rules in Prometheus.",
            alerts,
            COUNT,
            NONE_STEPS,
        ),
    ]


def _holdings() -> barchart.Panel:
    per_handle = (
        f'sum by (instance, handle) (placement_resident_bytes{{{WORKERS},memory="device"}})'
    )
    used = f"max {BY_WORKER}(placement_device_used_bytes{{{WORKERS}}})"
    rest = f"clamp_min({used} - ({held_bytes(WORKERS, BY_WORKER)}), 0)"
    fullest = f"topk(24, {used})"
    made = panels.bars(
        "What each GPU holds",
        f"Device memory now, by handle. '{REST}' is the other memory in use on that GPU: "
        "activations, torch's cache, other processes. Shows the 24 fullest workers; choose others "
        "with the variable 'Worker'.",
        BYTES,
        f'({per_handle} or label_replace({rest}, "handle", "{REST}", "", '
        '"")) '
        "and "
        "on "
        f"(instance) {fullest}",
        rows="instance",
        columns="handle",
        named="Worker",
    )
    made.override_by_name(REST, [panels.fixed("#6e7681")])
    return made.data_links([panels.worker_link("__data.fields.Worker")])


def _worst_stalls() -> timeseries.Panel:
    share = stall_share(WORKERS, BY_WORKER, "$__rate_interval")
    made = panels.lines(
        "Stall share, five worst ranks",
        "Fraction of the wall time in which a worker waited for moves, for the five workers with "
        "the largest in the time shown.",
        SHARE,
        [
            (
                (
                    f"({share}) and on (instance) topk(5, "
                    f"{_at_end(stall_share(WORKERS, BY_WORKER))})"
                ),
                "{{instance}}",
            )
        ],
    )
    made.thresholds(panels.thresholds(panels.STALL_STEPS)).thresholds_style(_dashed())
    return made.data_links([panels.worker_link("__field.labels.instance")])


def _worst_unaccounted() -> timeseries.Panel:
    bytes_now = f"max {BY_WORKER}(placement_unaccounted_bytes{{{WORKERS}}})"
    most = (
        f"topk(5, max {BY_WORKER}(max_over_time(placement_unaccounted_bytes{{{WORKERS}}}[$__range] "
        "@ end())))"
    )
    made = panels.lines(
        "Unaccounted bytes, five worst ranks",
        "GPU memory in use that neither torch, nor placement, nor a visible process explains: CUDA "
        "contexts, NCCL, leaks. It should not grow from step to step.",
        BYTES,
        [(f"{bytes_now} and on (instance) {most}", "{{instance}}")],
    )
    made.thresholds(panels.thresholds(panels.UNACCOUNTED_STEPS)).thresholds_style(_dashed())
    return made.data_links([panels.worker_link("__field.labels.instance")])


def _workers() -> table.Panel:
    made = (
        table.Panel()
        .title("Workers, worst first")
        .filterable(True)
        .cell_height(options.TableCellHeight.SM)
    )
    made.description(
        "One row for each worker; workers with unpaired bytes come first, then by stall share. "
        "Stall share and failures cover the time shown, other columns the present moment. Click a "
        "worker's name for its dashboard."
    )
    made.with_target(
        panels.query(
            f"max by (instance, gpu_uuid, phase) (placement_phase{{{WORKERS}}} == 1)", table=True
        )
    )
    titles = {"instance": "Worker", "gpu_uuid": "GPU", "phase": "Phase"}
    for letter, (title, expr, unit, steps, width) in zip("BCDEFGHI", _COLUMNS, strict=True):
        made.with_target(panels.query(expr, table=True))
        titles[f"Value #{letter}"] = title
        made.override_by_name(title, _cell(title, unit, steps, width))
    made.with_transformation(model.DataTransformerConfig(id_val="merge", options={}))
    made.with_transformation(
        model.DataTransformerConfig(
            id_val="organize",
            options={
                "excludeByName": {"Time": True, "Value #A": True},
                "indexByName": {name: index for index, name in enumerate(titles)},
                "renameByName": titles,
            },
        )
    )
    to_worker = panels.worker_link("__data.fields.Worker").build()
    made.override_by_name(
        "Worker", [model.DynamicConfigValue(id_val="links", value=[to_worker]), _width(170)]
    )
    worst = common.TableSortByFieldState
    return made.sort_by(
        [
            worst().display_name("Unpaired").desc(True),
            worst().display_name("Stall share").desc(True),
        ]
    )


def _cell(title: str, unit: str, steps: Steps, width: int) -> list[model.DynamicConfigValue]:
    look: Mapping[str, Any] = (
        {"type": "gauge", "mode": "basic"} if title in _GAUGES else {"type": "color-text"}
    )
    cell = [
        model.DynamicConfigValue(id_val="unit", value=unit),
        model.DynamicConfigValue(id_val="thresholds", value=panels.thresholds(steps).build()),
        model.DynamicConfigValue(id_val="custom.cellOptions", value=look),
        _width(width),
    ]
    if unit == COUNT:
        cell.append(model.DynamicConfigValue(id_val="decimals", value=0))
    if title in _GAUGES:
        cell += [
            model.DynamicConfigValue(id_val="min", value=0),
            model.DynamicConfigValue(id_val="max", value=1),
        ]
    return cell


def _width(pixels: int) -> model.DynamicConfigValue:
    return model.DynamicConfigValue(id_val="custom.width", value=pixels)


def _dashed() -> common.GraphThresholdsStyleConfig:
    return common.GraphThresholdsStyleConfig().mode(options.GraphThresholdsStyleMode.DASHED)


def _at_end(expr: str) -> str:
    """The expression evaluated at the end of the time shown, so that every moment shows the same
    workers."""
    return expr.replace("[$__range]", "[$__range] @ end()")
