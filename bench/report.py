"""Make the tables and the chart of docs/performance.md, and the README's headline, from the result files: `python -m bench.report`.

Nothing in them is written by hand. Each table goes between the two marks in its page. matplotlib (the extra `bench`) draws the chart.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench._results import FOLDER, read

BEGIN, END = "<!-- performance: begin, written by bench/report.py -->", "<!-- performance: end -->"
_ROOT = Path(__file__).resolve().parent.parent
_OURS = "placement"
_VARIANT = "placement, "
"""The prefix of system names that mean placement used in another way."""


@dataclass(frozen=True)
class _Line:
    """One line of the table for each scenario of a benchmark that has the metric."""

    benchmark: str
    metric: str
    text: str
    more_is_better: bool


TABLE: tuple[_Line, ...] = (
    _Line("weights", "offload, rate", "offload", True),
    _Line("weights", "load, rate", "load", True),
    _Line("weights", "first offload", "first offload, host memory reserved", False),
    _Line("weights", "load, until the host goes on", "load, host blocked", False),
    _Line("adam", "offload, rate", "offload", True),
    _Line("adam", "load, rate", "load", True),
    _Line("streamed_adam", "step", "step", False),
    _Line("streamed_adam", "step, rise of device memory, seen by the driver", "rise of device memory in a step", False),
    _Line("small_tensors", "offload, rate", "offload", True),
    _Line("small_tensors", "load, rate", "load", True),
    _Line("swap", "both ways, rate", "rate both ways", True),
    _Line("swap", "peak, seen by the driver", "peak", False),
    _Line("unchanged", "offload, bytes copied", "offload, bytes copied", False),
    _Line("unchanged", "offload", "offload", False),
    _Line("blocking", "host blocked, nothing queued", "host blocked", False),
    _Line("blocking", "host blocked, 320 ms queued", "host blocked behind 320 ms of queued work", False),
    _Line("blocking", "products slowed by", "matrix products beside it slowed by", False),
    _Line("replicated", "load, rate of each rank", "load, rate of each rank", True),
    _Line("host_reserve", "rate", "rate", True),
    _Line("grpo_step", "bytes both ways", "bytes over the link", False),
    _Line("grpo_step", "stalled", "work stands still", False),
    _Line("grpo_step", "peak, seen by the driver", "peak above the computation's", False),
    _Line("cycles", "free device bytes, largest less smallest", "free device bytes, largest less smallest", False),
)

HEADLINE: tuple[tuple[str, str, str], ...] = (
    ("weights", "offload, rate", "weights, bf16"),
    ("weights", "load, rate", "weights, bf16"),
    ("small_tensors", "offload, rate", "20,000 tensors of 64 KiB"),
    ("unchanged", "offload, bytes copied", "unchanged weights"),
    ("grpo_step", "stalled", "GRPO-shaped step"),
)
"""Benchmark, metric and scenario of each row that the README shows."""

Rows = Sequence[Mapping[str, Any]]


def shown(value: float, unit: str) -> str:
    """A number for people: three digits and a suitable unit."""
    if unit == "bytes" and value >= 1e6:
        return f"{value / 1e9:.2f} GB"
    if unit == "s" and value < 1:
        return f"{value * 1e3:.3g} ms"
    return f"{value:,.3g} {unit}"


def _cells(rows: Rows, scenario: str, line: _Line) -> tuple[str, str, str] | None:
    """The cells for placement with its variants, for the best peer, and for the other peers."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if row["scenario"] == scenario and row["metric"] == line.metric and row["system"] != "link":
            found.setdefault(row["system"], []).append(row["value"])
    if _OURS not in found:
        return None
    unit = next(row["unit"] for row in rows if row["scenario"] == scenario and row["metric"] == line.metric)
    means = {system: sum(values) / len(values) for system, values in found.items()}
    own = shown(means.pop(_OURS), unit) + _share(rows, scenario, line.metric)
    variants = {system: means.pop(system) for system in list(means) if system.startswith(_VARIANT)}
    own += "".join(f"; {system.removeprefix(_VARIANT)}: {shown(value, unit)}" for system, value in variants.items())
    peers = sorted(means.items(), key=lambda item: item[1], reverse=line.more_is_better)
    texts = [f"{shown(value, unit)} ({system})" for system, value in peers]
    return own, texts[0] if texts else "", ", ".join(texts[1:])


def _share(rows: Rows, scenario: str, metric: str) -> str:
    wanted = metric.replace(", rate", ", share of the link")
    shares = [
        row["value"] for row in rows if wanted != metric and (row["scenario"], row["system"], row["metric"]) == (scenario, _OURS, wanted)
    ]
    return f", {shares[0]:.1f} % of the link" if shares else ""


def table(results: Mapping[str, Mapping[str, Any]], lines: Iterable[_Line] = TABLE) -> str:
    """The table in Markdown, with the machine above it and the failed peers below it."""
    if not results:
        raise ValueError("there are no result files; run python -m bench.run first")
    machine = next(iter(results.values()))["machine"]
    peers = ", ".join(f"{name} {version}" for name, version in machine.get("peers", {}).items())
    written = [
        f"{machine.get('gpu', machine['device'])}, torch {machine['torch']}, Python {machine['python']}"
        + (f"; {peers}." if peers else "."),
        "",
        "| what | placement | best peer | others |",
        "|---|---|---|---|",
    ]
    for line in lines:
        rows: Rows = results.get(line.benchmark, {}).get("rows", [])
        for scenario in dict.fromkeys(row["scenario"] for row in rows):
            cells = _cells(rows, scenario, line)
            if cells is not None:
                written.append(f"| {scenario}: {line.text} | **{cells[0]}** | {cells[1]} | {cells[2]} |")
    failures = [
        f"* {name}, {error['scenario']}, {error['system']}: {error['message']}"
        for name, content in results.items()
        for error in content.get("errors", [])
    ]
    return "\n".join([*written, *(["", "Without numbers:", "", *failures] if failures else [])])


def headline(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The rows that the README shows: placement as it is used by default, and the best peer."""
    texts = {(line.benchmark, line.metric): line for line in TABLE}
    written = ["| what | placement | best peer |", "|---|---|---|"]
    for benchmark, metric, scenario in HEADLINE:
        line = texts[benchmark, metric]
        cells = _cells(results.get(benchmark, {}).get("rows", []), scenario, line)
        if cells is not None:
            written.append(f"| {scenario}: {line.text} | **{cells[0].split('; ')[0]}** | {cells[1]} |")
    return "\n".join(written)


def put_into(page: Path, text: str) -> None:
    """Replace the text between the marks.

    Raises:
        ValueError: the marks are missing.
    """
    content = page.read_text(encoding="utf-8")
    before, begin, rest = content.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page.name} needs the lines {BEGIN!r} and {END!r} where the table goes")
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


_BARS = (("weights", None), ("adam", None), ("small_tensors", "4 KiB"), ("small_tensors", "64 KiB"))


def draw(results: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Draw bars of the rates each way, a panel for each scenario, with the link's rate of the same run as a line."""
    from matplotlib.figure import Figure

    panels = [(name, part, results[name]["rows"]) for name, part in _BARS if name in results]
    figure = Figure(figsize=(11, 2.6 * max(1, len(panels))), layout="constrained")
    axes = figure.subplots(max(1, len(panels)), 1, squeeze=False)[:, 0]
    for axis, (_, part, rows) in zip(axes, panels, strict=False):
        _panel(axis, rows, part)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper right", ncols=3, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _panel(axis: Any, rows: Rows, part: str | None) -> None:
    scenario = next(
        row["scenario"] for row in rows if row["metric"] == "offload, rate" and (part is None or f"of {part}" in row["scenario"])
    )
    rates: dict[str, dict[str, float]] = {"offload, rate": {}, "load, rate": {}}
    for row in rows:
        if row["scenario"] == scenario and row["metric"] in rates:
            rates[row["metric"]][row["system"]] = row["value"]
    systems = sorted(rates["load, rate"], key=lambda system: (system == _OURS, rates["load, rate"][system]))
    for offset, (metric, colour) in zip((0.2, -0.2), (("offload, rate", "#4477aa"), ("load, rate", "#66ccee")), strict=True):
        places = [index + offset for index in range(len(systems))]
        bars = axis.barh(
            places, [rates[metric].get(system, 0) for system in systems], height=0.38, color=colour, label=metric.split(",")[0]
        )
        axis.bar_label(bars, fmt="%.1f", padding=3, fontsize=8)
    link = max((row["value"] for row in rows if row["system"] == "link" and row["metric"] == "host to device, rate"), default=0)
    axis.axvline(link, color="black", linestyle="--", linewidth=1, label="the link")
    axis.set_yticks(range(len(systems)), systems)
    axis.set_xlabel("GB/s")
    axis.set_title(scenario, loc="left")
    axis.set_xlim(0, 1.15 * link if link else None)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=FOLDER, help="folder of the result files")
    parser.add_argument("--page", type=Path, default=_ROOT / "docs" / "performance.md", help="where the table goes")
    parser.add_argument("--readme", type=Path, default=_ROOT / "README.md", help="where the headline goes")
    parser.add_argument("--chart", type=Path, default=_ROOT / "docs" / "performance.png")
    parser.add_argument("--print", action="store_true", help="print the table and write nothing")
    options = parser.parse_args(arguments)
    results = read(options.results)
    text = table(results)
    if options.print:
        print(text)
        return
    put_into(options.page, text)
    put_into(options.readme, headline(results))
    draw(results, options.chart)


if __name__ == "__main__":
    main()
