"""A placed train actor as Ray runs it: sent to processes that have no name for it, and called from the driver, method by method."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from placement.integrations.slime import train_actor_class
from tests.integrations import jobs, slime_standin, slime_worker
from tests.support.seeds import seed


def test_slimes_actor_on_two_ranks_of_ray(ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They change phase together, through the store that torch.distributed made."""
    args = slime_standin.arguments(jobs.plain, colocate=False)
    seed(0)
    expected = slime_standin.run(slime_standin.TrainActor(2, 0, None, None), args, with_ref=True)
    for name in ("slime", "slime.backends", "slime.backends.megatron_utils"):
        monkeypatch.setitem(sys.modules, name, jobs.made(name, {}))
    actor = jobs.made("slime.backends.megatron_utils.actor", {"MegatronTrainRayActor": slime_worker.RankActor})
    monkeypatch.setitem(sys.modules, actor.__name__, actor)
    made = ray.remote(num_cpus=1)(train_actor_class())
    first = made.remote(2, 0, None, None)
    ranks = [first, made.remote(2, 1, *ray.get(first.get_master_addr_and_port.remote()))]

    def call(method: str, *arguments: Any, **keywords: Any) -> Any:
        return ray.get([getattr(rank, method).remote(*arguments, **keywords) for rank in ranks], timeout=100)

    assert call("init", args, "actor", with_ref=True, with_opd_teacher=False) == [1, 1]
    call("update_weights")
    for rollout_id in range(3):
        call("train", rollout_id, None, external_data=None)
        if rollout_id == 1:
            call("save_model", rollout_id, force_sync=False)
        call("clear_memory")
        call("update_weights")
    assert call("get_seen") == [expected, expected]
    assert all(moved["actor"] > 0 and moved["actor.optimizer"] > 0 for moved in call("get_moved"))
    for rank in ranks:
        ray.kill(rank)
