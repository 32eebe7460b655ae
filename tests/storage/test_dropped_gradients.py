"""What drops gradients gives their memory back at once, wherever they lie, as in plain torch."""

from __future__ import annotations

import contextlib
import copy
import gc
import signal
import threading
from collections.abc import Callable

import pytest
import torch

import placement
from placement.policies import Cyclic
from placement.testing import Faults, InjectedFault, SimulatedDevice
from tests.support.kernel_device import KernelDevice, kernels_noted
from tests.support.sweeps import few
from tests.support.worker import CAPACITY, assert_same

CHUNK = 4096
LAYER = 4 * CHUNK  # bytes of a layer's weight, of its gradient, and of each of AdamW's two moments
LAYERS = 4
WEIGHTS = LAYER * LAYERS


class Job:
    """A model that learns, beside its twin that learns without placement."""

    def __init__(
        self, device: placement.Device | None = None, policy: object = "colocated", **more: object
    ) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            *[torch.nn.Linear(64, 64, bias=False) for _ in range(LAYERS)]
        )
        self.twin = copy.deepcopy(self.model)
        self.adam, self.twin_adam = (
            torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (self.model, self.twin)
        )
        self.device = device or SimulatedDevice(CAPACITY, chunk_bytes=CHUNK)
        self.manager = placement.Manager(device=self.device, policy=policy, **more)  # type: ignore[arg-type]
        self.actor = self.manager.register("actor", self.model, role="actor")
        self.optimizer = self.manager.register("actor.optimizer", self.adam)
        self.manager.register("ref", torch.nn.Linear(64, 64), role="ref", readonly=True)

    def both(self, change: Callable[[torch.nn.Module, torch.optim.Optimizer], object]) -> None:
        change(self.model, self.adam)
        change(self.twin, self.twin_adam)

    def check(self) -> None:
        """Everything is as without placement. Inside a phase that has all of it on the device."""
        for found, wanted in zip(self.model.parameters(), self.twin.parameters(), strict=True):
            assert_same(found.detach(), wanted.detach())
            assert_same(found.grad, wanted.grad)
        assert_same(self.adam.state_dict(), self.twin_adam.state_dict())
        self.manager.check_integrity()


def backward(model: torch.nn.Module, optimizer: object = None) -> None:
    inputs = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    model(inputs).square().mean().backward()


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    backward(model)
    optimizer.step()


def zero(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()


def zero_module(model: torch.nn.Module, optimizer: object) -> None:
    model.zero_grad()


def one_by_one(model: torch.nn.Module, optimizer: object) -> None:
    for parameter in reversed([*model.parameters()]):
        parameter.grad = None


def deleted(model: torch.nn.Module, optimizer: object) -> None:
    for parameter in model.parameters():
        del parameter.grad


def replaced(model: torch.nn.Module, optimizer: object) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)


def in_a_thread(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    thread = threading.Thread(target=optimizer.zero_grad)
    thread.start()
    thread.join()


def with_a_graph(model: torch.nn.Module, optimizer: object) -> None:
    """A backward that makes new gradients instead of adding to the ones that are there."""
    inputs = torch.ones(2, 64)
    model(inputs).square().mean().backward(create_graph=True)
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad.detach().clone()


WAYS = (zero, zero_module, one_by_one, deleted, replaced, in_a_thread, with_a_graph)


@pytest.mark.parametrize("drop", few(WAYS, zero, one_by_one, replaced, with_a_graph))
@pytest.mark.filterwarnings("ignore:Using backward")
def test_memory_in_a_range_is_given_back_at_once(
    drop: Callable[[torch.nn.Module, torch.optim.Optimizer], object],
) -> None:
    job = Job()
    for _ in range(3):
        with job.manager.phase("train"):
            job.both(step)
        with job.manager.phase("train"):
            assert job.actor.resident_bytes == job.actor.num_bytes == 2 * WEIGHTS
            job.check()
            job.both(drop)
            assert job.actor.resident_bytes == job.actor.num_bytes == WEIGHTS
            assert job.device.memory().chunk_bytes == 3 * WEIGHTS
            job.check()
            job.both(step)
            job.check()
        assert job.manager.audit().ok


def test_memory_of_torch_is_counted_no_more() -> None:
    """The model stays on the device, and its gradients in torch's memory."""
    job = Job(policy=Cyclic(), budget_bytes=7 * WEIGHTS)
    with job.manager.phase("train"):
        job.both(step)
    with job.manager.phase("ref_log_prob"):
        assert job.actor.resident_bytes == 2 * WEIGHTS
        job.both(zero)
        assert job.actor.resident_bytes == job.actor.num_bytes == WEIGHTS
    with job.manager.phase("train"):
        job.both(step)
        job.check()


@pytest.mark.parametrize("policy", ["colocated", "cyclic(idle='keep')", "resident"])
def test_a_loop_that_zeroes_first_needs_room_for_one_gradient(policy: str) -> None:
    """Beside weights and two moments; a page more has the optimizer's counters."""
    job = Job(policy=policy, budget_bytes=4 * WEIGHTS + CHUNK)
    for _ in range(4):
        with job.manager.phase("train"):
            job.both(step)
        for _ in range(2):
            with job.manager.phase("ref_log_prob"):
                pass
        with job.manager.phase("train"):
            job.both(step)
            job.check()
        with job.manager.phase("train"):
            job.check()
    job.manager.close()


def test_what_is_dropped_while_offloaded_is_not_loaded() -> None:
    job = Job(budget_bytes=4 * WEIGHTS)
    with job.manager.phase("train"):
        job.both(step)
    assert job.actor.num_bytes == 2 * WEIGHTS
    job.both(zero)
    assert job.actor.num_bytes == WEIGHTS
    with job.manager.phase("train"):
        assert job.actor.resident_bytes == WEIGHTS
        job.check()


@pytest.mark.parametrize("verify", ["off", "always"])
def test_a_part_of_them(verify: str) -> None:
    """What is left keeps its values, and alone comes back; in the end it is dropped, too."""
    job = Job(verify=verify)
    with job.manager.phase("train"):
        job.both(step)
    for number in range(LAYERS):
        with job.manager.phase("train"):
            job.both(lambda model, _, at=number: one_by_one(model[at], None))  # type: ignore[misc]
            assert job.actor.resident_bytes == 2 * WEIGHTS - (number + 1) * LAYER
            job.check()
        assert job.actor.resident_bytes == 0
        assert job.actor.num_bytes == 2 * WEIGHTS - (number + 1) * LAYER
    with job.manager.phase("train"):
        job.both(step)
        job.check()


def test_what_somebody_still_holds_stays() -> None:
    job = Job()
    with job.manager.phase("train"):
        job.both(step)
    with job.manager.phase("train"):
        wanted = [each.grad.clone() for each in job.model.parameters() if each.grad is not None]
        first = next(job.model.parameters()).grad
        assert first is not None
        row = first[3]
        del first
        job.both(zero)
        assert job.actor.resident_bytes == WEIGHTS + LAYER
        assert_same(row, wanted[0][3])
        del row
        assert job.actor.resident_bytes == WEIGHTS
        job.check()


def test_kernels_that_read_them_are_waited_for() -> None:
    with kernels_noted():
        job = Job(KernelDevice(CAPACITY, chunk_bytes=CHUNK))
        with job.manager.phase("train"):
            step(job.model, job.adam)
        with job.manager.phase("train"):
            job.adam.step()
            job.adam.zero_grad()
            assert job.actor.resident_bytes == WEIGHTS
        job.manager.close()


class Interrupted(SimulatedDevice):
    """Something happens the next time that the device is waited for."""

    happens: Callable[[], object] | None = None

    def sync(self) -> None:
        super().sync()
        if self.happens is not None:
            happens, self.happens = self.happens, None
            happens()


def test_the_budget_of_a_snapshot_stays() -> None:
    job = Job()
    with job.manager.phase("train"):
        job.both(step)
    with job.manager.phase("train"):
        before = job.manager.snapshot()
        job.both(zero)
        assert job.manager.snapshot().budget_bytes == before.budget_bytes


def test_a_ctrl_c_meanwhile_reaches_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Interrupted(CAPACITY, chunk_bytes=CHUNK)
    job = Job(device)
    with job.manager.phase("train"):
        job.both(step)
    with job.manager.phase("train"):
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            device.happens = lambda: signal.raise_signal(signal.SIGINT)
            job.both(zero)
            with pytest.raises(KeyboardInterrupt):
                threading.Event().wait(60)
        finally:
            signal.signal(signal.SIGINT, before)
        assert job.actor.resident_bytes == WEIGHTS
        job.both(zero)
        job.check()


def test_a_phase_that_is_collected_meanwhile_is_left_later() -> None:
    """The gradient is only half gone there: to look at it ends the process."""
    device = Interrupted(CAPACITY, chunk_bytes=CHUNK)
    job = Job(device)
    with job.manager.phase("train"):
        job.both(step)
    phases: list[object] = [job.manager.phase("train")]
    phases[0].__enter__()  # type: ignore[attr-defined]
    phases.append(phases)
    del phases
    device.happens = gc.collect
    job.both(lambda model, _: one_by_one(model[:1], None))  # type: ignore[index]
    assert job.manager.phase_name == "train"
    with job.manager.phase("train"):
        job.check()
    assert job.manager.phase_name == "idle"
    assert job.manager.audit().ok


@pytest.mark.parametrize("operation", few(["sync", "map", "copy", "create"], "sync", "map"))
def test_wherever_a_transition_fails_after_that(operation: str) -> None:
    """An error while memory is given back fails nothing, and no move brings back what is dead."""
    for at in range(1, 60):
        faults = Faults(SimulatedDevice(CAPACITY, chunk_bytes=CHUNK))
        job = Job(faults)
        with job.manager.phase("train"):
            job.both(step)
        with job.manager.phase("train") as phase:
            faults.fail(operation, at=at)
            job.both(lambda model, _: one_by_one(model[:2], None))  # type: ignore[index]
            with contextlib.suppress(InjectedFault, placement.DeviceMemoryError):
                phase.switch("ref_log_prob")
            faults.clear()
            if phase.name == "train":
                job.check()
        with job.manager.phase("train"):
            job.check()
            assert job.actor.resident_bytes == 2 * WEIGHTS - 2 * LAYER
        job.manager.close()
        if not faults.fired:
            return
    pytest.fail("the faults never came to an end")
