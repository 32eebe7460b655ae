"""How much does a rollout-only worker save by registering the trainer as a `Lazy`, which its policy
never builds?

Each way runs in a process of its own, because used host memory is not given back. Measured are the
growth of resident memory and its maximum, from before the objects are made to the end of three
rollout phases.
"""

from __future__ import annotations

import multiprocessing
import resource
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import placement
from bench import _rig
from bench._results import Results
from bench._rig import Rig


def _model(width: int) -> torch.nn.Module:
    return torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(8)))


def _memory_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _worker(rig: Rig, width: int, is_lazy: bool, answer: Connection) -> None:
    manager = placement.Manager(
        device=rig.placement_device(), policy="async_rollout", worker_role="rollout"
    )
    before, built = _memory_bytes(), []

    def register(name: str, make: Callable[[], Any], kind: str, **keywords: Any) -> None:
        def factory() -> Any:
            built.append(make())
            return built[-1]

        manager.register(
            name, placement.Lazy(factory, kind=kind) if is_lazy else factory(), **keywords
        )

    engine = _model(width // 4)
    manager.register("rollout", engine, role="rollout")
    register("actor", lambda: _model(width), "module", role="actor")
    register("ref", lambda: _model(width), "module", role="ref")
    register(
        "actor.optimizer",
        lambda: torch.optim.AdamW(built[0].parameters()),
        "optimizer",
        owner="actor",
    )
    for _ in range(3):
        with manager.phase("rollout"):
            engine(torch.zeros(1, width // 4, device=rig.torch_device))
    reserved = sum(handle.host_bytes for handle in manager.handles.values())
    answer.send((_memory_bytes() - before, _peak_bytes() - before, reserved, len(built)))
    manager.close()


def measure(rig: Rig, results: Results) -> None:
    width = rig.pick(256, 2_048, 4_096)
    trainer = 2 * 8 * width * width * 4
    scenario = f"rollout-only worker, actor and reference of {trainer >> 20:,} MiB with AdamW"
    grown = {}
    for is_lazy in (False, True):
        system = "placement, Lazy" if is_lazy else "placement, built"
        with results.system(scenario, system):
            ours, theirs = multiprocessing.Pipe()
            process = multiprocessing.get_context("spawn").Process(
                target=_worker, args=(rig, width, is_lazy, theirs)
            )
            process.start()
            theirs.close()
            grown[is_lazy], peak, reserved, built = ours.recv()
            process.join()
            results.add(scenario, system, "objects built", built, "")
            results.add(scenario, system, "host memory", grown[is_lazy] / 1e6, "MB")
            results.add(scenario, system, "host memory, peak", peak / 1e6, "MB")
            results.add(scenario, system, "host copies reserved", reserved / 1e6, "MB")
    if len(grown) == 2:
        results.add(
            scenario,
            "placement, Lazy",
            "host memory saved",
            (grown[False] - grown[True]) / 1e6,
            "MB",
        )


def main(arguments: Sequence[str] | None = None) -> None:
    _rig.run("rollout_only", __doc__, measure, arguments)


if __name__ == "__main__":
    main()
