"""Host copies in files beside a real device: the driver copies them as pageable memory, and every
byte is what it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import placement
from placement.policies import Colocated
from placement.testing import assert_nothing_resident
from tests.support.buckets import set_bucket_bytes
from tests.support.worker import assert_same

pytestmark = pytest.mark.gpu

MIB = 1 << 20
WIDTH = 2048


@pytest.mark.parametrize("optimizer_in", ["train", "streamed"])
def test_a_job_runs_bit_by_bit_with_host_copies_in_files(tmp_path: Path, optimizer_in: Any) -> None:
    set_bucket_bytes(32 * MIB)
    manager = placement.Manager(
        device="cuda:0",
        policy=Colocated(optimizer_in),
        host_limit_bytes=1,
        disk_directory=tmp_path,
    )
    torch.manual_seed(0)
    net, other = (
        torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, device="cuda") for _ in range(4)))
        for _ in range(2)
    )
    other.load_state_dict(net.state_dict())
    adam, other_adam = (torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (net, other))
    actor = manager.register("actor", net, role="actor")
    handle = manager.register("adam", adam)
    for _ in range(3):
        with manager.phase("train"):
            for model, optimizer in ((net, adam), (other, other_adam)):
                model(torch.ones(8, WIDTH, device="cuda")).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert_nothing_resident(manager)
        wanted = {name: value.cpu() for name, value in other.state_dict().items()}
        assert_same({name: value.cpu() for name, value in actor.state_dict().items()}, wanted)
        moments, others = adam.state_dict()["state"], other_adam.state_dict()["state"]
        for key, state in others.items():
            for name, value in state.items():
                assert torch.equal(moments[key][name].cpu(), value.cpu())
    for each in (actor, handle):
        assert each.host_bytes == 0
        assert each.disk_bytes > 0
        assert not any(r.host.pinned for r in each.storage.ranges)
    manager.close()
    assert [*tmp_path.iterdir()] == []
