"""KeyboardInterrupt at every distinct bytecode of our frames, first and last visit, during each kind of border.

One worker goes through all cases of an operation: whatever an earlier case left behind would show in a later one. Recovery is what
a user does: leave the `with`, drop the traceback, open the next phase.

What the sweep makes good by itself, because no signal arrives there: the interpreter looks for signals after calls and on jumps, never
between the last bytecode of a `with` body and the call of its `__exit__`. An exception that a tracer raises just there skips
`torch.no_grad().__exit__`, so grad mode is restored after each case.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import pytest
import torch
from torch import nn

import placement
from tests.faults.harness import Worker, as_bytes, check_left, check_sound, digest, hidden_bytes, many_cases
from tests.faults.tracing import Interrupter, Point, Recorder, describe

CAPACITY_BYTES = 256 * 1024


class Tracing(Protocol):
    def on(self) -> None: ...
    def off(self) -> None: ...


@pytest.fixture(scope="module", autouse=True)
def _many_cases() -> Iterator[None]:
    with many_cases():
        yield


class Case:
    """A worker and one operation on it, which can be repeated."""

    def __init__(self) -> None:
        self.worker = Worker(CAPACITY_BYTES).register()
        self.manager = self.worker.manager
        for _ in range(2):
            self.worker.run_step()
        with self.manager.phase("log_prob"):
            self.hidden = {name: hidden_bytes(self.manager.handles[name]) for name in ("actor", "ref")}

    def prepare(self) -> None:
        """What comes before the operation, undisturbed."""

    def run(self, tracing: Tracing) -> None:
        """The operation, with the tracing on where it counts."""
        raise NotImplementedError

    def check(self) -> None:
        """After recovery: everything is as the last commit left it."""
        gc.collect()
        with self.manager.phase("log_prob"):
            check_sound(self.worker)
            for name, before in self.hidden.items():
                assert hidden_bytes(self.manager.handles[name]) == before, name
        check_left(self.worker)


class Entry(Case):
    def run(self, tracing: Tracing) -> None:
        tracing.on()
        with self.manager.phase("train"):
            tracing.off()


class Exit(Case):
    """State that is born in the phase and gradients that outlive it: the exit adopts both."""

    def run(self, tracing: Tracing) -> None:
        with self.manager.phase("train"):
            for optimizer in self.worker.optimizers:
                optimizer.state.clear()
            self.worker.train()
            self.worker.critic(self.worker.states).square().mean().backward()
            self.gradients = [as_bytes(p.grad) for p in self.worker.critic.parameters() if p.grad is not None]
            tracing.on()
        tracing.off()

    def check(self) -> None:
        gc.collect()
        with self.manager.phase("values"):
            assert [as_bytes(p.grad) for p in self.worker.critic.parameters() if p.grad is not None] == self.gradients
        self.worker.critic.zero_grad()
        super().check()


class Switch(Case):
    """Both directions: the optimizers and the critic leave, the rollout engine comes, the actor stays."""

    def run(self, tracing: Tracing) -> None:
        with self.manager.phase("train") as step:
            tracing.on()
            step.switch("weight_sync")
            tracing.off()


class Nested(Case):
    def run(self, tracing: Tracing) -> None:
        with self.manager.phase("rollout"):
            tracing.on()
            with self.manager.phase("log_prob", only=["actor"]):
                pass
            tracing.off()


class EnterLeave(Case):
    def run(self, tracing: Tracing) -> None:
        tracing.on()
        self.manager.enter("values")
        self.manager.leave()
        tracing.off()


class Extra(Case):
    """A module with a tied weight that comes and goes."""

    def prepare(self) -> None:
        torch.manual_seed(3)
        self.extra = nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 12))
        self.extra[1].weight = self.extra[0].weight
        self.before = [as_bytes(p) for p in self.extra.parameters()]
        self.state = {k: as_bytes(v) for k, v in self.extra.state_dict().items()}

    def check(self) -> None:
        super().check()
        if "extra" in self.manager.handles:
            with self.manager.phase("reward"):
                assert [as_bytes(p) for p in self.extra.parameters()] == self.before
            assert {k: as_bytes(v) for k, v in self.extra.state_dict().items()} == self.state
            self.manager.unregister("extra")
        assert [as_bytes(p) for p in self.extra.parameters()] == self.before
        assert self.extra[1].weight is self.extra[0].weight
        self.extra(torch.zeros(1, 12))
        assert not self.extra._forward_pre_hooks
        check_sound(self.worker)


class Register(Extra):
    def run(self, tracing: Tracing) -> None:
        tracing.on()
        self.manager.register("extra", self.extra, role="reward")
        tracing.off()


class RegisterInPhase(Extra):
    def run(self, tracing: Tracing) -> None:
        with self.manager.phase("reward"):
            tracing.on()
            self.manager.register("extra", self.extra, role="reward")
            tracing.off()


class Unregister(Extra):
    def run(self, tracing: Tracing) -> None:
        self.manager.register("extra", self.extra, role="reward")
        tracing.on()
        self.manager.unregister("extra")
        tracing.off()


class BuildLazy(Extra):
    """A border that builds a `Lazy`: afterwards it is built, or can be built."""

    def run(self, tracing: Tracing) -> None:
        self.manager.register("extra", placement.Lazy(lambda: self.extra), role="reward")
        tracing.on()
        with self.manager.phase("reward"):
            tracing.off()

    def check(self) -> None:
        assert "extra" in self.manager.handles
        super().check()


def interrupted(case: Case, tracing: Tracing) -> BaseException | None:
    """Run the operation in frames of its own; what it raised, without its frames."""
    try:
        case.run(tracing)
    except BaseException as error:
        tracing.off()
        return error.with_traceback(None)
    finally:
        tracing.off()
    return None


def record(make: Callable[[], Case]) -> tuple[Case, dict[Point, int]]:
    """Every point of the operation in its steady state, with its number of visits."""
    case = make()
    for _ in range(2):
        case.prepare()
        recorder = Recorder()
        assert interrupted(case, recorder) is None
        case.check()
    return case, dict(recorder.visits)


def sweep(make: Callable[[], Case], error: type[BaseException]) -> tuple[int, int]:
    """Interrupt at every point. Returns the numbers of points and of cases.

    Raises:
        AssertionError: with the first cases that left something behind.
    """
    case, points = record(make)
    problems: list[str] = []
    cases = 0
    for point, visits in points.items():
        for visit in sorted({1, visits}):
            cases += 1
            tracing = Interrupter(point, visit, error)
            where = describe(point, visit)
            case.prepare()
            raised = interrupted(case, tracing)
            torch.set_grad_enabled(True)
            try:
                assert tracing.fired, "never reached"
                assert isinstance(raised, error), f"{raised!r} came out instead"
                del raised
                case.check()
            except Exception as problem:
                problems.append(f"{where}: {type(problem).__name__}: {str(problem)[:300]}")
                case = make()
                if len(problems) == 8:
                    break
        if len(problems) == 8:
            break
    assert not problems, f"{len(problems)} of {cases} cases:\n" + "\n".join(problems)
    return len(points), cases


OPERATIONS: list[type[Case]] = [Entry, Exit, Switch, Nested, EnterLeave, Register, RegisterInPhase, Unregister, BuildLazy]


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda each: each.__name__)
def test_interrupted_at_every_bytecode(operation: type[Case], capsys: pytest.CaptureFixture[str]) -> None:
    points, cases = sweep(operation, KeyboardInterrupt)
    with capsys.disabled():
        print(f"\n{operation.__name__}: interrupted at {points} bytecodes, {cases} cases, 0 inconsistent", end="")
