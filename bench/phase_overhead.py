"""What does a phase cost that moves nothing, and does it stay linear in the number of handles?

Every handle is at its target already: the policy is asked, the plan checked, the levels compared, the metrics counted. Runs on
the simulated device, or on `cuda:0` where there is one (`--device cuda:0`).
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from _results import Row, write

import placement
from placement.testing import SimulatedDevice


def worker(num_handles: int, device: str) -> placement.Manager:
    chosen = SimulatedDevice(capacity_bytes=1 << 30, chunk_bytes=1 << 16) if device == "simulated" else device
    manager = placement.Manager(device=chosen, budget_bytes=1 << 40)
    for index in range(num_handles):
        module = torch.nn.Linear(16, 16)
        KEPT.append(module)
        manager.register(f"handle{index}", module, role="reward" if index else "actor")
    return manager


KEPT: list[torch.nn.Module] = []


def measure(manager: placement.Manager, repetitions: int) -> tuple[float, float]:
    """Median microseconds of a nested phase and of a pair of switches, each border moving nothing."""
    nested, switched = [], []
    with manager.phase("eval") as phase:
        for _ in range(repetitions):
            began = time.perf_counter()
            with manager.phase("eval"):
                pass
            nested.append(time.perf_counter() - began)
            began = time.perf_counter()
            phase.switch("eval")
            switched.append(time.perf_counter() - began)
    return statistics.median(nested) * 1e6, statistics.median(switched) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "simulated")
    parser.add_argument("--handles", type=int, nargs="+", default=[6, 100, 1000])
    arguments = parser.parse_args()
    rows: list[Row] = []
    for num_handles in arguments.handles:
        began = time.perf_counter()
        manager = worker(num_handles, arguments.device)
        registered = (time.perf_counter() - began) / num_handles * 1e6
        nested, switched = measure(manager, repetitions=max(20, 2000 // num_handles))
        scenario = f"{num_handles} handles"
        rows.append(Row(scenario, "placement", "register one", registered, "us"))
        rows.append(Row(scenario, "placement", "enter and leave, nothing moves", nested, "us"))
        rows.append(Row(scenario, "placement", "switch, nothing moves", switched, "us"))
        manager.close()
        KEPT.clear()
    write("phase_overhead", arguments.device, rows)


if __name__ == "__main__":
    main()
