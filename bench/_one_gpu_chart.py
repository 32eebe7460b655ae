"""The chart of `bench.one_gpu`: seconds a step, and the peaks on the device and on the host."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

_COLOURS = {
    "torch": "#bbbbbb",
    "FSDP2 CPUOffloadPolicy": "#ccbb44",
    "DeepSpeed ZeRO-Offload": "#228833",
    "verl": "#ee6677",
    "placement, colocated": "#66ccee",
    "placement, cyclic": "#4477aa",
}
_PANELS = (
    ("step", "seconds a step", 1.0),
    ("peak, seen by the driver", "GB on the device", 1e9),
    ("host peak, of the process", "GB on the host", 1e9),
)
_LIMIT_GB = 80

Jobs = dict[str, dict[str, dict[str, float]]]


def draw(content: Mapping[str, Any], path: Path) -> None:
    """Draw a group of bars for each job and a bar for each system. A system that did not end its
    steps has words in place of its bar. The dashed line is at 80 GB of the device.

    Args:
        content: the results of `bench.one_gpu`.
        path: the PNG that is written.
    """
    from matplotlib.figure import Figure

    jobs = _by_job(content)
    reasons = {}
    for error in content.get("errors", ()):
        is_full = "MemoryError" in error["message"]
        reason = "out of memory" if is_full else error["message"].split(" in ")[0]
        reasons[error["scenario"], error["system"]] = reason
    figure = Figure(figsize=(13, 1.2 + 0.24 * sum(map(len, jobs.values()))), layout="constrained")
    axes = figure.subplots(1, len(_PANELS))
    for axis, (metric, title, unit) in zip(axes, _PANELS, strict=True):
        _draw_panel(axis, jobs, reasons, metric, unit)
        axis.set_title(title, loc="left")
    for axis in axes[1:]:
        axis.set_yticks([])
    axes[1].axvline(_LIMIT_GB, color="black", linestyle="--", linewidth=1)
    figure.legend(*_legend(), loc="outside upper right", ncols=len(_COLOURS), fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _by_job(content: Mapping[str, Any]) -> Jobs:
    """Metrics by job and system; jobs in the order of their tokens and sizes."""
    jobs: Jobs = {}
    for row in content["rows"]:
        if row["system"] in _COLOURS:
            systems = jobs.setdefault(row["scenario"], {})
            systems.setdefault(row["system"], {})[row["metric"]] = row["value"]
    return dict(sorted(jobs.items(), key=lambda job: _order(job[0])))


def _order(scenario: str) -> tuple[int, float, str]:
    size, tokens, room = scenario.split(", ")
    count = int(tokens.removesuffix(" tokens").replace(",", ""))
    return count, float(size.removesuffix("B")), room


def _draw_panel(
    axis: Any, jobs: Jobs, reasons: Mapping[tuple[str, str], str], metric: str, unit: float
) -> None:
    place = 0.0
    places, names = [], []
    for scenario, systems in jobs.items():
        first = place
        for system in sorted(systems, key=list(_COLOURS).index):
            value = systems[system].get(metric)
            if value is None:
                text = " " + reasons.get((scenario, system), "not measured")
                axis.text(0, place, text, va="center", fontsize=7, color="#aa3333")
            else:
                bar = axis.barh(place, value / unit, height=0.85, color=_COLOURS[system])
                axis.bar_label(bar, fmt="%.3g", padding=3, fontsize=7)
            place += 1
        places.append((first + place - 1) / 2)
        names.append(scenario)
        place += 0.8
    axis.set_yticks(places, names, fontsize=8)
    axis.set_ylim(place - 0.8, -1)
    axis.margins(x=0.12)


def _legend() -> tuple[list[Any], list[str]]:
    from matplotlib.patches import Patch

    return [Patch(color=colour) for colour in _COLOURS.values()], list(_COLOURS)
