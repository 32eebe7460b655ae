"""Placed trainers over several runs: checkpoints, evaluation, ranks, exceptions, and set-ups that are refused."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import placement
from placement import Manager, RegistrationError
from placement.testing import SimulatedDevice, assert_nothing_resident
from tests.integrations import trl_jobs as jobs
from tests.integrations.trl_jobs import assert_same, digits, grpo_config, make, manager_for, placed, train, train_both, trl
from tests.support import huggingface as hf
from tests.support.frameworks import needs
from tests.support.ranks import on_ranks

needs("trl")
needs("accelerate")

pytestmark = pytest.mark.filterwarnings(*jobs.QUIET)


# --- checkpoints, evaluation, several train() calls

SAVING: dict[str, Any] = {
    "eval_strategy": "steps",
    "eval_steps": 1,
    "save_strategy": "steps",
    "save_steps": 1,
    "load_best_model_at_end": True,
    "metric_for_best_model": "eval_reward",
    "max_steps": 3,
}


def test_evaluation_checkpoints_and_the_best_model(folder: str, tmp_path: Path) -> None:
    """Both save the same bytes, and each trains a second time."""
    ours, own = train_both(folder, tmp_path, lambda: {"eval_dataset": hf.prompts()}, **SAVING)
    for name in ("model.safetensors", "optimizer.pt"):
        saved = [_values(tmp_path / whose / "checkpoint-2" / name) for whose in ("ours", "own")]
        hf.assert_same_bytes(*saved)
    assert hf.moments_of(ours.optimizer)
    for trainer in (ours, own):
        train(trainer)
        trainer.evaluate()
    assert_same(ours, own)
    assert_nothing_resident(ours.manager)


def test_new_trainers_resume(folder: str, tmp_path: Path) -> None:
    """TRL's own one resumes from what the placed one has saved, and the other way round."""
    manager = manager_for()
    of_both = ((trl.GRPOTrainer, {}), (placed.PlacedGRPOTrainer, {"manager": manager}))
    for cls, keywords in of_both:
        config = grpo_config(tmp_path / cls.__name__, max_steps=2, save_strategy="steps", save_steps=2)
        make(cls, config, folder, **keywords).train()
    resumed = []
    for (cls, keywords), other in zip(of_both, reversed(of_both), strict=True):
        resumed.append(make(cls, grpo_config(tmp_path / "resumed", max_steps=3), folder, **keywords))
        resumed[-1].train(resume_from_checkpoint=str(tmp_path / other[0].__name__ / "checkpoint-2"))
    own, ours = resumed
    assert ours.state.global_step == 3
    assert_same(ours, own)
    assert_nothing_resident(manager)


def _values(file: Path) -> dict[str, torch.Tensor]:
    if file.suffix == ".safetensors":
        from safetensors.torch import load_file

        return dict(load_file(file))
    return hf.tensors_in(torch.load(file, weights_only=True))


# --- DistributedDataParallel


@on_ranks("two_ranks")
def test_two_ranks(folder: str, tmp_path: Path) -> None:
    """Gradients lie in the reducer's buckets, which leave the device with the model. The ranks change phase together."""
    os.environ["CI"] = "1"  # TRL sends telemetry otherwise
    warnings.simplefilter("ignore")
    store = dist.PrefixStore("trl", dist.distributed_c10d._get_default_store())
    group = placement.group.StoreGroup(store, dist.get_rank(), dist.get_world_size())
    device = SimulatedDevice(capacity_bytes=16 << 20, chunk_bytes=4096)
    manager = placement.Manager(device=device, group=group, phases=placed.PHASES)
    trainers = []
    for name, cls, keywords in (("own", trl.GRPOTrainer, {}), ("ours", placed.PlacedGRPOTrainer, {"manager": manager})):
        each = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "eval_strategy": "steps", "eval_steps": 2}
        ddp = {"ddp_backend": "gloo", "ddp_find_unused_parameters": False}
        config = grpo_config(tmp_path / name, max_steps=3, save_strategy="steps", save_steps=2, **each, **ddp)
        trainers.append(make(cls, config, folder, eval_dataset=hf.prompts(), **keywords))
        trainers[-1].train()
    own, ours = trainers
    assert_same(ours, own)
    assert_nothing_resident(manager)  # the reducer's buckets included
    manager.close()
    assert ours.state.global_step == 3
    assert {type(trainer.model_wrapped) for trainer in trainers} == {DistributedDataParallel}


# --- what fails


class Interrupting:
    __name__ = "interrupting"

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, completions: list[str], **_: Any) -> list[float]:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return digits(completions)


def test_an_interrupt_in_a_reward_function(folder: str, tmp_path: Path) -> None:
    """In the second backward pass of a step, with gradients of the first. TRL's own trainer, treated alike, says how it goes on."""
    manager = manager_for()
    trainers = []
    for cls, keywords in ((trl.GRPOTrainer, {}), (placed.PlacedGRPOTrainer, {"manager": manager})):
        config = grpo_config(tmp_path / cls.__name__, max_steps=2, steps_per_generation=1, num_iterations=1)
        trainers.append(make(cls, config, folder, reward_funcs=Interrupting(at=4), **keywords))
        with pytest.raises(KeyboardInterrupt):
            trainers[-1].train()
    assert manager.phase_name == "idle"
    manager.check_integrity()
    assert_nothing_resident(manager)
    for trainer in trainers:
        train(trainer)
    own, ours = trainers
    assert_same(ours, own)
    assert_nothing_resident(manager)


# --- what is refused


def test_a_manager_without_the_phase_of_a_synced_reference(folder: str, tmp_path: Path) -> None:
    manager = Manager(device=SimulatedDevice(capacity_bytes=16 << 20))
    with pytest.raises(ValueError, match=r"Manager\(phases=placement\.integrations\.trl\.PHASES\)"):
        make(placed.PlacedGRPOTrainer, grpo_config(tmp_path, sync_ref_model=True), folder, manager=manager)


def test_a_model_that_cannot_be_registered(folder: str, tmp_path: Path) -> None:
    from transformers import Qwen2ForSequenceClassification

    model, judge = hf.model_from(folder), Qwen2ForSequenceClassification(hf.config(num_labels=1))
    judge.model.embed_tokens.weight = model.model.embed_tokens.weight
    manager = manager_for()
    funcs = {"reward_funcs": judge, "reward_processing_classes": hf.tokenizer()}
    trainer = make(placed.PlacedGRPOTrainer, grpo_config(tmp_path), folder, manager=manager, **{"model": model, **funcs})
    with pytest.raises(RegistrationError, match="'reward'"):
        trainer.train()
    assert not manager.handles
    assert torch.isfinite(model.model.embed_tokens.weight).all()


@pytest.mark.parametrize(
    ("flag", "advice"), [("is_fsdp_enabled", "run one process or DDP"), ("is_deepspeed_enabled", "DeepSpeed's own offload")]
)
def test_what_places_models_itself_is_refused(folder: str, tmp_path: Path, flag: str, advice: str) -> None:
    """accelerate turns neither of them on without a GPU, so the trainer is told afterwards that it did."""
    trainer = make(placed.PlacedGRPOTrainer, grpo_config(tmp_path), folder, manager=manager_for())
    setattr(trainer, flag, True)
    with pytest.raises(ValueError, match=rf"use TRL's own GRPOTrainer.*{advice}"):
        trainer._refuse_what_is_not_covered()


def test_continuous_batching_is_refused(folder: str, tmp_path: Path) -> None:
    config = grpo_config(tmp_path, use_transformers_continuous_batching=True)
    with pytest.raises(ValueError, match="use_transformers_continuous_batching is not covered"):
        make(placed.PlacedGRPOTrainer, config, folder, manager=manager_for())
