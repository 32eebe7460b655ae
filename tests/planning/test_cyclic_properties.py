"""The policy `cyclic` on random cycles: as little moves as in the best plan, never more than under
`colocated`, and a manager agrees.

With SWEEP=all more cycles, and such with more plans to look at.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

import placement
from placement import State
from placement.core.journal import Record
from placement.testing import SimulatedDevice
from tests.support.cycles import Cycle, Moved, Simulator, best, steady
from tests.support.early import wait_for_copies

SWEEP = os.environ.get("SWEEP") == "all"
PARTS = range(40 if SWEEP else 1)
"""Each has 250 random cycles."""
CHUNK = 4096


@pytest.mark.sweep
@pytest.mark.parametrize("part", PARTS)
def test_as_little_moves_as_in_the_best_plan_and_never_more_than_under_colocated(part: int) -> None:
    rng = random.Random(part)
    for _ in range(250):
        cycle = Cycle.drawn(rng, most_gaps=18 if SWEEP and part % 4 == 0 else 14)
        cyclic, colocated = cycle.policies()
        found, least, simple = (
            steady(cycle, cyclic),
            best(cycle),
            steady(cycle, colocated, warm_up=1),
        )
        assert found.waited <= least.waited, cycle
        assert found.total <= least.total, cycle
        assert found.waited <= simple.waited, cycle
        assert found.total <= simple.total, cycle
        assert found.given_up == 0, cycle


@pytest.mark.parametrize("seed", range(40 if SWEEP else 1))
def test_whatever_comes_nobody_waits_longer_than_under_colocated(seed: int) -> None:
    """Phases in the wrong order, left out, put in: what was waited for until now is never more,
    from the first phase on."""
    rng = random.Random(f"disturbed {seed}")
    for _ in range(10):
        cycle = Cycle.drawn(rng)
        cyclic, colocated = (Simulator(cycle, policy) for policy in cycle.policies())
        mine, theirs = Moved(0, 0), Moved(0, 0)
        for phase in _disturbed(rng, cycle.phases):
            mine += cyclic.enter(phase)
            theirs += colocated.enter(phase)
            assert mine.waited <= theirs.waited, cycle
            on_the_way = sum(handle.prefetched_bytes for handle in cyclic.views.values())
            assert mine.total <= theirs.total + mine.given_up + on_the_way, cycle


def _disturbed(rng: random.Random, phases: tuple[str, ...]) -> Iterator[str]:
    for _ in range(8):
        for phase in phases:
            if rng.random() > 0.1:
                yield phase
            if rng.random() < 0.1:
                yield rng.choice([*phases, "idle", "eval"])


@pytest.mark.parametrize("seed", range(40 if SWEEP else 2))
def test_a_manager_moves_the_bytes_that_the_simulator_says(seed: int) -> None:
    cycle = Cycle.drawn(random.Random(f"real {seed}"), most_handles=5)
    handles = tuple(
        replace(h, num_bytes=h.num_bytes * CHUNK, can_prefetch=True) for h in cycle.handles
    )
    cycle = replace(cycle, handles=handles, budget_bytes=cycle.budget_bytes * CHUNK)
    simulator = Simulator(cycle, cycle.policies()[0])
    manager = placement.Manager(
        device=SimulatedDevice(cycle.budget_bytes, chunk_bytes=CHUNK),
        policy=cycle.policies()[0],
        budget_bytes=cycle.budget_bytes,
    )
    modules = {h.name: torch.nn.Module() for h in handles}
    for h in handles:
        modules[h.name].weight = torch.nn.Parameter(torch.zeros(h.num_bytes // 4))
        manager.register(h.name, modules[h.name], readonly=h.readonly)
        assert manager.handles[h.name].num_bytes == h.num_bytes
    trained = dict.fromkeys(modules, 0)
    with manager.phase(cycle.phases[0]) as step:
        assert _copied([*manager.journal]) == simulator.enter(cycle.phases[0])[3:]
        for phase in (*cycle.phases[1:], *cycle.phases * 4):
            _train(cycle, step.name, modules, trained)
            seen = len(manager.journal)
            step.switch(phase)
            moved = simulator.enter(phase)
            assert _copied([*manager.journal][seen:]) == moved[3:]
            assert {name: h.state for name, h in manager.handles.items()} == {
                name: h.state for name, h in simulator.views.items()
            }
            assert _arrived(manager) == sum(h.prefetched_bytes for h in simulator.views.values())
        manager.check_integrity()
    for name, module in modules.items():
        assert set(manager.handles[name].state_dict()["weight"].tolist()) == {
            float(trained[name])
        }, module
    assert manager.snapshot().prefetch_discarded_bytes == 0
    manager.close()


def _copied(records: list[Record]) -> tuple[int, int]:
    """Bytes that loads copied in the phase transition, and bytes that offloads copied then or
    later."""
    loads = sum(record.nbytes for record in records if record.trigger == "load")
    return loads, sum(record.nbytes for record in records if record.trigger == "offload")


def _train(
    cycle: Cycle, phase: str, modules: dict[str, torch.nn.Module], trained: dict[str, int]
) -> None:
    for name, state in cycle.needs[phase].items():
        if state is State.TRAINING:
            trained[name] += 1
            with torch.no_grad():
                modules[name].get_parameter("weight").fill_(float(trained[name]))


def _arrived(manager: placement.Manager) -> int:
    """Device bytes that have arrived early, once the copies of all of them have been started."""
    wait_for_copies(manager)
    return sum(each.prefetched_bytes for each in manager.snapshot().handles)
