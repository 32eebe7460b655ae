"""What ranks do to each other when one is late, interrupted, restarted or talks nonsense."""

from __future__ import annotations

import threading
import time
from itertools import count
from typing import Any

import pytest
import torch.distributed as dist

from placement.core.errors import CoordinatorLost, GroupError
from placement.core.states import Plan, State
from placement.group import Group, StoreGroup
from placement.group.base import Board
from placement.group.messages import MAX_BYTES, Decision, Proposal, abort, named
from placement.group.store import StoreBoard
from tests.support.boards import ForwardingBoard
from tests.support.threads import in_threads

PLAN = Plan({"actor": State.TRAINING})


def groups(world_size: int, deadline_seconds: float = 5.0, store: Any = None, generation: int = 0) -> list[StoreGroup]:
    store = dist.HashStore() if store is None else store
    return [StoreGroup(store, rank, world_size, deadline_seconds, generation=generation) for rank in range(world_size)]


def change(group: Group) -> int:
    group.propose("enter train", 1)
    group.agree(PLAN)
    return group.epoch


class Gate(ForwardingBoard):
    """A board that holds one rank back when it first waits for a key: a process that is stopped there."""

    def __init__(self, board: Board, name: str) -> None:
        super().__init__(board)
        self._name = name
        self.is_reached, self.may_go_on = threading.Event(), threading.Event()

    def wait(self, key: str, seconds: float) -> bytes | None:
        if key.endswith(self._name):
            self.is_reached.set()
            assert self.may_go_on.wait(30)
        return super().wait(key, seconds)


def test_a_rank_that_comes_back_much_later_obeys_what_was_decided() -> None:
    """The others have ended many epochs by then: the one that it asks for must not have been forgotten."""
    store = dist.HashStore()
    first, second = (StoreGroup(store, rank, 3, 5.0) for rank in range(2))
    gate = Gate(StoreBoard(store), "e0/decision")
    late = Group(gate, 2, 3, deadline_seconds=5.0)

    def goes_on() -> list[str]:
        change(first)
        assert gate.is_reached.wait(30)
        ended = [first.abort(RuntimeError("the user's")) for _ in range(6)]
        gate.may_go_on.set()
        return [str(each) for each in ended]

    ended, entered, much_later = in_threads(goes_on, lambda: change(second), lambda: change(late))
    assert len(ended) == 6
    assert entered == 1
    assert much_later == 1, "rank 2 read another decision than the others"


@pytest.mark.parametrize("interrupted", [0, 1, 2])
def test_an_interrupt_after_the_vote_ends_the_next_change(interrupted: int) -> None:
    """COMMIT may stand by then: the others have entered, and must not believe that this rank has."""
    ranks = groups(3)
    voted = threading.Event()

    class Interrupting(StoreBoard):
        def wait(self, key: str, seconds: float) -> bytes | None:
            if key.endswith("decision"):
                assert super().wait(key, 30) is not None
                raise KeyboardInterrupt
            return super().wait(key, seconds)

    group = ranks[interrupted]
    group._board = Interrupting(group._board._store)  # type: ignore[attr-defined]

    def is_interrupted() -> Any:
        group.propose("enter train", 1)
        try:
            group.agree(PLAN)
        except KeyboardInterrupt as error:
            voted.set()
            told = group.abort(error)
            assert told is not None
            return group.epoch, dict(told.failures)
        return "not interrupted"

    def another(rank: Group) -> Any:
        entered = change(rank)
        assert voted.wait(30)
        with pytest.raises(GroupError) as caught:
            change(rank)
        return entered, rank.epoch, dict(caught.value.failures)

    results = in_threads(*(is_interrupted if each is group else (lambda each=each: another(each)) for each in ranks))  # type: ignore[misc]
    reason = {interrupted: "KeyboardInterrupt: "}
    for rank, result in enumerate(results):
        assert result == ((2, reason) if rank == interrupted else (1, 2, reason))


@pytest.mark.parametrize("silent", [1, 2])
@pytest.mark.parametrize("step", ["propose", "agree"])
def test_who_gives_up_first_names_the_rank_that_is_missing(silent: int, step: str) -> None:
    """Not rank 0, although a rank that is neither waits for what rank 0 writes."""
    ranks = groups(3, deadline_seconds=0.3)
    ranks[0].deadline_seconds = 3.0  # the other one gives up before

    def body(group: Group) -> Any:
        if group.rank == silent and step == "propose":
            return None
        group.propose("enter train", 1)
        if group.rank == silent:
            return None
        group.agree(PLAN)
        return None

    for rank, error in enumerate(in_threads(*(lambda group=group: body(group) for group in ranks))):  # type: ignore[misc]
        if rank != silent:
            assert isinstance(error, GroupError)
            assert list(error.failures) == [silent]
            assert ("no proposal" if step == "propose" else "no vote") in str(error)


def test_a_rank_zero_that_never_answers_is_named() -> None:
    ranks = groups(2, deadline_seconds=0.2)
    ranks[0]._board.put("placement/g0/e0/proposal/0", Proposal(action="enter train", budget_bytes=1).encode())
    with pytest.raises(GroupError, match=r"rank 0: no answer within 0\.2 s"):
        change(ranks[1])


def test_two_generations_at_once_do_not_hear_each_other() -> None:
    store = dist.HashStore()
    old, new = groups(2, store=store), groups(2, store=store, generation=1)
    told = old[0].abort(ValueError("in the old one"))
    assert told is not None
    assert in_threads(*(lambda group=group: change(group) for group in new)) == [1, 1]  # type: ignore[misc]
    with pytest.raises(GroupError, match="in the old one"):
        change(old[1])
    assert in_threads(*(lambda group=group: change(group) for group in [*old, *new])) == [2, 2, 2, 2]  # type: ignore[misc]


def test_a_restarted_rank_ends_the_open_epoch_also_when_the_last_one_was_ended_by_another() -> None:
    store = dist.HashStore()
    first, second = groups(2, store=store)
    assert first.abort(ValueError("x")) is not None  # epoch 0, which rank 1 has not heard of: rank 0 is at 1
    with pytest.raises(GroupError, match="was restarted"):
        StoreGroup(store, 1, 2, 5.0)
    with pytest.raises(GroupError, match="was restarted"):
        change(first)
    assert second.epoch == 0


@pytest.mark.parametrize("jump_seconds", [-86_400.0, 86_400.0])
def test_a_wall_clock_that_jumps_changes_no_deadline(jump_seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at it is a day from the last: deadlines neither pass at once nor stay away."""
    begin, steps = time.time(), count()
    monkeypatch.setattr(time, "time", lambda: begin + jump_seconds * next(steps))
    ranks = groups(3, deadline_seconds=5.0)

    def late(group: Group) -> int:
        time.sleep(0.1)  # so that the others wait and look at their clocks
        return change(group)

    assert in_threads(lambda: change(ranks[0]), lambda: change(ranks[1]), lambda: late(ranks[2])) == [1, 1, 1]
    for rank in ranks[:2]:
        rank.deadline_seconds = 0.2
    for error in in_threads(lambda: change(ranks[0]), lambda: change(ranks[1])):
        assert isinstance(error, GroupError)
        assert list(error.failures) == [2]


def test_a_thousand_missing_ranks_fit_into_the_decision() -> None:
    decision = abort(dict.fromkeys(range(1000), "x" * 5000))
    assert len(decision.encode()) <= MAX_BYTES
    assert len(decision.failures) + decision.unnamed == 1000
    group = StoreGroup(dist.HashStore(), 0, 5000, 0.05)
    with pytest.raises(GroupError, match=r"and [0-9,]+ more ranks") as caught:
        change(group)
    assert 1 in caught.value.failures


@pytest.mark.parametrize("text", ["\udcff in a file's name", "\0" * 3000, "\u4e00" * 3000, '"' * 3000, "x" * 100_000])
def test_any_text_of_an_exception_reaches_the_others(text: str) -> None:
    first, second = groups(2)
    assert first.abort(ValueError(text)) is not None
    with pytest.raises(GroupError, match="rank 0: ValueError") as caught:
        change(second)
    assert list(caught.value.failures) == [0]


def test_an_exception_without_a_text_reaches_the_others() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    first, second = groups(2)
    assert first.abort(Mute()) is not None
    with pytest.raises(GroupError, match="rank 0: Mute"):
        change(second)


def test_an_action_of_any_length_stays_different_from_others() -> None:
    long = "enter train only=" + ",".join(f"handle{number}" for number in range(300))
    assert named(long) == named(long)
    assert named(long) != named(long + ",more")
    assert named("enter \udcff") != named("enter \udcfe")
    assert named("enter train") == "enter train"
    ranks = groups(2)
    assert in_threads(*(lambda group=group: group.propose(long, 7) for group in ranks)) == [7, 7]  # type: ignore[misc]


@pytest.mark.parametrize("nonsense", [b"{}", b"no json", b'{"action": "x", "budget_bytes": 1, "code": "y"}'])
def test_a_rank_that_is_not_understood_is_named(nonsense: bytes) -> None:
    ranks = groups(2)

    ranks[1]._board.put("placement/g0/e0/proposal/1", nonsense)
    (first,) = in_threads(lambda: change(ranks[0]))
    assert isinstance(first, GroupError)
    assert list(first.failures) == [1]
    assert "is not understood" in str(first)


def test_two_processes_in_one_place_are_found_out() -> None:
    """Only a board that was written by hand can show it: COMMIT stands, and this rank has not voted."""
    group = groups(2)[1]
    group._board.claim("placement/g0/e0/decision", Decision(verdict="commit").encode())
    group.deadline_seconds = 0.05
    with pytest.raises(CoordinatorLost, match="another process uses its rank"):
        change(group)
    assert group.is_in_doubt
