"""The protocol between ranks, with ranks as threads over a store in memory, or one rank over a
board on paper.

And a torch store as the board of a group: what it does, and what it does when it does not answer.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from placement.core import interrupts
from placement.core.errors import CoordinatorLost, GroupError
from placement.core.states import Plan, State
from placement.group import Board, BoardLost, Group, StoreGroup, from_environment, protocol
from placement.group.protocol import MAX_BYTES, Basis, Decision, Proposal, Vote, abort
from placement.group.store import StoreBoard
from tests.group.manager_ranks import groups_of
from tests.group.processes import Processes, StoreService
from tests.support.boards import ForwardingBoard
from tests.support.threads import in_threads, on_all

PLAN = Plan({"actor": State.TRAINING, "ref": State.CPU_OFFLOADED})
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


@pytest.mark.parametrize(
    ("rank", "world_size", "deadline"), [(2, 2, 1.0), (-1, 2, 1.0), (0, 1, 0.0), (0, 1, -1.0)]
)
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
            self.put(
                f"placement/g0/e0/proposal/{rank}",
                Proposal(action="enter train", budget_bytes=1).encode(),
            )


@pytest.fixture
def paper(monkeypatch: pytest.MonkeyPatch) -> Paper:
    board = Paper()

    def sleep(seconds: float) -> None:
        board.now += seconds

    for module in (protocol, interrupts):
        monkeypatch.setattr(
            module, "time", SimpleNamespace(monotonic=lambda: board.now, sleep=sleep)
        )
    return board


@pytest.mark.parametrize(("rank", "missing"), [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)])
def test_every_rank_gives_up_after_its_own_deadline_and_names_who_is_missing(
    rank: int, missing: int, paper: Paper
) -> None:
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
    assert told(
        lambda: group.propose("enter train", 1) if what == "basis" else group.agree(PLAN)
    ) == {0: "no answer within 3 s"}
    assert paper.now - began < DEADLINE + 3 * GRACE


def test_a_rank_that_comes_back_much_later_obeys_what_was_decided() -> None:
    """The others have ended many epochs by then: the one that it asks for must not have been
    forgotten."""
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

    assert in_threads(goes_on, lambda: change(second), lambda: change(late)) == [100] * 3, (
        "rank 2 read another decision"
    )


# --- reasons


def test_a_rank_that_fails_when_the_others_have_gone_on_names_itself_as_well() -> None:
    first, second = groups_of(2, deadline_seconds=1.0)
    assert aborted(first, ValueError("the quick one")) == {0: "ValueError: the quick one"}
    assert aborted(second, KeyError("the slow one")) == {
        0: ("ValueError: the quick one"),
        1: ("KeyError: 'the slow one'"),
    }


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
    [
        Mute(),
        *map(
            ValueError,
            ("\udcff in a file's name", "\0" * 3000, "\u4e00" * 3000, '"' * 3000, "x" * 100_000),
        ),
    ],
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
        for failures in on_all(
            groups_of(2),
            lambda group: told(lambda: group.propose((one, other)[group.rank], 7)),  # noqa: B023
        ):
            assert len(failures) == 2


@pytest.mark.parametrize(
    "nonsense", [b"{}", b"no json", (b'{"action": "x", "budget_bytes": 1, "code": "y"}')]
)
def test_a_rank_that_is_not_understood_is_named(nonsense: bytes) -> None:
    groups = groups_of(2)
    groups[1]._board.put("placement/g0/e0/proposal/1", nonsense)
    assert told(lambda: change(groups[0]))[1].startswith("is not understood")


def test_two_processes_in_one_place_are_found_out() -> None:
    """Only a board that was written by hand can show it: COMMIT stands, and this rank has not
    voted."""
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


# --- the store


def test_a_store_that_is_stopped_holds_nobody_past_the_deadline() -> None:
    """torch's client waits for an answer without a limit, whatever timeout it was given."""
    service = StoreService()
    store = dist.TCPStore("127.0.0.1", service.port, None, False, timeout=timedelta(seconds=30))
    asking: dict[str, Callable[[Board], Any]] = {
        "look": lambda board: board.look(["a"]),
        "claim": lambda board: board.claim("b", b"x"),
        "wait": lambda board: board.wait("c", 0.05),
        "remove": lambda board: board.remove(["a"]),
    }
    boards = {name: StoreBoard(store, answer_seconds=0.1) for name in asking}
    group = StoreGroup(store, 0, 1, 0.5)
    change(group)
    service.stop()
    for name, call in asking.items():
        with pytest.raises(BoardLost, match=r"no answer within 0\.1 s"):
            call(boards[name])
        with pytest.raises(BoardLost, match="an earlier call"):
            call(boards[name])
    with pytest.raises(CoordinatorLost, match="no answer within"):
        group.propose("enter train", 1)
    with pytest.raises(CoordinatorLost, match="join"):
        StoreGroup(store, 0, 1, 0.5, generation=1)
    service.go_on()
    service.kill()
    with pytest.raises(CoordinatorLost):
        StoreGroup(store, 0, 1, 0.5, generation=2)


def test_others_who_use_the_store_do_not_hold_the_group_up() -> None:
    """A client of a TCPStore takes one call at a time: a wait of somebody else's on it would keep
    ours out."""
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    shared = dist.TCPStore("127.0.0.1", server.port, None, False)
    before = shared.timeout
    group = StoreGroup(shared, 0, 1, 5.0)
    waits = threading.Thread(
        target=lambda: shared.wait(["never"], timedelta(seconds=20)), daemon=True
    )
    waits.start()
    assert change(group) == 100
    assert waits.is_alive()
    assert shared.timeout == before
    server.set("never", "now")
    waits.join(20)


@pytest.mark.parametrize("kind", ["hash", "file", "tcp", "prefix"])
def test_every_store_of_torch_is_a_board(kind: str, tmp_path: Any) -> None:
    server = (
        dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        if kind in ("tcp", "prefix")
        else None
    )
    stores: dict[str, Callable[[], Any]] = {
        "hash": dist.HashStore,
        "file": lambda: dist.FileStore(str(tmp_path / "store"), 1),
        "tcp": lambda: server,
        "prefix": lambda: dist.PrefixStore("mine", server),
    }
    board = StoreBoard(stores[kind]())
    assert board.look(["a"]) is None
    assert board.wait("a", 0.01) is None
    board.put("a", b"1")
    board.put("a", b"1")
    assert board.look(["a"]) == [b"1"]
    assert board.look(["a", "b"]) is None
    assert board.claim("b", b"first") == b"first"
    assert board.claim("b", b"second") == b"first"
    assert board.wait("b", 5.0) == b"first"
    assert board.look(["a", "b"]) == [b"1", b"first"]
    board.remove(["a", "never"])
    assert board.look(["a"]) is None
    assert board.claim("a", b"anew") == b"anew"


class Launched:
    """A process of a launcher that is not torchrun: its rank 0 serves the store itself."""

    def budgets(self) -> tuple[int, int]:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        os.environ |= {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        dist.init_process_group("gloo")
        group, other = (
            from_environment(deadline_seconds=30),
            from_environment("critic", deadline_seconds=30),
        )
        dist.destroy_process_group()
        return group.propose("enter train", 7).budget_bytes, other.propose(
            "enter values", 8
        ).budget_bytes


def test_the_environment_of_a_launcher_that_is_not_torchrun_after_init_process_group(
    processes: Processes,
) -> None:
    assert processes.start(Launched).call("budgets") == (7, 8)


def test_a_server_in_this_process_lives_as_long_as_the_group() -> None:
    group = StoreGroup(
        dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30), wait_for_workers=False),
        0,
        1,
        5.0,
    )
    assert change(group) == 100


def test_more_failures_than_a_text_has_letters() -> None:
    failures = abort(dict.fromkeys(range(100_001), "no vote")).failures
    assert set(failures.values()) == {"…"}
