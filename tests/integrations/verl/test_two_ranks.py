"""verl's FSDP engines over two ranks: each phase is one decision of both."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.verl import delta_sync, one_engine, several, worker
from tests.integrations.verl.subject import GPU, OFF, SYNC, TRAIN
from tests.support.frameworks import needs
from tests.support.ranks import Ranks

needs("verl")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return worker.write_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("keywords", one_engine.KINDS.values(), ids=one_engine.KINDS)
def test_steps_and_checkpoints_are_those_of_verl(two_ranks: Ranks, model: Path, tmp_path: Path, keywords: dict[str, object]) -> None:
    for states in two_ranks.run(one_engine.steps, model, tmp_path, keywords):
        assert states == {
            "infer": {"actor": GPU, "actor.optimizer": OFF},
            "train": {"actor": TRAIN, "actor.optimizer": TRAIN},
            "publish": {"actor": SYNC, "actor.optimizer": OFF},
        }


def test_checkpoints_for_transformers(two_ranks: Ranks, model: Path, tmp_path: Path) -> None:
    """Not FSDP1, which gathers for it what it has already freed where gloo gathers on a CPU, without placement too."""
    assert two_ranks.run(several.saved_for_transformers, model, tmp_path, {}) == [True, True]


def test_lora(two_ranks: Ranks, model: Path) -> None:
    needs("peft")
    for found in two_ranks.run(several.lora, model, {"strategy": "fsdp2"}, True):
        assert found["states"]["publish"]["actor"] == SYNC
        assert found["names"] == 27


def test_ranks_are_one_group(two_ranks: Ranks, model: Path) -> None:
    told = two_ranks.run(several.no_memory_on_one_rank, model)
    assert told == [["GroupError", "GroupError"]] * 2


@pytest.mark.parametrize("lr", [1e-6, 1e-2])
def test_delta_syncs_of_verl_send_what_offloads_have_recorded(two_ranks: Ranks, model: Path, lr: float) -> None:
    """What arrives is what arrives from verl's own offloading, bit for bit. No delta sync loads the actor, and no second copy is kept."""
    first, second = two_ranks.run(delta_sync.syncs, model, lr)
    for rank in (first, second):
        assert rank["loaded"] == 0
        assert rank["kept"][0] > 0 == rank["kept"][1]
        recorded = [nbytes / rank["kept"][0] for nbytes in rank["recorded"]]
        assert recorded[0] == recorded[4] == 0  # given up by who reads half
        assert all(0 < share < 0.2 for share in (*recorded[1:4], recorded[5])) if lr < 1e-3 else not any(recorded[1:])
    assert second["own"] == second["ours"] == [None] * 6  # only the first rank sends
    own, ours = first["own"], first["ours"]
    assert own[0] == ours[0] == ours[4] == 1.0
    if lr < 1e-3:
        assert all(0 < share < 0.1 for share in own[1:])
        assert all(mine == pytest.approx(its, rel=0.1) and mine >= its for mine, its in zip(ours[1:4], own[1:4], strict=True))
    else:  # more than the record is kept for
        assert all(0.5 < share < 1 for share in own[1:])
        assert ours[1:] == [1.0] * 5


def test_a_model_that_is_trained_in_the_middle_of_a_delta_sync(two_ranks: Ranks, model: Path) -> None:
    two_ranks.run(delta_sync.disturbed, model)
