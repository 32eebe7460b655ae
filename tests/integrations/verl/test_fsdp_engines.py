"""verl's FSDP engines under placement compute what they compute with verl's own offloading, bit for bit. The real verl."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.verl import scenarios, worker
from tests.integrations.verl.scenarios import GPU, OFF, SYNC, TRAIN
from tests.support.frameworks import needs
from tests.support.ranks import Ranks

needs("verl")

STRATEGIES = pytest.mark.parametrize("strategy", ["fsdp2", "fsdp"])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return worker.write_model(tmp_path_factory.mktemp("model"))


@STRATEGIES
def test_steps_and_checkpoints_are_those_of_verl(one_rank: Ranks, model: Path, tmp_path: Path, strategy: str) -> None:
    (states,) = one_rank.run(scenarios.steps, model, tmp_path, {"strategy": strategy})
    assert states == {
        "infer": {"actor": GPU, "actor.optimizer": OFF},
        "train": {"actor": TRAIN, "actor.optimizer": TRAIN},
        "publish": {"actor": SYNC, "actor.optimizer": OFF},
    }


@STRATEGIES
def test_weights_that_are_read_given_up_or_never_asked_for(one_rank: Ranks, model: Path, strategy: str) -> None:
    (states,) = one_rank.run(scenarios.publishing, model, {"strategy": strategy})
    assert states == {
        "returned": SYNC,
        "begun": SYNC,
        "exhausted": OFF,
        "closed": OFF,
        "never started": OFF,
        "shards": SYNC,
        "another reader": SYNC,
    }


@STRATEGIES
def test_manual_control(one_rank: Ranks, model: Path, strategy: str) -> None:
    (states,) = one_rank.run(scenarios.by_hand, model, {"strategy": strategy})
    assert states == [(TRAIN, TRAIN), (TRAIN, TRAIN), (GPU, OFF), (GPU, OFF), (OFF, OFF)]


@STRATEGIES
def test_errors_in_the_middle_leave_nothing_behind(one_rank: Ranks, model: Path, tmp_path: Path, strategy: str) -> None:
    (raised,) = one_rank.run(scenarios.errors, model, tmp_path, {"strategy": strategy})
    assert raised.count("_Refused") == 4
    assert raised.count("DeviceMemoryError") + raised.count("InjectedFault") == 9


@STRATEGIES
def test_reset_replaces_model_and_optimizer(one_rank: Ranks, model: Path, strategy: str) -> None:
    (names,) = one_rank.run(scenarios.reset, model, {"strategy": strategy})
    assert names == ["actor", "actor.optimizer"]
