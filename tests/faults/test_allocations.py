"""Every call of the device during a full step failed in turn, once and for ever: see
`calls_to_fail`.

Two steps in a row are swept, because they differ: in the first one optimizer state is born and a
`Lazy` is built.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

import placement
from placement.core.errors import HostMemoryError
from placement.core.states import State
from placement.devices.memory import Copy, Direction
from placement.planning.prefetcher import BURST_CHUNKS
from placement.testing import Faults, SimulatedDevice, assert_nothing_resident
from tests.faults.harness import (
    FAULTS,
    PAGE,
    FaultyWorker,
    as_bytes,
    calls_to_fail,
    check_left,
    check_sound,
    check_values,
    hidden_bytes,
)
from tests.support.early import Foresight
from tests.support.sweeps import diagonal, few
from tests.support.threads import until

STEPS = 2


@pytest.fixture(scope="module")
def undisturbed() -> list[dict[str, str]]:
    """The values after each of enough steps without a fault."""
    worker = FaultyWorker().register()
    values = []
    for _ in range(2 * STEPS):
        worker.run_step()
        check_left(worker)
        values.append(dict(worker.committed))
    return values


def run_until_it_fails(worker: FaultyWorker) -> BaseException | None:
    for _ in range(STEPS):
        try:
            worker.run_step()
        except FAULTS as error:
            return error.with_traceback(None)
        check_sound(worker)
    return None


@pytest.mark.parametrize(
    "forever", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["once", "forever"]
)
@pytest.mark.parametrize(
    "operation",
    few(["host", "reserve", "create", "map", "copy", "sync"], "host", "reserve"),
)
def test_every_call_failed(
    operation: str, forever: bool, undisturbed: list[dict[str, str]], counted: Callable[[str], None]
) -> None:
    survey = FaultyWorker().register()
    points = calls_to_fail(survey.device, operation, lambda: run_until_it_fails(survey))
    if operation not in ("host", "reserve") and os.environ.get("SWEEP") != "all":
        points = points[::3]  # the sweeps of swaps, of prefetch and of streamed steps have each
    for at in points:
        worker = FaultyWorker().register()
        identity = worker.identity()
        with worker.manager.phase("log_prob"):
            hidden = {name: hidden_bytes(worker.manager.handles[name]) for name in ("actor", "ref")}
        worker.device.fail(operation, at=at, forever=forever)
        error = run_until_it_fails(worker)
        where = f"{operation} call {at}"
        # one failure at an exit is made good at the same phase transition; then the metrics tell
        if error is None:
            assert worker.device.fired, f"{where} was not made"
            assert operation in ("map", "copy", "sync"), f"{where} failed and nobody was told"
            assert not forever
            assert any(shot.failures for shot in worker.manager.snapshot().handles), (
                f"{where} failed and nobody was told"
            )
        worker.manager.check_integrity()
        broken = {name for name, handle in worker.manager.handles.items() if handle.broken}
        # In the middle of a swap, a link that stays dead leaves handles that can go neither way,
        # and say so until it answers again.
        assert not broken or (forever and operation in ("copy", "sync"))
        check_values(worker, except_for=broken)
        if operation in ("host", "reserve", "create"):
            check_left(worker)
        worker.device.clear()
        with worker.manager.phase("log_prob"):
            assert {name: hidden_bytes(worker.manager.handles[name]) for name in hidden} == hidden
        check_left(worker)
        worker.run_step()
        check_left(worker)
        assert worker.committed == undisturbed[worker.trainings - 1], where
        assert worker.identity()[0] == identity[0]
        assert worker.identity()[2] == identity[2]
    assert points
    counted(
        f"{len(points)} calls of {operation} failed {'for ever' if forever else 'once'}: nothing "
        "lost, nothing left"
    )


def make_extra() -> tuple[nn.Module, list[bytes]]:
    extra = nn.Sequential(nn.Linear(12, 12), nn.BatchNorm1d(12))
    return extra, [as_bytes(tensor) for tensor in extra.state_dict().values()]


@pytest.mark.parametrize(
    ("operation", "forever"),
    diagonal(
        ["host", "reserve", "create", "map", "copy", "sync"], {"once": False, "forever": True}
    ),
)
def test_every_call_of_register_failed(
    operation: str, forever: bool, counted: Callable[[str], None]
) -> None:
    """Inside a phase that wants the new handle, so that it is loaded too: a failed registration
    leaves the object as it was."""
    points = 0
    while True:
        worker = FaultyWorker().register_few()
        extra, before = make_extra()
        with worker.manager.phase("reward"):
            worker.device.fail(operation, at=points + 1, forever=forever)
            try:
                worker.manager.register("extra", extra, role="reward")
            except FAULTS:
                assert "extra" not in worker.manager.handles or (operation, forever) == (
                    "sync",
                    True,
                )
            else:
                assert not worker.device.fired
            worker.device.clear()
            assert [as_bytes(tensor) for tensor in extra.state_dict().values()] == before
        check_left(worker)
        fired = worker.device.fired
        if fired:
            points += 1
            worker.manager.register("extra", extra, role="reward")
        worker.manager.close()
        assert [as_bytes(tensor) for tensor in extra.state_dict().values()] == before
        if not fired:
            break
    counted(
        f"{points} calls of {operation} failed {'for ever' if forever else 'once'} during "
        "register(): nothing changed"
    )


def test_gradients_that_find_no_host_memory_keep_their_handle_on_the_device() -> None:
    """Gradients are not reserved for: the exit says so, and what was written is not lost."""
    worker = FaultyWorker().register_few()
    with pytest.raises(HostMemoryError), worker.manager.phase("train"):  # noqa: PT012
        worker.train_actor()
        gradients = [as_bytes(p.grad) for p in worker.actor.parameters() if p.grad is not None]
        worker.device.fail("host", forever=True)
    assert worker.device.fired
    assert worker.manager.handles["actor"].state is State.GPU_RESIDENT
    check_sound(worker)
    check_values(worker)
    worker.device.clear()
    with worker.manager.phase("log_prob"):
        assert [
            as_bytes(p.grad) for p in worker.actor.parameters() if p.grad is not None
        ] == gradients
    check_left(worker)


# --- the same with prefetch, and copies that a thread starts


CAPACITY_BYTES = 256 * 1024


def a_few_phases(worker: FaultyWorker) -> None:
    """Everything arrives early once, is used, and is given up once."""
    with worker.manager.phase("log_prob") as step:
        for name in ("weight_sync", "train"):
            step.switch(name)
        worker.train_actor()
        worker.actor.zero_grad()
        worker.commit("actor")
        with worker.manager.phase("rollout"):
            pass
        step.switch("log_prob")


@pytest.mark.parametrize(
    "forever", [False, pytest.param(True, marks=pytest.mark.sweep)], ids=["once", "forever"]
)
@pytest.mark.parametrize(
    "operation", few(["reserve", "create", "map", "copy", "sync"], "reserve", "copy")
)
def test_every_call_failed_with_prefetch(
    operation: str, forever: bool, counted: Callable[[str], None]
) -> None:
    def worker_before() -> FaultyWorker:
        worker = FaultyWorker(CAPACITY_BYTES, policy=Foresight()).register_few()
        # addresses are reserved once, when something arrives early for the first time
        if operation != "reserve":
            a_few_phases(worker)
        return worker

    survey = worker_before()
    points = calls_to_fail(survey.device, operation, lambda: a_few_phases(survey))
    for at in points:
        worker = worker_before()
        worker.device.fail(operation, at=at, forever=forever)
        with contextlib.suppress(*FAULTS):
            a_few_phases(worker)
        assert worker.device.fired, f"{operation} call {at} was not made"
        worker.manager.check_integrity()
        broken = {name for name, handle in worker.manager.handles.items() if handle.broken}
        assert not broken or (forever and operation in ("map", "copy", "sync"))
        check_values(worker, except_for=broken)
        worker.device.clear()
        with worker.manager.phase("log_prob"):
            check_sound(worker)
        check_left(worker)
        a_few_phases(worker)
        check_left(worker)
    assert points
    how = "for ever" if forever else "once"
    counted(
        f"{len(points)} calls of {operation} failed {how} in phases with prefetch: nothing lost, "
        "nothing left"
    )


class Gate(Faults):
    """A device whose copies to the device wait, in the thread that starts them, until the test lets
    them through."""

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(SimulatedDevice(capacity_bytes, chunk_bytes=PAGE))
        self.let = threading.Semaphore(0)
        self.started = 0

    def copy(self, copies: Sequence[Copy], direction: Direction) -> None:
        if threading.current_thread().name == "placement-prefetch":
            self.let.acquire(timeout=60)
            self.started += 1
        super().copy(copies, direction)

    def wait_until_started(self, bursts: int) -> None:
        until(lambda: self.started >= bursts)


BURSTS = 6


def with_critic(device: Gate) -> tuple[placement.Manager, torch.nn.Module]:
    """A critic of six bursts that arrives early in `log_prob`: two are started at once, and a
    thread starts the others, one at a time."""
    manager = placement.Manager(device=device, policy=Foresight())
    critic = torch.nn.Linear(BURSTS * BURST_CHUNKS * PAGE // 4, 1, bias=False)
    torch.nn.init.constant_(critic.weight, 3)
    manager.register("critic", critic, role="critic")
    return manager, critic


def load_of_critic(manager: placement.Manager) -> tuple[int, int]:
    """The bytes that it copied, and those that had arrived early."""
    (load,) = [
        each for each in manager.journal if (each.handle, each.trigger) == ("critic", "load")
    ]
    return load.nbytes, load.prefetched_bytes


@pytest.mark.parametrize("bursts", [0, 1, 4])
def test_a_load_copies_what_the_thread_had_not_started(bursts: int) -> None:
    manager, critic = with_critic(device := Gate(4 << 20))
    with manager.phase("log_prob") as step:
        # the memory is there at once
        assert manager.snapshot().handles[0].prefetched_bytes == BURSTS * BURST_CHUNKS * PAGE
        for _ in range(bursts):
            device.let.release()
        device.wait_until_started(bursts)
        if bursts < BURSTS - 2:
            # the burst that the thread has taken, while the switch waits for it
            threading.Timer(0.05, device.let.release).start()
        step.switch("values")
        copied, early = load_of_critic(manager)
        assert copied + early == BURSTS * BURST_CHUNKS * PAGE
        assert early in {
            min(BURSTS, started) * BURST_CHUNKS * PAGE for started in (2 + bursts, 3 + bursts)
        }
        assert bool((critic.weight == 3).all())
    assert_nothing_resident(manager)


def test_bytes_arrive_while_an_offload_waits_for_the_work_and_that_time_is_no_stall(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Working(Gate):
        """Its kernels end when everything has arrived, an hour later."""

        hours = 0

        def wait_for_work(self) -> None:
            if self.hours == 0:
                self.let.release(BURSTS - 2)
                self.wait_until_started(BURSTS - 2)
            self.hours += 1

    device = Working(4 << 20)
    clock = time.monotonic
    monkeypatch.setattr("time.monotonic", lambda: clock() + 3600 * device.hours)
    manager, _ = with_critic(device)
    ref = torch.nn.Linear(PAGE // 4, 1, bias=False)
    manager.register("ref", ref, role="ref")
    with manager.phase("ref_log_prob") as step:
        step.switch("values")  # the reference leaves
        assert load_of_critic(manager) == (0, BURSTS * BURST_CHUNKS * PAGE)
    assert device.hours == 2
    assert sum(manager.snapshot().phase_stall_seconds.values()) < 3600
    assert_nothing_resident(manager)


def test_a_copy_that_fails_in_the_thread_is_made_by_the_load() -> None:
    manager, critic = with_critic(device := Gate(4 << 20))
    with manager.phase("log_prob") as step:
        device.fail("copy")
        device.let.release()
        device.wait_until_started(1)
        step.switch("values")
        assert device.fired == 1
        assert load_of_critic(manager) == (
            (BURSTS - 2) * BURST_CHUNKS * PAGE,
            2 * BURST_CHUNKS * PAGE,
        )
        assert bool((critic.weight == 3).all())
    assert_nothing_resident(manager)
