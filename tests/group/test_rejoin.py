"""Groups that are made anew: after a rank was restarted, and after a decision that could not be read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from placement import Manager, State
from placement.core.errors import CoordinatorLost, GroupError, PhaseError, PlacementError
from placement.core.states import Plan
from placement.group import BoardLost, StoreGroup
from placement.group.protocol import Decision
from placement.group.store import StoreBoard
from placement.testing import SimulatedDevice, assert_nothing_resident
from tests.group.fault_worker import join_store
from tests.group.manager_ranks import Rank
from tests.group.processes import Processes, StoreService
from tests.support.threads import in_threads, on_all

DEADLINE_SECONDS = 20.0
WORLD = 3


class Member:
    """A rank in a process of its own."""

    def __init__(self, port: int, number: int, generation: int) -> None:
        self._place = port, number, WORLD, DEADLINE_SECONDS
        self.rank = Rank(join_store(*self._place, generation))

    def rejoin(self, generation: int) -> int:
        self.rank.group = join_store(*self._place, generation)
        self.rank.manager.rejoin(self.rank.group)
        assert_nothing_resident(self.rank.manager)
        return self.rank.group.epoch

    def step(self) -> str:
        return self.rank.step()

    def enter(self) -> None:
        self.rank.manager.enter("train")

    def leave(self) -> str:
        try:
            self.rank.manager.leave()
        except PlacementError as error:
            return str(error)
        return "left"

    def weights(self) -> bytes:
        """Of the actor and its optimizer, wherever they are."""
        state = self.rank.manager.handles["adam"].state_dict()["state"]
        moments = b"".join(state[key]["exp_avg"].numpy().tobytes() for key in sorted(state))
        return self.rank.actor.weight.detach().numpy().tobytes() + moments


@pytest.fixture
def service() -> Iterator[StoreService]:
    made = StoreService()
    yield made
    made.kill()


@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_that_was_killed_and_restarted_goes_on_with_the_others(killed: int, service: StoreService, processes: Processes) -> None:
    ranks = [processes.start(Member, service.port, rank, 0) for rank in range(WORLD)]

    def tell(ranks: list[Any], method: str, *arguments: Any) -> list[Any]:
        """All of them at once, and what each answers."""
        for rank in ranks:
            rank.begin(method, *arguments)
        return [rank.answer() for rank in ranks]

    assert tell(ranks, "step") == ["done"] * WORLD
    tell(ranks, "enter")
    ranks[killed].kill()
    others = [rank for number, rank in enumerate(ranks) if number != killed]
    for rank in others:
        rank.begin("leave")
    with pytest.raises(GroupError, match=rf"rank {killed} was restarted: its place is taken.*pass it to manager.rejoin\(group\)"):
        processes.start(Member, service.port, killed, 0)
    for rank in others:
        told = rank.answer()
        assert f"rank {killed}: was restarted" in told
        assert "pass it to manager.rejoin(group)" in told
    trained = tell(others, "weights")
    for rank in others:
        rank.begin("rejoin", 1)
    ranks[killed] = processes.start(Member, service.port, killed, 1)
    assert [rank.answer() for rank in others] == [0, 0]
    assert tell(others, "weights") == trained
    for _ in range(2):
        assert tell(ranks, "step") == ["done"] * WORLD


class Cut(StoreBoard):
    """A board that one rank cannot reach for a while."""

    is_cut = False

    def look(self, keys: Any) -> Any:
        if self.is_cut:
            raise BoardLost("the cable is out")
        return super().look(keys)


class CutAtTheDecision(StoreGroup):
    """After its vote, or only after one for a plan that wants nothing on the device."""

    only_empty = False

    def agree(self, plan: Plan, *stage: Any) -> Decision:
        is_cut = not (self.only_empty and any(map(plan.on_device, plan.targets)))
        self._board.__class__, self._board.is_cut = Cut, is_cut  # type: ignore[attr-defined, assignment]
        return super().agree(plan, *stage)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_rank_that_has_not_heard_a_decision_goes_on_in_a_new_group(lost: int) -> None:
    store = dist.HashStore()
    ranks = [Rank((CutAtTheDecision if rank == lost else StoreGroup)(store, rank, 2, 1.0)) for rank in range(2)]

    def body(rank: Rank) -> str:
        try:
            rank.steps()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "done"

    found = on_all(ranks, body)
    assert found[lost].startswith("CoordinatorLost")
    assert "the prepared move is kept" in found[lost]
    assert "pass it to manager.rejoin(group)" in found[lost]
    assert found[1 - lost].startswith("GroupError")
    assert ranks[lost].manager.handles["actor"].state is State.GPU_RESIDENT  # prepared, and not decided
    assert "manager.rejoin" in body(ranks[lost])
    again = on_all(range(2), lambda rank: StoreGroup(store, rank, 2, 30.0, generation=1))
    for rank, group in zip(ranks, again, strict=True):
        rank.group = group
        rank.manager.rejoin(group)
        assert_nothing_resident(rank.manager)
        rank.manager.check_integrity()
    assert on_all(ranks, Rank.step) == ["done", "done"]


def test_what_is_kept_on_the_device_stays_there() -> None:
    rank = Rank(StoreGroup(dist.HashStore(), 0, 1, 5.0))
    with rank.manager.phase("log_prob") as phase:
        phase.keep("ref")
    rank.manager.rejoin(StoreGroup(dist.HashStore(), 0, 1, 5.0))
    assert rank.manager.handles["ref"].state is State.GPU_RESIDENT


def test_where_it_cannot_be_done_the_old_group_stays() -> None:
    store = dist.HashStore()
    rank = Rank(StoreGroup(store, 0, 1, 5.0))
    anew = StoreGroup(store, 0, 1, 5.0, generation=1)
    with rank.manager.phase("train"), pytest.raises(PhaseError, match=r"phase 'train' is open; leave it before rejoin\(\)"):
        rank.manager.rejoin(anew)
    with pytest.raises(ValueError, match="group must be"):
        rank.manager.rejoin("ranks")  # type: ignore[arg-type]
    assert (rank.step(), anew.epoch) == ("done", 0)


def test_managers_that_were_alone_join_their_first_group() -> None:
    store = dist.HashStore()
    managers = [Manager(device=SimulatedDevice(1 << 20)) for _ in range(2)]
    for manager in managers:
        manager.register("actor", nn.Linear(4, 4), role="actor")
        with manager.phase("log_prob"):
            pass

    def begin(rank: int) -> str:
        managers[rank].rejoin(StoreGroup(store, rank, 2, 10.0))
        with managers[rank].phase("log_prob" if rank else "train"):
            return "entered"

    for error in in_threads(lambda: begin(0), lambda: begin(1)):
        assert isinstance(error, GroupError)
        assert "train" in str(error)


def test_a_rank_in_doubt_that_leaves_its_phase_keeps_nothing_on_the_device() -> None:
    """Everything was off the device when the decision was lost, and leaving had nothing to move."""
    rank = Rank(CutAtTheDecision(dist.HashStore(), 0, 1, 0.5))
    rank.group.only_empty = True  # type: ignore[attr-defined]
    with pytest.raises(CoordinatorLost), rank.manager.phase("log_prob") as phase:
        phase.switch("reward")
    assert_nothing_resident(rank.manager)
    assert rank.group.abort(ValueError("anything")) is None


def test_a_group_that_is_in_doubt_is_none_to_go_on_with() -> None:
    rank = Rank(CutAtTheDecision(dist.HashStore(), 0, 1, 0.5))
    with pytest.raises(CoordinatorLost):
        rank.manager.enter("train")
    with pytest.raises(ValueError, match="is unusable"):
        rank.manager.rejoin(rank.group)
