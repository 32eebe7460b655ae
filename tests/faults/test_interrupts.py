"""Ctrl-C at every line of a phase transition, as a real signal: nothing is inconsistent, no value is lost, and the phases are as their
caller left them.

A share of the lines of each operation is interrupted; with SWEEP=all every line, at its first and its last visit, which takes ten minutes.
Recovery is what a user does: leave the `with`, drop the traceback, open the next phase.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from types import CodeType, FrameType, TracebackType
from typing import Any

import pytest
import torch
from torch import nn

import placement
import placement.policies
from placement.core import interrupts
from tests.faults.harness import FaultyWorker, Foresight, check_left, check_sound, hidden_bytes, many_cases
from tests.faults.test_streamed_step import Job

pytestmark = pytest.mark.leaves_behind("each of many cases is looked at by the harness when it ends")

OURS = tuple(os.path.dirname(os.path.abspath(each)) + os.sep for each in (placement.__file__, placement.policies.__file__))
EVERY_POINT = os.environ.get("SWEEP") == "all"
SHARE = 1 if EVERY_POINT else 8
INTERRUPTS = interrupts.__file__

Line = tuple[CodeType, int]


class Lines:
    """Sends SIGINT at one visit of one line of ours, in a `with` statement. Without a line, it counts the visits.

    Args:
        again: send it once more at the next line of ours.
    """

    def __init__(self, line: Line | None = None, visit: int = 1, *, again: bool = False) -> None:
        self.visits: dict[Line, int] = {}
        self._line, self._visit = line, visit
        self.left = 1 + again
        """Signals still to be sent."""
        self.was_raised_at_once = False
        """Whether the last signal was raised by its handler, in the middle of the line."""

    def __enter__(self) -> None:
        sys.settrace(self._call)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, argument: object) -> Any:
        name = frame.f_code.co_filename
        return self._each if name.startswith(OURS) and name != INTERRUPTS else None

    def _each(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "line" and self.left:
            line = frame.f_code, frame.f_lineno
            self.visits[line] = self.visits.get(line, 0) + 1
            if self._line is not None and self.visits.get(self._line, 0) >= self._visit:
                self.left -= 1
                self.was_raised_at_once = True
                signal.raise_signal(signal.SIGINT)
                self.was_raised_at_once = False
        return self._each


# --- operations


def entry(worker: FaultyWorker, lines: Lines) -> None:
    with lines, worker.manager.phase("train"):
        sys.settrace(None)


def leaving(worker: FaultyWorker, lines: Lines) -> None:
    """State that is born in the phase, and gradients that outlive it."""
    with worker.manager.phase("train"):
        worker.optimizers[0].state.clear()
        worker.train_actor()
        worker.actor.zero_grad()
        lines.__enter__()


def switch(worker: FaultyWorker, lines: Lines) -> None:
    """Both directions: the optimizer leaves, the rollout engine comes, the actor stays."""
    with worker.manager.phase("train") as step:
        try:
            with lines:
                step.switch("weight_sync")
        finally:
            assert worker.manager.snapshot().phases == (step.name,)


def prefetch(worker: FaultyWorker, lines: Lines) -> None:
    """What a phase does not need arrives early."""
    with worker.manager.phase("train") as step, lines:
        step.switch("weight_sync")
        with worker.manager.phase("rollout"):
            pass
        step.switch("train")


def failing_switch(worker: FaultyWorker, lines: Lines) -> None:
    with worker.manager.phase("train") as step:
        worker.device.fail("copy", at=2)
        try:
            with lines:
                step.switch("weight_sync")
        finally:
            worker.device.clear()


def failing_leave(worker: FaultyWorker, lines: Lines) -> None:
    try:
        with worker.manager.phase("train"):
            worker.train_actor()
            worker.actor.zero_grad()
            worker.device.fail("copy", at=1)
            lines.__enter__()
    finally:
        lines.__exit__(None, None, None)
        worker.device.clear()


def enter_leave(worker: FaultyWorker, lines: Lines) -> None:
    with lines:
        worker.manager.enter("log_prob")
    try:
        with lines:
            worker.manager.leave()
    finally:
        if worker.manager.snapshot().phases:
            worker.manager.leave()  # it had not begun


def holds(worker: FaultyWorker, lines: Lines) -> None:
    with lines:
        first = worker.manager.hold("train", only=["actor"])
        second = worker.manager.hold("rollout", only=["rollout"]).around(range(2))
        first.release()
        list(second)


def register(worker: FaultyWorker, lines: Lines) -> None:
    torch.manual_seed(3)
    extra = nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 12))
    extra[1].weight = extra[0].weight
    before = [p.detach().clone() for p in extra.parameters()]
    try:
        with lines:
            worker.manager.register("extra", extra, role="reward")
            worker.manager.unregister("extra")
    finally:
        with suppress(KeyError, placement.PhaseError):
            worker.manager.unregister("extra")
        assert extra[1].weight is extra[0].weight
        assert all(torch.equal(now, then) for now, then in zip(extra.parameters(), before, strict=True))


OPERATIONS = [entry, leaving, switch, prefetch, failing_switch, failing_leave, enter_leave, holds, register]


class Case:
    """A worker on which operations are interrupted, one after the other."""

    def __init__(self, operation: Callable[[FaultyWorker, Lines], None]) -> None:
        self.operation = operation
        self.worker = FaultyWorker(256 * 1024, **({"policy": Foresight()} if operation is prefetch else {})).register_few()
        for _ in range(2):  # what is done for the first time is done
            self.run(Lines())
            self.check()

    def run(self, lines: Lines) -> BaseException | None:
        try:
            self.operation(self.worker, lines)
        except BaseException as error:
            lines.__exit__(None, None, None)
            return error.with_traceback(None)
        finally:
            lines.__exit__(None, None, None)
        return None

    def check(self) -> None:
        """The phases are as the caller left them, and the next one finds everything whole."""
        assert self.worker.manager.snapshot().phases == ()
        with self.worker.manager.phase("log_prob"):
            check_sound(self.worker)
            assert hidden_bytes(self.worker.manager.handles["actor"])
        check_left(self.worker)


class StreamedStep:
    """The same for a step that streams its state."""

    def __init__(self) -> None:
        self.job = Job()
        for _ in range(2):
            self.job.check_goes_on()

    def run(self, lines: Lines) -> BaseException | None:
        def step() -> None:
            with lines:
                self.job.optimizer.step()

        return self.job.stepped(step)

    def check(self) -> None:
        assert self.job.manager.snapshot().phases == ()
        self.job.check()


@pytest.fixture(scope="module", autouse=True)
def _many_cases() -> Iterator[None]:
    with many_cases():
        yield


@pytest.fixture
def swallowed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The types of what was raised in a finalizer, which the interpreter can only report."""
    found: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda report: found.append(report.exc_type))
    return found


MAKE: dict[str, Callable[[], Any]] = {each.__name__: partial(Case, each) for each in OPERATIONS} | {"streamed_step": StreamedStep}


@pytest.mark.timeout(3600 if EVERY_POINT else 600)
@pytest.mark.parametrize("operation", MAKE)
def test_every_line(operation: str, swallowed: list[Any], counted: Callable[[str], None]) -> None:
    case, survey = MAKE[operation](), Lines()
    case.run(survey)
    case.check()
    chosen = [*survey.visits.items()][::SHARE]
    points = [(line, visit) for line, visits in chosen for visit in sorted({1, visits} if EVERY_POINT else {1})]
    problems, cases = [], 0
    for (code, number), visit in points:
        lines = Lines((code, number), visit)
        swallowed.clear()
        raised = case.run(lines)
        if lines.left:
            continue  # what an earlier case has left to do was done here instead
        cases += 1
        try:
            told = isinstance(raised, KeyboardInterrupt) or (KeyboardInterrupt in swallowed)
            assert told, f"{raised!r} came out"
            del raised
            case.check()
        except Exception as problem:
            problems.append(f"{code.co_filename}:{number} visit {visit}: {type(problem).__name__}: {str(problem)[:300]}")
            case = MAKE[operation]()
        if len(problems) == 8:
            break
    assert not problems, f"{len(problems)} of {cases} cases:\n" + "\n".join(problems)
    assert cases >= len(points) * 0.9
    counted(f"{operation}: SIGINT at {cases} lines, 0 inconsistent")


def test_a_second_one_is_raised_at_once(swallowed: list[Any], counted: Callable[[str], None]) -> None:
    case, survey = Case(switch), Lines()
    case.run(survey)
    cases = 0
    for line in [*survey.visits][::40]:
        lines = Lines(line, again=True)
        raised = case.run(lines)
        if lines.left:
            continue  # the first came before the transition had begun, and was raised
        cases += 1
        assert lines.was_raised_at_once
        assert isinstance(raised, KeyboardInterrupt) or KeyboardInterrupt in swallowed
        del raised
        case.worker.manager.audit()  # not refused: no phase transition is under way any more
        case = Case(switch)
    assert cases > 10
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    counted(f"a second SIGINT at {cases} lines, raised there")
