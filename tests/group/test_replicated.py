"""Replicated handles: one host copy for the ranks of a machine, loaded by all of them together. Real processes over gloo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from placement import Manager, RegistrationError
from placement.group import StoreGroup
from placement.testing import SimulatedDevice
from tests.group import full_rank_worker
from tests.group import replicated_worker as worker
from tests.group.conftest import beside
from tests.support.ranks import Ranks


def check_shares(seen: list[dict[str, Any]]) -> None:
    """One host copy in all, and no rank brought more than its share of it."""
    nbytes = seen[0]["bytes"]
    world_size = len(seen)
    slack = world_size * worker.PAGE * 2  # whole pages, and what does not divide in the last chunk
    assert nbytes <= sum(each["host"] for each in seen) < nbytes + worker.PAGE
    for each in seen:
        assert abs(each["host"] - nbytes / world_size) < slack
        assert all(abs(crossed - nbytes / world_size) < slack for crossed in each["crossed"])
    assert len({each["epoch"] for each in seen}) == 1


def test_values_host_memory_and_bytes_over_the_link(ranks: Ranks, generation: int) -> None:
    check_shares(ranks.run(worker.loads, generation, False))


def test_it_may_be_registered_inside_a_phase_and_stay_on_the_device(ranks: Ranks, generation: int) -> None:
    ranks.run(worker.joins, generation, False)


@pytest.mark.parametrize(("other", "name"), [(0, "body.0.bias"), (1, "bytes")])
def test_unequal_weights_are_refused_on_every_rank_by_name(ranks: Ranks, generation: int, other: int, name: str) -> None:
    for told, crossed in ranks.run(worker.different, generation, False, other, name):
        # Of two ranks nobody can say which is the odd one.
        odd = max(other, 1) if ranks.world_size == 2 else other
        assert f"'ref' cannot be replicated: {name!r} has other bytes on rank {odd}" in told
        assert crossed


def test_a_mistake_on_one_rank_is_told_to_all(three: Ranks, generation: int) -> None:
    first, second, third = three.run(worker.mistaken, generation)
    differ = ("not readonly", "an optimizer")
    assert {mistake: told for mistake, told in first.items() if mistake not in differ} == {
        mistake: told for mistake, told in third.items() if mistake not in differ
    }
    for mistake, words in (("a Lazy", "Lazy"), ("an engine", "engine"), ("external", "placement")):
        assert words in second[mistake]
        assert f"rank 1: {second[mistake]}" in first[mistake]
    for mistake in differ:
        # A rank that is late hears rank 1's own error before it has compared.
        words = ("rank 1 has other tensors than the rest", f"rank 1: {second[mistake]}")
        assert all(any(each in told[mistake] for each in words) for told in (first, third))
        assert "registers them in another way" in second[mistake]
    assert "rank 1: is about to enter log_prob" in first["something else"]


def test_an_fsdp2_actor_and_its_reference_train_on_after_one_rank_was_full(ranks: Ranks, generation: int) -> None:
    for told in ranks.run(full_rank_worker.trains_on, generation, "cpu", 1):
        assert len(told) == 2
        assert all("rank 1: DeviceMemoryError" in each for each in told)


@pytest.mark.parametrize("failing", [0, 1])
def test_out_of_memory_on_one_rank_is_everybodys_and_the_next_load_succeeds(ranks: Ranks, generation: int, failing: int) -> None:
    for told in ranks.run(worker.out_of_memory, generation, False, failing):
        assert all(f"rank {failing}: DeviceMemoryError" in each for each in told)


@pytest.mark.parametrize("failing", [0, 1])
def test_each_device_call_may_fail_in_a_registration_and_in_a_load(
    three: Ranks, generation: int, failing: int, counted: Callable[[str], None]
) -> None:
    cases = three.run(worker.faults, generation, failing)
    assert min(cases) > 20
    counted(f"replicated handles, 3 ranks: every device call of rank {failing} fails once: {max(cases)} cases")


def test_the_process_group_goes(three: Ranks, generation: int) -> None:
    for together, alone, reason, again in three.run(worker.destroyed, generation):
        assert together < alone == again
        assert reason == "the process group was destroyed"


def test_a_rank_that_cannot_read_the_decision_has_everything_and_the_others_go_on(three: Ranks, generation: int) -> None:
    told = [lost for lost, _ in three.run(worker.in_doubt, generation, 1)]
    assert "the prepared move is kept" in told[1]
    assert not told[0]
    assert not told[2]
    three.close()  # their process group is not what it was


def test_one_rank_leaves(three: Ranks, generation: int) -> None:
    (_, nothing), *others = three.run(worker.leaves, generation)
    assert nothing is None
    assert all(reason == "rank 0 has unregistered it" for _, reason in others)


def test_a_rank_dies_while_all_load() -> None:
    entering = {(2, "before put vote"): False, (0, "after put vote"): False, (1, "after put vote"): True, (0, "after put at"): True}
    for ((victim, _), enters), results in zip(entering.items(), beside(worker.killed_in_load, [*entering]), strict=True):
        for entered, alone in results[:victim] + results[victim + 1 :]:
            assert entered == enters
            assert (alone or "").startswith("a collective failed") == enters


def test_a_rank_dies_while_all_register() -> None:
    for results in beside(worker.killed_in_registration, [(0, "after wait basis"), (2, "before put vote")]):
        told = [each for each in results if each is not None]
        assert len(told) == 2
        assert all("cannot be replicated" in each for each in told)


@pytest.mark.parametrize("together", [True, False])
def test_rejoin(three: Ranks, generation: int, together: bool) -> None:
    """It is loaded by all ranks together as before; by each for itself where its new group has other ranks."""
    for crossed, alone, nbytes in three.run(worker.rejoins, generation, together):
        assert alone == (None if together else "the group was made anew with other ranks")
        assert [count < 0.6 * nbytes for count in crossed] == [True, together]


def test_one_rank_alone_has_an_ordinary_handle() -> None:
    manager = Manager(device=SimulatedDevice(1 << 20), group=StoreGroup(dist.HashStore(), 0, 1, 5.0))
    model = torch.nn.Linear(8, 8)
    handle = manager.register("ref", model, role="ref", readonly=True, replicated=True)
    before = model.weight.data_ptr()
    with manager.phase("log_prob"):
        assert handle.resident_bytes
    assert model.weight.data_ptr() == before
    manager.close()


def test_it_needs_a_group() -> None:
    manager = Manager(device=SimulatedDevice(1 << 20))
    with pytest.raises(RegistrationError, match="group="):
        manager.register("ref", torch.nn.Linear(8, 8), role="ref", readonly=True, replicated=True)
    assert not manager.handles
