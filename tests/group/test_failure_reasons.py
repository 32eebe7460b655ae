"""Who is named when ranks do not change together, with which reason, and how long anybody waits to learn that."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch import nn

from placement import Manager
from placement.core.errors import GroupError
from placement.core.states import Plan, State
from placement.group import Board, BoardLost, Group, StoreGroup, agreement, reasons
from placement.group.messages import MAX_BYTES, Basis, Decision, Failures, Outcome, Proposal, Vote, decode, gathered
from placement.testing import SimulatedDevice, assert_nothing_resident
from tests.group.manager_ranks import Join, Rank, joining, on_all, ranks_of
from tests.support.threads import in_threads

PLAN = Plan({"actor": State.TRAINING})
DEADLINE = 3.0


class Paper(Board):
    """A board in a dictionary, with a clock that only goes on while somebody waits."""

    def __init__(self, values: dict[str, bytes]) -> None:
        self.values = values
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


@pytest.fixture
def paper(monkeypatch: pytest.MonkeyPatch) -> Paper:
    board = Paper({})

    def sleep(seconds: float) -> None:
        board.now += seconds

    clock = SimpleNamespace(monotonic=lambda: board.now, sleep=sleep)
    monkeypatch.setattr(agreement, "time", clock)
    monkeypatch.setattr(reasons, "time", clock)
    return board


def proposes(paper: Paper, *ranks: int) -> None:
    for rank in ranks:
        paper.put(f"placement/g0/e0/proposal/{rank}", Proposal(action="enter train", budget_bytes=1).encode())


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("missing", [0, 1, 2])
def test_every_rank_gives_up_after_its_own_deadline_and_names_who_is_missing(rank: int, missing: int, paper: Paper) -> None:
    if rank == missing:
        return
    group = Group(paper, rank, 3, deadline_seconds=DEADLINE)
    proposes(paper, *({0, 1, 2} - {rank, missing}))
    with pytest.raises(GroupError) as caught:
        group.propose("enter train", 1)
    assert caught.value.failures == {missing: "no proposal within 3 s"}
    assert paper.now < DEADLINE + 2 * group._grace_seconds  # for the decision, and for reasons that do not come


def test_a_rank_zero_that_comes_after_the_deadline_finds_the_change_given_up(paper: Paper) -> None:
    first, second = (Group(paper, rank, 2, deadline_seconds=DEADLINE) for rank in range(2))
    for group in (second, first):
        with pytest.raises(GroupError) as caught:
            group.propose("enter train", 1)
        assert list(caught.value.failures) == [0]
    assert paper.now < 1.5 * DEADLINE


@pytest.mark.parametrize("what", ["basis", "decision"])
def test_rank_zero_is_named_where_everybody_else_has_spoken(what: str, paper: Paper) -> None:
    group = Group(paper, 1, 2, deadline_seconds=DEADLINE)
    proposes(paper, 0)
    if what == "decision":
        paper.put("placement/g0/e0/basis", Basis(budget_bytes=1).encode())
        group.propose("enter train", 1)
        paper.put("placement/g0/e0/vote/0", Vote(digest=agreement.digest_of(PLAN)).encode())
    began = paper.now
    with pytest.raises(GroupError) as caught:
        group.propose("enter train", 1) if what == "basis" else group.agree(PLAN)
    assert caught.value.failures == {0: "no answer within 3 s"}
    assert paper.now - began < DEADLINE + 3 * group._grace_seconds


def test_a_basis_that_is_written_in_the_last_moment_counts(paper: Paper) -> None:
    class Late(Paper):
        def wait(self, key: str, seconds: float) -> bytes | None:
            found = super().wait(key, seconds)
            if key.endswith("basis"):  # for the next look
                self.values.setdefault(key, Basis(budget_bytes=7).encode())
            return found

    board = Late(paper.values)
    group = Group(board, 1, 2, deadline_seconds=DEADLINE)
    proposes(paper, 0)
    assert group.propose("enter train", 9) == 7


# --- reasons


@pytest.fixture
def join() -> Join:
    return joining()


@pytest.mark.parametrize("failing", [(0, 1, 2), (0, 2), (1, 2), (1,)])
def test_every_rank_that_fails_is_named_with_its_own_reason_on_all_ranks(failing: tuple[int, ...], join: Join) -> None:
    groups = in_threads(*(lambda rank=rank: join(rank, 3, 30.0, 0) for rank in range(3)))  # type: ignore[misc]
    at_once = threading.Barrier(len(failing))

    def body(group: Group) -> dict[int, str]:
        group.propose("enter train", 100)
        if group.rank not in failing:
            with pytest.raises(GroupError) as caught:
                group.agree(PLAN)
            return caught.value.failures
        at_once.wait(30)
        told = group.abort(ValueError(f"of rank {group.rank}"))
        assert told is not None
        return told.failures

    found = in_threads(*(lambda group=group: body(group) for group in groups))  # type: ignore[misc]
    assert found == [{rank: f"ValueError: of rank {rank}" for rank in failing}] * 3


def test_a_rank_that_fails_when_the_others_have_gone_on_names_itself_as_well() -> None:
    store = dist.HashStore()
    first, second = (StoreGroup(store, rank, 2, 1.0) for rank in range(2))
    quick = first.abort(ValueError("the quick one"))
    slow = second.abort(KeyError("the slow one"))
    assert quick is not None
    assert slow is not None
    assert quick.failures == {0: "ValueError: the quick one"}
    assert slow.failures == {0: "ValueError: the quick one", 1: "KeyError: 'the slow one'"}


@pytest.mark.parametrize("dead", [0, 1, 2])
def test_a_rank_that_is_dead_costs_the_others_a_moment_and_no_deadline(dead: int, paper: Paper) -> None:
    """They are heard one after the other, so that each of them waits for the others in vain."""
    groups = [Group(paper, rank, 3, deadline_seconds=100.0) for rank in range(3) if rank != dead]
    proposes(paper, 0, 1, 2)
    for group in groups:
        told = group.abort(ValueError(f"of rank {group.rank}"))
        assert told is not None
        assert list(told.failures) == sorted({groups[0].rank, group.rank})
    assert paper.now < 5.0


def test_a_board_that_is_lost_while_reasons_are_gathered_changes_nothing_in_the_decision() -> None:
    class Fails(Paper):
        def look(self, keys: Sequence[str]) -> list[bytes] | None:
            if any("outcome" in key for key in keys):
                raise BoardLost("gone")
            return super().look(keys)

    group = Group(Fails({}), 0, 2, deadline_seconds=0.1)
    told = group.abort(ValueError("x"))
    assert told is not None
    assert told.failures == {0: "ValueError: x"}
    assert group.epoch == 1
    assert not group.is_in_doubt


def test_reasons_that_are_no_message_are_named_and_long_ones_fit() -> None:
    board = Paper({"placement/g0/e0/outcome/1": b"no json"})
    group = Group(board, 0, 2, deadline_seconds=0.1)
    told = group.abort(ValueError("x"))
    assert told is not None
    assert told.failures[1].startswith("is not understood")
    many = gathered(dict.fromkeys(range(1000), "x" * 5000))
    assert len(many.encode()) <= MAX_BYTES
    assert len(many.failures) + many.unnamed == 1000
    for value in (b"{}", b'{"failures": {}, "more": 1}', b'{"failures": {"x": "y"}}'):
        with pytest.raises(ValueError, match="not a valid Failures"):
            decode(Failures, value)
    with pytest.raises(ValueError, match="not a valid Outcome"):
        decode(Outcome, b'{"reason": 1}')
    with pytest.raises(ValueError, match="not a valid Decision"):
        decode(Decision, b'{"verdict": "abort", "missed": 3}')


def test_keys_of_epochs_that_failed_are_forgotten() -> None:
    store = dist.HashStore()
    groups = [StoreGroup(store, rank, 3, 1.0) for rank in range(3)]

    def body(group: Group) -> None:
        for _ in range(20):
            if group.rank == 1:
                group.abort(ValueError("x"))
            else:
                with pytest.raises(GroupError):
                    group.propose("enter train", 1)
        group.propose("enter train", 1)
        group.agree(PLAN)

    assert in_threads(*(lambda group=group: body(group) for group in groups)) == [None] * 3  # type: ignore[misc]
    assert store.num_keys() < 20


# --- budgets


class Small:
    """A rank of three with a budget or a device of its own."""

    def __init__(self, group: Group, how: str, nbytes: int | None, rows: int = 1024) -> None:
        capacity = nbytes if how == "device" and nbytes is not None else 1 << 28
        self.manager = Manager(device=SimulatedDevice(capacity), budget_bytes=nbytes if how == "budget" else None, group=group)
        self.models = {name: nn.Linear(1024, rows, bias=False) for name in ("actor", "ref")}
        for name, model in self.models.items():
            self.manager.register(name, model, role=name)

    def told(self) -> GroupError:
        with pytest.raises(GroupError) as caught, self.manager.phase("log_prob"):
            pass
        assert_nothing_resident(self.manager)
        return caught.value


@pytest.mark.parametrize("how", ["budget", "device"])
@pytest.mark.parametrize("small", [0, 2])
def test_the_rank_whose_memory_is_short_is_named_with_its_number(how: str, small: int, join: Join) -> None:
    groups = in_threads(*(lambda rank=rank: join(rank, 3, 30.0, 0) for rank in range(3)))  # type: ignore[misc]
    ranks = [Small(group, how, 6 << 20 if rank == small else None) for rank, group in enumerate(groups)]
    for _ in range(5):
        for told in in_threads(*(lambda rank=rank: rank.told() for rank in ranks)):  # type: ignore[misc]
            assert list(told.failures) == [small]
            number = 6 << 20 if how == "budget" else int((6 << 20) * 0.8)
            assert f"{number:,} bytes" in told.failures[small]
            assert "raise budget_bytes" in told.failures[small]


def test_a_budget_that_is_enough_for_its_own_rank_alone_is_named_too() -> None:
    """Rank 0 has little, and needs little; rank 1 needs more than that."""
    store = dist.HashStore()
    groups = [StoreGroup(store, rank, 2, 30.0) for rank in range(2)]
    ranks = [Small(groups[0], "budget", 6 << 20, rows=256), Small(groups[1], "budget", None)]
    for told in in_threads(*(lambda rank=rank: rank.told() for rank in ranks)):  # type: ignore[misc]
        assert list(told.failures) == [0]
        assert "has a budget of 6.0 MiB (6,291,456 bytes), and phase 'log_prob' needs 8.0 MiB" in told.failures[0]


def test_ranks_with_the_same_budget_speak_each_for_itself() -> None:
    store = dist.HashStore()
    groups = [StoreGroup(store, rank, 2, 30.0) for rank in range(2)]
    ranks = [Small(group, "budget", 6 << 20) for group in groups]
    for told in in_threads(*(lambda rank=rank: rank.told() for rank in ranks)):  # type: ignore[misc]
        assert [reason.partition(":")[0] for reason in told.failures.values()] == ["DeviceMemoryError"] * 2


def test_three_ranks_whose_moves_fail_differently(join: Join) -> None:
    """Past the proposals: no memory from the driver, a policy that fails, and a copy that fails."""
    ranks = ranks_of(join, 3)
    ranks[0].faults.fail("create")
    ranks[1].policy.fails_in = "train"
    ranks[2].faults.fail("copy")
    for failures in on_all(ranks, lambda rank: rank.failures(lambda: rank.manager.enter("train"))):
        assert [reason.partition(":")[0] for _, reason in sorted(failures.items())] == ["DeviceMemoryError", "PolicyError", "InjectedFault"]
    assert on_all(ranks, Rank.step) == ["done"] * 3
    assert len({rank.group.epoch for rank in ranks}) == 1
