"""The board of a Ray job without Ray: requests that are lost, doubled and late, and an actor that forgets everything in between."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor

import pytest

from placement.core.errors import CoordinatorLost, GroupError
from placement.core.states import Plan, State
from placement.group.agreement import Group
from placement.group.base import BoardLost
from placement.group.messages import decode
from placement.group.ray import RayBoard
from placement.group.ray_board import MAX_MESSAGE_BYTES, Books, Request
from tests.support.threads import in_threads

PLAN = Plan({"actor": State.TRAINING})
OTHER = Plan({"actor": State.GPU_RESIDENT})


class Actor:
    """Where the actor's process would be: its books, in a loop of their own, over lines that lose things.

    Args:
        loss: the share of messages, and of answers, that are lost.
        late: the share of messages that arrive a second time, a moment later.
    """

    def __init__(self, seed: int = 0, loss: float = 0.0, late: float = 0.0) -> None:
        self._random = random.Random(seed)
        self._loss, self._late = loss, late
        self.books = Books(was_restarted=False)
        self.asked: Counter[str] = Counter()
        self._timers: list[threading.Timer] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def restart(self) -> None:
        self.books = Books(was_restarted=True)
        self._loop.call_soon_threadsafe(self._end_requests)

    def _end_requests(self) -> None:
        for task in asyncio.all_tasks(self._loop):
            task.cancel()

    def close(self) -> None:
        for timer in self._timers:
            timer.join()
        self.restart()
        self._loop.call_soon_threadsafe(self._loop.call_soon, self._loop.stop)
        self._thread.join()
        self._loop.close()

    def board(self, rank: int, world_size: int, deadline_seconds: float, generation: int = 0) -> RayBoard:
        return RayBoard(self.ask, f"ranks/g{generation}", rank, world_size, deadline_seconds)

    def group(self, rank: int, world_size: int = 3, deadline_seconds: float = 1.0, generation: int = 0) -> Group:
        board = self.board(rank, world_size, deadline_seconds, generation)
        return Group(board, rank, world_size, deadline_seconds=deadline_seconds, generation=generation)

    def ask(self, message: bytes, seconds: float) -> bytes | None:
        self.asked[decode(Request, message, max_bytes=MAX_MESSAGE_BYTES).operation] += 1
        if self._random.random() < self._loss:
            return None
        books = self.books
        answer = self._carry_out(books, message, seconds)
        if self._random.random() < self._late:
            self._timers.append(threading.Timer(self._random.random() * 0.02, self._carry_out, (self.books, message, 5.0)))
            self._timers[-1].start()
        return None if self._random.random() < self._loss or books is not self.books else answer

    def _carry_out(self, books: Books, message: bytes, seconds: float) -> bytes | None:
        request = decode(Request, message, max_bytes=MAX_MESSAGE_BYTES)
        future = asyncio.run_coroutine_threadsafe(books.answer(request), self._loop)
        try:
            return future.result(seconds).encode()
        except CancelledError:
            return None  # its process ended
        except TimeoutError as error:
            raise BoardLost("the board does not answer in time") from error


@pytest.fixture
def actor() -> Iterator[Actor]:
    actor = Actor()
    yield actor
    actor.close()


def change(group: Group, plan: Plan = PLAN) -> str:
    """One change; how it ended for this rank."""
    epoch = group.epoch
    try:
        group.propose("enter train", 100)
        group.agree(plan)
    except GroupError:
        return f"{epoch} abort"
    except CoordinatorLost:
        return f"{epoch} lost"
    return f"{epoch} commit"


def test_all_commit_and_nothing_piles_up(actor: Actor) -> None:
    groups = [actor.group(rank) for rank in range(3)]
    assert (
        in_threads(*(lambda group=group: [change(group) for _ in range(50)] for group in groups))
        == [[f"{epoch} commit" for epoch in range(50)]] * 3
    )
    assert len(actor.books._books["ranks/g0"].values) < 40
    assert max(len(group._board._notes) for group in groups) < 20


def test_a_decision_that_one_rank_has_read_survives_the_actor(actor: Actor) -> None:
    """COMMIT is read by rank 0 alone, then the actor forgets it: the others, out of time, claim ABORT, and get COMMIT."""
    boards = [actor.board(rank, 3, 2.0) for rank in range(3)]
    for rank, board in enumerate(boards):
        board.claim(f"g0/member/{rank}", b"x")
    assert boards[0].claim("g0/e0/decision", b"commit") == b"commit"
    actor.restart()
    claims = [lambda board=board: board.claim("g0/e0/decision", b"abort") for board in boards[1:]]
    assert in_threads(*claims, lambda: boards[0].look(["g0/member/0"])) == [b"commit", b"commit", [b"x"]]


def test_without_the_rank_that_may_know_nobody_decides(actor: Actor) -> None:
    boards = [actor.board(rank, 3, 0.3) for rank in range(3)]
    for rank, board in enumerate(boards):
        board.claim(f"g0/member/{rank}", b"x")
    boards[0].claim("g0/e0/decision", b"commit")
    actor.restart()
    for told in in_threads(*(lambda board=board: board.claim("g0/e0/decision", b"abort") for board in boards[1:])):
        assert isinstance(told, BoardLost)
        assert "rank 0 has not reported its values yet" in str(told)
    assert boards[0].look(["g0/e0/decision"]) == [b"commit"]  # it comes at last, and brings it back
    assert boards[1].claim("g0/e0/decision", b"abort") == b"commit"


def test_why_it_could_not_be_done_is_said_also_when_the_last_question_has_no_answer(actor: Actor) -> None:
    def ask(message: bytes, seconds: float) -> bytes | None:
        if seconds > 0.5:
            return actor.ask(message, seconds)
        time.sleep(seconds)  # as long as the board asks an actor that does not answer
        raise BoardLost("no answer")

    boards = [actor.board(0, 2, 5.0), RayBoard(ask, "ranks/g0", 1, 2, 1.0)]
    for rank, board in enumerate(boards):
        board.claim(f"g0/member/{rank}", b"x")
    actor.restart()
    with pytest.raises(BoardLost, match="rank 0 has not reported its values yet"):
        boards[1].claim("g0/e0/decision", b"abort")


def test_a_rank_that_was_restarted_with_the_actor_does_not_speak_for_its_predecessor(actor: Actor) -> None:
    groups = [actor.group(rank) for rank in range(3)]
    actor.restart()
    results = in_threads(lambda: change(groups[0]), lambda: change(groups[1]), lambda: actor.group(2))
    assert results[:2] == ["0 lost", "0 lost"]
    assert isinstance(results[2], CoordinatorLost)
    assert "the process of rank 2 were both restarted" in str(results[2])
    fresh = in_threads(*(lambda rank=rank: actor.group(rank, generation=1) for rank in range(3)))
    assert in_threads(*(lambda group=group: change(group) for group in fresh)) == ["0 commit"] * 3


def test_a_process_from_before_does_not_disturb_a_membership_of_the_same_name(actor: Actor) -> None:
    old = actor.group(0)
    actor.restart()
    groups = in_threads(*(lambda rank=rank: actor.group(rank) for rank in range(3)))  # all began anew
    assert change(old) == "0 lost"
    assert in_threads(*(lambda group=group: change(group) for group in groups)) == ["0 commit"] * 3


def test_a_restarted_rank_is_fenced(actor: Actor) -> None:
    groups = [actor.group(rank) for rank in range(3)]
    assert in_threads(*(lambda group=group: change(group) for group in groups)) == ["0 commit"] * 3
    with pytest.raises(GroupError, match="rank 1 was restarted"):
        actor.group(1)
    assert in_threads(lambda: change(groups[0]), lambda: change(groups[2])) == ["1 abort"] * 2


def test_another_world_size_is_refused(actor: Actor) -> None:
    actor.group(0, world_size=3)
    for rank, world_size in ((1, 2), (3, 4)):
        with pytest.raises(CoordinatorLost, match=f"has 3 ranks: rank {rank} of {world_size} is not one of them"):
            actor.group(rank, world_size=world_size)


def test_a_message_to_an_earlier_incarnation_does_not_count(actor: Actor) -> None:
    board = actor.board(0, 1, 1.0)
    board.claim("g0/member/0", b"x")
    late = board._request("claim", ["g0/e0/decision"], "abort", 0.0).encode()
    actor.restart()
    assert board.claim("g0/e0/decision", b"commit") == b"commit"
    answer = actor.ask(late, 1.0)
    assert answer is not None
    assert b'"stranger"' in answer


def test_what_is_no_request_is_refused() -> None:
    for message in (b"", b"{}", b"\x80\x04K\x01.", b'{"book":"b","incarnation":"","rank":0,"operation":"drop"}'):
        with pytest.raises(ValueError, match="not a valid Request"):
            decode(Request, message)


STEPS, RUNS = 12, 80


def disturbed(seed: int) -> list[list[str]]:
    """Three ranks make changes while messages are lost, doubled and late, and the actor forgets everything three times. By rank."""
    chance = random.Random(seed)
    actor = Actor(seed, loss=chance.choice([0.0, 0.05, 0.15]), late=chance.choice([0.0, 0.3]))
    pauses = [chance.random() * 0.15 for _ in range(3)]

    def run(group: Group) -> list[str]:
        chance = random.Random(seed * 3 + group.rank)
        ended: list[str] = []
        while len(ended) < STEPS and not group.is_in_doubt:
            time.sleep(chance.random() * 0.01)
            ended.append(change(group, OTHER if chance.random() < 0.1 else PLAN))
        return ended

    def disturb() -> None:
        for pause in pauses:
            time.sleep(pause)
            actor.restart()

    try:
        groups = [actor.group(rank, deadline_seconds=0.5) for rank in range(3)]
        *by_rank, _ = in_threads(*(lambda group=group: run(group) for group in groups), disturb)
        return by_rank
    finally:
        actor.close()


@pytest.mark.slow
def test_no_two_ranks_ever_decide_differently(counted: Callable[[str], None]) -> None:
    outcomes: Counter[str] = Counter()
    with ThreadPoolExecutor(10) as pool:
        for seed, by_rank in enumerate(pool.map(disturbed, range(RUNS))):
            verdicts: defaultdict[str, set[str]] = defaultdict(set)
            for ended in by_rank:
                assert isinstance(ended, list), ended
                for epoch, verdict in (each.split() for each in ended):
                    outcomes[verdict] += 1
                    verdicts[epoch] |= {verdict} - {"lost"}
            assert [epoch for epoch, found in verdicts.items() if len(found) > 1] == [], seed
    assert outcomes["commit"] > 300
    assert outcomes["abort"] > 100
    counted(f"Ray board: {RUNS} random runs, {3 * RUNS} restarts of the actor: {dict(sorted(outcomes.items()))}, 0 split decisions")
