"""Is this version as fast as an older one? `python -m bench.turns --old FOLDER --out DIR [--size
quick|full] [names]`.

Each benchmark runs four times, each time in a process of its own: this version, the older one (the
`placement` and `policies` of FOLDER, under the benchmarks of this version), and both again. The
first run measures the peers, too, and its result file is kept. The others measure placement and the
raw link alone. What placement reached in each run is added to that file as `turns`, and the table
of both is printed.

A benchmark for which too little is left of `--seconds` is not begun.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import report
from bench._results import Results, read
from bench.run import default_device, run_one

SECONDS: dict[str, tuple[int, int]] = {
    "host_reserve": (35, 90),
    "weights": (160, 160),
    "adam": (80, 95),
    "streamed_adam": (280, 290),
    "grpo_step": (150, 230),
    "small_tensors": (140, 150),
    "swap": (50, 125),
    "unchanged": (65, 130),
    "blocking": (45, 95),
    "phase_overhead": (60, 85),
    "cycles": (40, 190),
}
"""The benchmarks in their order, with what their four runs take on an H100: quick, full. One run is
stopped after as long. The first benchmark needs memory that is untouched. `streamed_adam` includes
the time until DeepSpeed's C++ is compiled."""

_COLD = ("host_reserve",)
"""Only the first run finds untouched memory, so it is not compared with the others."""


def _links(folder: Path, old: Path) -> str:
    """A folder for `sys.path` that has the older packages and not their benchmarks."""
    for package in ("placement", "policies"):
        if not (old / package).is_dir():
            raise SystemExit(f"{old} has no folder {package}")
        (folder / package).symlink_to((old / package).resolve())
    return str(folder)


class _Turns:
    """The runs of one benchmark, and the values of placement in each."""

    def __init__(self, name: str, device: str, size: str, out: Path, links: str) -> None:
        self.name, self.links = name, links
        self.arguments = ["--device", device, "--size", size]
        self.kept = Results(name, device, size, out)
        self.kept.path.unlink(missing_ok=True)
        self.problems: list[str] = []
        self.values: dict[tuple[str, str, str], dict[str, list[float]]] = {}

    def run(self, version: str, limit: float, *, is_first: bool) -> None:
        """Measure once. A run that fails leaves what it has measured."""
        with tempfile.TemporaryDirectory() as folder:
            out = self.kept.path.parent if is_first else Path(folder)
            arguments = [
                *self.arguments,
                "--out",
                str(out),
                *([] if is_first else ["--only", "placement"]),
            ]
            if version == "before":
                sys.path.insert(0, self.links)  # a process begins with the path of its parent
            try:
                problem = (
                    run_one(self.name, arguments, limit) if limit > 1 else "no time was left for it"
                )
            finally:
                if version == "before":
                    sys.path.remove(self.links)
            if problem is not None:
                self.problems.append(f"{version}: {problem}")
            path = out / self.kept.path.name
            if path.exists() and not (is_first and self.name in _COLD):
                self._collect(version, json.loads(path.read_text(encoding="utf-8"))["rows"])

    def _collect(self, version: str, rows: Sequence[dict[str, Any]]) -> None:
        seen: dict[tuple[str, str, str], list[float]] = {}
        for row in rows:
            if row["system"] == "placement":
                seen.setdefault((row["scenario"], row["metric"], row["unit"]), []).append(
                    row["value"]
                )
        for key, values in seen.items():
            self.values.setdefault(key, {"before": [], "after": []})[version].append(
                sum(values) / len(values)
            )

    def write(self, commits: dict[str, str]) -> None:
        """Add the values to the result file of the first run."""
        if not self.kept.path.exists():
            return
        content = json.loads(self.kept.path.read_text(encoding="utf-8"))
        rows = [
            {"scenario": scenario, "metric": metric, "unit": unit, **both}
            for (scenario, metric, unit), both in self.values.items()
        ]
        content["turns"] = {"commits": commits, "rows": rows, "problems": self.problems}
        self.kept.path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _options(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", metavar="name", help=f"of {', '.join(SECONDS)}; all if none is named"
    )
    parser.add_argument(
        "--old", type=Path, required=True, help="folder with the older placement and policies"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the result files")
    parser.add_argument("--size", choices=("tiny", "quick", "full"), default="full")
    parser.add_argument(
        "--device", default=None, help='"cuda:0" or "simulated"; default: the GPU, else simulated'
    )
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="limit for all together"
    )
    parser.add_argument(
        "--commits",
        nargs=2,
        default=("older", "this"),
        metavar=("OLD", "THIS"),
        help="names of the two versions",
    )
    options = parser.parse_args(given)
    if unknown := [name for name in options.names if name not in SECONDS]:
        parser.error(f"no benchmark of these: {', '.join(unknown)}")
    return options


def main(given: Sequence[str] | None = None) -> int:
    """Run the named benchmarks by turns. Returns how many are left out or did not end well."""
    options = _options(given)
    deadline = time.monotonic() + options.seconds
    device = options.device or default_device()
    is_full = options.size == "full"
    commits = dict(zip(("before", "after"), options.commits, strict=True))
    # placement is imported in each process, by its path
    multiprocessing.get_context("forkserver").set_forkserver_preload(["torch"])
    problems = 0
    with tempfile.TemporaryDirectory() as folder:
        links = _links(Path(folder), options.old)
        for name in [each for each in SECONDS if each in (options.names or SECONDS)]:
            began = time.monotonic()
            if device.startswith("cuda") and deadline - began < SECONDS[name][is_full]:
                print(f"== {name}: left out, {deadline - began:.0f} s are not enough", flush=True)
                problems += 1
                continue
            turns = _Turns(name, device, options.size, options.out, links)
            for index, version in enumerate(
                ("after", "before", "after", "before", *(("after",) if name in _COLD else ()))
            ):
                print(f"== {name}, {version}", flush=True)
                turns.run(
                    version,
                    min(SECONDS[name][is_full], deadline - time.monotonic()),
                    is_first=index == 0,
                )
                turns.write(commits)
            print(
                f"== {name}: {'; '.join(turns.problems) or 'done'}, {time.monotonic() - began:.1f} "
                "s",
                flush=True,
            )
            problems += bool(turns.problems)
    print(report.by_turns(read(options.out)))
    return problems


if __name__ == "__main__":
    raise SystemExit(main())
