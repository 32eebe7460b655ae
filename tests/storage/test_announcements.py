"""The announcements of a move: which come, and in which order, also after a failure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import partial

import pytest
import torch
from torch import nn

import placement
from placement.storage.move import Stage
from placement.testing import Faults, InjectedFault, SimulatedDevice

NAMES = ("leaving", "left", "coming", "came")


class Job:
    def __init__(self, net: nn.Module | None = None) -> None:
        self.faults = Faults(SimulatedDevice(1 << 20, chunk_bytes=4096))
        self.manager = placement.Manager(device=self.faults)
        self.net = nn.Linear(32, 32) if net is None else net
        self.handle = self.manager.register("actor", self.net, role="actor")
        self.said: list[str] = []
        holding = self.handle.holding
        assert holding is not None
        for name in NAMES:
            getattr(holding.announce, name).append(partial(self.said.append, name))

    def hear(self) -> list[str]:
        said, self.said[:] = [*self.said], []
        return said


@pytest.fixture
def job() -> Iterator[Job]:
    job = Job()
    yield job
    job.manager.close()


def test_a_load_comes_and_an_offload_leaves(job: Job) -> None:
    with job.manager.phase("log_prob"):
        assert job.hear() == ["coming", "came"]
        with job.manager.phase("log_prob"):
            assert job.hear() == [], "nothing moves"
    assert job.hear() == ["leaving", "left"]


def test_a_load_that_fails_leaves_everything_on_the_host(job: Job) -> None:
    job.faults.fail("copy")
    with pytest.raises(InjectedFault), job.manager.phase("log_prob"):
        pass
    assert job.hear() == ["coming", "left"]
    with job.manager.phase("log_prob"):
        assert job.hear() == ["coming", "came"]


def test_an_offload_that_is_undone_has_never_left(job: Job) -> None:
    """A switch would take the handle off, and fails before any of it is given up."""
    other = job.manager.register("ref", nn.Linear(64, 64), role="ref")
    step = job.manager.phase("log_prob", only=["actor"])
    with step:
        before = job.net(torch.ones(1, 32))
        job.hear()
        job.faults.fail("map")
        with pytest.raises(placement.errors.PlacementError):
            step.switch("log_prob", only=["ref"])
        assert job.hear() == ["leaving", "came"]
        assert torch.equal(job.net(torch.ones(1, 32)), before)
        assert other.resident_bytes == 0


def test_what_broke_half_off_the_device_has_not_come_because_its_end_failed() -> None:
    """A part of its memory is gone: tensors of a state dict go on showing the host copy."""
    for call in range(1, 40):
        job = Job(nn.Linear(64, 64))
        weight = None
        with suppress(InjectedFault), job.manager.phase("log_prob"):
            weight = job.net.state_dict()["weight"].fill_(3.0)
            job.faults.fail("sync", at=call, forever=True)
        job.faults.clear()
        assert job.handle.holding is not None
        assert weight is not None
        if job.handle.holding.stage is Stage.VACATING:
            break
        job.manager.close()
    job.hear()
    job.faults.fail("sync")
    with pytest.raises(InjectedFault):
        job.manager.unregister("actor")
    assert job.hear() == ["leaving"]
    assert weight.eq(3.0).all()
