"""Every call of the device during a full step failed in turn, once and for ever.

Two steps in a row are swept, because they differ: in the first one optimizer state is born and a `Lazy` is built.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from placement.testing import InjectedFault
from placement.errors import DeviceMemoryError, HostMemoryError
from tests.faults.harness import Worker, check_left, check_sound, check_values, many_cases

FAULTS = (DeviceMemoryError, HostMemoryError, InjectedFault)
STEPS = 2


@pytest.fixture(scope="module")
def undisturbed() -> list[dict[str, str]]:
    """The values after each of enough steps without a fault."""
    worker = Worker().register()
    values = []
    for _ in range(2 * STEPS):
        worker.run_step()
        check_left(worker)
        values.append(dict(worker.committed))
    return values


@pytest.fixture(scope="module", autouse=True)
def _many_cases() -> Iterator[None]:
    with many_cases():
        yield


def run_until_it_fails(worker: Worker) -> BaseException | None:
    for _ in range(STEPS):
        try:
            worker.run_step()
        except FAULTS as error:
            return error.with_traceback(None)
        check_sound(worker)
    return None


@pytest.mark.parametrize("forever", [False, True], ids=["once", "forever"])
@pytest.mark.parametrize("operation", ["host", "reserve", "create", "map", "copy", "sync"])
def test_every_call_failed(operation: str, forever: bool, undisturbed: list[dict[str, str]], capsys: pytest.CaptureFixture[str]) -> None:
    points = 0
    while True:
        worker = Worker().register()
        identity = worker.identity()
        worker.device.fail(operation, at=points + 1, forever=forever)
        error = run_until_it_fails(worker)
        if not worker.device.fired:
            assert error is None
            worker.device.clear()
            break
        points += 1
        where = f"{operation} call {points}"
        assert error is not None, f"{where} failed and nobody was told"
        worker.manager.check_integrity() if not forever else None
        check_values(worker)
        if operation in ("host", "reserve", "create"):
            check_left(worker)
        worker.device.clear()
        with worker.manager.phase("log_prob"):
            pass
        check_left(worker)
        worker.run_step()
        check_left(worker)
        assert worker.committed == undisturbed[worker.trainings - 1], where
        assert worker.identity()[0] == identity[0]
        assert worker.identity()[2] == identity[2]
    assert points
    with capsys.disabled():
        print(f"\n{points} calls of {operation} failed {'for ever' if forever else 'once'}: nothing lost, nothing left", end="")
