"""Forecasts with a limit on host memory, against the real manager with a disk: every byte that is written and read in each phase."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

import placement
from placement.forecasting import Layout, Model
from placement.forecasting.description import CYCLES
from placement.testing import SimulatedDevice
from tests.support.disk import settle
from tests.support.measured_steps import train

MIB = 1 << 20
CHUNK_BYTES = 64 << 10
GRPO = {"actor": True, "ref": False}
PPO = {"actor": True, "critic": True, "ref": False, "reward": False}
"""The models, of 2 MiB each, and whether they are trained. Then AdamW has 4 MiB."""


@dataclass(frozen=True)
class Case:
    limit: float
    """In MiB."""
    policy: str = "colocated"
    cycle: Sequence[str] = CYCLES["grpo"]
    roles: Mapping[str, bool] = field(default_factory=lambda: GRPO)
    budget: int = 1 << 30


CASES = {
    "GRPO, the least": Case(6.5),
    "GRPO, all fits": Case(8),
    "PPO, 3 MiB short": Case(13, cycle=CYCLES["ppo"], roles=PPO),
    "PPO, 4 MiB short, a budget": Case(12, cycle=("values", "reward", "train", "log_prob"), roles=PPO, budget=12 * MIB),
    "resident, a budget": Case(6.5, "resident", ("train", "ref_log_prob", "train", "rollout", "weight_sync"), budget=6 * MIB),
    "the optimizer in its step": Case(6.5, "colocated(optimizer_in='optimizer_step')", ("log_prob", "train", "optimizer_step")),
    "streamed steps, two optimizers": Case(12, "colocated('streamed')", ("checkpoint", "values", "reward", "train"), roles=PPO),
}


def net() -> torch.nn.Module:
    return torch.nn.Sequential(*(torch.nn.Linear(256, 256, bias=False) for _ in range(8)))


def register(manager: placement.Manager, roles: Mapping[str, bool]) -> tuple[dict[str, torch.nn.Module], dict[str, torch.optim.Optimizer]]:
    """The models and optimizers, by role."""
    models: dict[str, torch.nn.Module] = {role: net() for role in roles}
    optimizers: dict[str, torch.optim.Optimizer] = {}
    for role, is_trained in roles.items():
        manager.register(role, models[role], role=role, readonly=not is_trained)
        if is_trained:
            optimizers[role] = torch.optim.AdamW(models[role].parameters())
            manager.register(f"{role}.optimizer", optimizers[role])
    return models, optimizers


def forecast(case: Case, *, layout: Layout | None = None) -> placement.Forecast:
    with torch.device("meta"):
        handles = {
            role: Model(net(), optimizer="adamw" if is_trained else None, readonly=not is_trained)
            for role, is_trained in case.roles.items()
        }
    device = SimulatedDevice(1 << 30, chunk_bytes=CHUNK_BYTES)
    limit = int(case.limit * MIB)
    return placement.forecast(
        handles,
        layout=layout or Layout(),
        policy=case.policy,
        cycle=case.cycle,
        budget_bytes=case.budget,
        host_limit_bytes=limit,
        device=device,
    )


@pytest.mark.parametrize(("limit", "roles"), [(1, GRPO), (5.9, GRPO), (6, GRPO), (5.9, PPO), (6, PPO)])
def test_a_registration_that_a_manager_refuses_is_foreseen(limit: float, roles: Mapping[str, bool], tmp_path: Path) -> None:
    manager = placement.Manager(
        device=SimulatedDevice(1 << 30, chunk_bytes=CHUNK_BYTES), host_limit_bytes=int(limit * MIB), disk_directory=str(tmp_path)
    )
    refused, kept = "", []
    try:
        kept.append(register(manager, roles))
    except placement.HostMemoryError as error:
        refused = str(error).partition("\n")[0]
    manager.close()
    told = forecast(Case(limit, roles=roles))
    assert told.refused_registrations[:1] == ((refused,) if refused else ())
    assert told.fits is not bool(refused)


def measure(case: Case, directory: Path, cycles: int = 8) -> list[list[tuple[object, ...]]]:
    """The phases of each cycle with the bytes that left the device, those that the disk wrote and read, and the bytes of the files."""
    device = SimulatedDevice(1 << 30, chunk_bytes=CHUNK_BYTES)
    limit = int(case.limit * MIB)
    manager = placement.Manager(
        device=device, policy=case.policy, budget_bytes=case.budget, host_limit_bytes=limit, disk_directory=str(directory)
    )
    models, optimizers = register(manager, case.roles)
    settle(manager)
    steps_in = "optimizer_step" if "optimizer_step" in case.cycle else "train"
    found: list[list[tuple[object, ...]]] = []
    for _ in range(cycles):
        found.append([])
        for index, phase in enumerate((*case.cycle, "idle")):
            before = _traffic(manager)
            manager.leave() if phase == "idle" else manager.switch(phase) if index else manager.enter(phase)
            for role in optimizers if phase == steps_in else ():
                train(models[role], optimizers[role])
            settle(manager)
            moved = [now - then for now, then in zip(_traffic(manager), before, strict=True)]
            found[-1].append((phase, *moved, sum(handle.disk_bytes for handle in manager.handles.values())))
    manager.close()
    return found


def _traffic(manager: placement.Manager) -> tuple[int, int, int]:
    counters = [handle.counters for handle in manager.handles.values()]
    offloaded = sum(each.offloaded_bytes for each in manager.snapshot().handles)
    return offloaded, sum(each.spilled_bytes for each in counters), sum(each.disk_read_bytes for each in counters)


@pytest.mark.parametrize("name", CASES)
def test_a_forecast_is_what_the_disk_does(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    told, measured = forecast(case), measure(case, tmp_path)
    assert measured[-1] == measured[-2], "the run is not steady yet"
    rows = [(p.phase, p.offloaded_bytes, p.disk_written_bytes, p.disk_read_bytes, p.disk_bytes) for p in told.phases]
    assert rows == measured[-1]
    assert told.disk_bytes == measured[-1][-1][-1]


def test_the_limit_and_a_node_are_told() -> None:
    told = forecast(CASES["PPO, 3 MiB short"], layout=Layout(data_parallel=4))
    assert told.host_bytes > 13 * MIB
    assert [note for note in told.notes if "goes over the limit, up to 14,680,064 bytes" in note]
    assert told.node_disk_bytes == 4 * told.disk_bytes > 0
    assert told.node_host_bytes == 4 * told.host_bytes
    assert forecast(CASES["GRPO, all fits"]).disk_bytes == 0


def test_a_host_copy_that_the_ranks_of_a_node_share_stays_in_host_memory(caplog: pytest.LogCaptureFixture) -> None:
    """Only this rank's part of it counts towards the limit."""
    with torch.device("meta"):
        handles = {"actor": Model(net(), optimizer="sgd"), "ref": Model(net(), readonly=True, replicated=True)}
    layout, device = Layout(data_parallel=4), SimulatedDevice(1 << 30, chunk_bytes=CHUNK_BYTES)

    def told(limit_bytes: int) -> placement.Forecast:
        return placement.forecast(handles, layout=layout, cycle=["log_prob", "train"], host_limit_bytes=limit_bytes, device=device)

    roomy = told(5 * MIB // 2)
    assert (roomy.disk_bytes, roomy.host_bytes, roomy.node_host_bytes) == (0, 5 * MIB // 2, 10 * MIB)
    tight = told(9 * MIB // 4)  # the actor's host copy leaves: it takes 2 MiB, and a quarter of the other one 0.5 MiB
    assert tight.disk_bytes == 2 * MIB
    assert any("goes over the limit, up to 2,621,440 bytes" in note for note in tight.notes)
    assert not caplog.records  # the note is enough
    assert {each.name: each.host_bytes for each in tight.handles} == {"actor": 2 * MIB, "actor.optimizer": 0, "ref": MIB // 2}
