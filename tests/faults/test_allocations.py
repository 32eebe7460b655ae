"""Every call of the device during a full step failed in turn, once and for ever: see `calls_to_fail`.

Two steps in a row are swept, because they differ: in the first one optimizer state is born and a `Lazy` is built.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from torch import nn

from placement.core.errors import DeviceMemoryError, HostMemoryError
from placement.core.states import State
from placement.testing import InjectedFault
from tests.faults.harness import FaultyWorker, as_bytes, calls_to_fail, check_left, check_sound, check_values, hidden_bytes

FAULTS = (DeviceMemoryError, HostMemoryError, InjectedFault)
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


@pytest.mark.parametrize("forever", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["once", "forever"])
@pytest.mark.parametrize("operation", ["host", "reserve", "create", "map", "copy", "sync"])
def test_every_call_failed(operation: str, forever: bool, undisturbed: list[dict[str, str]], counted: Callable[[str], None]) -> None:
    survey = FaultyWorker().register()
    points = calls_to_fail(survey.device, operation, lambda: run_until_it_fails(survey))
    if operation not in ("host", "reserve") and os.environ.get("SWEEP") != "all":
        points = points[::2]  # the sweeps of swaps, of prefetch and of streamed steps have each
    for at in points:
        worker = FaultyWorker().register()
        identity = worker.identity()
        with worker.manager.phase("log_prob"):
            hidden = {name: hidden_bytes(worker.manager.handles[name]) for name in ("actor", "ref")}
        worker.device.fail(operation, at=at, forever=forever)
        error = run_until_it_fails(worker)
        where = f"{operation} call {at}"
        if error is None:  # one failure at an exit is made good at the same phase transition; then the metrics tell
            assert worker.device.fired, f"{where} was not made"
            assert operation in ("map", "copy", "sync"), f"{where} failed and nobody was told"
            assert not forever
            assert any(shot.failures for shot in worker.manager.snapshot().handles), f"{where} failed and nobody was told"
        worker.manager.check_integrity()
        broken = {name for name, handle in worker.manager.handles.items() if handle.broken}
        # In the middle of a swap, a link that stays dead leaves handles that can go neither way, and say so until it answers again.
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
    counted(f"{len(points)} calls of {operation} failed {'for ever' if forever else 'once'}: nothing lost, nothing left")


def make_extra() -> tuple[nn.Module, list[bytes]]:
    extra = nn.Sequential(nn.Linear(12, 12), nn.BatchNorm1d(12))
    return extra, [as_bytes(tensor) for tensor in extra.state_dict().values()]


@pytest.mark.parametrize("forever", [False, True], ids=["once", "forever"])
@pytest.mark.parametrize("operation", ["host", "reserve", "create", "map", "copy", "sync"])
def test_every_call_of_register_failed(operation: str, forever: bool, counted: Callable[[str], None]) -> None:
    """Inside a phase that wants the new handle, so that it is loaded too: a failed registration leaves the object as it was."""
    points = 0
    while True:
        worker = FaultyWorker().register_few()
        extra, before = make_extra()
        with worker.manager.phase("reward"):
            worker.device.fail(operation, at=points + 1, forever=forever)
            try:
                worker.manager.register("extra", extra, role="reward")
            except FAULTS:
                assert "extra" not in worker.manager.handles or (operation, forever) == ("sync", True)
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
    counted(f"{points} calls of {operation} failed {'for ever' if forever else 'once'} during register(): nothing changed")


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
        assert [as_bytes(p.grad) for p in worker.actor.parameters() if p.grad is not None] == gradients
    check_left(worker)
