"""Processes that die, stop or lose answers of the board at every step of the protocol: real ranks with real managers over a TCPStore.

After each case: nobody hung, no two ranks read different decisions, every value is what it was, as bytes, and the fault has happened.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from multiprocessing.connection import wait
from typing import Any

import pytest

from tests.group.fault_worker import Case, RankProcess, StoreService, wait_until_stopped
from tests.support import boards

WORLD = 3
DEADLINE_SECONDS = 1.2
AMPLE_SECONDS = 30.0
"""A deadline where none has to pass: so much of it is there for a machine that is busy with other tests."""
STOPPED_SECONDS = 6.0
"""What a board that is stopped costs each rank; one that lives has to answer within as much."""
HANG_SECONDS = 100.0
AT_ONCE = 8

STEPS = [
    (rank, step, "claim decision" in step and rank > 0)  # ranks other than 0 claim when their own move fails
    for rank in range(WORLD)
    for step in boards.STEPS
    if rank == 0 or step != "before claim basis"
]
MESSAGES = [
    (rank, name, name == "decision" and rank > 0)
    for rank in (0, 1)  # 2 is another 1
    for name in ("proposal", "basis", "vote", "decision", "at")
    if rank == 0 or name != "basis"
]
MESSAGES += [(rank, "outcome", True) for rank in (0, 1)]  # of a rank whose move fails
_generations = count(1)
IDLE: list[RankProcess] = []
"""Processes that wait for a case."""


@pytest.fixture(scope="module")
def service() -> Iterator[StoreService]:
    """One for all cases that leave it alone."""
    made = StoreService()
    yield made
    while IDLE:
        IDLE.pop().kill()
    made.close()


def deadline_of(case: Case) -> float:
    """A short one where ranks have to wait for one that says nothing any more."""
    says_something = case.fault in ("twice", "board killed") or (case.fault == "raise" and not case.its_move_fails)
    return max(AMPLE_SECONDS, DEADLINE_SECONDS) if says_something else DEADLINE_SECONDS


class Ranks:
    """The processes of one case, and what they said."""

    def __init__(self, service: StoreService, case: Case) -> None:
        self.case, self.service = case, service
        self.said: list[Any] = [None] * WORLD
        self.transitions = [0] * WORLD
        generation = next(_generations)
        to_join = STOPPED_SECONDS if case.fault == "board stopped" else max(AMPLE_SECONDS, DEADLINE_SECONDS)
        self._ranks: list[RankProcess] = []
        for rank in range(WORLD):
            try:
                self._ranks.append(IDLE.pop())
            except IndexError:
                self._ranks.append(RankProcess())
            self._ranks[-1].connection.send((case, deadline_of(case), service.port, rank, WORLD, to_join, generation))
        self._open = set(range(WORLD))
        self._well: set[int] = set()

    @property
    def processes(self) -> list[Any]:
        return [rank.process for rank in self._ranks]

    def listen(self, until: Callable[[], bool]) -> bool:
        """Hear what ranks say. False when nothing more comes although it is not so yet: a hang."""
        deadline = time.monotonic() + HANG_SECONDS
        while not until():
            if time.monotonic() > deadline:
                return False
            by_connection = {self._ranks[rank].connection: rank for rank in self._open}
            for connection in wait(list(by_connection), timeout=0.05):
                self._hear(by_connection[connection])  # type: ignore[index]
        return True

    def _hear(self, rank: int) -> None:
        try:
            said = self._ranks[rank].connection.recv()
        except (EOFError, ConnectionError):
            self._open.discard(rank)
            return
        if said[0] == "next":
            self._open.discard(rank)
            self._well.add(rank)
        else:
            self.said[rank] = said
            self.transitions[rank] = len(said[1])

    def start(self) -> bool:
        """Let them go into the phase transition of the fault together, as soon as all have come to it."""
        if not self.listen(lambda: bool(min(self.transitions)) or len(self._open) < WORLD) or not min(self.transitions):
            return False
        for rank in self._ranks:
            rank.connection.send(None)
        return True

    def has_ended(self, rank: int) -> bool:
        return rank not in self._open

    def close(self) -> None:
        for rank, each in enumerate(self._ranks):
            if rank in self._well:
                IDLE.append(each)
            else:
                each.kill()


class NotReached(AssertionError):
    """The ranks did not come to the step of the fault: nothing was tried."""


def disturb(ranks: Ranks) -> str:
    """Do what the case asks for while the ranks run. Returns what did not happen as it should.

    Raises:
        NotReached: what the ranks said.
    """
    fault, victim = ranks.case.fault, ranks.processes[ranks.case.rank]
    others = [rank for rank in range(WORLD) if rank != ranks.case.rank]
    if not ranks.start():
        raise NotReached(f"{ranks.case}: {ranks.said}")
    if fault in ("stop", "board killed", "board stopped"):
        if not wait_until_stopped(victim.pid):
            raise NotReached(f"{ranks.case}: {ranks.said}")
        if fault == "board killed":
            ranks.service.kill()
        elif fault == "board stopped":
            ranks.service.stop()
        elif not ranks.listen(lambda: all(ranks.transitions[rank] >= 2 for rank in others)):
            return "the others hung while one was stopped"
        os.kill(victim.pid, signal.SIGCONT)
    if not ranks.listen(lambda: all(map(ranks.has_ended, range(WORLD)))):
        return f"ranks {[rank for rank in range(WORLD) if not ranks.has_ended(rank)]} hung"
    if fault == "kill":
        victim.join()
        if victim.exitcode != -signal.SIGKILL:
            raise NotReached(f"{ranks.case}: {ranks.said}")
    return ""


def judge(ranks: Ranks) -> list[str]:
    """What went wrong in a case that is over."""
    case, wrong = ranks.case, []
    by_epoch: dict[int, set[str]] = {}
    for rank, said in enumerate(ranks.said):
        if case.fault == "kill" and rank == case.rank:
            events = [] if said is None else said[1]
        elif said is None or said[0] != "end":
            wrong.append(f"rank {rank} died: {said}")
            continue
        else:
            _, events, problems, has_happened = said
            wrong += [f"rank {rank}: {problem}" for problem in problems]
            if case.fault != "kill" and rank == case.rank and not has_happened:
                wrong.append("the fault has not happened")
        for epoch, verdict in events:
            by_epoch.setdefault(epoch, set()).add(verdict)
    wrong += [f"epoch {epoch} was obeyed as {verdicts}" for epoch, verdicts in by_epoch.items() if {"commit", "abort"} <= verdicts]
    return wrong


def run_case(case: Case, service: StoreService | None) -> tuple[list[str], list[Any]]:
    """What went wrong, and what the ranks saw. Ranks that a busy machine keeps from coming to the step in time begin anew."""
    for _ in range(2):
        with contextlib.suppress(NotReached):
            return run_once(case, service)
    return run_once(case, service)


def run_once(case: Case, service: StoreService | None) -> tuple[list[str], list[Any]]:
    own = StoreService() if service is None else service
    ranks = Ranks(own, case)
    try:
        undone = disturb(ranks)
        wrong = [undone] if undone else judge(ranks)
        return [f"{case}: {each}; {ranks.said}" for each in wrong], [said and said[1] for said in ranks.said]
    finally:
        ranks.close()
        if service is None:
            own.close()


def sweep(cases: list[Case], service: StoreService | None) -> list[list[Any]]:
    """All cases, a few at a time. Returns what the ranks of each saw."""
    waits_only = cases[0].fault == "board stopped"
    with ThreadPoolExecutor(len(cases) if waits_only else AT_ONCE) as pool:
        results = list(pool.map(lambda case: run_case(case, service), cases))
    wrong = [each for found, _ in results for each in found]
    assert not wrong, "\n".join(wrong)
    return [seen for _, seen in results]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", ["kill", pytest.param("stop", marks=pytest.mark.slow), "raise"])
def test_a_rank_at_every_step(fault: str, service: StoreService, counted: Callable[[str], None]) -> None:
    cases = [Case(fault, *step) for step in STEPS if fault != "raise" or step[0] < 2]  # rank 2 is another 1
    seen = sweep(cases, service)
    verdicts = [{verdict for events in ranks for epoch, verdict in events if epoch == 1} for ranks in seen]
    assert {"commit"} in verdicts, "killed after its vote: the others go on"
    assert {"abort"} in verdicts
    if fault == "raise":
        went_on = [all(events[-1][1] == "commit" for events in ranks) for ranks in seen]
        assert all(fine for fine, case in zip(went_on, cases, strict=True) if not case.its_move_fails), "the job did not go on"
    counted(f"group: {fault} one of {WORLD} ranks at every step of a change: {len(cases)} cases")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("fault", "ranks"), [("board killed", (0, 1)), pytest.param("board stopped", (0,), marks=pytest.mark.slow)])
def test_the_board_at_every_step(fault: str, ranks: tuple[int, ...], counted: Callable[[str], None]) -> None:
    """With SWEEP=all at the steps of every rank: a stopped board costs each of them seconds."""
    cases = [Case(fault, *step) for step in STEPS if step[0] in ranks or os.environ.get("SWEEP") == "all"]
    seen = sweep(cases, None)
    assert all(any(verdict == "doubt" for events in ranks for _, verdict in events) for ranks in seen)
    counted(f"group: {fault} at every step of a change: {len(cases)} cases")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", ["twice", "unanswered"])
def test_every_message(fault: str, service: StoreService, counted: Callable[[str], None]) -> None:
    cases = [Case(fault, *message) for message in MESSAGES]
    seen = sweep(cases, service)
    if fault == "twice":
        assert all(events[-1][1] == "commit" for ranks in seen for events in ranks), "a message that came twice changed something"
    counted(f"group: every message {fault}, of ranks 0 and 1 of {WORLD}: {len(cases)} cases")
