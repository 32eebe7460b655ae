"""A streamed step that is cut short by every call of the device that fails in turn.

Each parameter is then either stepped, with its new state on the host, or as it was, with its old
state. Of one that is stepped in slices the same holds for each element. Nothing of the state is on
the device, the optimizer is as the user made it, and the next step is that of an optimizer with the
same values.
"""

from __future__ import annotations

import copy
import gc
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import placement
from placement import State
from placement.policies import Colocated
from placement.testing import Faults, SimulatedDevice, assert_nothing_resident
from tests.faults.harness import FAULTS, as_bytes, calls_to_fail
from tests.support.buckets import set_bucket_bytes
from tests.support.poison import reads_poison
from tests.support.worker import assert_same

pytestmark = pytest.mark.leaves_behind("each case is looked at when it ends")

WIDTH = 32
WIDE = 5 * WIDTH
BUCKET_BYTES = 3 * 4096


def values(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[bytes]]:
    """The bytes of each parameter and of its state. What is offloaded is read from the host
    copies."""
    parameters = net.state_dict()
    state = optimizer.state_dict()["state"]
    return [
        [as_bytes(parameters[name]), *(as_bytes(value) for value in state.get(index, {}).values())]
        for index, (name, _) in enumerate(net.named_parameters())
    ]


def _is_of_one_step(found: list[bytes], old: list[bytes], new: list[bytes]) -> bool:
    """Whether a parameter and its state are of one step. In a sliced one each element is, and the
    counter is new once all of them are."""
    if found in (old, new):
        return True
    if len(found[0]) <= BUCKET_BYTES:
        return False

    def is_as_in(values: list[bytes]) -> Any:
        # without the counter
        pairs = zip(found[:1] + found[2:], values[:1] + values[2:], strict=True)
        return np.logical_and.reduce(
            [np.frombuffer(now, np.int32) == np.frombuffer(then, np.int32) for now, then in pairs]
        )

    is_new = is_as_in(new)
    return bool((is_as_in(old) | is_new).all()) and found[1] == (new if is_new.all() else old)[1]


class Job:
    """A model and an optimizer that streams, on a device that fails on demand, and the same without
    placement.

    Args:
        width: of the third layer. A wide one has moments of several buckets.
    """

    def __init__(self, width: int = WIDTH) -> None:
        torch.manual_seed(0)
        widths = (WIDTH, WIDTH, WIDTH, width, WIDTH, WIDTH)
        self.net = nn.Sequential(*(nn.Linear(*each) for each in itertools.pairwise(widths)))
        self.plain = copy.deepcopy(self.net)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        self.other = torch.optim.AdamW(self.plain.parameters(), lr=1e-2)
        self.device: Any = Faults(SimulatedDevice(4 << 20, chunk_bytes=4096))
        set_bucket_bytes(BUCKET_BYTES)
        self.manager = placement.Manager(device=self.device, policy=Colocated("streamed"))
        self.actor = self.manager.register("actor", self.net, role="actor")
        self.handle = self.manager.register("adam", self.optimizer)
        self.groups = self.optimizer.param_groups
        self.members = [list(group["params"]) for group in self.groups]
        self.steps = 0

    def stepped(self, disturbed: Callable[[], Any]) -> BaseException | None:
        """One step of both. `disturbed` steps the placed optimizer. Returns the error that it
        raised."""
        self.plain.load_state_dict(
            {name: value.clone() for name, value in self.actor.state_dict().items()}
        )
        self.other.load_state_dict(copy.deepcopy(self.handle.state_dict()))
        self.steps += 1
        batch = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(self.steps))
        self.plain(batch).square().mean().backward()
        self.old = values(self.plain, self.other)
        self.other.step()
        self.new = values(self.plain, self.other)
        self.plain.zero_grad()
        try:
            with self.manager.phase("train"):
                self.net(batch).square().mean().backward()
                disturbed()
                self.net.zero_grad()
        except BaseException as error:
            return error.with_traceback(None)
        return None

    def check(self) -> int:
        """What must hold outside every phase after a step, however far it came. Returns how many
        parameters were stepped."""
        gc.collect()
        # what a device that does not answer has left is settled at the next phase transition
        with self.manager.phase("train"):
            self.net.zero_grad()
        assert self.manager.snapshot().phases == ()
        assert self.handle.state is State.CPU_OFFLOADED
        assert self.optimizer.param_groups is self.groups
        assert all(
            a is b
            for group, own in zip(self.groups, self.members, strict=True)
            for a, b in zip(group["params"], own, strict=True)
        )
        self.manager.check_integrity()
        assert_nothing_resident(self.manager)
        assert self.device.memory().chunk_bytes == 0
        holding = self.handle.holding
        assert holding is not None
        for r in holding.ranges:
            assert not r.pages.own_bytes
            assert reads_poison(self.device.view(r.layout.addresses, 0, r.nbytes))
        found = values(self.net, self.optimizer)
        for now, old, new in zip(found, self.old, self.new, strict=True):
            assert _is_of_one_step(now, old, new), "a parameter and its state are not of one step"
        return sum(now == new for now, new in zip(found, self.new, strict=True))

    def step(self) -> None:
        self.optimizer.step()  # looked up at each call, as in a user's loop

    def check_goes_on(self) -> None:
        assert self.stepped(self.step) is None
        assert self.check() == len(self.new)
        assert_same(self.handle.state_dict(), self.other.state_dict())


CASES = [
    *(("first step", operation) for operation in ("reserve", "copy", "sync")),
    *(("step in slices", operation) for operation in ("map", "copy", "sync")),
]


@pytest.mark.parametrize(
    ("when", "operation"),
    [pytest.param(*case, marks=pytest.mark.sweep if case in CASES[2:] else ()) for case in CASES],
)
@pytest.mark.parametrize(
    "forever", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["once", "forever"]
)
def test_every_call_failed(
    operation: str, forever: bool, when: str, counted: Callable[[str], None]
) -> None:
    def job_before() -> Job:
        job = Job(WIDE if when == "step in slices" else WIDTH)
        if when != "first step":
            job.check_goes_on()
        return job

    survey, seen = job_before(), set[int]()
    points: list[int] = []
    assert (
        survey.stepped(lambda: points.extend(calls_to_fail(survey.device, operation, survey.step)))
        is None
    )
    survey.check_goes_on()
    survey.manager.close()
    assert points
    for at in points:
        job = job_before()

        def step(job: Job = job, at: int = at) -> None:
            job.device.fail(operation, at=at, forever=forever)
            try:
                job.step()
            finally:
                assert job.device.fired, f"{operation} call {at} was not made"
                if not forever or operation not in ("copy", "sync"):
                    # else the device does not answer while the phase is left, either
                    job.device.clear()

        error = job.stepped(step)
        job.device.clear()
        assert error is None or isinstance(error, (*FAULTS, placement.PlacementError)), repr(error)
        done = job.check()
        seen.add(done)
        if error is None:  # less memory than wanted: then with fewer buckets at a time
            assert operation == "map"
            assert done == len(job.new)
        job.check_goes_on()
        job.manager.close()
    counted(
        f"{operation}, {'for ever' if forever else 'once'}, {when}: {len(points)} calls, "
        f"parameters stepped: {sorted(seen)}"
    )
    if operation in ("copy", "sync"):
        assert len(seen) > 2, "a step was never stopped half-way"
