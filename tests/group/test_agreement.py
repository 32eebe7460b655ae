"""The protocol between ranks, with ranks as threads over a store in memory."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from placement import Manager
from placement.core.errors import CoordinatorLost, GroupError
from placement.core.states import Plan, State
from placement.group import StoreGroup
from placement.group.agreement import Reached
from placement.group.base import BoardLost
from placement.group.messages import Stage
from placement.group.vote import GroupVote
from placement.testing import SimulatedDevice, assert_nothing_resident
from tests.support.threads import in_threads

PLAN = Plan({"actor": State.TRAINING, "ref": State.CPU_OFFLOADED})
OTHER = Plan({"actor": State.GPU_RESIDENT, "ref": State.CPU_OFFLOADED})


def together(world_size: int, body: Callable[[StoreGroup], Any], deadline_seconds: float = 5.0, store: Any = None) -> list[Any]:
    """`body(group)` on every rank; what each returned or raised, by rank."""
    store = dist.HashStore() if store is None else store
    return in_threads(*(lambda rank=rank: body(StoreGroup(store, rank, world_size, deadline_seconds)) for rank in range(world_size)))  # type: ignore[misc]


def change(group: StoreGroup, plan: Plan = PLAN, action: str = "enter train", budget_bytes: int = 100) -> int:
    budget = group.propose(action, budget_bytes)
    group.agree(plan)
    return budget


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_all_commit_with_the_least_budget(world_size: int) -> None:
    def body(group: StoreGroup) -> list[int]:
        return [change(group, budget_bytes=100 + (group.rank + epoch) % world_size) for epoch in range(5)]

    assert together(world_size, body) == [[100] * 5] * world_size


def test_another_plan_on_one_rank_is_named_and_the_next_change_works() -> None:
    def body(group: StoreGroup) -> tuple[str, int]:
        group.propose("enter train", 100)
        with pytest.raises(GroupError) as caught:
            group.agree(OTHER if group.rank == 1 else PLAN)
        assert caught.value.failures == {1: "has another plan"}
        return str(caught.value), change(group)

    for text, budget in together(3, body):
        assert "rank 1: has another plan" in text
        assert budget == 100


def test_another_action_is_refused_before_anything_moves() -> None:
    def body(group: StoreGroup) -> Any:
        with pytest.raises(GroupError) as caught:
            group.propose("leave train" if group.rank == 2 else "enter eval", 100)
        return dict(caught.value.failures), change(group)

    assert together(3, body) == [({0: "is about to enter eval", 2: "is about to leave train"}, 100)] * 3


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_one_ranks_failure_makes_every_rank_raise_and_names_it(failing: int) -> None:
    def body(group: StoreGroup) -> Any:
        group.propose("enter train", 100)
        if group.rank == failing:
            told = group.abort(MemoryError("no memory for the actor"))
            assert told is not None
        else:
            with pytest.raises(GroupError) as caught:
                group.agree(PLAN)
            told = caught.value
        return dict(told.failures), change(group)

    assert together(3, body) == [({failing: "MemoryError: no memory for the actor"}, 100)] * 3


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_rank_that_does_not_come_is_named_within_the_deadline(missing: int) -> None:
    def body(group: StoreGroup) -> Any:
        if group.rank == missing:
            return None
        with pytest.raises(GroupError) as caught:
            change(group)
        return caught.value.failures

    results = together(3, body, deadline_seconds=0.3)
    for rank, failures in enumerate(results):
        if rank != missing:
            assert list(failures) == [missing]


def test_a_failure_that_the_group_raised_is_not_told_again() -> None:
    def body(group: StoreGroup) -> Any:
        vote = GroupVote(group)
        vote.propose("enter train", lambda: 100)
        if group.rank == 0:
            told: Exception | None = vote.failed(ValueError("x"))
        else:
            with pytest.raises(GroupError) as caught:
                vote.agree(PLAN)
            told = caught.value
        assert told is not None
        assert vote.failed(told) is None
        assert vote.failed(pickle.loads(pickle.dumps(told))) is not None  # one that comes from elsewhere is news
        return group.epoch, change(group)

    assert together(2, body) == [(2, 100)] * 2


def test_a_restarted_rank_is_fenced_and_ends_the_open_epoch() -> None:
    store = dist.HashStore()
    restarted: list[Exception] = []

    def body(group: StoreGroup) -> Any:
        change(group)
        group.propose("enter eval", 100)
        if group.rank == 1:  # died here, and came back
            with pytest.raises(GroupError, match="rank 1 was restarted") as caught:
                StoreGroup(store, 1, 3, 5.0)
            restarted.append(caught.value)
            return None
        with pytest.raises(GroupError) as caught:
            group.agree(PLAN)
        return caught.value.failures

    results = together(3, body, store=store)
    assert len(restarted) == 1
    assert results[0] == results[2] == {1: "was restarted, and knows nothing of what the others hold"}
    assert together(3, lambda group: None, store=store)[0] is not None  # its place stays taken in this generation
    fresh = [StoreGroup(store, rank, 3, 5.0, generation=1) for rank in range(3)]
    assert [group.epoch for group in fresh] == [0, 0, 0]


class Silent(dist.HashStore):
    """A store that stops answering."""

    is_gone = False

    def check(self, keys: Any) -> Any:
        if Silent.is_gone:
            raise dist.DistNetworkError("the connection was closed")
        return super().check(keys)


def test_a_board_that_is_lost_leaves_the_rank_in_doubt() -> None:
    Silent.is_gone = False
    group = StoreGroup(Silent(), 0, 1, 0.5)
    group.propose("enter train", 100)
    Silent.is_gone = True
    with pytest.raises(CoordinatorLost, match="the prepared move is kept"):
        group.agree(PLAN)
    Silent.is_gone = False
    assert group.is_in_doubt
    with pytest.raises(CoordinatorLost, match="make the group anew"):
        group.propose("enter train", 100)
    assert group.abort(ValueError("anything")) is None


class LosesItsBoard(StoreGroup):
    """At the decision of a plan that wants nothing on the device."""

    def agree(self, plan: Plan, stage: Stage = "moved", lacks_engines: bool = False) -> Reached:
        Silent.is_gone = not any(map(plan.on_device, plan.targets))
        return super().agree(plan, stage, lacks_engines)


def test_a_rank_in_doubt_that_leaves_its_phase_keeps_nothing_on_the_device() -> None:
    """Everything was off the device when the decision was lost, and leaving had nothing to move."""
    Silent.is_gone = False
    manager = Manager(device=SimulatedDevice(1 << 20), group=LosesItsBoard(Silent(), 0, 1, 0.5))
    model = torch.nn.Linear(64, 64)
    manager.register("ref", model, role="ref")
    with pytest.raises(CoordinatorLost), manager.phase("log_prob") as phase:
        phase.switch("reward")
    assert_nothing_resident(manager)


def test_keys_do_not_pile_up() -> None:
    store = dist.HashStore()

    def body(group: StoreGroup) -> None:
        for _ in range(20):
            change(group)

    together(3, body, store=store)
    assert store.num_keys() < 60


@pytest.mark.parametrize(("rank", "world_size", "deadline"), [(2, 2, 1.0), (-1, 2, 1.0), (0, 1, 0.0), (0, 1, -1.0)])
def test_plain_mistakes(rank: int, world_size: int, deadline: float) -> None:
    with pytest.raises(ValueError, match=r"rank|deadline_seconds"):
        StoreGroup(dist.HashStore(), rank, world_size, deadline)


def test_what_is_no_message_is_refused() -> None:
    from placement.group.messages import MAX_BYTES, Decision, decode

    for value in (b"", b"{}", b'{"verdict": "maybe"}', b'{"verdict": "commit", "more": 1}', b" " * (MAX_BYTES + 1), b"\x80\x04K\x01."):
        with pytest.raises(ValueError, match=r"not a valid Decision|a message has"):
            decode(Decision, value)
    assert issubclass(BoardLost, Exception)
