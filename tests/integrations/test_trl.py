"""TRL's trainers under placement against TRL's own: the same rewards, losses and weights, bit for bit, and an empty device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from placement import NotResidentError
from placement.testing import assert_nothing_resident
from tests.integrations import trl_jobs as jobs
from tests.integrations.trl_jobs import Watch, assert_same, digits, grpo_config, make, manager_for, placed, train_both, trl
from tests.support import huggingface as hf
from tests.support.frameworks import needs

needs("trl")
needs("accelerate")

pytestmark = pytest.mark.filterwarnings(*jobs.QUIET)


def test_grpo_with_a_reference(folder: str, tmp_path: Path) -> None:
    watch = Watch(manager_for())

    def look(ours: Any) -> None:
        watch.around(ours, "_generate_single_turn", "_compute_loss", "_clip_grad_norm", "log")
        watch.around(ours.ref_model, "forward")

    ours, _ = train_both(folder, tmp_path, manager=watch.manager, before=look)
    assert watch.seen == {
        "_generate_single_turn": {frozenset({"actor"})},
        "forward": {frozenset({"actor", "ref"})},
        "_compute_loss": {frozenset({"actor"}), frozenset({"actor", "actor.optimizer"})},  # no moments before the first step
        "_clip_grad_norm": {frozenset({"actor"}), frozenset({"actor", "actor.optimizer"})},
        "log": {frozenset({"actor"}), frozenset({"actor", "actor.optimizer"})},
    }
    rows = [row for row in ours.state.log_history if "loss" in row]
    assert len(rows) == 4
    assert sum(row["placement/loaded_bytes"] for row in rows) > 0
    assert all(row["placement/stall_seconds"] > 0 for row in rows)


def test_the_model_generates_after_training(folder: str, tmp_path: Path) -> None:
    manager = manager_for()
    trainer = make(placed.PlacedGRPOTrainer, grpo_config(tmp_path, max_steps=1), folder, manager=manager)
    trainer.train()
    ids = torch.tensor([[3, 4, 5]])
    with pytest.raises(NotResidentError, match="'actor' is CPU_OFFLOADED"):
        trainer.model.generate(ids, max_new_tokens=2)
    with manager.phase("rollout"):
        first = trainer.model.generate(ids, max_new_tokens=2, do_sample=False)
    assert_nothing_resident(manager)
    trainer.save_model(str(tmp_path / "saved"))  # in every state
    manager.close(on_device=["actor"])
    assert torch.equal(trainer.model.generate(ids, max_new_tokens=2, do_sample=False), first)
    again = hf.model_from(str(tmp_path / "saved"))
    hf.assert_same_bytes(hf.weights_of(again), hf.weights_of(trainer.model))


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5}, id="reference synced"),
        pytest.param({"activation_checkpointing": True, "bf16": True}, id="checkpointing and autocast"),
        pytest.param({"beta": 0.0, "max_grad_norm": 0.0}, id="no reference"),
    ],
)
def test_variants_of_grpo(folder: str, tmp_path: Path, changes: dict[str, Any]) -> None:
    train_both(folder, tmp_path, **{"max_steps": 2, **changes})


def test_settings_come_from_the_environment(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One import changes in a script, and nothing else."""
    monkeypatch.setenv("PLACEMENT_DEVICE", "simulated:16MiB")
    monkeypatch.setenv("PLACEMENT_POLICY", "colocated('optimizer_step')")
    monkeypatch.setenv("PLACEMENT_PHASES", '{"distill": ["actor", "teacher"]}')
    own = make(trl.GRPOTrainer, grpo_config(tmp_path / "own", max_steps=2, sync_ref_model=True), folder)
    own.train()
    ours = make(placed.PlacedGRPOTrainer, grpo_config(tmp_path / "ours", max_steps=2, sync_ref_model=True), folder)
    ours.train()
    assert_same(ours, own)
    assert ours.manager.settings.phases.keys() == {"distill", "sync_ref"}
    assert ours.manager.snapshot().peak_bytes > 0
    assert_nothing_resident(ours.manager)


@pytest.mark.parametrize("policy", ["resident", "colocated('optimizer_step', drop_gradients=True)"])
def test_other_policies(folder: str, tmp_path: Path, policy: str) -> None:
    """With gradients of an unfinished step around, which must not be dropped."""
    train_both(folder, tmp_path, manager=manager_for(policy=policy), steps_per_generation=1, num_iterations=1, max_steps=2)


def test_lora_whose_reference_is_the_base(folder: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    ours, _ = train_both(folder, tmp_path, lambda: {"peft_config": lora}, max_steps=3)
    assert ours.ref_model is None


def test_a_callback_that_copies_the_weights_when_training_begins(folder: str, tmp_path: Path) -> None:
    """TRL's BEMACallback reads the parameters themselves in `on_train_begin`, and averages what it has read with those of each step."""
    callbacks: list[Any] = []

    def keywords() -> dict[str, Any]:
        callbacks.append(trl.BEMACallback(update_freq=1))
        return {"callbacks": callbacks[-1:]}

    train_both(folder, tmp_path, keywords, max_steps=2)
    averages = [hf.weights_of(callback.running_model) for callback in callbacks]
    hf.assert_same_bytes(*averages)
    assert all(value.isfinite().all() for value in averages[0].values())


def test_a_reward_model(folder: str, tmp_path: Path) -> None:
    from transformers import Qwen2ForSequenceClassification

    def keywords() -> dict[str, Any]:
        torch.manual_seed(3)
        model = Qwen2ForSequenceClassification(hf.config(num_labels=1))
        return {"reward_funcs": [model, digits], "reward_processing_classes": [hf.tokenizer(), None]}

    watch = Watch(manager_for())
    train_both(folder, tmp_path, keywords, watch.manager, before=lambda ours: watch.around(ours.reward_funcs[0], "forward"), max_steps=2)
    assert watch.seen["forward"] == {frozenset({"reward"})}
