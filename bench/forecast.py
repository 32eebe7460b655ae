"""Does a forecast come true? Four small jobs: the bytes and the seconds that `placement.forecast`
tells, beside those that are measured.

`placement doctor` measures the machine first, and its file is all that a forecast knows of it. A
measured stall is the time of a phase transition from an idle device to an idle device, so a load
counts until its last byte has arrived; it is the median of all cycles but the first. In each phase
the host does some work, as a trainer does, so that no transition finds all that it needs in the
caches. On the simulated device the link has a rate of its own, and the figures show only that the
arithmetic agrees.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import placement
from bench import _rig
from bench._results import Results
from bench._rig import Rig
from placement.cli.doctor import examine
from placement.devices.base import Device
from placement.devices.select import select_device
from placement.forecasting import Link, Run
from placement.forecasting.description import CYCLES
from placement.testing import SimulatedDevice

_CYCLES = 8
_BATCH_BYTES = 64 << 20
"""What the host writes in each phase: more than a core's share of the processor's caches."""
_SIMULATED_BYTES_PER_SECOND = 1e8


@dataclass(frozen=True)
class _Job:
    name: str
    policy: str = "colocated"
    cycle: str = "grpo"
    trained: tuple[str, ...] = ("actor",)
    readonly: tuple[str, ...] = ("ref",)
    budget_in_models: float | None = None
    """The budget in sizes of one model; None: all fits."""


_JOBS = (
    _Job("GRPO, colocated"),
    _Job("GRPO, resident, all fits", policy="resident"),
    _Job("GRPO, resident, no room for all", policy="resident", budget_in_models=3.5),
    _Job("PPO, colocated", cycle="ppo", trained=("actor", "critic"), readonly=("ref", "reward")),
)


def _register(
    manager: placement.Manager | Run, job: _Job, width: int
) -> list[tuple[torch.nn.Module, torch.optim.Optimizer | None]]:
    """Register a job's objects, with a manager and with a forecast alike, on torch's default
    device. Returns each model with its optimizer."""
    made: list[tuple[torch.nn.Module, torch.optim.Optimizer | None]] = []
    for name in (*job.trained, *job.readonly):
        model = torch.nn.Sequential(
            *(torch.nn.Linear(width, width, bias=False, dtype=torch.bfloat16) for _ in range(8))
        )
        manager.register(name, model, role=name, readonly=name in job.readonly)
        optimizer = None
        if name in job.trained:
            optimizer = torch.optim.AdamW(model.parameters())
            manager.register(f"{name}.optimizer", optimizer)
        made.append((model, optimizer))
    return made


def _device(rig: Rig) -> Device:
    if rig.is_cuda:
        return select_device(rig.device)
    return SimulatedDevice(
        1 << 30, chunk_bytes=1 << 18, bandwidth_bytes_per_second=_SIMULATED_BYTES_PER_SECOND
    )


def measured_link(device: Device, nbytes: int) -> Link:
    """The link as a user's forecast knows it: from the file that `placement doctor --json`
    writes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "doctor.json")
        path.write_text(examine(device, nbytes).model_dump_json())
        return Link.of(path)


def _train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def _measured(
    rig: Rig, job: _Job, width: int, budget: int, device: Device
) -> tuple[list[tuple[str, int, int, float]], int, int]:
    """Run a job. Returns phase, device bytes, moved bytes and seconds of each transition of a
    cycle, the host bytes, and the peak."""
    manager = placement.Manager(device=device, policy=job.policy, budget_bytes=budget)
    with rig.torch_device:
        made = _register(manager, job, width)
    batch = torch.ones(_BATCH_BYTES, dtype=torch.uint8)
    cycles: list[list[tuple[str, int, int, float]]] = []
    for _ in range(_CYCLES):
        rows: list[tuple[str, int, int, float]] = []
        for index, phase in enumerate((*CYCLES[job.cycle], "idle")):
            batch.neg_()
            before = _moved(manager)

            def go(phase: str = phase, index: int = index) -> None:
                manager.leave() if phase == "idle" else manager.switch(
                    phase
                ) if index else manager.enter(phase)

            seconds = rig.seconds(go)
            held = sum(handle.resident_bytes for handle in manager.handles.values())
            rows.append((phase, held, _moved(manager) - before, seconds))
            for model, optimizer in made if phase == "train" else ():
                if optimizer is not None:
                    _train(model, optimizer)
        cycles.append(rows)
    host = sum(handle.host_bytes for handle in manager.handles.values())
    peak = manager.snapshot().peak_bytes
    manager.close()
    seconds_of_cycles = zip(*([row[3] for row in rows] for rows in cycles[1:]), strict=True)
    medians = [statistics.median(each) for each in seconds_of_cycles]
    return [(*row[:3], median) for row, median in zip(cycles[-1], medians, strict=True)], host, peak


def _moved(manager: placement.Manager) -> int:
    return sum(each.loaded_bytes + each.offloaded_bytes for each in manager.snapshot().handles)


def _compare(rig: Rig, results: Results, job: _Job, width: int) -> None:
    device = _device(rig)
    link = measured_link(device, rig.pick(4 << 20, 1 << 30, 1 << 30))
    one = 8 * width * width * 2
    budget = (
        rig.pick(1 << 29, 60 << 30, 60 << 30)
        if job.budget_in_models is None
        else int(one * job.budget_in_models)
    )

    def register(run: Run) -> None:
        with torch.device("meta"):
            _register(run, job, width)

    told = placement.forecast(
        register, policy=job.policy, cycle=job.cycle, budget_bytes=budget, device=device, link=link
    )
    rows, host, peak = _measured(rig, job, width, budget, device)
    pairs = [
        ("peak", told.peak_bytes, peak, "B"),
        ("host copies", told.host_bytes, host, "B"),
        ("bytes moved", told.loaded_bytes + told.offloaded_bytes, sum(row[2] for row in rows), "B"),
        ("stall", told.stall_seconds or 0.0, sum(row[3] for row in rows), "s"),
    ]
    for phase, (name, held, moved, seconds) in zip(told.phases, rows, strict=True):
        pairs += [(f"{name}: on the device", phase.device_bytes, held, "B")]
        pairs += [(f"{name}: moved", phase.loaded_bytes + phase.offloaded_bytes, moved, "B")]
        pairs += [(f"{name}: stall", phase.stall_seconds or 0.0, seconds, "s")]
    for metric, predicted, measured, unit in pairs:
        results.add(job.name, "forecast", metric, predicted, unit)
        results.add(job.name, "placement", metric, measured, unit)


def measure(rig: Rig, results: Results) -> None:
    width = rig.pick(256, 4096, 8192)  # a model of 1 MiB, 256 MiB, 1 GiB
    for job in _JOBS:
        with results.system(job.name, "placement"):
            _compare(rig, results, job, width)
        rig.clean()


def main(arguments: Sequence[str] | None = None) -> None:
    _rig.run("forecast", __doc__, measure, arguments)


if __name__ == "__main__":
    main()
