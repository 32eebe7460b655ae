"""Ctrl-C at the lines of a phase transition, as a real signal: nothing inconsistent, no value lost,
the phases as their caller left them.

A share of the lines of each operation is interrupted; with SWEEP=all every line, at its first and
its last visit, which takes ten minutes. Recovery is what a user does: leave the `with`, drop the
traceback, open the next phase.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from types import CodeType, FrameType, TracebackType
from typing import Any

import pytest
import torch
from torch import nn

import placement
import placement.policies
from placement.core import interrupts
from placement.devices.base import Addresses
from placement.testing import SimulatedDevice, assert_nothing_resident
from tests.faults.harness import FaultyWorker, check_left, check_sound
from tests.faults.test_streamed_step import Job
from tests.support.early import Foresight
from tests.support.sweeps import few

pytestmark = pytest.mark.leaves_behind(
    "each of many cases is looked at by the harness when it ends"
)

OURS = tuple(
    os.path.dirname(os.path.abspath(each)) + os.sep
    for each in (placement.__file__, placement.policies.__file__)
)
IS_WHOLE = os.environ.get("SWEEP") == "all"


class Lines:
    """Sends SIGINT at one visit of one line of ours, in a `with` statement. Without a line, it
    counts the visits.

    Args:
        again: send it once more at the next line of ours.
    """

    def __init__(
        self, line: tuple[CodeType, int] | None = None, visit: int = 1, *, again: bool = False
    ) -> None:
        self.visits: dict[tuple[CodeType, int], int] = {}
        self._line, self._visit = line, visit
        self.left = 1 + again
        """Signals still to be sent."""
        self.was_raised_at_once = False
        """Whether the last signal was raised by its handler, in the middle of the line."""

    def __enter__(self) -> None:
        sys.settrace(self._call)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, argument: object) -> Any:
        name = frame.f_code.co_filename
        return self._each if name.startswith(OURS) and name != interrupts.__file__ else None

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


class Case:
    """A worker on which one operation is interrupted again and again."""

    def __init__(self, operation: str) -> None:
        self.operation = getattr(self, operation)
        self.worker = FaultyWorker(
            256 * 1024, **({"policy": Foresight()} if operation == "prefetch" else {})
        ).register_few()
        self.manager, self.device = self.worker.manager, self.worker.device
        for _ in range(2):  # what is done for the first time is done
            assert self.run(Lines()) is None or operation.startswith("failing")
            self.check()

    def run(self, lines: Lines) -> BaseException | None:
        """Run the operation in frames of its own. Returns what it raised, without its frames."""
        try:
            self.operation(lines)
        except BaseException as error:
            sys.settrace(None)
            return error.with_traceback(None)
        finally:
            sys.settrace(None)
            self.device.clear()
        return None

    def check(self) -> None:
        """The phases are as the caller left them, and the next one finds everything whole."""
        assert self.manager.snapshot().phases == ()
        with self.manager.phase("log_prob"):
            check_sound(self.worker)
        check_left(self.worker)

    def entry(self, lines: Lines) -> None:
        with lines, self.manager.phase("train"):
            sys.settrace(None)

    def leaving(self, lines: Lines) -> None:
        """Created state is adopted on the way out."""
        with self.manager.phase("train"):
            self.worker.optimizers[0].state.clear()
            self.worker.train_actor()
            self.worker.actor.zero_grad()
            lines.__enter__()

    def switch(self, lines: Lines) -> None:
        """A swap: the optimizer leaves, the rollout engine comes, the actor stays."""
        with self.manager.phase("train") as step:
            try:
                with lines:
                    step.switch("weight_sync")
            finally:
                assert self.manager.snapshot().phases == (step.name,)

    def prefetch(self, lines: Lines) -> None:
        with self.manager.phase("train") as step, lines:
            step.switch("weight_sync")
            with self.manager.phase("rollout"):
                pass
            step.switch("train")

    def failing_switch(self, lines: Lines) -> None:
        with self.manager.phase("train") as step:
            self.device.fail("copy", at=2)
            with lines:
                step.switch("weight_sync")

    def failing_leaving(self, lines: Lines) -> None:
        with self.manager.phase("train"):
            self.worker.train_actor()
            self.worker.actor.zero_grad()
            self.device.fail("copy")
            lines.__enter__()

    def enter_and_leave(self, lines: Lines) -> None:
        with lines:
            self.manager.enter("log_prob")
        try:
            with lines:
                self.manager.leave()
        finally:
            if self.manager.snapshot().phases:
                self.manager.leave()  # it had not begun

    def holds(self, lines: Lines) -> None:
        with lines:
            first = self.manager.hold("train", only=["actor"])
            second = self.manager.hold("rollout", only=["rollout"]).around(range(2))
            first.release()
            list(second)

    def register(self, lines: Lines) -> None:
        torch.manual_seed(3)
        extra = nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 12))
        extra[1].weight = extra[0].weight
        before = [p.detach().clone() for p in extra.parameters()]
        try:
            with lines:
                self.manager.register("extra", extra, role="reward")
                self.manager.unregister("extra")
        finally:
            with suppress(placement.PhaseError):
                self.manager.unregister("extra")
            assert extra[1].weight is extra[0].weight
            assert all(
                torch.equal(now, then) for now, then in zip(extra.parameters(), before, strict=True)
            )


class StreamedStep:
    """The same for a step that streams its state."""

    def __init__(self, _: str) -> None:
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


OPERATIONS: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(
        ("entry", "leaving", "switch", "prefetch", "failing_switch", "failing_leaving"), Case
    ),
    **dict.fromkeys(("enter_and_leave", "holds", "register"), Case),
    "streamed_step": StreamedStep,
}


@pytest.fixture
def swallowed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The types of what was raised in a finalizer, which the interpreter can only report."""
    found: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda report: found.append(report.exc_type))
    return found


@pytest.mark.timeout(3600 if IS_WHOLE else 600)
@pytest.mark.parametrize(
    "operation",
    few(
        OPERATIONS,
        *("entry", "streamed_step"),
    ),
)
def test_interrupted_at_lines(
    operation: str, swallowed: list[Any], counted: Callable[[str], None]
) -> None:
    case, survey = OPERATIONS[operation](operation), Lines()
    case.run(survey)
    case.check()
    points = [
        (line, visit) for line, visits in survey.visits.items() for visit in sorted({1, visits})
    ]
    problems, cases = [], 0
    for line, visit in points if IS_WHOLE else points[:: len(points) // 20]:
        lines = Lines(line, visit)
        swallowed.clear()
        raised = case.run(lines)
        cases += not lines.left  # an earlier case may have left nothing to do there
        try:
            assert (
                lines.left
                or isinstance(raised, KeyboardInterrupt)
                or KeyboardInterrupt in swallowed
            ), f"{raised!r} came out"
            del raised
            case.check()
        except Exception as problem:
            problems.append(
                f"{line[0].co_filename}:{line[1]} visit {visit}: {type(problem).__name__}: "
                f"{str(problem)[:300]}"
            )
            case = OPERATIONS[operation](operation)
        if len(problems) == 8:
            break
    assert not problems, f"{len(problems)} of {cases} cases:\n" + "\n".join(problems)
    assert cases > 16
    counted(f"{operation}: SIGINT at {cases} lines, 0 inconsistent")


@pytest.mark.sweep
def test_a_second_one_is_raised_at_once(
    swallowed: list[Any], counted: Callable[[str], None]
) -> None:
    case, survey = Case("switch"), Lines()
    case.run(survey)
    cases = 0
    for line in [*survey.visits][::60]:
        lines = Lines(line, again=True)
        raised = case.run(lines)
        if lines.left:
            continue  # the first came before the transition had begun, and was raised
        cases += 1
        assert lines.was_raised_at_once
        assert isinstance(raised, KeyboardInterrupt) or KeyboardInterrupt in swallowed
        del raised
        case.manager.audit()  # not refused: no phase transition is under way any more
        case = Case("switch")
    assert cases > 6
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    counted(f"a second SIGINT at {cases} lines, raised there")


class CutShort(SimulatedDevice):
    """The handler of a signal raises as an `unmap` returns.

    Attributes:
        unmaps_left: the number of calls until then; 0: it raises no more.
    """

    unmaps_left = 0

    def unmap(self, addresses: Addresses, nbytes: int, start: int = 0) -> None:
        super().unmap(addresses, nbytes, start)
        if self.unmaps_left:
            self.unmaps_left -= 1
            if not self.unmaps_left:
                raise SystemExit


@pytest.mark.parametrize("operation", ["entry", "switch", "exit"])
def test_sigterm_as_memory_is_unmapped_loses_no_value(operation: str) -> None:
    device = CutShort(16 << 20, chunk_bytes=4096)
    manager = placement.Manager(device=device)
    model = nn.Linear(64, 64)
    adam = torch.optim.Adam(model.parameters())
    manager.register("actor", model, role="actor")
    handle = manager.register("adam", adam)
    with manager.phase("train"):
        model(torch.ones(2, 64)).sum().backward()
        adam.step()
        adam.zero_grad()

    def values() -> bytes:
        tensors = [*model.state_dict().values()]
        for state in handle.state_dict()["state"].values():
            tensors += state.values()
        return b"".join(tensor.numpy().tobytes() for tensor in tensors)

    saved = values()
    cases = 0
    for unmaps in range(1, 100):
        with suppress(SystemExit):
            if operation == "entry":
                device.unmaps_left = unmaps
            with manager.phase("train") as phase:
                for parameter in model.parameters():
                    parameter.data.add_(0)  # every page has changed, as far as anyone knows
                if operation != "entry":
                    device.unmaps_left = unmaps
                if operation == "switch":
                    phase.switch("log_prob")
        is_over, device.unmaps_left = device.unmaps_left > 0, 0
        if is_over:
            break
        cases += 1
        with manager.phase("checkpoint"):
            pass
        assert_nothing_resident(manager)
        assert values() == saved, f"after unmap {unmaps}"
        with manager.phase("train"):
            assert values() == saved, f"loaded after unmap {unmaps}"
    assert cases > 3
