"""Run every benchmark in a process of its own with a time limit: `python -m bench.run
--quick|--full --out DIR`.

A benchmark that fails, is killed or runs into its limit becomes a row `error` in its result file;
the others go on. `--dry-run` imports the peers, reports what is missing, and measures nothing.
"""

from __future__ import annotations

import argparse
import importlib
import math
import multiprocessing
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from bench import _peers
from bench._results import FOLDER, Results, read

# The order matters: only the first benchmarks find memory that the machine has not touched yet.
# Seconds: quick, full. On a fresh machine `streamed_adam` waits until DeepSpeed's C++ is compiled,
# which takes more than two minutes of one core.
LIMITS: dict[str, tuple[int, int]] = {
    "host_reserve": (30, 60),
    "link": (20, 30),
    "unchanged": (30, 60),
    "swap": (40, 80),
    "blocking": (30, 60),
    "grpo_step": (90, 360),
    "adam": (60, 120),
    "streamed_adam": (240, 330),
    "small_tensors": (45, 240),
    "cycles": (30, 120),
    "phase_overhead": (30, 60),
    "rollout_only": (30, 60),
    "observe": (30, 60),
    "replicated": (60, 180),
    "weights": (150, 240),
    "first_load": (90, 180),
    "after_free": (40, 80),
    "publish": (60, 120),
    "weight_changes": (90, 150),
    "forecast": (40, 60),
    "foresight": (120, 480),
    "host_files": (120, 300),
}


def _child(name: str, arguments: list[str]) -> None:
    importlib.import_module(f"bench.{name}").main(arguments)


def _options(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    size = parser.add_mutually_exclusive_group()
    for name, text in (
        ("full", "as in the README"),
        ("quick", ("about a third of the bytes")),
        ("tiny", ("to see that everything runs")),
    ):
        size.add_argument(f"--{name}", dest="size", action="store_const", const=name, help=text)
    parser.add_argument(
        "--device", default=None, help='"cuda:0" or "simulated"; default: the GPU, else simulated'
    )
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder for the result files")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=list(LIMITS),
        default=list(LIMITS),
        help="run only these benchmarks",
    )
    parser.add_argument(
        "--skip", nargs="+", choices=list(LIMITS), default=[], help="run all but these benchmarks"
    )
    parser.add_argument(
        "--limit-seconds",
        type=float,
        default=math.inf,
        help="limit for all together; the rest is not run",
    )
    parser.add_argument("--dry-run", action="store_true", help="only import the peers")
    return parser.parse_args(given)


def default_device() -> str:
    # Asked as the children do, without making a CUDA context here.
    return "cuda:0" if torch.cuda.device_count() else "simulated"


def run_one(name: str, arguments: list[str], limit_seconds: float) -> str | None:
    """Run one benchmark. Returns the reason if it did not end well; None if it did."""
    # each process starts with torch imported, and makes a CUDA context of its own
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=_child, args=(name, arguments))
    process.start()
    process.join(limit_seconds)
    if process.is_alive():
        process.kill()
        process.join()
        return f"stopped after {limit_seconds:.0f} s"
    return None if process.exitcode == 0 else f"exit status {process.exitcode}"


def _record(out: Path, name: str, device: str, size: str, problem: str) -> None:
    """Add a row `error` to the rows that the process had written."""
    results = Results(name, device, size, out)
    known = read(out).get(name) if results.path.exists() else None
    if known is not None and known["machine"]["size"] == size:
        results.read()
    results.failed(
        "all" if known is None else "what came after",
        "placement" if known is None else "not measured",
        problem,
    )
    results.write()


def main(given: Sequence[str] | None = None) -> int:
    """Run the chosen benchmarks. Returns how many did not end well."""
    options = _options(given)
    if options.dry_run:
        found = _peers.check()
        for peer, verdict in found.items():
            print(f"{peer:<20} {verdict}")
        return sum(verdict != "ok" for verdict in found.values())
    device = options.device or default_device()
    size = options.size or ("full" if device.startswith("cuda") else "tiny")
    is_full = size == "full"
    multiprocessing.get_context("forkserver").set_forkserver_preload(
        ["torch", "placement", "bench._rig"]
    )
    deadline = time.monotonic() + options.limit_seconds
    problems: dict[str, str] = {}
    for name in [each for each in options.only if each not in options.skip]:
        print(f"== {name}", flush=True)
        began = time.monotonic()
        path = Results(name, device, size, options.out).path
        path.unlink(missing_ok=True)
        limit = min(LIMITS[name][is_full], deadline - began)
        problem = (
            run_one(name, ["--device", device, "--size", size, "--out", str(options.out)], limit)
            if limit > 1
            else "no time was left for it"
        )
        if problem is not None:
            problems[name] = problem
            _record(options.out, name, device, size, problem)
        print(f"== {name}: {problem or 'done'}, {time.monotonic() - began:.1f} s", flush=True)
    for name, problem in problems.items():
        print(f"{name}: {problem}")
    return len(problems)


if __name__ == "__main__":
    raise SystemExit(main())
