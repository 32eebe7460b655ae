"""A forecast as data: immutable, and JSON by `model_dump_json()`.

`table` and `svg` show a forecast to people: as text, and as a picture of the device bytes in each phase against the budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from placement.core.snapshot import readable
from placement.core.states import State


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class HandleForecast(_Frozen):
    """One handle of a forecast, in the steady state."""

    name: str
    kind: str
    role: str | None
    readonly: bool
    owners: tuple[str, ...] = ()
    num_bytes: int
    """Device bytes that it needs while it is on the device."""
    host_bytes: int
    """Host bytes of this rank's host copy."""
    node_host_bytes: int
    """Host bytes of the host copies of all ranks of a node."""


class PhaseForecast(_Frozen):
    """One phase, and the phase transition at its beginning. The numbers are those of one rank."""

    phase: str
    only: tuple[str, ...] | None = None
    fits: bool
    """Whether the manager would open the phase. If not, its handles stay as they are in the phase before."""
    problem: str = ""
    """Why the policy gives no plan; empty if it gives one."""
    wanted_bytes: int
    """Device bytes that the plan needs."""
    over_bytes: int = 0
    """Bytes by which it misses the budget; 0 if it fits."""
    device_bytes: int
    """Device bytes that the handles hold in the phase."""
    handle_bytes: dict[str, int]
    states: dict[str, State]
    gradient_bytes: int = 0
    """Bytes of the gradients during the phase. They lie in torch's own memory, beside the budget."""
    loaded_bytes: int = 0
    offloaded_bytes: int = 0
    skipped_bytes: int = 0
    """Bytes that leave the device without a copy, because the host copy has them."""
    prefetched_bytes: int = 0
    """The part of `loaded_bytes` that came early: its copies began while the phase before computed."""
    streamed_bytes: int = 0
    """The part of `loaded_bytes` and `offloaded_bytes` together that the steps of optimizers copy (`optimizer_in="streamed"`)."""
    host_bytes: int
    """Host bytes of this rank's host copies that are in host memory, at their most."""
    disk_bytes: int = 0
    """Bytes of this rank's files on disk."""
    disk_written_bytes: int = 0
    disk_read_bytes: int = 0
    disk_waited_bytes: int = 0
    """The part of `disk_read_bytes` that the phase transition waits for. The rest is read while phases compute."""
    stall_seconds: float | None = None
    """How long the moves take and streamed steps keep the link busy, without waits for the disk; None if the link is not known."""
    work_seconds: float | None = None
    """The given duration of the work itself; None if it was not given."""


class Forecast(_Frozen):
    """The bytes and the seconds of a job's phases, on one rank, under one policy."""

    policy: str
    budget_bytes: int | None
    """Device bytes that the handles may hold together; None: no limit was given."""
    phases: tuple[PhaseForecast, ...]
    """One cycle in the steady state; the last entry is the phase "idle", outside all others. For a recording: the whole run."""
    first_phases: tuple[PhaseForecast, ...] = ()
    """The first cycle, in which optimizer state is created."""
    handles: tuple[HandleForecast, ...]
    peak_bytes: int
    """The most device bytes that the handles hold together."""
    host_bytes: int
    """The most host bytes of this rank's host copies."""
    node_host_bytes: int
    """Host bytes of the host copies of all ranks of a node."""
    disk_bytes: int = 0
    """The most bytes of this rank's files on disk."""
    node_disk_bytes: int = 0
    """Bytes of the files of all ranks of a node."""
    fits: bool
    """Whether every registration and every phase fits, the first cycle included."""
    refused_registrations: tuple[str, ...] = ()
    """Why the limit on host memory refuses registrations, a sentence for each; empty where it refuses none."""
    over_bytes: int = 0
    """Bytes by which the largest phase misses the budget."""
    stall_seconds: float | None
    """How long the moves of all `phases` take together; None if the link is not known."""
    loaded_bytes: int
    offloaded_bytes: int
    skipped_bytes: int
    notes: tuple[str, ...] = ()
    """Sentences on what an operator should know besides."""

    def phase(self, name: str) -> PhaseForecast:
        """The first phase of this name.

        Raises:
            KeyError: there is none.
        """
        for each in self.phases:
            if each.phase == name:
                return each
        raise KeyError(f"no phase {name!r}; there are {', '.join(dict.fromkeys(each.phase for each in self.phases))}")


def by_phase(forecast: Forecast) -> Forecast:
    """The same forecast with one entry for all runs of a phase: bytes and seconds added up, sizes at their most."""
    groups: dict[tuple[str, tuple[str, ...] | None], list[PhaseForecast]] = {}
    for each in forecast.phases:
        groups.setdefault((each.phase, each.only), []).append(each)
    return forecast.model_copy(update={"phases": tuple(_together(group) for group in groups.values())})


def _together(group: Sequence[PhaseForecast]) -> PhaseForecast:
    worst = max(group, key=lambda each: (not each.fits, each.over_bytes, each.device_bytes))
    stalls = [each.stall_seconds for each in group if each.stall_seconds is not None]
    works = [each.work_seconds for each in group if each.work_seconds is not None]
    moved = ("loaded_bytes", "offloaded_bytes", "streamed_bytes", "skipped_bytes", "prefetched_bytes")
    added = (*moved, "disk_written_bytes", "disk_read_bytes", "disk_waited_bytes")
    sums = {name: sum(getattr(each, name) for each in group) for name in added}
    return worst.model_copy(
        update={**sums, "stall_seconds": sum(stalls) if stalls else None, "work_seconds": sum(works) if works else None}
    )


_HEADS = ("device", "load", "offload", "clean", "stall s", "work s")
_COLOURS = ("#3f51b5", "#ff9800", "#009688", "#e91e63", "#795548", "#607d8b", "#8bc34a", "#9c27b0", "#00bcd4", "#ffc107")
_BAR, _GAP, _LEFT, _TOP, _HEIGHT, _BELOW = 64, 26, 86, 46, 260, 58
_LEGEND = 230


def table(forecast: Forecast) -> str:
    """One forecast: its phases, its handles, and the sums."""
    left = max(len("phase"), *(len(_name(each)) for each in forecast.phases)) + 2
    lines = [f"policy {forecast.policy}, budget {_budget(forecast)}", "", _line("phase", left, _HEADS)]
    for each in forecast.phases:
        lines.append(_line(_name(each), left, _cells(each)))
        lines += [f"{'':<{left}}{text}" for text in _troubles(each)]
    lines += _troubles_at_first(forecast)
    lines += ["", *_handles(forecast), "", *_sums(forecast)]
    return "\n".join(line.rstrip() for line in lines)


def comparison(forecasts: Sequence[Forecast], heads: Sequence[str] = ()) -> str:
    """Several forecasts side by side: the device bytes and the stall of each phase, then the sums.

    Args:
        heads: of the columns, such as policies with their options; empty: the policies' names.
    """
    first, heads = forecasts[0], heads or [each.policy for each in forecasts]
    widths = [max(24, len(head) + 2) for head in heads]
    left = max(len("phase"), *(len(_name(each)) for each in first.phases), len("host, this rank")) + 2

    def row(name: str, cells: Sequence[str]) -> str:
        return f"{name:<{left}}" + "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))

    lines = [f"budget {_budget(first)}", "", row("", heads)]
    lines.append(row("phase", ["device     stall s"] * len(forecasts)))
    for index, phase in enumerate(first.phases):
        lines.append(row(_name(phase), [_device_and_stall(each.phases[index]) for each in forecasts]))
    lines.append("")
    lines.append(row("peak", [readable(each.peak_bytes) for each in forecasts]))
    lines.append(row("loaded", [readable(each.loaded_bytes) for each in forecasts]))
    lines.append(row("offloaded", [readable(each.offloaded_bytes) for each in forecasts]))
    lines.append(row("host, this rank", [readable(each.host_bytes) for each in forecasts]))
    if any(each.disk_bytes for each in forecasts):
        lines.append(row("disk, this rank", [_size(each.disk_bytes) for each in forecasts]))
    lines.append(row("stall", [_seconds(each.stall_seconds, " s") for each in forecasts]))
    lines.append(row("fits", [_fits(each) for each in forecasts]))
    notes = dict.fromkeys(note for each in forecasts for note in (*each.refused_registrations, *each.notes))
    lines += [f"note: {note}" for note in notes]
    return "\n".join(line.rstrip() for line in lines)


def _line(name: str, left: int, cells: Sequence[str]) -> str:
    return f"{name:<{left}}" + "".join(f"{cell:>11}" for cell in cells)


def _name(phase: PhaseForecast) -> str:
    return phase.phase if phase.only is None else f"{phase.phase}[{'+'.join(phase.only)}]"


def _cells(phase: PhaseForecast) -> list[str]:
    sizes = (phase.device_bytes, phase.loaded_bytes, phase.offloaded_bytes, phase.skipped_bytes)
    return [*map(_size, sizes), _seconds(phase.stall_seconds), _seconds(phase.work_seconds)]


def _device_and_stall(phase: PhaseForecast) -> str:
    device = _size(phase.device_bytes)
    return f"{device if phase.fits else 'refused'}  {_seconds(phase.stall_seconds):>10}"


def _troubles(phase: PhaseForecast) -> list[str]:
    if phase.problem:
        return [f"no plan: {phase.problem}"]
    if phase.over_bytes:
        return [f"does not fit: needs {readable(phase.wanted_bytes)}, {readable(phase.over_bytes)} ({phase.over_bytes:,} bytes) too many"]
    said = [f"{readable(phase.prefetched_bytes)} of what it loads came early"] if phase.prefetched_bytes else []
    if phase.streamed_bytes:
        said.append(f"steps: {readable(phase.streamed_bytes)} of what it loads and offloads is streamed by optimizers")
    if phase.disk_written_bytes or phase.disk_read_bytes:
        waited = f", {readable(phase.disk_waited_bytes)} of it waited for" if phase.disk_waited_bytes else ""
        said.append(f"disk: {_size(phase.disk_written_bytes)} written, {_size(phase.disk_read_bytes)} read{waited}")
    return said + ([f"gradients: {readable(phase.gradient_bytes)} in torch's own memory beside"] if phase.gradient_bytes else [])


def _troubles_at_first(forecast: Forecast) -> list[str]:
    """Lines about phases that fail in the first step alone, or at registration."""
    if forecast.fits or any(not each.fits for each in forecast.phases):
        return []
    if forecast.refused_registrations:
        return ["", "registration is refused:", *forecast.refused_registrations]
    troubles = [f"{_name(each)}: {text}" for each in forecast.first_phases if not each.fits for text in _troubles(each)]
    return ["", "in the first step, or at registration:", *(troubles or [f"{readable(forecast.over_bytes)} too many"])]


def _handles(forecast: Forecast) -> list[str]:
    left = max(len("handle"), *(len(each.name) for each in forecast.handles)) + 2
    lines = [_line("handle", left, ("device", "host, rank", "host, node"))]
    for each in forecast.handles:
        lines.append(_line(each.name, left, [readable(size) for size in (each.num_bytes, each.host_bytes, each.node_host_bytes)]))
    return lines


def _sums(forecast: Forecast) -> list[str]:
    lines = [f"peak on the device    {readable(forecast.peak_bytes)} ({forecast.peak_bytes:,} bytes)"]
    on_disk = f"{readable(forecast.disk_bytes)} a rank, {readable(forecast.node_disk_bytes)} a node" if forecast.disk_bytes else "none"
    host = f"{readable(forecast.host_bytes)} a rank, {readable(forecast.node_host_bytes)} a node"
    lines.append(f"host copies           {host}; on disk: {on_disk}")
    per = "a step" if forecast.first_phases else "in all"
    lines.append(f"moved {per:<15} {readable(forecast.loaded_bytes)} loaded, {readable(forecast.offloaded_bytes)} offloaded")
    stall = forecast.stall_seconds
    lines.append(f"stall {per:<15} {_seconds(stall, ' s')}" + (" (no link given: see placement doctor --json)" if stall is None else ""))
    verdict = "everything fits" if forecast.budget_bytes is not None else "no budget given"
    if not forecast.fits:
        verdict = f"it does not fit: {readable(forecast.over_bytes)} too many" if forecast.over_bytes else "it does not fit"
    return [*lines, *(f"note: {note}" for note in forecast.notes), verdict]


def _fits(forecast: Forecast) -> str:
    if forecast.fits:
        return "yes"
    return f"no, {readable(forecast.over_bytes)} over" if forecast.over_bytes else "no"


def _size(nbytes: int) -> str:
    return readable(nbytes) if nbytes else "0"


def _seconds(seconds: float | None, unit: str = "") -> str:
    return "-" if seconds is None else f"{seconds:.3f}{unit}"


def _budget(forecast: Forecast) -> str:
    return "none" if forecast.budget_bytes is None else readable(forecast.budget_bytes)


def svg(forecasts: Sequence[Forecast]) -> str:
    """One panel for each forecast, one under the other, all of one scale. A dashed line is the budget, a hatched bar a refused phase."""
    top = max([1, *(phase.wanted_bytes for each in forecasts for phase in each.phases), *(each.peak_bytes for each in forecasts)])
    budgets = [each.budget_bytes for each in forecasts if each.budget_bytes is not None]
    top = max(top, *(budget for budget in budgets if budget < 4 * top), 1) if budgets else top
    most = max(len(each.phases) for each in forecasts)
    width, panel = _LEFT + most * (_BAR + _GAP) + _LEGEND, _TOP + _HEIGHT + _BELOW
    names = list(dict.fromkeys(handle.name for each in forecasts for handle in each.handles))
    colours = {name: _COLOURS[index % len(_COLOURS)] for index, name in enumerate(names)}
    body = "".join(_panel(each, index * panel, top, colours, width) for index, each in enumerate(forecasts))
    legend = "".join(
        f'<rect x="{width - _LEGEND + 24}" y="{_TOP + 20 * i}" width="12" height="12" fill="{colours[name]}"/>'
        f'<text x="{width - _LEGEND + 42}" y="{_TOP + 20 * i + 10}">{escape(name)}</text>'
        for i, name in enumerate(names)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{panel * len(forecasts)}" font-family="sans-serif" '
        'font-size="12">'
        '<defs><pattern id="refused" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<rect width="6" height="6" fill="#fff"/><line x1="0" y1="0" x2="0" y2="6" stroke="#d32f2f" stroke-width="3"/></pattern></defs>'
        f'<rect width="100%" height="100%" fill="#fff"/>{body}{legend}</svg>\n'
    )


def _panel(forecast: Forecast, offset: int, top: int, colours: dict[str, str], width: int) -> str:
    base, right = offset + _TOP + _HEIGHT, width - _LEGEND

    def height(nbytes: int) -> float:
        return round(nbytes / top * _HEIGHT, 2)

    stall = "" if forecast.stall_seconds is None else f", stall {forecast.stall_seconds:.3f} s"
    parts = [f'<text x="{_LEFT}" y="{offset + 24}" font-size="14">{escape(forecast.policy)}{stall}</text>']
    parts += [
        f'<line x1="{_LEFT}" x2="{right}" y1="{base - height(top * i // 4)}" y2="{base - height(top * i // 4)}" stroke="#ddd"/>'
        f'<text x="{_LEFT - 8}" y="{base - height(top * i // 4) + 4}" text-anchor="end">{readable(top * i // 4)}</text>'
        for i in range(5)
    ]
    for index, phase in enumerate(forecast.phases):
        x, y = _LEFT + _GAP / 2 + index * (_BAR + _GAP), float(base)
        for name, nbytes in phase.handle_bytes.items() if phase.fits else ():
            y -= height(nbytes)
            title = f"<title>{escape(name)}: {readable(nbytes)}</title>"
            parts.append(f'<rect x="{x}" y="{y:.2f}" width="{_BAR}" height="{height(nbytes)}" fill="{colours[name]}">{title}</rect>')
        if not phase.fits:
            high = height(phase.wanted_bytes)
            parts.append(f'<rect x="{x}" y="{base - high:.2f}" width="{_BAR}" height="{high}" fill="url(#refused)" stroke="#d32f2f"/>')
        parts.append(f'<text x="{x + _BAR / 2}" y="{base + 18}" text-anchor="middle">{escape(phase.phase)}</text>')
        if phase.stall_seconds is not None:
            text = f"{phase.stall_seconds:.2f} s"
            parts.append(f'<text x="{x + _BAR / 2}" y="{base + 34}" text-anchor="middle" fill="#777">{text}</text>')
    if forecast.budget_bytes is not None and forecast.budget_bytes <= top:
        y = base - height(forecast.budget_bytes)
        parts.append(f'<line x1="{_LEFT}" x2="{right}" y1="{y}" y2="{y}" stroke="#d32f2f" stroke-dasharray="6 4"/>')
        parts.append(f'<text x="{right}" y="{y - 4}" text-anchor="end" fill="#d32f2f">budget {readable(forecast.budget_bytes)}</text>')
    return "".join(parts)


def write_svg(path: Path, forecasts: Sequence[Forecast]) -> None:
    """Write the chart.

    Raises:
        ValueError: the name does not end in .svg.
        OSError: the file cannot be written.
    """
    if path.suffix.lower() != ".svg":
        raise ValueError(f"the chart is an SVG: give a name that ends in .svg, not {path.name!r}")
    path.write_text(svg(forecasts), encoding="utf-8")
