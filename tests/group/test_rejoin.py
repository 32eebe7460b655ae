"""Groups that are made anew: after a rank was restarted, and after a decision that could not be read."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from multiprocessing.connection import wait
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from placement import Manager, State
from placement.core.errors import CoordinatorLost, GroupError, PhaseError
from placement.core.states import Plan
from placement.group import BoardLost, StoreGroup
from placement.group.agreement import Reached
from placement.group.messages import Stage
from placement.group.store import StoreBoard
from placement.testing import SimulatedDevice, assert_nothing_resident
from tests.group import rejoin_worker, replicated_worker
from tests.group.manager_ranks import Rank, joining, on_all, ranks_of
from tests.group.services import StoreService
from tests.support.forked import processes
from tests.support.ranks import Ranks
from tests.support.threads import in_threads

DEADLINE_SECONDS = 20.0
HANG_SECONDS = 60.0
_generations = itertools.count(5000)


class Process:
    """One rank, in a process."""

    def __init__(self, service: StoreService, rank: int, world_size: int) -> None:
        self._connection, theirs = processes.Pipe()
        arguments = (theirs, service.join, service.address, rank, world_size, DEADLINE_SECONDS)
        self.process: Any = processes.Process(target=rejoin_worker.serve, args=arguments, daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, name: str, *arguments: Any) -> None:
        self._connection.send((name, arguments))

    def hear(self) -> Any:
        assert wait([self._connection], HANG_SECONDS), "a rank hangs"
        return self._connection.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


def tell(ranks: list[Process], name: str, *arguments: Any) -> list[Any]:
    """All of them at once, and what each answers."""
    for rank in ranks:
        rank.ask(name, *arguments)
    return [rank.hear() for rank in ranks]


@pytest.fixture
def service() -> Iterator[StoreService]:
    made = StoreService()
    yield made
    made.close()


@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_that_was_killed_and_restarted_goes_on_with_the_others(killed: int, service: StoreService) -> None:
    world_size = 3
    ranks = [Process(service, rank, world_size) for rank in range(world_size)]
    try:
        assert tell(ranks, "begin", 0) == ["joined"] * world_size
        assert tell(ranks, "step") == ["done"] * world_size
        assert tell(ranks, "enter") == ["entered"] * world_size
        ranks[killed].kill()
        others = [rank for number, rank in enumerate(ranks) if number != killed]
        for rank in others:
            rank.ask("leave")
        ranks[killed] = Process(service, killed, world_size)
        (told,) = tell([ranks[killed]], "begin", 0)
        assert told.startswith(f"rank {killed} was restarted: its place is taken")
        assert "pass it to manager.rejoin(group)" in told
        for rank in others:
            told = rank.hear()
            assert f"rank {killed}: was restarted" in told
            assert "pass it to manager.rejoin(group)" in told
        trained = tell(others, "weights")
        for rank in others:
            rank.ask("rejoin", 1)
        assert tell([ranks[killed]], "begin", 1) == ["joined"]
        assert [rank.hear() for rank in others] == [0, 0]
        assert tell(others, "weights") == trained
        for _ in range(2):
            assert tell(ranks, "step") == ["done"] * world_size
    finally:
        for rank in ranks:
            rank.kill()


class Cut(StoreBoard):
    """A board that one rank cannot reach for a while."""

    is_cut = False

    def look(self, keys: Any) -> Any:
        if self.is_cut:
            raise BoardLost("the cable is out")
        return super().look(keys)


class CutAtTheDecision(StoreGroup):
    """After its vote."""

    def agree(self, plan: Plan, stage: Stage = "moved", lacks_engines: bool = False) -> Reached:
        self._board.__class__, self._board.is_cut = Cut, True  # type: ignore[attr-defined, assignment]
        return super().agree(plan, stage, lacks_engines)


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
    again = in_threads(*(lambda rank=rank: StoreGroup(store, rank, 2, 30.0, generation=1) for rank in range(2)))  # type: ignore[misc]
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


def test_a_group_that_is_in_doubt_is_none_to_go_on_with() -> None:
    rank = Rank(CutAtTheDecision(dist.HashStore(), 0, 1, 0.5))
    with pytest.raises(CoordinatorLost):
        rank.manager.enter("train")
    with pytest.raises(ValueError, match="is unusable"):
        rank.manager.rejoin(rank.group)


def test_a_replicated_handle_is_loaded_by_all_ranks_together_in_the_new_group() -> None:
    ranks = Ranks(2)
    try:
        for crossed, alone, nbytes in ranks.run(replicated_worker.rejoins, next(_generations)):
            assert alone is None
            assert [bytes_ < 0.6 * nbytes for bytes_ in crossed] == [True, True]
    finally:
        ranks.close()


def test_a_replicated_handle_whose_group_has_other_ranks_is_loaded_alone_and_says_so() -> None:
    ranks = Ranks(2)
    try:
        for crossed, alone, nbytes in ranks.run(replicated_worker.rejoins_alone, next(_generations)):
            assert alone == "the group was made anew with other ranks"
            assert crossed[0] < 0.6 * nbytes <= crossed[1]
    finally:
        ranks.close()


def test_ranks_that_are_apart_go_on_together_in_a_new_generation() -> None:
    """One has left the others in the middle of a change, and every epoch and note of the old group is void."""
    join = joining()
    ranks = ranks_of(join, 2)
    assert on_all(ranks, Rank.step) == ["done", "done"]
    ranks[0].group.abort(ValueError("of the old group"), waits=False)
    for rank, group in zip(ranks, in_threads(lambda: join(0, 2, 30.0, 1), lambda: join(1, 2, 30.0, 1)), strict=True):
        rank.group = group
        rank.manager.rejoin(group)
    assert on_all(ranks, Rank.step) == ["done", "done"]
    assert [rank.group.epoch for rank in ranks] == [3, 3]
