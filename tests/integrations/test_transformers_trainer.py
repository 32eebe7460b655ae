"""transformers' `Trainer` with the callback against the same trainer without it: the same losses
and weights, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from placement import Manager, RegistrationError, State
from placement.testing import Faults, SimulatedDevice, assert_nothing_resident
from tests.support import huggingface as hf
from tests.support.frameworks import needs
from tests.support.sweeps import few

needs("accelerate")
transformers = needs("transformers")
ours = needs("placement.integrations.transformers")

pytestmark = pytest.mark.filterwarnings("ignore", r"error:::placement\.")
"""transformers and what it imports warn of one another."""

CHUNK = 4096


def manager_for(**settings: Any) -> Manager:
    return Manager(
        device=SimulatedDevice(capacity_bytes=16 << 20, chunk_bytes=CHUNK),
        phases=ours.PHASES,
        **settings,
    )


def examples() -> list[dict[str, Any]]:
    ids = hf.tokenizer()(["1+1=2", "2+3=5", "3+3=6", "4+1=5"])["input_ids"]
    return [{"input_ids": each, "labels": each} for each in ids]


def rewarded(
    folder: str,
    out: Path,
    callback: Any = None,
    reward: Any = None,
    watch: Any = None,
    **changes: Any,
) -> Any:
    """A trainer whose loss asks a frozen model how it likes what the model says; gradients flow
    through it."""

    class Trainer(transformers.Trainer):  # type: ignore[misc, name-defined]
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any
        ) -> Any:
            outputs = model(**inputs)
            loss = outputs.loss
            if reward is not None:
                said = outputs.logits.softmax(-1) @ reward.get_input_embeddings().weight
                loss = loss - reward(inputs_embeds=said).logits.mean()
            if watch is not None:
                watch("loss of a step" if model.training else "loss of an evaluation")
            return (loss, outputs) if return_outputs else loss

    arguments = {
        "output_dir": str(out),
        "use_cpu": True,
        "report_to": "none",
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "max_steps": 3,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": 7,
    }
    args = transformers.TrainingArguments(**{**arguments, **changes})
    callbacks = [] if callback is None else [callback]
    data = {
        "train_dataset": examples(),
        "eval_dataset": {"first": examples(), "second": examples()[:1]},
    }
    return Trainer(model=hf.model_from(folder), args=args, callbacks=callbacks, **data)


def reward_model() -> Any:
    torch.manual_seed(3)
    return transformers.Qwen2ForSequenceClassification(hf.config(num_labels=1)).requires_grad_(
        False
    )


EVALUATED: dict[str, Any] = {
    "eval_strategy": "steps",
    "eval_steps": 1,
    "save_strategy": "steps",
    "save_steps": 1,
    "prediction_loss_only": True,
}
BEST: dict[str, Any] = {
    "load_best_model_at_end": True,
    "metric_for_best_model": "eval_first_loss",
    "eval_on_start": True,
}


def assert_same(trainer: Any, own: Any) -> None:
    assert hf.logged(trainer) == hf.logged(own)
    hf.assert_same_bytes(hf.weights_of(trainer.model), hf.weights_of(own.model))
    hf.assert_same_bytes(hf.moments_of(trainer.optimizer), hf.moments_of(own.optimizer))


@pytest.mark.parametrize(
    "policy", few(["colocated", "colocated('optimizer_step')"], "colocated('optimizer_step')")
)
def test_a_frozen_reward_model(folder: str, tmp_path: Path, policy: str) -> None:
    own = rewarded(folder, tmp_path / "own", reward=reward_model(), **EVALUATED, **BEST)
    own.train()
    manager, reward = manager_for(policy=policy), reward_model()
    seen: dict[str, set[frozenset[str]]] = {}

    def watch(at: str) -> None:
        seen.setdefault(at, set()).add(
            frozenset(name for name, each in manager.handles.items() if each.resident_bytes)
        )

    class AtSteps(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_optimizer_step(self, *_: Any, **__: Any) -> None:
            watch("optimizer step")

    with ours.PlacementCallback(manager, reward=reward) as callback:
        trainer = rewarded(folder, tmp_path / "ours", callback, reward, watch, **EVALUATED, **BEST)
        trainer.add_callback(AtSteps)
        load, states = trainer._load_best_model, []
        trainer._load_best_model = lambda: (states.append(manager.handles["actor"].state), load())
        trainer.train()
        assert states == [State.TRAINING]  # the values change
        assert not manager.handles
    assert_same(trainer, own)
    model, moments = frozenset({"actor"}), frozenset({"actor", "actor.optimizer"})
    if policy == "colocated":
        assert seen == {
            # no moments before the first step
            "loss of a step": {model | {"reward"}, moments | {"reward"}},
            "loss of an evaluation": {model | {"reward"}},
            "optimizer step": {model, moments},
        }
    else:
        assert seen["loss of a step"] == seen["loss of an evaluation"] == {model | {"reward"}}
        assert seen["optimizer step"] == {model, moments}
    for name in ("model.safetensors", "optimizer.pt"):
        assert (tmp_path / "ours" / "checkpoint-2" / name).exists()


def test_the_trainer_goes_on_as_without_placement(folder: str, tmp_path: Path) -> None:
    """Evaluation, generation and a second training, from a checkpoint, after the first."""
    trainers = [rewarded(folder, tmp_path / "own", **EVALUATED)]
    with ours.PlacementCallback(manager_for()) as callback:
        trainers.append(rewarded(folder, tmp_path / "ours", callback, **EVALUATED))
        answers = []
        for trainer, other in zip(trainers, ("ours", "own"), strict=True):
            transformers.set_seed(5)
            trainer.train()
            answers.append(
                (
                    trainer.evaluate()["eval_first_loss"],
                    trainer.model.generate(torch.tensor([[3, 4]]), max_new_tokens=3),
                )
            )
            trainer.save_model(str(tmp_path / other / "saved"))
        for trainer, other in zip(trainers, ("ours", "own"), strict=True):
            transformers.set_seed(5)
            trainer.train(resume_from_checkpoint=str(tmp_path / other / "checkpoint-2"))
    own, placed = trainers
    assert answers[0][0] == answers[1][0]
    assert torch.equal(answers[0][1], answers[1][1])
    assert_same(placed, own)


def test_an_exception_in_the_loss(folder: str, tmp_path: Path) -> None:
    manager, reward = manager_for(), reward_model()
    left = [3]

    def interrupt(at: str) -> None:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt

    callback = ours.PlacementCallback(manager, reward=reward)
    trainer = rewarded(folder, tmp_path, callback, reward, interrupt)
    with pytest.raises(KeyboardInterrupt), callback:
        trainer.train()
    assert manager.phase_name == "idle"
    assert not manager.handles
    assert torch.isfinite(trainer.model.get_input_embeddings().weight).all()
    left[0] = 4
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    # without close() in between: the callback closes what the last training left open
    trainer.train()
    assert trainer.state.global_step == 3
    assert not manager.handles


def test_what_does_not_fit_in_the_end_stays_on_the_host(
    folder: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    device = Faults(SimulatedDevice(capacity_bytes=16 << 20, chunk_bytes=CHUNK))
    manager, reward = (
        Manager(device=device, phases=ours.PHASES, policy="colocated('optimizer_step')"),
        reward_model(),
    )
    own = rewarded(folder, tmp_path / "own", reward=reward_model())
    own.train()
    callback = ours.PlacementCallback(manager, reward=reward)

    class NoRoom(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_train_end(self, *_: Any, **__: Any) -> None:
            device.fail("create", at=1, forever=True)

    trainer = rewarded(folder, tmp_path / "ours", None, reward)
    trainer.add_callback(NoRoom)
    trainer.add_callback(callback)
    trainer.train()
    device.clear()
    assert "'actor' does not fit on the device any more" in caplog.text
    assert not manager.handles
    assert_nothing_resident(manager)
    assert_same(trainer, own)


def test_a_frozen_model_that_cannot_be_registered(folder: str, tmp_path: Path) -> None:
    """It shares a weight with the model. The trainer does not train, and everything is as
    before."""
    manager, reward = manager_for(), reward_model()
    callback = ours.PlacementCallback(manager, reward=reward)
    trainer = rewarded(folder, tmp_path, callback, reward)
    reward.model.embed_tokens.weight = trainer.model.model.embed_tokens.weight
    with pytest.raises(RegistrationError, match="'reward'"):
        trainer.train()
    assert not manager.handles
    trainer.remove_callback(callback)
    trainer.train()
    assert trainer.state.global_step == 3


def test_several_ranks_are_refused(folder: str, tmp_path: Path) -> None:
    trainer = rewarded(folder, tmp_path, callback := ours.PlacementCallback(manager_for()))
    trainer.args.deepspeed = "config.json"
    with pytest.raises(
        ValueError,
        match=r"Register "
        r"trainer\.model_wrapped "
        r"and "
        r"trainer\.optimizer "
        r"with a Manager",
    ):
        callback.on_train_begin(
            trainer.args, trainer.state, trainer.control, model=trainer.model, optimizer=None
        )
    assert not callback.manager.handles


def test_wrong_use(folder: str, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="unknown role judge of a frozen model: it is one of ref, reward, teacher"
    ):
        ours.PlacementCallback(manager_for(), judge=reward_model())
    with pytest.raises(
        ValueError, match=r"Manager\(phases=placement\.integrations\.transformers\.PHASES\)"
    ):
        ours.PlacementCallback(Manager(device=SimulatedDevice(1 << 20)), ref=reward_model())


def test_a_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the error itself, or in its note where only the manager finds out."""
    monkeypatch.setenv("PLACEMENT_DEVICE", "gpu")
    with pytest.raises(ValueError, match="device 'gpu' is not known") as raised:
        ours.PlacementCallback()
    assert raised.value.__notes__ == ["placement: set in the environment: PLACEMENT_DEVICE='gpu'"]
    monkeypatch.setenv("PLACEMENT_BUDGET_BYTES", "much")
    with pytest.raises(
        ValueError,
        match=r"PLACEMENT_BUDGET_BYTES: .*'much' is not a number of bytes",
    ):
        ours.PlacementCallback()
