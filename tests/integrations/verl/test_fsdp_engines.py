"""verl's FSDP engines under placement compute what they compute with verl's own offloading, bit for bit. The real verl."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integrations.verl import one_engine, several, worker
from tests.integrations.verl.subject import GPU, OFF, SYNC, TRAIN
from tests.support.frameworks import needs
from tests.support.ranks import Ranks

needs("verl")

STRATEGIES = pytest.mark.parametrize("strategy", ["fsdp2", "fsdp"])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return worker.write_model(tmp_path_factory.mktemp("model"))


@STRATEGIES
def test_weights_that_are_read_given_up_or_never_asked_for(one_rank: Ranks, model: Path, strategy: str) -> None:
    (states,) = one_rank.run(one_engine.publishing, model, {"strategy": strategy})
    assert states == {
        "returned": SYNC,
        "begun": SYNC,
        "exhausted": OFF,
        "closed": OFF,
        "never started": OFF,
        "shards": OFF if strategy == "fsdp2" else SYNC,
        "another reader": SYNC,
    }


def test_manual_control(one_rank: Ranks, model: Path) -> None:
    (states,) = one_rank.run(one_engine.by_hand, model, {"strategy": "fsdp2"})
    assert states == [(TRAIN, TRAIN), (TRAIN, TRAIN), (GPU, OFF), (GPU, OFF), (OFF, OFF)]


def test_moves_by_hand_that_verl_refuses_are_refused(one_rank: Ranks, model: Path) -> None:
    (raised,) = one_rank.run(one_engine.refused_by_hand, model)
    gradients = "Gradient buffers must be moved to device along with model parameters"
    names = ["FSDPEngineWithLMHead", "PlacedFSDPEngineWithLMHead"]
    assert raised == [(name, text) for text in ("", "", gradients) for name in names]


def test_errors_in_the_middle_leave_nothing_behind(one_rank: Ranks, model: Path, tmp_path: Path) -> None:
    (raised,) = one_rank.run(one_engine.errors, model, tmp_path, {"strategy": "fsdp2"})
    assert raised.count("_Refused") == 4
    assert raised.count("DeviceMemoryError") + raised.count("InjectedFault") == 9


def test_reset_replaces_model_and_optimizer(one_rank: Ranks, model: Path) -> None:
    (names,) = one_rank.run(one_engine.reset, model, {"strategy": "fsdp"})
    assert names == ["actor", "actor.optimizer"]


def test_actor_reference_and_critic_in_one_process(one_rank: Ranks, model: Path) -> None:
    (found,) = one_rank.run(several.together, model, {"strategy": "fsdp2"})
    roles = {"actor": "actor", "actor.optimizer": "actor", "ref": "ref", "critic": "critic", "critic.optimizer": "critic"}
    assert found["handles"] == {name: (role, False) for name, role in roles.items()}
    away = dict.fromkeys(roles, OFF)
    assert found["states"] == {
        "actor": {
            "infer": {**away, "actor": GPU},
            "train": {**away, "actor": TRAIN, "actor.optimizer": TRAIN},
            "publish": {**away, "actor": SYNC},
        },
        "ref": {"infer": {**away, "ref": GPU}},
        "critic": {"infer": {**away, "critic": GPU}, "train": {**away, "critic": TRAIN, "critic.optimizer": TRAIN}},
    }
    actor, critic = ["actor", "actor.optimizer"], ["critic", "critic.optimizer"]
    assert found["orders"] == [
        ["actor", "ref"],
        ["ref"],
        ["ref", *critic],
        critic,
        [*actor, *critic],
        actor,
        ["actor"],
        actor,
        [],
    ]


@pytest.mark.parametrize(("merge", "keywords"), [(False, {}), (True, {"offload_policy": True})], ids=["unmerged", "merged, left to FSDP2"])
def test_lora(one_rank: Ranks, model: Path, merge: bool, keywords: dict[str, Any]) -> None:
    needs("peft")
    (found,) = one_rank.run(several.lora, model, keywords, merge)
    assert found["states"]["publish"]["actor"] == SYNC
    assert found["names"] == (27 if merge else 28)


def test_a_base_that_verl_moves_to_the_host_and_back(one_rank: Ranks, model: Path) -> None:
    needs("peft")
    assert one_rank.run(several.base_sync_through_the_host, model) == [27]


LORA = {"lora_rank": 4, "lora_alpha": 8, "target_modules": "all-linear", "lora": {"merge": True}}


@pytest.mark.parametrize(
    ("keywords", "expected"),
    [({"strategy": "fsdp2"}, (SYNC, False)), ({"strategy": "fsdp"}, (GPU, True)), ({"strategy": "fsdp2", "lora": LORA}, (GPU, True))],
    ids=["fsdp2", "fsdp", "lora"],
)
def test_a_policy_that_publishes_from_the_host(one_rank: Ranks, model: Path, keywords: dict[str, Any], expected: tuple[str, bool]) -> None:
    assert one_rank.run(several.published_from_the_host, model, keywords) == [expected]


def test_a_policy_that_brings_the_optimizer_for_its_step_alone(one_rank: Ranks, model: Path) -> None:
    (states,) = one_rank.run(several.optimizer_in_its_step_alone, model, {"strategy": "fsdp2"})
    assert states["train"] == {"actor": TRAIN, "actor.optimizer": OFF}


@pytest.mark.parametrize(("strategy", "offload"), [("fsdp2", (True, False)), ("fsdp", (False, True))], ids=["parameters", "optimizer"])
def test_only_one_of_the_flags(one_rank: Ranks, model: Path, strategy: str, offload: tuple[bool, bool]) -> None:
    (found,) = one_rank.run(several.partial, model, {"strategy": strategy}, offload)
    assert found["moved"] == {"actor": offload[0], "actor.optimizer": offload[1]}
    assert found["external"] == {"actor": not offload[0], "actor.optimizer": not offload[1]}
    assert found["states"]["train"] == {"actor": TRAIN, "actor.optimizer": TRAIN}


@pytest.mark.parametrize("offload", [(True, True), (False, False)], ids=["both flags", "no flag"])
def test_what_fsdp2_places_is_tracked_and_never_moved(one_rank: Ranks, model: Path, offload: tuple[bool, bool]) -> None:
    """verl#5995: its sync crashed on such a model, which `to` had left half-moved."""
    (found,) = one_rank.run(several.left_to_fsdp2, model, {"offload": offload})
    assert found["external"] == dict.fromkeys(("actor", "actor.optimizer"), "FSDP2's CPUOffloadPolicy keeps its parameters on the CPU")
    said = "placement tracks 'actor', which FSDP2's CPUOffloadPolicy places: offload_policy=True (PlacedFSDPEngineWithLMHead)"
    assert found["log"] == [said]
    assert found["by hand"] == {"actor": TRAIN, "actor.optimizer": TRAIN}
    assert found["states"] == {
        "infer": {"actor": GPU, "actor.optimizer": OFF},
        "train": {"actor": TRAIN, "actor.optimizer": TRAIN},
        "publish": {"actor": SYNC, "actor.optimizer": OFF},
    }


@pytest.mark.parametrize("policy", ["colocated('streamed', stream_sync=True)", "resident"])
def test_no_policy_moves_what_fsdp2_places(one_rank: Ranks, model: Path, policy: str) -> None:
    one_rank.run(several.left_to_fsdp2, model, {"policy": policy})


@pytest.mark.parametrize(
    ("keywords", "role"),
    [
        ({"forward_only": True, "offload": (False, False)}, "ref"),
        ({"model_type": "value_model"}, "critic"),
    ],
    ids=["reference without flags", "critic"],
)
def test_other_roles_that_fsdp2_places(one_rank: Ranks, model: Path, keywords: dict[str, Any], role: str) -> None:
    (found,) = one_rank.run(several.left_to_fsdp2, model, keywords)
    assert list(found["external"]) == ([role] if role == "ref" else [role, f"{role}.optimizer"])
    assert found["states"]["infer"][role] == GPU


@pytest.mark.parametrize(
    ("keywords", "reason"),
    [
        ({"offload": (False, False)}, "param_offload and optimizer_offload are off"),
        ({"offload": (False, True), "forward_only": True}, "param_offload and optimizer_offload are off"),
    ],
    ids=["no flag", "reference without param_offload"],
)
def test_an_engine_that_stays_verls_own_says_why(one_rank: Ranks, model: Path, keywords: dict[str, Any], reason: str) -> None:
    ((handles, records),) = one_rank.run(several.left_alone, model, keywords)
    assert handles == []
    assert len(records) == 1
    assert reason in records[0]
