"""Replicated handles of what is trained: one host copy of weights and optimizer state, written by
all ranks together. Over gloo."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from placement import HostMemoryError, Manager, RegistrationError, checkpoint
from placement.core.errors import GroupError, PlacementError
from placement.registration import replication
from placement.storage import shared as shared_copy
from placement.testing import assert_nothing_resident
from tests.group import part_worker
from tests.group import trained_worker as trained
from tests.group.conftest import beside
from tests.group.replicated_worker import PAGE, as_bytes, faults_of, meet_again
from tests.group.trained_worker import STEPS, Actor, Heard, Rank, arm
from tests.sharded.one_of_each import mesh, net
from tests.sharded.training import as_bytes as tensor_bytes
from tests.sharded.training import bytes_of, device_of
from tests.support.ranks import Ranks, group_of_all, on_ranks

_impatience = mock.patch.object(shared_copy, "_PATIENCE_SECONDS", 0.5)


def test_training_is_bit_exact_with_one_host_copy_of_weights_and_optimizer_state(
    three: Ranks, generation: int
) -> None:
    together = three.run(trained.trains, generation, 6, False, True, {})
    alone = three.run(trained.trains, generation + 100_000, 6, False, False, {})
    for ours, theirs in zip(together, alone, strict=True):
        names = [name for name in ours["values"] if name != "seen"]
        assert all(
            ours["values"][name] == theirs["values"][name] == together[0]["values"][name]
            for name in names
        )
        slack = 20 * PAGE  # whole pages of each chunk
        for held in (ours["host"] - ours["own"], ours["to_host"], ours["first"]):
            assert abs(held - ours["shared"] / 3) < slack
        assert theirs["host"] > 0.95 * ours["shared"] < 1.05 * theirs["to_host"]


@pytest.mark.parametrize(
    "settings",
    [{"policy": "cyclic"}, {"policy": "resident"}, {"verify": "always"}],
    ids=["cyclic", "resident", "verified"],
)
def test_replicas_are_shared_under_each_policy(
    two_ranks: Ranks, generation: int, settings: dict[str, Any]
) -> None:
    first, second = two_ranks.run(trained.trains, generation, 6, False, True, settings, True)
    assert first["host"] + second["host"] < 1.1 * first["shared"]


@pytest.mark.parametrize("born", [False, True], ids=["later", "at birth"])
def test_replicas_that_differ_are_told_and_have_host_copies_of_their_own(
    three: Ranks, generation: int, born: bool
) -> None:
    for told in three.run(trained.differs, generation, 2, born):
        assert len(told) == 2
        assert all("has other bytes on rank 2 than on the rest" in each for each in told)
        assert "'actor' has" in told[0]
        assert "'body.2.bias'" in told[0]
        assert "'optimizer'" in told[1]
        assert "exp_avg" in told[1]


@pytest.mark.parametrize("on", [[0, 1], [1]])
@on_ranks("two_ranks")
def test_what_is_written_into_a_host_copy_is_the_ranks_own(generation: int, on: list[int]) -> None:
    """Once all ranks have the same values, they share a host copy again."""
    rank = Rank(generation)
    writes = rank.rank in on
    rank.step()
    assert rank.shares == [True, True]
    held = None
    if writes:  # through a state dict
        held = rank.handle("actor").state_dict()
        held["body.0.weight"].fill_(0.25)
        with torch.no_grad():
            rank.twin.body[0].weight.fill_(0.25)
    assert rank.shares == [not writes, True]
    dist.barrier()
    rank.check_offloaded()
    if len(on) < rank.world_size:  # put it right, so that the ranks are alike again
        with rank.manager.phase("train"), torch.no_grad():
            rank.check_loaded()
            for actor in (rank.actor, rank.twin):
                actor.body[0].weight.fill_(0.25)
    rank.check()
    assert rank.shares[0] != writes  # who holds a state dict keeps what it shows
    assert writes or rank.shares[1]
    if held is not None:
        assert as_bytes(rank.twin)["body.0.weight"] == tensor_bytes(held["body.0.weight"])
    del held
    rank.step()
    rank.check()
    assert rank.shares == [True, True]
    rank.end()


def test_a_rank_dies_while_all_write() -> None:
    """After a first step, at each step of the write; where the optimizer's state is born, and in a
    switch, at some."""
    cases = [(1, *step, False, False) for step in STEPS]
    cases += [(1, *step, born, not born) for born in (True, False) for step in STEPS[::4]]
    for case, (first, _, third) in zip(cases, beside(trained.killed, cases), strict=True):
        met = case[1:3] != ("meet", "before")
        for shares, told in (first, third):
            assert shares[0] == met, case
            assert met or "rank 1 has died" in told[0]


def test_a_rank_stops_while_all_write_and_goes_on_later() -> None:
    cases = [
        (1, "meet", "before"),
        (1, "meet", "after"),
        (1, "note_arrived", "before"),
        (1, "wait_for_shares", "before"),
    ]
    for case, (first, _, third) in zip(
        cases, beside(trained.stopped, cases, dies=False), strict=True
    ):
        assert first[0] == third[0] == (case != cases[0]), case


@pytest.mark.parametrize("born", [False, True], ids=["later", "at birth"])
@on_ranks("three")
def test_each_step_of_the_shared_write_may_fail_on_one_rank(generation: int, born: bool) -> None:
    """In turn. After the next step that succeeds all share a host copy again."""
    rank: Rank | None = None
    for number, (method, when) in enumerate(STEPS):
        if rank is None:
            rank = Rank(generation + 100_000 * number)
            if not born:
                rank.step()
                rank.check()
        kind = (RuntimeError, HostMemoryError)[(number + born) % 2]
        if rank.rank == 1:
            arm(method, when, mock.Mock(side_effect=kind("injected")))
        with contextlib.suppress(PlacementError, RuntimeError), _impatience:
            rank.step()
        rank.check_offloaded()
        meet_again(rank.check)
        for _ in range(2):
            rank.step()
            rank.check()
        assert rank.shares == [True, True], (method, when)
        if born:
            rank.end()
            rank = None
    if rank is not None:
        rank.end()


def faults(generation: int, failing: int, switches: bool) -> int:
    """Device calls of a training phase fail once on one rank: see `faults_of`. Returns the
    cases."""
    rank = Rank(generation)
    rank.switches = switches
    rank.step()
    calls = rank.device.calls.copy()
    rank.check()
    rank.step()
    counts = {name: count - calls[name] for name, count in rank.device.calls.items()}
    cases = 0
    batch = torch.full((3, rank.actor.size), 0.1)
    for _ in faults_of(rank, failing, counts, 3):
        # A step without collectives: a rank that failed right after the vote does not make it, and
        # has other values from then on.
        with contextlib.suppress(PlacementError, RuntimeError), _impatience, rank.training():
            rank.learn(batch, placed=True, averages=False)
            rank.learn(batch, placed=False, averages=False)
        rank.device.clear()
        meet_again(rank.check)
        cases += 1
    rank.end()
    return cases


@pytest.mark.parametrize(
    ("failing", "switches"), [(0, False), pytest.param(1, True, marks=pytest.mark.slow)]
)
def test_device_calls_may_fail_while_replicas_train(
    two_ranks: Ranks, generation: int, failing: int, switches: bool, counted: Callable[[str], None]
) -> None:
    cases = two_ranks.run(faults, generation, failing, switches, deadline_seconds=240.0)
    assert min(cases) > 10
    counted(f"trained replicas: device calls of rank {failing} fail once: {cases[0]} cases")


@on_ranks("three")
def test_an_error_on_one_rank_parts_the_ranks_until_the_next_step(generation: int) -> None:
    """The user's code raises on rank 1, after its step."""
    rank, heard = Rank(generation), Heard()
    rank.step()
    rank.check()
    batch = rank.batch()
    rank.learn(batch, placed=False)
    with contextlib.suppress(GroupError, ZeroDivisionError), rank.training():
        rank.learn(batch, placed=True)
        if rank.rank == 1:
            raise ZeroDivisionError
    assert_nothing_resident(rank.manager)
    assert rank.shares == [False, False]
    assert ("alone" if rank.rank == 1 else "rank 1") in heard.take()[0]
    rank.check_offloaded()
    meet_again(rank.check)
    rank.step()
    rank.check()
    assert rank.shares == [True, True]
    rank.end()


@on_ranks("two_ranks")
def test_a_rank_without_memory_for_a_copy_of_its_own_keeps_its_values(generation: int) -> None:
    """The ranks part, and rank 0 has no host memory for it."""
    rank = Rank(generation)
    lacks = rank.rank == 0
    rank.step()
    rank.check()

    def spoil(actor: Actor) -> None:
        actor.odd += rank.rank

    if lacks:
        rank.device.fail("host", at=1, forever=True)
    with pytest.raises(HostMemoryError if lacks else GroupError) as caught:
        rank.step(also=spoil)
    assert lacks or "rank 0: HostMemoryError" in str(caught.value)
    assert bool(rank.handle("actor").resident_bytes) == lacks
    rank.group.deadline_seconds = 1.0
    if lacks:
        with contextlib.suppress(GroupError), rank.manager.phase("train"):  # nothing is lost
            rank.check_loaded()
    dist.barrier()
    rank.group.deadline_seconds = 20.0
    rank.device.clear()
    meet_again(rank.check)
    rank.check_offloaded()
    assert not rank.shares[0]
    rank.end()


@on_ranks("two_ranks")
def test_a_run_that_is_resumed_shares_its_optimizer_state(generation: int, tmp_path: Path) -> None:
    """From the next step on, where a checkpoint was loaded into an optimizer that had made no
    step."""
    first = Rank(generation)
    first.actor.number = first.twin.number = 1  # a checkpoint has the buffers of one rank
    first.step()
    checkpoint.save(first.manager, tmp_path / "a")
    assert first.shares == [True, True]  # to read it needs no copy
    dist.barrier()
    first.end()
    rank = Rank(generation + 50_000)
    rank.actor.number = rank.twin.number = 1
    checkpoint.load(rank.manager, tmp_path / "a")
    rank.twin.load_state_dict(first.twin.state_dict())
    rank.twins_optimizer.load_state_dict(first.twins_optimizer.state_dict())
    rank.check_offloaded()
    assert rank.shares == [False, False]
    rank.step()
    assert rank.shares == [True, True]
    rank.check()
    rank.end()


# --- a part of the group


def test_ranks_of_a_mesh_that_replicates_share_their_shards(generation: int) -> None:
    four = Ranks(4)
    seen = four.run(part_worker.hybrid, generation, "cpu")
    four.close()
    for rank, (members, _) in enumerate(seen):
        assert set(members) == {(rank % 2, rank % 2 + 2)}
        assert len(members) >= 2  # of the weights, and of the optimizer's state
    shares = [share for _, share in seen]
    # whole pages
    assert [shares[rank] + shares[rank + 2] for rank in (0, 1)] == pytest.approx([1, 1], rel=0.15)


@on_ranks("three")
def test_ranks_of_each_machine_share_a_copy(generation: int) -> None:
    """Rank 1 is on a machine of its own."""
    is_apart = dist.get_rank() == 1
    with (
        mock.patch.object(replication, "_machine", return_value="another")
        if is_apart
        else contextlib.nullcontext()
    ):
        manager = Manager(device=device_of("cpu"), group=group_of_all(generation, 60.0))
        for name in ("ref", "teacher"):
            torch.manual_seed(4)
            model = Actor()
            wanted = as_bytes(model)
            handle = manager.register(name, model, role="ref", readonly=True, replicated=True)
            assert part_worker.shared_with(handle) == [(1,) if is_apart else (0, 2)]
            with manager.phase("ref_log_prob"):
                assert as_bytes(model) == wanted
        assert len(manager._replication._machine_groups) == 1
        manager.close()


@on_ranks("three")
def test_a_group_that_nobody_can_tell_is_refused(generation: int) -> None:
    """Nobody can know who holds the same; and rank 0 names another group than the others, who raise
    the reason of whoever failed first."""
    manager = Manager(device=device_of("cpu"), group=group_of_all(generation, 5.0))
    sharded = net("cpu")
    fully_shard(sharded, mesh=mesh("cpu"))
    pair = dist.new_group([0, 1], backend="gloo")
    unequal = "of the (2 ranks of its process group 1|3 ranks of its process group 2) register it"
    for model, group, said in (
        (sharded, True, "0 replicate all of them"),
        (net("cpu"), pair if dist.get_rank() == 0 else True, unequal),
    ):
        before = bytes_of([*model.parameters()])
        with pytest.raises(RegistrationError, match=said):
            manager.register("actor", model, role="actor", replicated=group)
        assert bytes_of([*model.parameters()]) == before
        assert all(parameter.device.type == "cpu" for parameter in model.parameters())
    assert not manager.handles
    manager.close()
