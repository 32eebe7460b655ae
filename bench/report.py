"""Make the tables and the charts of docs/performance.md, the README's headline, and the tables of
docs/which_model.md and docs/integrations/verl.md from the result files: `python -m bench.report`.

Nothing in them is written by hand. Each table goes between its two marks in its page. matplotlib
(the extra `bench`) draws the charts.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import _one_gpu_chart
from bench._results import FOLDER, read

_ROOT = Path(__file__).resolve().parent.parent
_OURS = "placement"
_VARIANT = "placement, "
"""The prefix of system names that mean placement used in another way."""
_SAYS_HOW_MUCH = ("small_tensors", "blocking", "phase_overhead", "cycles")
"""Benchmarks whose scenarios have other names at another size, or are the same at all sizes."""


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
    _Line("small_tensors", "offload, rate", "offload", True),
    _Line("small_tensors", "load, rate", "load", True),
    _Line("swap", "both ways, rate", "rate both ways", True),
    _Line("swap", "peak, seen by the driver", "peak", False),
    _Line("unchanged", "offload, bytes copied", "offload, bytes copied", False),
    _Line("unchanged", "offload", "offload", False),
    _Line("blocking", "host blocked, nothing queued", "host blocked", False),
    _Line(
        "blocking",
        "host blocked, 320 ms queued",
        "host blocked behind 320 ms of queued work",
        False,
    ),
    _Line("blocking", "products slowed by", "matrix products beside it slowed by", False),
    _Line("host_reserve", "rate", "rate", True),
    _Line("grpo_step", "bytes both ways", "bytes over the link", False),
    _Line("grpo_step", "stalled", "work stands still", False),
    _Line("grpo_step", "peak, seen by the driver", "peak above the computation's", False),
    _Line("phase_overhead", "call", "a call", False),
    _Line(
        "cycles",
        "free device bytes, largest less smallest",
        "free device bytes, largest less smallest",
        False,
    ),
)

REPLICATED = (_Line("replicated", "load, rate of each rank", "load, rate of each rank", True),)
"""Measured on another machine than the rest, because it needs several GPUs."""

BY_TURNS = (
    # older steps copy before they begin
    *(line for line in TABLE if line.metric != "rate"),
    _Line("host_reserve", "rate", "rate, of memory that was used before", True),
    _Line("first_load", "first load", "first load", False),
    _Line("first_load", "later load", "later loads", False),
    _Line(
        "first_load",
        "left on the device when offloaded, seen by the driver",
        "left on the device when all is offloaded",
        False,
    ),
    _Line("streamed_adam", "step", "step", False),
    _Line(
        "streamed_adam",
        "step, rise of device memory, seen by the driver",
        "rise of device memory in a step",
        False,
    ),
    _Line("streamed_adam", "first step", "first step, host memory reserved", False),
    _Line("cycles", "one cycle", "one cycle", False),
    _Line(
        "phase_overhead",
        "switch out of a training, nothing moves",
        "switch out of a training, nothing moves",
        False,
    ),
    _Line(
        "phase_overhead", "enter and leave, nothing moves", "enter and leave, nothing moves", False
    ),
    _Line("phase_overhead", "switch, nothing moves", "switch, nothing moves", False),
)
"""The lines that are compared with an older version, where `bench.turns` has measured them."""

HEADLINE: tuple[tuple[str, str, str], ...] = (
    ("weights", "offload, rate", "weights, bf16"),
    ("weights", "load, rate", "weights, bf16"),
    ("small_tensors", "offload, rate", "20,000 tensors of 4 KiB"),
    ("unchanged", "offload, bytes copied", "unchanged weights"),
    ("grpo_step", "stalled", "GRPO-shaped step"),
)
"""Benchmark, metric and scenario of each row that the README shows."""

Rows = Sequence[Mapping[str, Any]]
Results = Mapping[str, Mapping[str, Any]]


def shown(value: float, unit: str) -> str:
    """A number for people: three digits and a suitable unit."""
    if unit == "bytes" and value >= 1e9:
        return f"{value / 1e9:.2f} GB"
    if unit == "bytes" and value >= 1e6:
        return f"{value / 1e6:.0f} MB"
    if unit == "us":
        return shown(value * 1e-6, "s")
    if unit == "s" and value < 1:
        return f"{value * 1e3:.3g} ms"
    return f"{value:,.3g} {unit}"


def _cells(rows: Rows, scenario: str, line: _Line) -> tuple[str, str] | None:
    """The cells for placement with its variants, and for the best peer."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if row["scenario"] == scenario and row["metric"] == line.metric and row["system"] != "link":
            found.setdefault(row["system"], []).append(row["value"])
    if _OURS not in found:
        return None
    unit = next(
        row["unit"] for row in rows if row["scenario"] == scenario and row["metric"] == line.metric
    )
    means = {system: sum(values) / len(values) for system, values in found.items()}
    own = shown(means.pop(_OURS), unit) + _share(rows, scenario, line.metric)
    variants = {system: means.pop(system) for system in list(means) if system.startswith(_VARIANT)}
    own += "".join(
        f"; {system.removeprefix(_VARIANT)}: {shown(value, unit)}"
        for system, value in variants.items()
    )
    peers = sorted(means.items(), key=lambda item: item[1], reverse=line.more_is_better)
    return own, f"{shown(peers[0][1], unit)} ({peers[0][0]})" if peers else ""


def _share(rows: Rows, scenario: str, metric: str) -> str:
    wanted = metric.replace(", rate", ", share of the link")
    shares = [
        row["value"]
        for row in rows
        if wanted != metric
        and (row["scenario"], row["system"], row["metric"]) == (scenario, _OURS, wanted)
    ]
    return f", {shares[0]:.1f} % of the link" if shares else ""


def _machines(results: Results, lines: Iterable[_Line]) -> str:
    """One line: the machines of these lines, and the versions that were measured on them."""
    names = dict.fromkeys(line.benchmark for line in lines)
    machines = [results[name]["machine"] for name in names if name in results]
    devices = dict.fromkeys(machine.get("gpu", machine["device"]) for machine in machines)
    versions = dict.fromkeys(
        f"torch {machine['torch']}, Python {machine['python']}" for machine in machines
    )
    peers: dict[str, str] = {}
    for machine in machines:
        peers |= machine.get("peers", {})
    parts = [", ".join([" and ".join(devices), *versions])]
    parts += [", ".join(f"{name} {peers[name]}" for name in sorted(peers))] if peers else []
    return "; ".join(parts) + "."


def _named(scenario: str, name: str, content: Mapping[str, Any]) -> str:
    is_quick = content["machine"].get("size") == "quick" and name not in _SAYS_HOW_MUCH
    return f"{scenario} (quick)" if is_quick else scenario


def _failures(results: Results, lines: Iterable[_Line]) -> list[str]:
    """What to say of peers that are not installed, and of those that failed."""
    absent, failed = set(), []
    for name in dict.fromkeys(line.benchmark for line in lines):
        for error in results.get(name, {}).get("errors", []):
            if error["message"].startswith("ModuleNotFoundError"):
                absent.add(error["system"])
            else:
                failed.append(
                    f"* {name}, {error['scenario']}, {error['system']}: {error['message']}"
                )
    said = ["", f"Not on this machine: {', '.join(sorted(absent))}."] if absent else []
    return said + (["", "Without numbers:", "", *failed] if failed else [])


def table(results: Results, lines: Sequence[_Line] = TABLE) -> str:
    """The table in Markdown, with the machine above it and the failed peers below it."""
    if not results:
        raise ValueError("there are no result files; run python -m bench.run first")
    written = [
        _machines(results, lines),
        "",
        "| what | placement | best peer |",
        "|---|---|---|",
    ]
    for line in lines:
        content = results.get(line.benchmark, {})
        rows: Rows = content.get("rows", [])
        for scenario in dict.fromkeys(row["scenario"] for row in rows):
            cells = _cells(rows, scenario, line)
            if cells is not None:
                what = _named(scenario, line.benchmark, content)
                written.append(f"| {what}: {line.text} | **{cells[0]}** | {cells[1]} |")
    return "\n".join(written + _failures(results, lines))


def by_turns(results: Results) -> str:
    """The table of an older version and this one, as `bench.turns` has measured them, and what is
    worse now."""
    compared = {name: content for name, content in results.items() if "turns" in content}
    if not compared:
        return "Nothing was measured by turns."
    commits = [content["turns"]["commits"] for content in compared.values()]
    old, new = (
        ", ".join(sorted({each[version] for each in commits})) for version in ("before", "after")
    )
    written = [
        _machines(compared, BY_TURNS),
        "",
        (f"| what | before ({old}) | after ({new}) |"),
        "|---|---|---|",
    ]
    worse = []
    for line in BY_TURNS:
        content = compared.get(line.benchmark, {"turns": {"rows": []}})
        for row in content["turns"]["rows"]:
            if row["metric"] == line.metric and row["before"] and row["after"]:
                what = f"{_named(row['scenario'], line.benchmark, content)}: {line.text}"
                cells = (
                    ", ".join(shown(value, row["unit"]) for value in row[version])
                    for version in ("before", "after")
                )
                written.append(f"| {what} | {' | '.join(cells)} |")
                if _is_worse(row["before"], row["after"], more_is_better=line.more_is_better):
                    worse.append(what)
    listed = "; ".join(worse) if worse else "nothing"
    problems = [
        f"* {name}, {problem}"
        for name, content in compared.items()
        for problem in content["turns"]["problems"]
    ]
    written += [
        "",
        (
            "Worse after than before, by more than the runs of one version differ and by more than "
            f"1 %: {listed}."
        ),
    ]
    return "\n".join(
        [*written, *(["", ("Runs that did not end well:"), "", *problems] if problems else [])]
    )


def _is_worse(before: Sequence[float], after: Sequence[float], *, more_is_better: bool) -> bool:
    old, new = statistics.mean(before), statistics.mean(after)
    spread = max(max(values) - min(values) for values in (before, after))
    return (old - new if more_is_better else new - old) > max(spread, 0.01 * abs(old))


def headline(results: Results) -> str:
    """The rows that the README shows: placement as it is used by default, and the best peer."""
    texts = {(line.benchmark, line.metric): line for line in TABLE}
    contents = [results[benchmark] for benchmark, _, _ in HEADLINE if benchmark in results]
    machines = dict.fromkeys(
        content["machine"].get("gpu", content["machine"]["device"]) for content in contents
    )
    written = [f"| what, on one {' or '.join(machines)} | placement | best peer |", "|---|---|---|"]
    for benchmark, metric, scenario in HEADLINE:
        line, content = texts[benchmark, metric], results.get(benchmark, {})
        cells = _cells(content.get("rows", []), scenario, line)
        if cells is not None:
            what = _named(scenario, benchmark, content)
            written.append(f"| {what}: {line.text} | **{cells[0].split('; ')[0]}** | {cells[1]} |")
    return "\n".join(written)


_ONE_GPU = (
    ("a step", "step"),
    ("of it moves", "of it moves"),
    ("`optimizer.step()`", "of it optimizer.step()"),
    ("rate", "rate"),
    ("device", "peak, seen by the driver"),
    ("host", "host peak"),
    ("between steps", "on the device outside phases"),
    ("forecast", "registered, peak on the device, forecast off by"),
    ("losses as torch's", "losses as torch's"),
)
"""The columns of the table of `bench.one_gpu`, and their metrics."""


def _by_job(content: Mapping[str, Any]) -> dict[tuple[str, str], dict[str, Mapping[str, Any]]]:
    """The rows of a result file by their metrics, for each scenario and system."""
    found: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = {}
    for row in content["rows"]:
        found.setdefault((row["scenario"], row["system"]), {})[row["metric"]] = row
    return found


def one_gpu(results: Results) -> str:
    """The table of what one GPU trains: a line for each job and system."""
    content = results.get("one_gpu")
    if content is None:
        return "No figures yet: `python -m bench.one_gpu` measures them on yours."
    found = _by_job(content)
    reasons = {
        (each["scenario"], each["system"]): each["message"] for each in content.get("errors", [])
    }
    written = [
        _machines({"one_gpu": content}, [_Line("one_gpu", "step", "step", False)]),
        "",
        f"| job | system | fits | {' | '.join(title for title, _ in _ONE_GPU)} |",
        "|---" * (3 + len(_ONE_GPU)) + "|",
    ]
    for (scenario, system), rows in sorted(found.items(), key=lambda item: item[0][0]):
        fits = "yes" if "step" in rows else reasons[scenario, system]
        cells = [_cell_of_one_gpu(rows, metric) for _, metric in _ONE_GPU]
        written.append(f"| {scenario} | {system} | {fits} | {' | '.join(cells)} |")
    return "\n".join(written)


def _cell_of_one_gpu(rows: Mapping[str, Mapping[str, Any]], metric: str) -> str:
    """Several metrics that begin in the same way are measures of one thing: the largest counts."""
    values = [row for name, row in rows.items() if name.startswith(metric)]
    if not values:
        return ""
    largest = max(values, key=lambda row: row["value"])
    if largest["unit"] == "yes=1":
        return "yes" if largest["value"] else "no"
    if largest["unit"] == "tokens/s":
        return f"{largest['value']:,.0f} tokens/s"
    if largest["unit"] == "%":
        return f"{abs(largest['value']):.2f} %"
    return shown(largest["value"], largest["unit"])


_FORECASTS = (
    ("device", "registered, peak on the device"),
    ("host", "registered, on the host"),
    ("moves", "moves"),
    ("streamed step", "streamed step"),
)
"""The columns of the table of forecasts, and their metrics."""
H200_FOLDER = "h200"
"""The folder, inside that of the result files, with the runs of `bench.one_gpu` for this table and
of `bench.verl_grpo` for the next. The other tables are from other runs of the same benchmarks."""


def forecasts(results: Results) -> str:
    """The table of what was forecast of the jobs of `bench.one_gpu`, and what was measured."""
    content = results.get("one_gpu")
    if content is None:
        return "No figures yet: `python -m bench.one_gpu` measures them on yours."
    titles = [f"{title}: forecast, measured" for title, _ in _FORECASTS]
    written = [
        _machines({"one_gpu": content}, [_Line("one_gpu", "", "", False)]),
        "",
        f"| job, policy | {' | '.join(titles)} |",
        "|---" * (1 + len(titles)) + "|",
    ]
    for (scenario, system), rows in sorted(_by_job(content).items(), key=lambda item: item[0][0]):
        if system.startswith(_VARIANT):
            cells = [_forecast_cell(rows, metric) for _, metric in _FORECASTS]
            policy = system.removeprefix(_VARIANT)
            written.append(f"| {scenario}, {policy} | {' | '.join(cells)} |")
    return "\n".join(written)


def _forecast_cell(rows: Mapping[str, Mapping[str, Any]], metric: str) -> str:
    if metric not in rows:
        return "not measured"
    told, found = rows[f"{metric}, forecast"]["value"], rows[metric]["value"]
    if rows[metric]["unit"] == "bytes":
        return f"{told / 1e9:.2f}, {found / 1e9:.2f} GB"
    return f"{told:.2f}, {found:.2f} s"


_VERL_STEP = (
    ("a step", ("step",)),
    ("generation", ("gen",)),
    ("log-probabilities", ("old_log_prob", "ref")),
    ("`update_actor`", ("update_actor",)),
    ("`update_weights`", ("update_weights",)),
    ("device, in training", ("train, peak on the device",)),
    ("host", ("host peak, of the machine",)),
    ("between steps", ("on the device after a step, without the awake rollout",)),
)
"""The columns of the table of `bench.verl_grpo`, and the metrics whose sum each shows."""
_WAITED = ", waited for moves"


def verl_at_size(results: Results) -> str:
    """The table of steps of verl's own driver: a line for each job and system."""
    content = results.get("verl_grpo")
    if content is None:
        return "No figures yet: `python -m bench.verl_grpo` measures them on yours."
    reasons = {
        (error["scenario"], error["system"]): error["message"]
        for error in content.get("errors", ())
    }
    titles = [title for title, _ in _VERL_STEP]
    written = [
        _machines({"verl_grpo": content}, [_Line("verl_grpo", "step", "step", False)]),
        "",
        f"| job | system | {' | '.join(titles)} | waits for moves |",
        "|---" * (3 + len(titles)) + "|",
    ]
    for (scenario, system), rows in sorted(_by_job(content).items(), key=lambda item: item[0][0]):
        job = scenario.removeprefix("a step of verl's GRPO driver, 1 GPU, ")
        if "GB" not in job:
            job += ", the whole GPU"
        if "step" in rows:
            cells = [_summed(rows, metrics) for _, metrics in _VERL_STEP]
            cells.append(_summed(rows, [name for name in rows if name.endswith(_WAITED)]))
        else:
            reason = reasons[scenario, system].removeprefix("RuntimeError: verl's driver: ")
            cells = [textwrap.shorten(reason.partition(". ")[0], 120), *[""] * len(titles)]
        written.append(f"| {job} | {system} | {' | '.join(cells)} |")
    return "\n".join(written)


def _summed(rows: Mapping[str, Mapping[str, Any]], metrics: Sequence[str]) -> str:
    values = [rows[metric]["value"] for metric in metrics if metric in rows]
    return shown(sum(values), rows[metrics[0]]["unit"]) if values else ""


_ENGINES = (
    ("engine_sleep_vllm", "vLLM 0.26", "first sleep", ("sleep",)),
    ("engine_sleep_vllm", "vLLM 0.26", "written", ("sleep", "wake", "copied")),
    ("engine_sleep_vllm", "vLLM 0.26", "unchanged", ("sleep", "wake", "copied")),
    ("engine_sleep_vllm", "vLLM 0.26", "by tags", ("wake weights", "wake kv_cache")),
    ("engine_sleep_vllm", "vLLM 0.26", "level 2", ("sleep", "wake")),
    ("engine_sleep_allocator", "vLLM's allocator alone", "first sleep", ("sleep",)),
    ("engine_sleep_allocator", "vLLM's allocator alone", "written", ("sleep", "wake")),
    ("engine_sleep_allocator", "vLLM's allocator alone", "unchanged", ("sleep", "wake", "copied")),
    ("engine_sleep_allocator", "vLLM's allocator alone", "level 2", ("sleep", "wake")),
    ("engine_sleep_vllm_2", "vLLM 0.26, two GPUs", "first sleep", ("sleep",)),
    ("engine_sleep_vllm_2", "vLLM 0.26, two GPUs", "written", ("sleep", "wake", "copied")),
    ("engine_sleep_vllm_2", "vLLM 0.26, two GPUs", "unchanged", ("sleep", "wake")),
    ("sglang_sleep", "SGLang 0.5.14", "first", ("release",)),
    ("sglang_sleep", "SGLang 0.5.14", "written", ("release", "resume weights")),
    ("sglang_sleep", "SGLang 0.5.14", "unchanged", ("release", "resume weights")),
)
"""Result file, engine, scenario and metrics of the lines of the table of engines."""


def engines(results: Results) -> str:
    """The table of engines that sleep and wake: the engine's own way, and placement's."""
    lines = [_Line(benchmark, "", "", False) for benchmark, _, _, _ in _ENGINES]
    written = [_machines(results, lines), "", "| what | its own | placement |", "|---|---|---|"]
    for benchmark, engine, scenario, metrics in _ENGINES:
        if benchmark not in results:
            continue
        cells: dict[tuple[str, str], str] = {}
        for row in results[benchmark]["rows"]:
            if row["scenario"] == scenario:
                system = _OURS if row["system"] == _OURS else "own"
                cells[row["metric"], system] = shown(row["value"], row["unit"])
        for metric in metrics:
            own, ours = cells[metric, "own"], cells[metric, _OURS]
            written.append(f"| {engine}, {scenario}: {metric} | {own} | **{ours}** |")
    return "\n".join(written)


_WHOLE_JOBS = ("7.6B, 4,096 tokens", "4B, 65,536 tokens")
_ROOMS = ("80 GB", "the whole GPU")


def whole_job(results: Results) -> str:
    """What the README shows of `bench.one_gpu`: seconds of a step, and the peaks on the device and
    on the host, with and without placement."""
    content = results["one_gpu"]
    reasons = {
        (error["scenario"], error["system"]): error["message"]
        for error in content.get("errors", ())
    }
    found = _by_job(content)
    written = [
        f"| on one {content['machine']['gpu']} | {' a step | '.join(_WHOLE_JOBS)} a step |",
        "|---" * (1 + len(_WHOLE_JOBS)) + "|",
    ]
    for room in _ROOMS:
        for system in dict.fromkeys(system for scenario, system in found if room in scenario):
            jobs = [(f"{job}, {room}", system) for job in _WHOLE_JOBS]
            cells = [_whole_job_cell(found.get(job), reasons.get(job, "")) for job in jobs]
            if cells.count("not run") == 0 or (cells[0] != "not run" and room == _ROOMS[0]):
                written.append(f"| {system}, {room} | {' | '.join(cells)} |")
    return "\n".join(written)


def _whole_job_cell(rows: Mapping[str, Mapping[str, Any]] | None, reason: str) -> str:
    if rows is None:
        return "not run"
    if "step" not in rows:
        return "out of memory" if "MemoryError" in reason else reason
    metrics = ("step", "peak, seen by the driver", "host peak")
    step, on_device, on_host = (_cell_of_one_gpu(rows, metric) for metric in metrics)
    return f"{step}, {on_device}, host {on_host}"


PAGES: Mapping[str, Callable[[Results], str]] = {
    "performance": table,
    "replicated": functools.partial(table, lines=REPLICATED),
    "one_gpu": one_gpu,
    "engines": engines,
}
"""The texts of docs/performance.md, by their marks."""


def marks(name: str) -> tuple[str, str]:
    """The lines before and after a text."""
    return f"<!-- {name}: begin, written by bench/report.py -->", f"<!-- {name}: end -->"


def shown_in(page: Path, name: str) -> str:
    """The text between the marks of this name.

    Raises:
        ValueError: the marks are missing.
    """
    begin, end = marks(name)
    content = page.read_text(encoding="utf-8")
    if begin not in content or end not in content:
        raise ValueError(f"{page.name} needs the lines {begin!r} and {end!r} where the text goes")
    return content.partition(begin)[2].partition(end)[0]


def put_into(page: Path, name: str, text: str) -> None:
    """Replace the text between the marks of this name. Raises ValueError: the marks are missing."""
    begin, end = marks(name)
    old = f"{begin}{shown_in(page, name)}{end}"
    page.write_text(
        page.read_text(encoding="utf-8").replace(old, f"{begin}\n{text}\n{end}"), encoding="utf-8"
    )


_BARS = (("weights", None), ("adam", None), ("small_tensors", "4 KiB"), ("small_tensors", "64 KiB"))


def draw(results: Results, path: Path) -> None:
    """Draw bars of the rates each way, a panel for each scenario, with the link's rate of the same
    run as a line."""
    from matplotlib.figure import Figure

    panels = [(name, part, results[name]["rows"]) for name, part in _BARS if name in results]
    figure = Figure(figsize=(11, 2.6 * max(1, len(panels))), layout="constrained")
    axes = figure.subplots(max(1, len(panels)), 1, squeeze=False)[:, 0]
    for axis, (_, part, rows) in zip(axes, panels, strict=False):
        _panel(axis, rows, part)
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="outside upper right", ncols=3, fontsize=8
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _panel(axis: Any, rows: Rows, part: str | None) -> None:
    scenario = next(
        row["scenario"]
        for row in rows
        if row["metric"] == "offload, rate" and (part is None or f"of {part}" in row["scenario"])
    )
    rates: dict[str, dict[str, float]] = {"offload, rate": {}, "load, rate": {}}
    for row in rows:
        if row["scenario"] == scenario and row["metric"] in rates:
            rates[row["metric"]][row["system"]] = row["value"]
    systems = sorted(
        rates["load, rate"], key=lambda system: (system == _OURS, rates["load, rate"][system])
    )
    for offset, (metric, colour) in zip(
        (0.2, -0.2), (("offload, rate", "#4477aa"), ("load, rate", "#66ccee")), strict=True
    ):
        places = [index + offset for index in range(len(systems))]
        bars = axis.barh(
            places,
            [rates[metric].get(system, 0) for system in systems],
            height=0.38,
            color=colour,
            label=metric.split(",")[0],
        )
        axis.bar_label(bars, fmt="%.1f", padding=3, fontsize=8)
    link = max(
        (
            row["value"]
            for row in rows
            if row["system"] == "link" and row["metric"] == "host to device, rate"
        ),
        default=0,
    )
    axis.axvline(link, color="black", linestyle="--", linewidth=1, label="the link")
    axis.set_yticks(range(len(systems)), systems)
    axis.set_xlabel("GB/s")
    axis.set_title(scenario, loc="left")
    axis.set_xlim(0, 1.15 * link if link else None)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=FOLDER, help="folder of the result files")
    parser.add_argument(
        "--page", type=Path, default=_ROOT / "docs" / "performance.md", help="where the table goes"
    )
    parser.add_argument(
        "--readme", type=Path, default=_ROOT / "README.md", help="where the headline goes"
    )
    parser.add_argument(
        "--which-model",
        type=Path,
        default=_ROOT / "docs" / "which_model.md",
        help="where the forecasts go",
    )
    parser.add_argument(
        "--verl",
        type=Path,
        default=_ROOT / "docs" / "integrations" / "verl.md",
        help="where the steps of verl's driver go",
    )
    parser.add_argument("--chart", type=Path, default=_ROOT / "docs" / "performance.png")
    parser.add_argument("--print", action="store_true", help="print the table and write nothing")
    options = parser.parse_args(arguments)
    results = read(options.results)
    texts = {name: write(results) for name, write in PAGES.items()}
    on_h200 = read(options.results / H200_FOLDER)
    told, steps = forecasts(on_h200), verl_at_size(on_h200)
    if options.print:
        print(*texts.values(), told, steps, sep="\n\n")
        return
    for name, text in texts.items():
        put_into(options.page, name, text)
    put_into(options.which_model, "forecasts", told)
    put_into(options.verl, "verl", steps)
    put_into(options.readme, "one_gpu", whole_job(results))
    put_into(options.readme, "performance", headline(results))
    draw(results, options.chart)
    if "one_gpu" in results:
        _one_gpu_chart.draw(results["one_gpu"], options.chart.with_name("one_gpu.png"))


if __name__ == "__main__":
    main()
