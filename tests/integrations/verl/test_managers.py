"""The one manager of a process that has verl's engines. verl itself is not needed for it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from placement import PlacementError
from placement.devices.simulated.device import SimulatedDevice
from placement.integrations import verl
from placement.policies import Colocated
from tests.integrations.verl.worker import CAPACITY
from tests.support.ranks import on_ranks


@pytest.fixture(autouse=True)
def simulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    verl.close_manager()
    monkeypatch.setenv("PLACEMENT_DEVICE", "simulated:16MiB")
    yield
    verl.close_manager()


def test_a_manager_that_cannot_be_announced_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The next call does not give one whose metrics nobody can read."""
    targets = tmp_path / "targets"
    targets.write_text("")  # a file where a folder should be
    monkeypatch.setenv("PLACEMENT_DISCOVERY", str(targets))
    for _ in range(2):
        with pytest.raises(PlacementError, match=f"cannot announce this worker in {targets}"):
            verl.manager()
    targets.unlink()
    assert verl.manager() is verl.manager()
    assert [file.suffix for file in targets.iterdir()] == [".json"]


@pytest.mark.parametrize(("chosen", "streams"), [(None, True), ("colocated", False)])
def test_a_sync_is_streamed_unless_a_policy_is_chosen(monkeypatch: pytest.MonkeyPatch, chosen: str | None, streams: bool) -> None:
    if chosen is not None:
        monkeypatch.setenv("PLACEMENT_POLICY", chosen)
    policy = verl.manager().policy
    assert isinstance(policy, Colocated)
    assert policy.stream_sync == streams


@on_ranks("two_ranks")
def test_a_rank_that_is_announced_at_the_second_try_is_in_the_group_of_the_others(tmp_path: Path) -> None:
    """And the next manager of both is in a group of its own. The second rank's folder is a file at first."""
    folder, later = tmp_path / "first", tmp_path / "second"
    verl.close_manager()
    os.environ.update(PLACEMENT_DEVICE=f"simulated:{CAPACITY}", PLACEMENT_DISCOVERY=str(folder if dist.get_rank() == 0 else later))
    try:
        if dist.get_rank() == 1:
            later.write_text("")
            with pytest.raises(PlacementError):
                verl.manager()
            later.unlink()
        for _ in range(2):
            with verl.manager().phase("log_prob"):
                assert verl.manager().phase_name == "log_prob"
            assert isinstance(verl.manager().device, SimulatedDevice)
            verl.close_manager()
    finally:
        del os.environ["PLACEMENT_DEVICE"], os.environ["PLACEMENT_DISCOVERY"]
