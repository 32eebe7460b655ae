"""Host copies on disk beside a real device: they are page-locked again when they are back, and
every byte is what it was."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import placement
from placement.policies import Colocated, Resident
from placement.testing import assert_nothing_resident
from tests.support.buckets import set_bucket_bytes
from tests.support.disk import send_to_disk, settle, spills_of

pytestmark = pytest.mark.gpu

MIB = 1 << 20
WIDTH = 2048


class Job:
    def __init__(self, **settings: Any) -> None:
        set_bucket_bytes(32 * MIB)
        self.manager = placement.Manager(device="cuda:0", **settings)
        torch.manual_seed(0)
        self.net, self.other = (
            torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, device="cuda") for _ in range(4)))
            for _ in range(2)
        )
        self.other.load_state_dict(self.net.state_dict())
        self.adam, self.other_adam = (
            torch.optim.AdamW(net.parameters(), lr=1e-2) for net in (self.net, self.other)
        )
        self.actor = self.manager.register("actor", self.net, role="actor")
        self.manager.register("adam", self.adam)

    def step(self) -> None:
        with self.manager.phase("train"):
            for net, adam in ((self.net, self.adam), (self.other, self.other_adam)):
                net(torch.ones(8, WIDTH, device="cuda")).square().mean().backward()
                adam.step()
                adam.zero_grad()

    def check(self) -> None:
        found, wanted = self.actor.state_dict(), self.other.state_dict()
        assert all(torch.equal(found[name].cpu(), wanted[name].cpu()) for name in wanted)
        moments, others = self.adam.state_dict()["state"], self.other_adam.state_dict()["state"]
        assert all(
            torch.equal(moments[key][name].cpu(), value.cpu())
            for key, state in others.items()
            for name, value in state.items()
        )


@pytest.fixture(params=["train", "streamed"])
def job(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Job]:
    made = Job(policy=Colocated(request.param), host_limit_bytes="1GiB", disk_directory=tmp_path)
    yield made
    assert_nothing_resident(made.manager)
    made.manager.close()
    assert [*tmp_path.iterdir()] == []


def test_what_leaves_is_not_page_locked_and_what_is_back_is(job: Job) -> None:
    job.step()
    slabs = [r.host for name in ("actor", "adam") for r in job.manager.handles[name].storage.ranges]
    for slab in slabs:
        slab.ready.wait()
    assert all(slab.pinned for slab in slabs)
    send_to_disk(job.manager, "actor", "adam")
    assert not any(slab.pinned for slab in slabs)
    with job.manager.phase("rollout"):
        settle(job.manager)
    assert all(
        spill.is_here for name in ("actor", "adam") for spill in spills_of(job.manager, name)
    )
    for slab in slabs:
        slab.ready.wait()
    assert all(slab.pinned for slab in slabs)
    job.check()


class Staying(Resident):
    """Resident, but everything leaves in the phase `reward`."""

    def plan(self, view: placement.View) -> placement.Plan:
        return view.total_plan({}) if view.phase == "reward" else super().plan(view)


def anonymous_bytes() -> int:
    """What the kernel counts as this process's own memory, page-locked or not."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["RssAnon"].split()[0]) << 10


def test_what_stays_on_the_device_has_no_host_memory_until_it_leaves() -> None:
    first = Job(policy=Colocated())  # takes what torch takes at first use
    first.step()
    first.manager.close()
    before = anonymous_bytes()
    job = Job(policy=Staying(), budget_bytes="1GiB", host_copies="while_needed")
    handles = [job.actor, job.manager.handles["adam"]]
    adam: Any = handles[1].storage
    for slab in [*(r.host for r in job.actor.storage.ranges), adam.scanner.reserved]:
        slab.ready.wait()
    reserved = sum(each.host_bytes for each in handles)
    assert anonymous_bytes() - before > 0.9 * reserved > 0
    for _ in range(6):
        job.step()
        settle(job.manager)
    assert [each.host_bytes for each in handles] == [0, 0]
    assert anonymous_bytes() - before < 0.1 * reserved
    for _ in range(3):
        with job.manager.phase("reward"):
            slabs = [r.host for each in handles for r in each.storage.ranges]
            for slab in slabs:
                slab.ready.wait()
            assert all(slab.pinned for slab in slabs)
            assert not any(each.resident_bytes for each in handles)
        job.step()
        settle(job.manager)
    with job.manager.phase("reward"):
        job.check()
    assert job.manager.snapshot().disk_wait_seconds > 0
    job.manager.close()
