"""A rollout that shares the worker's device is a handle of placement, although verl's driver puts it to sleep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integrations.verl import colocated, sglang_failures, worker
from tests.integrations.verl.colocated import BYTES
from tests.integrations.verl.subject import GPU, OFF
from tests.support.frameworks import needs
from tests.support.ranks import Ranks

needs("verl")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return worker.write_model(tmp_path_factory.mktemp("model"))


SLEEP = {"vllm": "sleep", "sglang": "sleep kv_cache weights"}
"""The driver's call, and placement's where the driver has not made it. To SGLang the parts are named."""
each_rollout = pytest.mark.parametrize("rollout", SLEEP)


@each_rollout
def test_it_is_awake_in_the_phases_in_which_verl_wakes_it(one_rank: Ranks, model: Path, tmp_path: Path, rollout: str) -> None:
    (found,) = one_rank.run(colocated.steps, rollout, model, tmp_path / "capacity", {})
    asleep = {"actor": OFF, "actor.optimizer": OFF, "rollout": OFF}
    assert found["syncs"] == [["weights", "weights", "kv_cache weights"]] * 2
    assert found["awake"] == [({**asleep, "rollout": GPU}, "rollout", sum(BYTES.values()), True)] * 2
    assert found["asleep"] == [(asleep, "idle", 0, True)] * 2
    assert found["told"] == [
        f"placement knows the rollout as 'rollout' ({'PlacedAdapter' if rollout == 'vllm' else 'PlacedServerAdapter'})"
    ]
    assert found["calls"] == ["wake_up weights", "wake_up kv_cache", SLEEP[rollout]] * 4, "each call once"


def test_sglang_that_serves_an_adapter_keeps_its_base_weights(one_rank: Ranks, model: Path, tmp_path: Path) -> None:
    (found,) = one_rank.run(colocated.steps, "sglang", model, tmp_path / "capacity", {"lora_rank": 4})
    assert found["syncs"] == [["", "kv_cache"]] * 2
    assert [(states["rollout"], phase, nbytes) for states, phase, nbytes, _ in found["awake"]] == [(GPU, "rollout", BYTES["kv_cache"])] * 2
    assert [(states["rollout"], phase, nbytes) for states, phase, nbytes, _ in found["asleep"]] == [(OFF, "idle", 0)] * 2
    assert found["calls"] == ["wake_up kv_cache", "sleep kv_cache"] * 4


_WOKEN = ["wake_up weights", "wake_up kv_cache"]


@pytest.mark.parametrize(
    ("rollout", "options", "reason", "calls"),
    [
        ("vllm", {"policy": "resident"}, "policy 'resident' may keep it", [*_WOKEN, "sleep"]),
        ("vllm", {"free_cache_engine": False}, "free_cache_engine=False", [*_WOKEN, "sleep"]),
        ("sglang", {"free_cache_engine": False}, "free_cache_engine=False", []),
        (
            "sglang",
            {"engine_kwargs": {"sglang": {"enable_memory_saver": False}}},
            "engine_kwargs.sglang.enable_memory_saver=False",
            [*_WOKEN, SLEEP["sglang"]],
        ),
    ],
    ids=["policy", "never sleeps", "never sleeps, sglang", "no memory saver"],
)
def test_what_stays_verls_own(
    one_rank: Ranks, model: Path, tmp_path: Path, rollout: str, options: dict[str, Any], reason: str, calls: list[str]
) -> None:
    ((handles, told, made),) = one_rank.run(colocated.left_alone, rollout, model, tmp_path / "capacity", options)
    assert handles == ["actor", "actor.optimizer"]
    assert reason in told[0]
    assert made == calls


def test_a_budget_counts_it(one_rank: Ranks, model: Path, tmp_path: Path) -> None:
    ((error, calls, state),) = one_rank.run(colocated.too_little_budget, "sglang", model, tmp_path / "capacity")
    assert "rollout" in error
    assert calls[-2:] == ["wake_up weights", "sleep weights"], "the KV cache that does not fit was not asked for, and the weights went back"
    assert state == OFF


def test_the_weights_that_reach_sglang_are_the_actors(one_rank: Ranks, model: Path, tmp_path: Path) -> None:
    ((received, published),) = one_rank.run(sglang_failures.weights_sent, model, tmp_path / "capacity")
    assert received == published


def test_an_sglang_that_refuses_to_wake_is_asleep_again(one_rank: Ranks, model: Path, tmp_path: Path) -> None:
    (found,) = one_rank.run(sglang_failures.refused, model, tmp_path / "capacity")
    assert "400" in found["error"]
    assert found["calls"] == ["wake_up weights", "wake_up kv_cache", "sleep weights"]
    assert (found["state"], found["phase"], found["held"]) == (OFF, "idle", [])
    assert found["later"] == ["wake_up weights", "wake_up kv_cache"]
    assert found["accidents"] == []


def test_a_rollout_that_fails_in_a_sync_leaves_nothing_on_the_device(one_rank: Ranks, model: Path, tmp_path: Path) -> None:
    ((error, states, later),) = one_rank.run(colocated.refused_weights, model, tmp_path / "capacity")
    assert error == "no room for model.embed_tokens.weight"
    assert states == {"actor": OFF, "actor.optimizer": OFF, "rollout": OFF}
    assert later == ["weights", "weights", "kv_cache weights"]


def test_a_sync_that_fails_is_told_although_its_server_waits_for_the_rest_of_the_weights(
    one_rank: Ranks, model: Path, tmp_path: Path
) -> None:
    ((error, notes, states, later),) = one_rank.run(colocated.cut_off_server, model, tmp_path / "capacity")
    assert error == "no room for model.embed_tokens.weight"
    assert "no answer within 0.1 s" in "".join(notes)
    assert states["actor"] == OFF
    assert "no answer within 0.1 s" in later


def test_all_weights_that_are_open_end_with_a_sync_that_fails(one_rank: Ranks, model: Path, tmp_path: Path) -> None:
    """verl opens those of LoRA's adapters before it sends the base."""
    ((error, states, reading_on, later),) = one_rank.run(colocated.refused_base, model, tmp_path / "capacity")
    assert error == "no room for model.embed_tokens.weight"
    assert states == {"actor": OFF, "actor.optimizer": OFF, "rollout": OFF}
    assert reading_on == "these weights ended with the sync that failed: ask the engine for new ones"
    assert later == ["weights", "weights", "kv_cache weights"]


def test_an_error_of_verls_is_not_hidden_by_what_fails_after_it(one_rank: Ranks, model: Path, tmp_path: Path) -> None:
    ((error, notes),) = one_rank.run(colocated.failing_ends, model, tmp_path / "capacity")
    assert error == "no room for weight"
    assert notes == ["placement: OSError: the weights cannot be closed", "placement: OSError: the phase cannot be left"]


@pytest.mark.parametrize(("cancelled", "named"), [(False, "RuntimeError"), (True, "TimeoutError")], ids=["failed", "cancelled"])
def test_weights_that_a_checkpoint_engine_cannot_send(one_rank: Ranks, model: Path, tmp_path: Path, cancelled: bool, named: str) -> None:
    """No rollout tells placement of it: the task of verl's worker ends with the error."""
    ((error, states, told),) = one_rank.run(colocated.failed_sender, model, tmp_path / "capacity", cancelled)
    assert error.startswith(named)
    assert states == {"actor": OFF, "actor.optimizer": OFF, "rollout": OFF}
    assert len(told) == 1
    assert told[0].startswith("a sync of weights has failed, so the phase of its model ends")


def test_an_sglang_that_dies_is_not_asked_again(one_rank: Ranks, model: Path, tmp_path: Path) -> None:
    (found,) = one_rank.run(sglang_failures.killed, model, tmp_path / "capacity")
    assert found["state"] == OFF, "its memory is free"
    first, second = found["errors"]
    assert first.startswith("EngineLost: verl's rollout failed in resume()")
    assert second.startswith("BrokenHandleError: 'rollout' is broken"), "nothing was sent"
    assert found["after"] == {"actor": OFF, "actor.optimizer": OFF, "rollout": OFF}
    assert found["calls"] == ["wake_up weights", "wake_up kv_cache"]


@each_rollout
def test_a_replica_over_two_ranks(two_ranks: Ranks, model: Path, tmp_path: Path, rollout: str) -> None:
    leader, follower = two_ranks.run(colocated.over_two_ranks, rollout, model, tmp_path / "capacity")
    asleep = {"actor": OFF, "actor.optimizer": OFF, "rollout": OFF}
    assert leader[0] == follower[0] == [{**asleep, "rollout": GPU}, asleep] * 2
    assert leader[1] == ["wake_up weights", "wake_up kv_cache", SLEEP[rollout]] * 2
    assert follower[1] == (["sleep"] * 2 if rollout == "vllm" else []), "the driver's"


def test_verl_finds_the_placed_adapter(one_rank: Ranks) -> None:
    (found,) = one_rank.run(colocated.placed_adapters)
    assert found == {"bases": ["PlacedRollout", "Adapter"], "same": True, "unknown": "('nowhere', 'async')"}
