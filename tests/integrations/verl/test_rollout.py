"""A rollout that shares the worker's device is a handle of placement, although verl's driver puts it to sleep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integrations.verl import colocated, worker
from tests.integrations.verl.colocated import BYTES
from tests.integrations.verl.subject import GPU, OFF
from tests.support.frameworks import needs
from tests.support.ranks import Ranks

needs("verl")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return worker.write_model(tmp_path_factory.mktemp("model"))


def test_it_is_awake_in_the_phases_in_which_verl_wakes_it(one_rank: Ranks, model: Path, tmp_path: Path) -> None:
    (found,) = one_rank.run(colocated.steps, model, tmp_path / "capacity")
    asleep = {"actor": OFF, "actor.optimizer": OFF, "rollout": OFF}
    assert found["syncs"] == [["weights", "weights", "kv_cache weights"]] * 3
    assert found["awake"] == [({**asleep, "rollout": GPU}, "rollout", sum(BYTES.values()), True)] * 3
    assert found["asleep"] == [(asleep, "idle", 0, True)] * 3
    assert found["told"] == ["placement knows the rollout as 'rollout' (PlacedAdapter)"]
    assert found["calls"] == ["wake_up weights", "wake_up kv_cache", "sleep"] * 3, "each call once, and the sleep is the driver's"


def test_it_is_put_to_sleep_where_the_driver_has_not(one_rank: Ranks, model: Path, tmp_path: Path) -> None:
    ((calls, state),) = one_rank.run(colocated.left_awake, model, tmp_path / "capacity")
    assert calls == ["wake_up weights", "wake_up kv_cache", "sleep"]
    assert state == OFF


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"policy": "resident"}, "policy 'resident' may keep it"), ({"free_cache_engine": False}, "free_cache_engine=False")],
    ids=["policy", "never sleeps"],
)
def test_what_stays_verls_own(one_rank: Ranks, model: Path, tmp_path: Path, options: dict[str, Any], reason: str) -> None:
    ((handles, told, calls),) = one_rank.run(colocated.left_alone, model, tmp_path / "capacity", options)
    assert handles == ["actor", "actor.optimizer"]
    assert reason in told[0]
    assert calls == ["wake_up weights", "sleep"]


def test_a_budget_counts_it(one_rank: Ranks, model: Path, tmp_path: Path) -> None:
    ((error, calls, state),) = one_rank.run(colocated.too_little_budget, model, tmp_path / "capacity")
    assert "rollout" in error
    assert calls[-2:] == ["wake_up weights", "sleep"], "the KV cache that does not fit was not asked for, and the weights went back"
    assert state == OFF


def test_a_rollout_that_fails_to_wake(one_rank: Ranks, model: Path, tmp_path: Path) -> None:
    (error,) = one_rank.run(colocated.failure, model, tmp_path / "capacity")
    assert "no memory left on the device" in error


def test_a_replica_over_two_ranks(two_ranks: Ranks, model: Path, tmp_path: Path) -> None:
    leader, follower = two_ranks.run(colocated.over_two_ranks, model, tmp_path / "capacity")
    asleep = {"actor": OFF, "actor.optimizer": OFF, "rollout": OFF}
    assert leader[0] == follower[0] == [{**asleep, "rollout": GPU}, asleep] * 2
    assert leader[1] == ["wake_up weights", "wake_up kv_cache", "sleep"] * 2
    assert follower[1] == ["sleep"] * 2, "the driver's"


def test_verl_finds_the_placed_adapter(one_rank: Ranks) -> None:
    (found,) = one_rank.run(colocated.placed_adapters)
    assert found == {"bases": ["PlacedRollout", "Adapter"], "same": True, "unknown": "('nowhere', 'async')"}
