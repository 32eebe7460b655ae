"""The check of managers at the end of every test."""

from __future__ import annotations

import pytest
import torch

from placement import IntegrityError, Manager
from placement.testing import Faults
from tests.support.nothing_left import check, watched
from tests.support.worker import Worker, make_manager


def left(manager: Manager) -> None:
    """A phase whose device cannot be emptied: the actor stays."""
    assert isinstance(manager.device, Faults)
    manager.device.fail("copy", forever=True)
    manager.device.fail("sync", forever=True)


def faulty() -> Worker:
    return Worker(device=Faults(make_manager().device))


@pytest.mark.leaves_behind("that is what is looked at")
def test_a_handle_that_stays_on_the_device_is_found() -> None:
    worker = faulty()
    with pytest.raises(RuntimeError, match="injected fault"), worker.manager.phase("train"):  # noqa: PT012
        worker.net[0].weight.data.add_(1)
        left(worker.manager)
    with pytest.raises(AssertionError, match="actor is GPU_RESIDENT outside every phase"):
        check(worker.manager)


@pytest.mark.leaves_behind("that is what is looked at")
def test_bytes_that_no_handle_holds_are_found() -> None:
    worker = Worker()
    chunk = worker.manager.device.create(4096)
    with pytest.raises((AssertionError, IntegrityError), match="4,096"):
        check(worker.manager)
    worker.manager.device.release(chunk)
    check(worker.manager)


def test_every_manager_is_known_and_held_with_what_it_registered() -> None:
    with watched(holds=True) as seen:
        manager = make_manager()
        manager.register("actor", torch.nn.Linear(8, 8))
        del manager
        (known,) = seen.managers()
        assert list(known.handles) == ["actor"]
