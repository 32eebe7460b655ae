"""What tests/group/test_faults.py does to the ranks of a store, on a Ray board; and that board killed or stopped at every step.

A board takes seconds to start, so many cases share one, and all their ranks are at their steps when it dies.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from placement.core.errors import CoordinatorLost
from placement.core.states import Plan, State
from placement.group import RayGroup
from tests.group import test_faults as faults
from tests.group.fault_worker import Case
from tests.group.services import wait_until_stopped
from tests.ray.service import RayService

WAIT_SECONDS = 90.0
AT_ONCE = 14
"""Cases: the most of each is waiting for deadlines, and a rank is a driver of its own."""


@pytest.fixture(scope="module")
def service(cluster: Any) -> Iterator[RayService]:
    before, faults.AT_ONCE = faults.AT_ONCE, AT_ONCE
    service = RayService(cluster)
    yield service
    faults.PROCESSES.close()
    service.close()
    faults.AT_ONCE = before


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", ["kill", "stop"])
def test_a_rank_at_every_step(fault: str, service: RayService, counted: Callable[[str], None]) -> None:
    """With SWEEP=all both faults at every step, else each at every other one: the ranks do the same on every board."""
    steps = faults.STEPS if os.environ.get("SWEEP") == "all" else faults.STEPS[fault == "stop" :: 2]
    cases = [Case(fault, *step) for step in steps]
    seen = faults.sweep(cases, service, "ray")
    verdicts = [{verdict for events in ranks for epoch, verdict in events if epoch == 1} for ranks in seen]
    assert {"commit"} in verdicts
    assert {"abort"} in verdicts
    counted(f"ray group: {fault} one of the ranks at a step of a change: {len(cases)} cases")


def disturbed(cases: list[Case], service: RayService, disturb: Callable[[], None]) -> list[list[Any]]:
    """All cases at once: when every victim stands at its step, something happens to the board, and they go on. What the ranks saw."""
    stand = threading.Barrier(len(cases), disturb)

    def run(case: Case) -> tuple[list[str], list[Any]]:
        ranks = faults.Ranks(service, case)
        victim = ranks.processes[case.rank]
        try:
            is_there = ranks.start() and wait_until_stopped(victim.pid, WAIT_SECONDS)
            stand.wait(WAIT_SECONDS)
            os.kill(victim.pid, signal.SIGCONT)
            if not is_there:
                return [f"{case}: the step was not reached"], []
            if not ranks.listen(lambda: all(map(ranks.has_ended, range(faults.WORLD)))):
                return [f"{case}: a rank hung"], []
            return [f"{case}: {wrong}; {ranks.said}" for wrong in faults.judge(ranks)], [said and said[1] for said in ranks.said]
        finally:
            ranks.close()

    with ThreadPoolExecutor(len(cases)) as pool:
        results = list(pool.map(run, cases))
    wrong = [each for found, _ in results for each in found]
    assert not wrong, "\n".join(wrong)
    return [seen for _, seen in results]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_board_is_killed_at_every_step_and_all_agree(
    service: RayService, monkeypatch: pytest.MonkeyPatch, counted: Callable[[str], None]
) -> None:
    """It comes back empty, hears from all what they know, and every rank reads what the others read."""
    monkeypatch.setattr(faults, "DEADLINE_SECONDS", 60.0)
    cases = [Case("board killed", *step) for step in faults.STEPS]
    seen = []
    for begin in range(0, len(cases), AT_ONCE):
        before = service.pid()
        seen += disturbed(cases[begin : begin + AT_ONCE], service, service.kill)
        assert service.pid() != before
    verdicts = Counter(verdict for ranks in seen for events in ranks for _, verdict in events)
    assert set(verdicts) == {"commit", "abort"}, "a rank is in doubt although every rank lives"
    ended = [all(events[-1][1] == "commit" for events in ranks) for ranks in seen]
    assert all(fine for fine, case in zip(ended, cases, strict=True) if not case.its_move_fails), "the job did not go on"
    counted(f"ray group: board killed while one of the ranks is at every step of a change: {len(cases)} cases, 0 in doubt")


def test_a_board_that_is_stopped_leaves_the_rank_in_doubt_within_its_deadline(cluster: Any) -> None:
    service = RayService(cluster)
    group = RayGroup(service.address[2], 0, 1, 2.0)
    group.propose("enter train", 100)
    pid = service.pid()
    os.kill(pid, signal.SIGSTOP)
    assert wait_until_stopped(pid)
    try:
        with pytest.raises(CoordinatorLost, match="does not answer within 2 s; the prepared move is kept"):
            group.agree(Plan({"actor": State.TRAINING}))
    finally:
        os.kill(pid, signal.SIGCONT)
    assert group.is_in_doubt
    service.close()
