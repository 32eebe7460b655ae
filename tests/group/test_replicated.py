"""Replicated handles: one host copy for the ranks of a machine, loaded by all of them together. Real processes over gloo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from placement import Manager, PlacementError, RegistrationError, State
from placement.group import StoreGroup
from placement.testing import SimulatedDevice
from tests.group import part_worker
from tests.group import replicated_worker as worker
from tests.group.conftest import beside
from tests.group.replicated_worker import Rank, as_bytes
from tests.support.ranks import Ranks, group_of_all, on_ranks


def check_shares(seen: list[dict[str, Any]], chunk_bytes: int = 0) -> None:
    """One host copy in all, and no rank brought more than its share of it. `chunk_bytes` where those do not divide among the ranks."""
    nbytes = seen[0]["bytes"]
    world_size = len(seen)
    num_uneven = nbytes // chunk_bytes + 1 if chunk_bytes else 1
    slack = world_size * worker.PAGE * 2 * num_uneven  # whole pages, and what does not divide in a chunk
    assert nbytes <= sum(each["host"] for each in seen) < nbytes + worker.PAGE
    for each in seen:
        assert abs(each["host"] - nbytes / world_size) < slack
        assert all(abs(crossed - nbytes / world_size) < slack for crossed in each["crossed"])
    assert len({each["epoch"] for each in seen}) == 1


def test_values_host_memory_and_bytes_over_the_link(ranks: Ranks, generation: int) -> None:
    check_shares(ranks.run(worker.loads, generation, False))


@on_ranks("ranks")
def test_it_may_be_registered_inside_a_phase_and_stay_on_the_device(generation: int) -> None:
    """Of a phase that wants it, and then where a policy keeps it on the device when idle."""
    rank = Rank(generation, policy="resident")
    before = rank.device.crossed["to_device"]
    with rank.manager.phase("log_prob"):
        rank.register()
        assert rank.handle.state is State.GPU_RESIDENT
        assert rank.device.crossed["to_device"] - before < rank.handle.num_bytes
        rank.check_values()
    assert rank.handle.state is State.GPU_RESIDENT
    rank.check_values()
    rank.manager.unregister("ref")  # from the device
    rank.check_values()
    rank.manager.close()


@pytest.mark.parametrize(("other", "name"), [(0, "body.0.bias"), (1, "bytes")])
@on_ranks("ranks")
def test_unequal_weights_are_refused_on_every_rank_by_name(generation: int, other: int, name: str) -> None:
    """One rank has another value; then all have the same ones."""
    rank = Rank(generation)
    changed = rank.ref.state_dict()[name].view(-1).view(torch.uint8)[-1:]
    wanted, addresses = rank.wanted, rank.addresses()
    if rank.rank == other:
        changed ^= 1
    rank.wanted = as_bytes(rank.ref)
    told = rank.fails(rank.register, RegistrationError)
    rank.check_unregistered(addresses)
    # Of two ranks nobody can say which is the odd one.
    odd = max(other, 1) if rank.world_size == 2 else other
    assert f"'ref' cannot be replicated: {name!r} has other bytes on rank {odd}" in told
    if rank.rank == other:
        changed ^= 1
    rank.wanted = wanted
    rank.register()
    assert rank.load()


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
    for told in ranks.run(part_worker.full, generation, "cpu", 1):
        assert len(told) == 2
        assert all("rank 1: DeviceMemoryError" in each for each in told)


@pytest.mark.parametrize("failing", [0, 1])
def test_each_device_call_may_fail_in_a_registration_and_in_a_load(
    three: Ranks, generation: int, failing: int, counted: Callable[[str], None]
) -> None:
    cases = three.run(worker.faults, generation, failing)
    assert min(cases) > 20
    counted(f"replicated handles, 3 ranks: every device call of rank {failing} fails once: {max(cases)} cases")


@on_ranks("three")
def test_the_process_group_goes(generation: int) -> None:
    rank = Rank(generation)
    own = dist.new_group(backend="gloo")
    rank.register(replicated=own)
    together = rank.load()
    dist.destroy_process_group(own)
    assert together < rank.load() == rank.load()
    assert rank.alone == "the process group was destroyed"


@on_ranks("three")
def test_one_rank_leaves(generation: int) -> None:
    """Rank 0 makes the handle an ordinary one: nothing changes for the values of anybody."""
    rank = Rank(generation)
    rank.register()
    rank.load()
    if rank.rank == 0:
        rank.manager.unregister("ref")
        rank.check_values()
        rank.register(replicated=False)
    rank.load()
    if rank.rank > 0:
        assert rank.alone == "rank 0 has unregistered it"
    if rank.rank == 1:  # where everything of it is gone, the others still have the copy
        rank.manager.close()
        rank.check_values()
        rank.fails(rank.load, PlacementError)
    elif rank.rank > 1:
        rank.check_host_copy()


def test_a_rank_dies_while_all_load() -> None:
    entering = {(2, "before put vote"): False, (0, "after put vote"): False, (1, "after put vote"): True, (0, "after put at"): True}
    for ((victim, _), enters), results in zip(entering.items(), beside(worker.killed_in_load, [*entering]), strict=True):
        for entered, alone in results[:victim] + results[victim + 1 :]:
            assert entered == enters
            assert (alone or "").startswith("a collective failed") == enters


@pytest.mark.parametrize("together", [True, False])
@on_ranks("three")
def test_rejoin(generation: int, together: bool) -> None:
    """It is loaded by all ranks together as before; by each for itself where its new group has other ranks."""
    rank = Rank(generation)
    rank.register()
    storages = {each.data_ptr(): each.nbytes for each in [*rank.ref.parameters(), *rank.ref.buffers()]}
    most_bytes = 0.6 * sum(storages.values())
    assert rank.load() < most_bytes
    rank.manager.rejoin(group_of_all(generation + 10_000) if together else StoreGroup(dist.HashStore(), 0, 1, 20.0))
    assert (rank.load() < most_bytes) == together
    assert rank.alone == (None if together else "the group was made anew with other ranks")


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
