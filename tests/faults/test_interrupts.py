"""KeyboardInterrupt at bytecodes of our frames during each kind of phase transition; with SWEEP=all at every one, first and last visit.

One worker goes through all cases of an operation: whatever an earlier case left behind would show in a later one. Recovery is what
a user does: leave the `with`, drop the traceback, open the next phase.

What the sweep makes good by itself, because no signal arrives there: the interpreter looks for signals after calls and on jumps, never
between the last bytecode of a `with` body and the call of its `__exit__`. An exception that a tracer raises just there skips
`torch.no_grad().__exit__`, so grad mode is restored after each case. And one between the registration of a hook with torch and the note
that we take of it leaves a hook that does nothing, because it knows its handle weakly.
"""

from __future__ import annotations

import copy
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Protocol
from unittest import mock

import pytest
import torch
from torch import nn

import placement
from placement import frameworks, ownership, tensors
from placement.devices import adoption
from placement.storage.offloaded.host_reads import is_reading
from placement.tensors.plain import nested_tensors
from placement.testing import SimulatedDevice
from tests.faults.harness import FaultyWorker, Foresight, as_bytes, check_left, check_sound, hidden_bytes, many_cases, partition
from tests.faults.tracing import Interrupter, Point, Recorder, describe

pytestmark = pytest.mark.leaves_behind("each of thousands of cases is looked at by the harness when it ends")


@pytest.fixture(scope="module", autouse=True)
def _nothing_is_done_for_the_first_time() -> None:
    """A process looks for frameworks once, at its first registration: no later case would come to these bytecodes again."""
    manager = placement.Manager(device=SimulatedDevice(1 << 20, chunk_bytes=4096))
    model = nn.Linear(2, 2)
    manager.register("actor", model, role="actor")
    manager.register("optimizer", torch.optim.AdamW(model.parameters()))
    with manager.phase("train"):
        pass
    manager.close()


CAPACITY_BYTES = 256 * 1024
EVERY_POINT = os.environ.get("SWEEP") == "all"


class Tracing(Protocol):
    def on(self) -> None: ...
    def off(self) -> None: ...


@pytest.fixture(scope="module", autouse=True)
def _many_cases() -> Iterator[None]:
    with many_cases():
        yield


class Case:
    """A worker and one operation on it, which can be repeated."""

    every_point = EVERY_POINT
    """Whether each of its points is interrupted, and not a share of them."""
    settings: Mapping[str, Any] = MappingProxyType({})
    capacity_bytes = CAPACITY_BYTES

    def __init__(self) -> None:
        self.worker = FaultyWorker(self.capacity_bytes, **self.settings).register_few()
        self.manager = self.worker.manager
        with self.manager.phase("train"):
            self.worker.train_actor()
            self.worker.actor.zero_grad()
        with self.manager.phase("log_prob"):
            self.hidden = hidden_bytes(self.manager.handles["actor"])

    def prepare(self) -> None:
        """What comes before the operation, undisturbed."""

    def run(self, tracing: Tracing) -> None:
        """The operation, with the tracing on where it counts."""
        raise NotImplementedError

    def check(self) -> None:
        """After recovery: everything is as the last commit left it."""
        with self.manager.phase("log_prob"):
            check_sound(self.worker)
            assert hidden_bytes(self.manager.handles["actor"]) == self.hidden
        check_left(self.worker)


class Entry(Case):
    def run(self, tracing: Tracing) -> None:
        tracing.on()
        with self.manager.phase("train"):
            tracing.off()


class Exit(Case):
    """State that is born in the phase and gradients that outlive it: the exit adopts both."""

    def prepare(self) -> None:
        # A new worker each time: an offload that was cut short keeps its host memory for the next, which then takes another way.
        self.manager.close()
        super().__init__()

    def run(self, tracing: Tracing) -> None:
        with self.manager.phase("train"):
            self.worker.optimizers[0].state.clear()
            self.worker.train_actor()
            self.gradients = [as_bytes(p.grad) for p in self.worker.actor.parameters() if p.grad is not None]
            tracing.on()
        tracing.off()

    def check(self) -> None:
        with self.manager.phase("log_prob"):
            assert [as_bytes(p.grad) for p in self.worker.actor.parameters() if p.grad is not None] == self.gradients
            self.worker.actor.zero_grad()
        super().check()


class NamedExit(Case):
    """The variable of `as` lives on, as in a function that catches the interrupt: only the with statement may hold the phase open."""

    def run(self, tracing: Tracing) -> None:
        with self.manager.phase("log_prob") as self.step:
            tracing.on()
        tracing.off()

    def check(self) -> None:
        with self.manager.phase("checkpoint"):  # a phase transition later at the latest
            assert self.manager.snapshot().phases == ("checkpoint",)
        with pytest.raises(placement.PhaseError, match="not open"):
            self.step.switch("train")
        super().check()


class NamedSwitch(NamedExit):
    """A step that is interrupted at a switch and while it is left."""

    def run(self, tracing: Tracing) -> None:
        with self.manager.phase("train", only=["actor"]) as self.step:
            tracing.on()
            self.step.switch("log_prob")
            with self.manager.phase("values") as self.inner:
                pass
        tracing.off()


class Switch(Case):
    """Both directions: the optimizer leaves, the rollout engine comes, the actor stays."""

    def run(self, tracing: Tracing) -> None:
        with self.manager.phase("train") as step:
            tracing.on()
            step.switch("weight_sync")
            tracing.off()


class Prefetch(Case):
    """What a phase does not need arrives early: one switch uses the engine's bytes and begins with the optimizer's, the next uses those."""

    settings: Mapping[str, Any] = MappingProxyType({"policy": Foresight()})

    def run(self, tracing: Tracing) -> None:
        with self.manager.phase("train") as step:
            tracing.on()
            step.switch("weight_sync")
            with self.manager.phase("rollout"):
                pass
            step.switch("train")
            tracing.off()

    def check(self) -> None:
        super().check()
        assert self.manager.handles["actor.optimizer"].counters.prefetch_used_bytes


class Crowded(Case):
    """The optimizer leaves; the engine, which comes sooner, gets its memory as it is saved, and is used."""

    settings: Mapping[str, Any] = MappingProxyType({"policy": Foresight()})
    capacity_bytes = 64 * 1024

    def prepare(self) -> None:
        self.worker.actor.zero_grad()
        with self.manager.phase("rollout"):
            pass  # what a state dict has shown arrives early only after its next load

    def run(self, tracing: Tracing) -> None:
        with self.manager.phase("train") as step:
            for parameter in self.worker.actor.parameters():
                parameter.grad = torch.zeros_like(parameter)  # they take the room
            tracing.on()
            step.switch("log_prob")
            tracing.off()
            self.wait_for_the_engine()
            tracing.on()
            step.switch("rollout")
            tracing.off()

    def wait_for_the_engine(self) -> None:
        """Another thread hands it the memory."""
        engine, deadline = self.manager.handles["rollout"], time.monotonic() + 10
        while engine.prefetched_bytes < engine.num_bytes and time.monotonic() < deadline:
            time.sleep(1e-4)  # it tells nobody; `check` says whether the engine has used what arrived

    def check(self) -> None:
        super().check()
        assert self.manager.handles["rollout"].counters.prefetch_used_bytes


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
        self.manager.enter("log_prob")
        self.manager.leave()
        tracing.off()

    def check(self) -> None:
        while self.manager.snapshot().phases:
            self.manager.leave()  # an interrupted leave() is called again
        super().check()


class Holds(Case):
    """Two holds that are opened, and released in the order in which they were opened; the second by an iterator."""

    def run(self, tracing: Tracing) -> None:
        self.held: list[Any] = []
        tracing.on()
        self.held.append(self.manager.hold("train", only=["actor"]))
        self.held.append(self.manager.hold("rollout", only=["rollout"]).around(range(2)))
        self.held[0].release()
        list(self.held[1])
        tracing.off()

    def check(self) -> None:
        for held in self.held:
            (held.release if isinstance(held, placement.Hold) else held.close)()  # again, where it was released before
        self.held.clear()
        super().check()


class Extra(Case):
    """A module with a tied weight and a view of a buffer that comes and goes."""

    def prepare(self) -> None:
        torch.manual_seed(3)
        self.extra = nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 12))
        self.extra[1].weight = self.extra[0].weight
        self.extra.register_buffer("table", torch.randn(6, 12))
        self.extra.register_buffer("window", self.extra.table[1:3])
        self.parts = partition(self.extra)
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
        assert partition(self.extra) == self.parts
        self.extra(torch.zeros(1, 12))
        check_sound(self.worker)


class Register(Extra):
    def run(self, tracing: Tracing) -> None:
        tracing.on()
        self.manager.register("extra", self.extra, role="reward")
        tracing.off()


class RegisterFromElsewhere(Register):
    """As what lies on another device than it is registered for: tensors are rebound one by one, and none follows its storage."""

    every_point = True

    def run(self, tracing: Tracing) -> None:
        with mock.patch.object(adoption, "can_swap", return_value=False):
            super().run(tracing)


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


class UnregisterToElsewhere(Unregister):
    """As what leaves the device for another: see `RegisterFromElsewhere`."""

    every_point = True

    def run(self, tracing: Tracing) -> None:
        with mock.patch.object(adoption, "can_swap", return_value=False):
            super().run(tracing)

    def check(self) -> None:
        with mock.patch.object(adoption, "can_swap", return_value=False):
            super().check()


class BuildLazy(Extra):
    """A phase transition that builds a `Lazy`: afterwards it is built, or can be built."""

    def run(self, tracing: Tracing) -> None:
        self.manager.register("extra", placement.Lazy(lambda: self.extra), role="reward")
        tracing.on()
        with self.manager.phase("reward"):
            tracing.off()

    def check(self) -> None:
        assert "extra" in self.manager.handles
        super().check()


class ComputedStateDict(Case):
    """Of what is offloaded, by hooks that compute: afterwards what lies there is poison again for everybody."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 12))
        self.extra[0]._register_state_dict_hook(lambda _, found, prefix, __: found.update({prefix + "weight": self.extra[0].weight * 2}))
        self.worker.optimizers[0].register_state_dict_post_hook(lambda _, found: {**found, "state": copy.deepcopy(found["state"])})
        self.handle = self.manager.register("extra", self.extra, role="reward")
        self.wanted = self.shown()

    def shown(self) -> list[bytes]:
        found = nested_tensors([self.extra.state_dict(), self.worker.optimizers[0].state_dict()], "")
        return [as_bytes(tensor.contiguous()) for _, tensor in found]

    def run(self, tracing: Tracing) -> None:
        tracing.on()
        self.extra.state_dict()
        self.worker.optimizers[0].state_dict()
        tracing.off()

    def check(self) -> None:
        assert not is_reading()
        assert self.extra[0].weight.isnan().all()
        assert self.shown() == self.wanted
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


ROOMS_THAT_LOOK = tuple(os.path.dirname(str(room.__file__)) + os.sep for room in (frameworks, ownership, tensors))
"""What these rooms do is to look for tensors in the user's objects: little of their code changes anything."""


def share_of(index: int, point: Point, visits: int) -> list[int]:
    """Which visits of a point are interrupted where not all are: code that only looks needs fewer than code that changes something."""
    if point[0].co_filename.startswith(ROOMS_THAT_LOOK):
        return [1] if index % 96 == 0 else []
    return sorted({1, visits} if index % 48 == 0 else {1}) if index % 24 == 0 else []


def sweep(make: Callable[[], Case], error: type[BaseException], known: set[Point], swallowed: list[Any]) -> tuple[int, int]:
    """Interrupt at every point that is not known, and make it known. Returns the numbers of points and of cases.

    Args:
        swallowed: types of what the interpreter could only report, because it was raised in `__del__`.

    Raises:
        AssertionError: with the first cases that left something behind.
    """
    case, points = record(make)
    points = {point: visits for point, visits in points.items() if point not in known}
    known.update(points)
    chosen = [
        (point, visit)
        for index, (point, visits) in enumerate(points.items())
        for visit in (sorted({1, visits}) if case.every_point else share_of(index, point, visits))
    ]
    problems: list[str] = []
    cases = unreached = 0
    for point, visit in chosen:
        cases += 1
        tracing = Interrupter(point, visit, error)
        where = describe(point, visit)
        swallowed.clear()
        raised = None
        for _ in range(2):  # what an earlier case cut short can hide a point from the next one; an undisturbed run brings it back
            if not tracing.fired:
                case.prepare()
                raised = interrupted(case, tracing)
        torch.set_grad_enabled(True)
        if not tracing.fired:  # reached only from a state that the recorded run was in; left for another operation
            known.discard(point)
            unreached += 1
            continue
        try:
            # An ordinary exception may come out as an error of ours: PolicyError from a policy, BrokenHandleError while settling.
            told = isinstance(raised, (error, placement.PlacementError)) or swallowed == [error]
            assert told, f"{raised!r} came out instead"
            del raised
            case.check()
        except Exception as problem:
            problems.append(f"{where}: {type(problem).__name__}: {str(problem)[:300]}")
            case = make()
        if len(problems) == 8:
            break
    assert not problems, f"{len(problems)} of {cases} cases:\n" + "\n".join(problems)
    assert unreached <= max(1, cases // 100), f"{unreached} of {cases} cases were not reached again"
    return len(points), cases - unreached


OPERATIONS: list[type[Case]] = [
    Entry, EnterLeave, Switch, Prefetch, Crowded, Nested, Holds, Exit, Register, RegisterFromElsewhere, Unregister, UnregisterToElsewhere,
    RegisterInPhase, BuildLazy, ComputedStateDict,
]  # fmt: skip


_SLOW = (EnterLeave, Crowded, RegisterFromElsewhere, UnregisterToElsewhere, NamedExit, NamedSwitch)
"""Like another operation, in a state that is reached in more ways."""


def _marked(operation: type[Case]) -> Any:
    return pytest.param(operation, marks=[pytest.mark.slow] if operation in _SLOW else [])


@pytest.fixture
def swallowed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda report: found.append(report.exc_type))
    return found


@pytest.fixture(scope="module")
def known() -> set[Point]:
    return set()


@pytest.fixture(scope="module")
def known_by_name() -> set[Point]:
    return set()


@pytest.mark.timeout(1500 if EVERY_POINT else 400)
@pytest.mark.parametrize("operation", [*map(_marked, OPERATIONS)], ids=lambda each: each.__name__)
def test_interrupted_at_bytecodes_of_every_operation(
    operation: type[Case], known: set[Point], swallowed: list[Any], counted: Callable[[str], None]
) -> None:
    """Distinct bytecodes, each in the first operation that reaches it: every one with SWEEP=all, which takes ten minutes."""
    points, cases = sweep(operation, KeyboardInterrupt, known, swallowed)
    counted(f"{operation.__name__}: {points} more bytecodes, interrupted in {cases} cases, 0 inconsistent")


@pytest.mark.timeout(1500 if EVERY_POINT else 400)
@pytest.mark.parametrize("operation", [*map(_marked, (NamedExit, NamedSwitch))], ids=lambda each: each.__name__)
def test_interrupted_with_a_variable_that_names_the_phase(
    operation: type[Case], known_by_name: set[Point], swallowed: list[Any], counted: Callable[[str], None]
) -> None:
    """The same bytecodes again: a phase that ends with its own object must not live on in a variable."""
    points, cases = sweep(operation, KeyboardInterrupt, known_by_name, swallowed)
    counted(f"{operation.__name__}: {points} more bytecodes, interrupted in {cases} cases, 0 inconsistent")


@pytest.mark.parametrize("error", [SystemExit, MemoryError])
def test_other_exceptions_in_strides(error: type[BaseException], known: set[Point], swallowed: list[Any]) -> None:
    """The kind of exception makes no difference: one operation, in strides."""
    _, points = record(Switch)
    skipped = {point for index, point in enumerate(points) if index % 10}
    assert sweep(Switch, error, skipped, swallowed)[0]
