"""verl's FSDP engines over two ranks: each phase is one decision of both."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from placement import DeviceMemoryError, GroupError, PlacementError
from tests.integrations.verl import delta_sync
from tests.integrations.verl.subject import GPU, OFF, SYNC, TRAIN, moves_of_verl, pair
from tests.integrations.verl.test_several_engines import lora
from tests.integrations.verl.worker import batch
from tests.sharded.training import as_bytes
from tests.support.frameworks import needs
from tests.support.ranks import Ranks, on_ranks

needs("verl")


KINDS: dict[str, dict[str, Any]] = {
    "fsdp2": {"strategy": "fsdp2"},
    "fsdp": {"strategy": "fsdp"},
    "offload policy": {"strategy": "fsdp2", "offload_policy": True},
}
"""Who places an engine's model, by the keywords of `worker.build`: placement with either FSDP, or FSDP2 itself."""


@pytest.mark.parametrize("keywords", KINDS.values(), ids=KINDS)
@on_ranks("two_ranks")
def test_steps_and_checkpoints_are_those_of_verl(model: Path, tmp_path: Path, keywords: dict[str, Any]) -> None:
    """Steps of both; then each loads the other's checkpoint and goes on."""
    own, placed = both = pair(model, **keywords)
    for seed in range(2):
        both.infer(10 + seed)
        both.train(seed)
        both.publish()
    both.same()
    for subject, name in ((own, "own"), (placed, "placed")):
        subject.worker.save_checkpoint(str(tmp_path / name), global_step=2)
        subject.check()
        subject.train(7)  # away from what was saved
    for subject, name in ((own, "placed"), (placed, "own")):
        subject.worker.load_checkpoint(str(tmp_path / name))
        subject.check()
        subject.train(3)
        subject.infer(13)
    both.same()
    with moves_of_verl() as routines:
        placed.infer(14)
        placed.train(4)
        placed.publish()
        placed.worker.save_checkpoint(str(tmp_path / "last"), global_step=3)
        placed.worker.load_checkpoint(str(tmp_path / "last"))
    assert not any(routine.called for routine in routines)
    assert placed.seen.states == {
        "infer": {"actor": GPU, "actor.optimizer": OFF},
        "train": {"actor": TRAIN, "actor.optimizer": TRAIN},
        "publish": {"actor": SYNC, "actor.optimizer": OFF},
    }


@on_ranks("two_ranks")
def test_checkpoints_for_transformers(model: Path, tmp_path: Path) -> None:
    """verl's `hf_model`. Not FSDP1, which gathers for it what it has already freed where gloo gathers on a CPU, without placement too."""
    from safetensors.torch import load_file

    own, placed = pair(model, contents=("model", "optimizer", "extra", "hf_model"))
    for subject, name in ((own, "own"), (placed, "placed")):
        subject.train(0)
        subject.worker.save_checkpoint(str(tmp_path / name), global_step=1)
        subject.check()
    files = (model, tmp_path / "own" / "huggingface", tmp_path / "placed" / "huggingface")
    first, theirs, mine = ({name: as_bytes(value) for name, value in load_file(each / "model.safetensors").items()} for each in files)
    assert mine == theirs
    assert mine.keys() == first.keys()
    assert all(mine[name] != value for name, value in first.items())


@on_ranks("two_ranks")
def test_lora(model: Path) -> None:
    needs("peft")
    lora(model, {"strategy": "fsdp2"}, True)


@on_ranks("two_ranks")
def test_ranks_are_one_group(model: Path) -> None:
    """Memory that one rank lacks for a training and an inference is an error of both, and both can go on."""
    _, placed = both = pair(model)
    for call, seed in ((placed.worker.train_batch, 0), (placed.worker.infer_batch, 1)):
        lacks_memory = mock.patch.object(placed.manager.device, "create", side_effect=DeviceMemoryError("no bytes"))
        with lacks_memory if dist.get_rank() == 1 else nullcontext(), pytest.raises(GroupError):
            call(batch(seed))
        placed.check()
    both.train(0)
    both.infer(1)
    both.same()


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


@on_ranks("two_ranks")
def test_a_model_that_is_trained_in_the_middle_of_a_delta_sync(model: Path) -> None:
    _, placed = pair(model)
    weights, _ = placed.engine.get_per_tensor_param_shard()
    next(weights)
    placed.worker.train_batch(batch(1))
    with pytest.raises(PlacementError, match="'actor' was loaded while its shards were read from the host copy: begin this sync again"):
        next(weights)
    placed.check()
