"""The protocol between ranks, with ranks as threads over a store in memory, or one rank over a board on paper."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from placement.core import interrupts
from placement.core.errors import CoordinatorLost, GroupError
from placement.core.states import Plan, State
from placement.group import Board, Group, StoreGroup, protocol
from placement.group.protocol import MAX_BYTES, Basis, Decision, Proposal, Vote, abort
from placement.group.store import StoreBoard
from tests.group.manager_ranks import groups_of
from tests.support.boards import ForwardingBoard
from tests.support.threads import in_threads, on_all

PLAN = Plan({"actor": State.TRAINING, "ref": State.CPU_OFFLOADED})
OTHER = Plan({"actor": State.GPU_RESIDENT, "ref": State.CPU_OFFLOADED})
DEADLINE, GRACE = 3.0, 0.3  # seconds


def change(group: Group, budget_bytes: int = 100) -> int:
    """Returns the least budget."""
    least = group.propose("enter train", budget_bytes)
    group.agree(PLAN)
    return least.budget_bytes


def told(do: Callable[[], object]) -> dict[int, str]:
    """The failures of the `GroupError` that `do` raises."""
    with pytest.raises(GroupError) as caught:
        do()
    return caught.value.failures


def aborted(group: Group, error: BaseException, **keywords: Any) -> dict[int, str]:
    raised = group.abort(error, **keywords)
    assert raised is not None
    return raised.failures


# --- one decision for all


def test_keys_do_not_pile_up() -> None:
    store = dist.HashStore()

    def body(group: StoreGroup) -> None:
        for attempt in range(40):
            if attempt % 2:
                change(group)
            elif group.rank == 1:
                group.abort(ValueError("x"))
            else:
                told(lambda: group.propose("enter train", 1))

    assert on_all(groups_of(3, store=store), body) == [None] * 3
    assert store.num_keys() < 30


@pytest.mark.parametrize(("rank", "world_size", "deadline"), [(2, 2, 1.0), (-1, 2, 1.0), (0, 1, 0.0), (0, 1, -1.0)])
def test_plain_mistakes(rank: int, world_size: int, deadline: float) -> None:
    with pytest.raises(ValueError, match=r"rank|deadline_seconds"):
        StoreGroup(dist.HashStore(), rank, world_size, deadline)


# --- late


class Paper(Board):
    """A board in a dictionary, with a clock that only goes on while somebody waits."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.now = 0.0

    def put(self, key: str, value: bytes) -> None:
        self.values[key] = value

    def claim(self, key: str, value: bytes) -> bytes:
        return self.values.setdefault(key, value)

    def look(self, keys: Sequence[str]) -> list[bytes] | None:
        return [self.values[key] for key in keys] if set(keys) <= set(self.values) else None

    def wait(self, key: str, seconds: float) -> bytes | None:
        self.now += 0.0 if key in self.values else seconds
        return self.values.get(key)

    def remove(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.values.pop(key, None)

    def proposals(self, *ranks: int) -> None:
        for rank in ranks:
            self.put(f"placement/g0/e0/proposal/{rank}", Proposal(action="enter train", budget_bytes=1).encode())


@pytest.fixture
def paper(monkeypatch: pytest.MonkeyPatch) -> Paper:
    board = Paper()

    def sleep(seconds: float) -> None:
        board.now += seconds

    for module in (protocol, interrupts):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: board.now, sleep=sleep))
    return board


@pytest.mark.parametrize(("rank", "missing"), [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)])
def test_every_rank_gives_up_after_its_own_deadline_and_names_who_is_missing(rank: int, missing: int, paper: Paper) -> None:
    group = Group(paper, rank, 3, deadline_seconds=DEADLINE)
    paper.proposals(*({0, 1, 2} - {rank, missing}))
    assert told(lambda: group.propose("enter train", 1)) == {missing: "no proposal within 3 s"}
    assert paper.now < DEADLINE + 2 * GRACE  # for the decision, and for reasons that do not come


@pytest.mark.parametrize("what", ["basis", "decision"])
def test_rank_zero_is_named_where_everybody_else_has_spoken(what: str, paper: Paper) -> None:
    group = Group(paper, 1, 2, deadline_seconds=DEADLINE)
    paper.proposals(0)
    if what == "decision":
        paper.put("placement/g0/e0/basis", Basis(budget_bytes=1).encode())
        group.propose("enter train", 1)
        paper.put("placement/g0/e0/vote/0", Vote(digest=protocol.digest_of(PLAN)).encode())
    began = paper.now
    assert told(lambda: group.propose("enter train", 1) if what == "basis" else group.agree(PLAN)) == {0: "no answer within 3 s"}
    assert paper.now - began < DEADLINE + 3 * GRACE


def test_a_rank_that_comes_back_much_later_obeys_what_was_decided() -> None:
    """The others have ended many epochs by then: the one that it asks for must not have been forgotten."""
    store = dist.HashStore()
    is_reached, may_go_on = threading.Event(), threading.Event()

    class Gate(ForwardingBoard):
        def wait(self, key: str, seconds: float) -> bytes | None:
            if key.endswith("e0/decision"):
                is_reached.set()
                assert may_go_on.wait(30)
            return super().wait(key, seconds)

    first, second = (StoreGroup(store, rank, 3, 2.0) for rank in range(2))
    late = Group(Gate(StoreBoard(store)), 2, 3, deadline_seconds=2.0)

    def goes_on() -> int:
        change(first)
        assert is_reached.wait(30)
        for _ in range(6):
            first.abort(RuntimeError("the user's"))
        may_go_on.set()
        return 100

    assert in_threads(goes_on, lambda: change(second), lambda: change(late)) == [100] * 3, "rank 2 read another decision"


# --- reasons


def test_a_rank_that_fails_when_the_others_have_gone_on_names_itself_as_well() -> None:
    first, second = groups_of(2, deadline_seconds=1.0)
    assert aborted(first, ValueError("the quick one")) == {0: "ValueError: the quick one"}
    assert aborted(second, KeyError("the slow one")) == {0: "ValueError: the quick one", 1: "KeyError: 'the slow one'"}


def test_a_thousand_reasons_fit_into_one_message() -> None:
    decision = abort(dict.fromkeys(range(1000), "x" * 5000))
    assert len(decision.encode()) <= MAX_BYTES
    assert list(decision.failures) == [*range(1000)]
    group = StoreGroup(dist.HashStore(), 0, 5000, 0.05)
    assert list(told(lambda: change(group))) == [*range(1, 5000)]


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    "error",
    [Mute(), *map(ValueError, ("\udcff in a file's name", "\0" * 3000, "\u4e00" * 3000, '"' * 3000, "x" * 100_000))],
    ids=["mute", "surrogate", "zeros", "wide", "quotes", "long"],
)
def test_any_text_of_an_exception_reaches_the_others(error: Exception) -> None:
    first, second = groups_of(2, deadline_seconds=1.0)
    first.abort(error)
    assert told(lambda: change(second))[0].startswith(type(error).__name__)


# --- messages


def test_an_action_of_any_length_stays_different_from_others() -> None:
    long = "enter train only=" + ",".join(f"handle{number}" for number in range(3000))
    for one, other in ((long, f"{long},more"), ("enter \udcff", "enter \udcfe")):
        assert on_all(groups_of(2), lambda group: group.propose(one, 7).budget_bytes) == [7, 7]  # noqa: B023
        for failures in on_all(groups_of(2), lambda group: told(lambda: group.propose((one, other)[group.rank], 7))):  # noqa: B023
            assert len(failures) == 2


@pytest.mark.parametrize("nonsense", [b"{}", b"no json", b'{"action": "x", "budget_bytes": 1, "code": "y"}'])
def test_a_rank_that_is_not_understood_is_named(nonsense: bytes) -> None:
    groups = groups_of(2)
    groups[1]._board.put("placement/g0/e0/proposal/1", nonsense)
    assert told(lambda: change(groups[0]))[1].startswith("is not understood")


def test_two_processes_in_one_place_are_found_out() -> None:
    """Only a board that was written by hand can show it: COMMIT stands, and this rank has not voted."""
    group = groups_of(2)[1]
    group._board.claim("placement/g0/e0/decision", Decision(verdict="commit").encode())
    group.deadline_seconds = 0.05
    with pytest.raises(CoordinatorLost, match="another process uses its rank"):
        change(group)
    assert group.is_in_doubt


# --- interrupted, restarted, cut off


def test_a_restarted_rank_ends_the_open_epoch_also_when_the_last_one_was_ended_by_another() -> None:
    store = dist.HashStore()
    first, second = groups_of(2, store=store)
    aborted(first, ValueError("x"))  # epoch 0, which rank 1 has not heard of: rank 0 is at 1
    with pytest.raises(GroupError, match="was restarted"):
        StoreGroup(store, 1, 2, 5.0)
    assert told(lambda: change(first))[1].startswith("was restarted")
    assert second.epoch == 0
