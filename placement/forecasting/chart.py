"""A forecast as a picture: an SVG of the device bytes in each phase, handle by handle, against the budget."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from placement.core.summary import readable
from placement.forecasting.report import Forecast

_COLOURS = ("#3f51b5", "#ff9800", "#009688", "#e91e63", "#795548", "#607d8b", "#8bc34a", "#9c27b0", "#00bcd4", "#ffc107")
_BAR, _GAP, _LEFT, _TOP, _HEIGHT, _BELOW = 64, 26, 86, 46, 260, 58
_LEGEND = 230


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


def write(path: Path, forecasts: Sequence[Forecast]) -> None:
    """Write the chart.

    Raises:
        ValueError: the name does not end in .svg.
        OSError: the file cannot be written.
    """
    if path.suffix.lower() != ".svg":
        raise ValueError(f"the chart is an SVG: give a name that ends in .svg, not {path.name!r}")
    path.write_text(svg(forecasts), encoding="utf-8")
