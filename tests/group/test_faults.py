"""Processes that die, stop or fail at every step of the protocol, and their board: real ranks with
real managers over a TCPStore.

After each case: nobody hung, no two ranks read different decisions, every value is what it was, as
bytes, and the fault has happened.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import pytest

from tests.group.fault_worker import Case, Member
from tests.group.processes import Process, StoreService
from tests.support import boards

WORLD = 3
DEADLINE_SECONDS = 1.2
AMPLE_SECONDS = 30.0
"""A deadline where none has to pass: so much of it is there for a machine that is busy with other
tests."""
STOPPED_SECONDS = 6.0
"""What a board that is stopped costs each rank; one that lives has to answer within as much."""
HANG_SECONDS = 100.0
AT_ONCE = 8
EVERYTHING = os.environ.get("SWEEP") == "all"

STEPS = [
    # ranks other than 0 claim when their own move fails
    (rank, step, "claim decision" in step and rank > 0)
    for rank in range(WORLD)
    for step in boards.STEPS
    if rank == 0 or step != "before claim basis"
]
_generations = count(1)
IDLE: list[Process] = []
"""Processes that wait for a case."""


@pytest.fixture(scope="module")
def service() -> Iterator[StoreService]:
    """One for all cases that leave it alone."""
    made = StoreService()
    yield made
    while IDLE:
        IDLE.pop().kill()
    made.kill()


def deadline_of(case: Case) -> float:
    """A short one where ranks have to wait for one that says nothing any more."""
    says_something = case.fault == "board killed" or (
        case.fault == "raise" and not case.its_move_fails
    )
    return max(AMPLE_SECONDS, DEADLINE_SECONDS) if says_something else DEADLINE_SECONDS


class NotReached(AssertionError):
    """The ranks did not come to the step of the fault: nothing was tried."""


def answers_of(case: Case, service: StoreService, ranks: list[Process]) -> list[Any]:
    """Do what the case asks for while the ranks run. Returns what each says at its end; None of one
    that died.

    Raises:
        NotReached: see there.
    """
    to_join = STOPPED_SECONDS if case.fault == "board stopped" else AMPLE_SECONDS
    generation = next(_generations)
    for number, rank in enumerate(ranks):
        rank.begin("run", case, deadline_of(case), service.port, number, WORLD, to_join, generation)
    victim = ranks[case.rank]
    answers: dict[Process, Any] = {}
    if case.fault in ("stop", "board killed", "board stopped"):
        if not victim.is_stopped():
            raise NotReached(f"{case}: the rank ended")
        if case.fault == "board killed":
            service.kill()
        elif case.fault == "board stopped":
            service.stop()
        else:
            # they do not hang while it is stopped
            answers = {rank: rank.answer(HANG_SECONDS) for rank in ranks if rank is not victim}
        victim.go_on()
    for rank in ranks:
        if rank is victim and case.fault == "kill":
            if not victim.was_killed:
                raise NotReached(f"{case}: the rank was not killed")
        elif rank not in answers:
            answers[rank] = rank.answer(HANG_SECONDS)
    return [answers.get(rank) for rank in ranks]


def judge(case: Case, answers: list[Any]) -> list[str]:
    """What went wrong in a case that is over."""
    wrong = []
    by_epoch: dict[int, set[str]] = {}
    for rank, (events, problems, has_happened, _) in enumerate(
        each or ([], [], True, False) for each in answers
    ):
        wrong += [f"rank {rank}: {problem}" for problem in problems]
        if rank == case.rank and not has_happened:
            wrong.append("the fault has not happened")
        for epoch, verdict in events:
            by_epoch.setdefault(epoch, set()).add(verdict)
    return wrong + [
        (f"epoch {epoch} was obeyed as {verdicts}")
        for epoch, verdicts in by_epoch.items()
        if {"commit", "abort"} <= verdicts
    ]


def run_case(case: Case, service: StoreService | None) -> tuple[list[str], list[Any]]:
    """What went wrong, and what the ranks saw. Ranks that a busy machine keeps from coming to the
    step in time begin anew."""
    for _ in range(2):
        with contextlib.suppress(NotReached):
            return run_once(case, service)
    return run_once(case, service)


def run_once(case: Case, service: StoreService | None) -> tuple[list[str], list[Any]]:
    own = StoreService() if service is None else service
    ranks = [next_idle() for _ in range(WORLD)]
    answers: list[Any] = [None] * WORLD
    try:
        answers = answers_of(case, own, ranks)
        return [(f"{case}: {each}; {answers}") for each in judge(case, answers)], [
            [] if each is None else each[0] for each in answers
        ]
    finally:
        for rank, answer in zip(ranks, answers, strict=True):
            if answer is not None and answer[3]:
                IDLE.append(rank)
            else:
                rank.kill()
        if service is None:
            own.kill()


def next_idle() -> Process:
    with contextlib.suppress(IndexError):
        return IDLE.pop()
    process = Process(Member)
    process.answer(AMPLE_SECONDS)
    return process


def sweep(cases: list[Case], service: StoreService | None) -> list[list[Any]]:
    """All cases, a few at a time. Returns what the ranks of each saw."""
    waits_only = cases[0].fault == "board stopped"
    with ThreadPoolExecutor(len(cases) if waits_only else AT_ONCE) as pool:
        results = list(pool.map(lambda case: run_case(case, service), cases))
    wrong = [each for found, _ in results for each in found]
    assert not wrong, "\n".join(wrong)
    return [seen for _, seen in results]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("fault", "rank"),
    [
        ("kill", 0),
        pytest.param("kill", 1, marks=pytest.mark.sweep),
        pytest.param("raise", 0, marks=pytest.mark.sweep),
        pytest.param("raise", 1, marks=pytest.mark.sweep),
        *(pytest.param("stop", rank, marks=pytest.mark.slow) for rank in (0, 1)),
    ],
)
def test_a_rank_at_every_step(
    fault: str, rank: int, service: StoreService, counted: Callable[[str], None]
) -> None:
    """With SWEEP=all rank 2, too, which is another 1."""
    cases = [
        Case(fault, *step)
        for step in STEPS
        if step[0] == rank or (EVERYTHING and rank == 1 and step[0] == 2)
    ]
    seen = sweep(cases, service)
    verdicts = [
        {verdict for events in ranks for epoch, verdict in events if epoch == 1} for ranks in seen
    ]
    assert {"commit"} in verdicts, "killed after its vote: the others go on"
    assert {"abort"} in verdicts
    if fault == "raise":
        went_on = [all(events[-1][1] == "commit" for events in ranks) for ranks in seen]
        assert all(
            fine for fine, case in zip(went_on, cases, strict=True) if not case.its_move_fails
        ), "the job did not go on"
    counted(f"group: {fault} rank {rank} of {WORLD} at every step of a change: {len(cases)} cases")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("fault", "rank"),
    [
        *(pytest.param("board killed", rank, marks=pytest.mark.sweep) for rank in (0, 1)),
        pytest.param("board stopped", 0, marks=pytest.mark.slow),
    ],
)
def test_the_board_at_every_step(fault: str, rank: int, counted: Callable[[str], None]) -> None:
    """With SWEEP=all at the steps of every rank: a stopped board costs each of them seconds."""
    cases = [Case(fault, *step) for step in STEPS if step[0] == rank or EVERYTHING]
    seen = sweep(cases, None)
    assert all(
        any(verdict == "doubt" for events in ranks for _, verdict in events) for ranks in seen
    )
    counted(f"group: {fault} at every step of a change: {len(cases)} cases")
