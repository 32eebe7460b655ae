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


# Not FSDP1 unmerged: verl takes `.cpu()` of gathered weights, which on a CPU copies nothing, and FSDP1 frees them at once.
@pytest.mark.parametrize(
    ("strategy", "merge"), [("fsdp2", True), *(pytest.param(*each, marks=pytest.mark.slow) for each in (("fsdp2", False), ("fsdp", True)))]
)
def test_lora(two_ranks: Ranks, model: Path, strategy: str, merge: bool) -> None:
    needs("peft")
    for found in two_ranks.run(several.lora, model, {"strategy": strategy}, merge):
        assert found["states"]["publish"]["actor"] == SYNC
        assert found["names"] == (27 if merge else 28)


def test_ranks_are_one_group(two_ranks: Ranks, model: Path) -> None:
    """Memory that one rank lacks is an error of both, and both can go on."""
    told = two_ranks.run(several.no_memory_on_one_rank, model)
    assert told == [["GroupError", "GroupError"]] * 2


def test_delta_syncs_of_verl_read_the_host_copy(two_ranks: Ranks, model: Path) -> None:
    """What arrives is what arrives from verl's own offloading, bit for bit, and no delta sync loads the actor."""
    first, second = two_ranks.run(delta_sync.syncs, model)
    assert first["loaded"] == second["loaded"] == 0
    assert first["ratios"][0] == 1.0
    assert all(0 < ratio < 1 for ratio in first["ratios"][1:])
    assert second["ratios"] == [None] * 4  # only the first rank sends


def test_a_model_that_is_trained_in_the_middle_of_a_delta_sync(two_ranks: Ranks, model: Path) -> None:
    two_ranks.run(delta_sync.disturbed, model)
