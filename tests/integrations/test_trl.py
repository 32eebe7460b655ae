"""TRL's trainers under placement against TRL's own: the same rewards, losses and weights, bit for
bit, and an empty device.

Also over several runs, after exceptions, and with a vLLM in this process as a handle: that engine
is a stand-in, and TRL's own code around it is the real one. On two ranks: test_trl_ranks.py.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from placement import Manager, NotResidentError, RegistrationError
from placement.testing import SimulatedDevice, assert_nothing_resident
from tests.engines import standin
from tests.integrations.standin_llm import GeneratingLLM
from tests.support import huggingface as hf
from tests.support.buckets import set_bucket_bytes
from tests.support.frameworks import needs
from tests.support.sweeps import few

needs("accelerate")
trl = needs("trl")
placed = needs("placement.integrations.trl")

pytestmark = pytest.mark.filterwarnings("ignore", r"error:::placement\.")
"""The frameworks warn of one another: TRL's defaults name arguments that transformers calls
deprecated."""


def digits(completions: list[str], **_: Any) -> list[float]:
    return [sum(ord(character) for character in text) / 100 for text in completions]


def manager_for(**settings: Any) -> Manager:
    return Manager(
        device=SimulatedDevice(capacity_bytes=16 << 20, chunk_bytes=4096),
        phases=placed.PHASES,
        **settings,
    )


def grpo_config(out: Path, **changes: Any) -> Any:
    return trl.GRPOConfig(**{**COMMON, **changes}, output_dir=str(out))


COMMON: dict[str, Any] = {
    "use_cpu": True,
    "report_to": "none",
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "num_generations": 2,
    "num_iterations": 2,
    "max_steps": 4,
    "beta": 0.1,
    "max_completion_length": 4,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_strategy": "no",
    "disable_tqdm": True,
    "activation_checkpointing": False,
    "bf16": False,
    "seed": 7,
}


def lora() -> Any:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    return peft.LoraConfig(
        r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )


def make(cls: Any, config: Any, folder: str, **keywords: Any) -> Any:
    how = {
        "reward_funcs": digits,
        "train_dataset": hf.prompts(),
        "processing_class": hf.tokenizer(),
        "model": hf.model_from(folder),
    }
    return cls(args=config, **{**how, **keywords})


def train(trainer: Any, **keywords: Any) -> None:
    """Train again. The random numbers of sampling go on from where they are, so they are set."""
    from transformers import set_seed

    set_seed(11)
    trainer.train(**keywords)


def assert_same(ours: Any, own: Any) -> None:
    """What was logged (losses, rewards, KL, lengths), and every weight and moment."""
    assert hf.logged(ours) == hf.logged(own)
    hf.assert_same_bytes(hf.weights_of(ours.model), hf.weights_of(own.model))
    if own.ref_model is not None:
        hf.assert_same_bytes(hf.weights_of(ours.ref_model), hf.weights_of(own.ref_model))
    hf.assert_same_bytes(hf.moments_of(ours.optimizer), hf.moments_of(own.optimizer))


def train_both(
    folder: str,
    out: Path,
    keywords: Callable[[], dict[str, Any]] = dict,
    manager: Manager | None = None,
    before: Callable[[Any], None] = id,
    **changes: Any,
) -> tuple[Any, Any]:
    """The placed trainer and TRL's own one, which have computed the same.

    Args:
        keywords: makes those of each trainer.
        before: called with the placed trainer before it trains.
    """
    manager = manager or manager_for()
    given = keywords()
    own = make(trl.GRPOTrainer, grpo_config(out / "own", **changes), folder, **given)
    own.train()
    given = keywords()
    ours = make(
        placed.PlacedGRPOTrainer,
        grpo_config(out / "ours", **changes),
        folder,
        manager=manager,
        **given,
    )
    before(ours)
    ours.train()
    if manager.policy.name == "colocated":
        assert_nothing_resident(manager)
    assert_same(ours, own)
    return ours, own


class Watch:
    """What is on the device when TRL calls, by the names of handles."""

    def __init__(self, manager: Manager) -> None:
        self.manager = manager
        self.seen: dict[str, set[frozenset[str]]] = {}

    def around(self, trainer: Any, *methods: str) -> None:
        for method in methods:
            setattr(trainer, method, self._looking(method, getattr(trainer, method)))

    def _looking(self, at: str, call: Any) -> Any:
        def looking(*args: Any, **keywords: Any) -> Any:
            there = frozenset(
                name for name, handle in self.manager.handles.items() if handle.resident_bytes
            )
            self.seen.setdefault(at, set()).add(there)
            return call(*args, **keywords)

        return looking


def test_grpo_with_a_reference(folder: str, tmp_path: Path) -> None:
    watch = Watch(manager_for())

    def look(ours: Any) -> None:
        watch.around(ours, "_generate_single_turn", "_compute_loss", "_clip_grad_norm", "log")
        watch.around(ours.ref_model, "forward")

    ours, _ = train_both(folder, tmp_path, manager=watch.manager, before=look)
    assert watch.seen == {
        "_generate_single_turn": {frozenset({"actor"})},
        "forward": {frozenset({"actor", "ref"})},
        # no moments before the first step
        "_compute_loss": {frozenset({"actor"}), frozenset({"actor", "actor.optimizer"})},
        "_clip_grad_norm": {frozenset({"actor"}), frozenset({"actor", "actor.optimizer"})},
        "log": {frozenset({"actor"}), frozenset({"actor", "actor.optimizer"})},
    }
    rows = [row for row in ours.state.log_history if "loss" in row]
    assert len(rows) == 4
    assert sum(row["placement/to_device_gb"] for row in rows) > 0
    assert all(row["placement/stall_seconds"] > 0 for row in rows)


def test_the_model_generates_after_training(folder: str, tmp_path: Path) -> None:
    manager = manager_for()
    trainer = make(
        placed.PlacedGRPOTrainer, grpo_config(tmp_path, max_steps=1), folder, manager=manager
    )
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


def only_a_layer_learns(folder: str) -> Any:
    """A model with few gradients, so that a training step needs less than actor and reference
    together."""
    model = hf.model_from(folder).requires_grad_(False)
    model.model.layers[-1].requires_grad_(True)
    return model


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("policy", "changes"),
    [
        ("colocated", {"optim": "sgd"}),
        # the reference is asked between two backward passes of one step
        ("colocated", {"optim": "sgd", "steps_per_generation": 1, "num_iterations": 1}),
        ("colocated('streamed')", {}),
    ],
)
def test_actor_and_reference_that_do_not_fit_together(
    folder: str, tmp_path: Path, policy: str, changes: dict[str, Any]
) -> None:
    model_bytes = sum(each.nbytes for each in hf.model_from(folder).parameters())
    # A step that streams its moments holds three buckets of them.
    set_bucket_bytes(4096)
    watch = Watch(manager_for(policy=policy, budget_bytes=int(1.9 * model_bytes)))
    train_both(
        folder,
        tmp_path,
        lambda: {"eval_dataset": hf.prompts(), "model": only_a_layer_learns(folder)},
        watch.manager,
        before=lambda ours: watch.around(ours.ref_model, "forward"),
        max_steps=2,
        eval_strategy="steps",
        eval_steps=1,
        **changes,
    )
    assert watch.seen["forward"] == {frozenset({"ref"})}
    assert watch.manager.journal.decisions["refuse"] == 1  # it is tried once


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(
            {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5},
            id="reference synced",
            marks=pytest.mark.sweep,
        ),
        pytest.param(
            {"activation_checkpointing": True, "bf16": True}, id="checkpointing and autocast"
        ),
        pytest.param({"beta": 0.0, "max_grad_norm": 0.0}, id="no reference"),
    ],
)
def test_variants_of_grpo(folder: str, tmp_path: Path, changes: dict[str, Any]) -> None:
    train_both(folder, tmp_path, **{"max_steps": 2, **changes})


def test_settings_come_from_the_environment(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One import changes in a script, and nothing else."""
    monkeypatch.setenv("PLACEMENT_DEVICE", "simulated:16MiB")
    monkeypatch.setenv("PLACEMENT_POLICY", "colocated('optimizer_step')")
    monkeypatch.setenv("PLACEMENT_PHASES", '{"distill": ["actor", "teacher"]}')
    own = make(
        trl.GRPOTrainer, grpo_config(tmp_path / "own", max_steps=2, sync_ref_model=True), folder
    )
    own.train()
    ours = make(
        placed.PlacedGRPOTrainer,
        grpo_config(tmp_path / "ours", max_steps=2, sync_ref_model=True),
        folder,
    )
    ours.train()
    assert_same(ours, own)
    assert ours.manager.settings.phases.keys() == {"distill", "sync_ref"}
    assert ours.manager.snapshot().peak_bytes > 0
    assert_nothing_resident(ours.manager)


@pytest.mark.parametrize(
    "policy",
    few(
        ["resident", "colocated('optimizer_step', drop_gradients=True)"],
        "colocated('optimizer_step', drop_gradients=True)",
    ),
)
def test_other_policies(folder: str, tmp_path: Path, policy: str) -> None:
    """With gradients of an unfinished step around, which must not be dropped."""
    train_both(
        folder,
        tmp_path,
        manager=manager_for(policy=policy),
        steps_per_generation=1,
        num_iterations=1,
        max_steps=2,
    )


def test_lora_whose_reference_is_the_base(folder: str, tmp_path: Path) -> None:
    ours, _ = train_both(folder, tmp_path, lambda: {"peft_config": lora()}, max_steps=3)
    assert ours.ref_model is None


def test_a_callback_that_copies_the_weights_when_training_begins(
    folder: str, tmp_path: Path
) -> None:
    """TRL's BEMACallback reads the parameters themselves in `on_train_begin`, and averages what it
    has read with those of each step."""
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
        return {
            "reward_funcs": [model, digits],
            "reward_processing_classes": [hf.tokenizer(), None],
        }

    watch = Watch(manager_for())
    train_both(
        folder,
        tmp_path,
        keywords,
        watch.manager,
        before=lambda ours: watch.around(ours.reward_funcs[0], "forward"),
        max_steps=2,
    )
    assert watch.seen["forward"] == {frozenset({"reward"})}


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


@pytest.mark.sweep
def test_evaluation_checkpoints_and_the_best_model(folder: str, tmp_path: Path) -> None:
    """Both save the same bytes, and each trains a second time."""
    ours, own = train_both(folder, tmp_path, lambda: {"eval_dataset": hf.prompts()}, **SAVING)
    for name in ("model.safetensors", "optimizer.pt"):
        hf.assert_same_bytes(
            *(_values(tmp_path / whose / "checkpoint-2" / name) for whose in ("ours", "own"))
        )
    assert hf.moments_of(ours.optimizer)
    for trainer in (ours, own):
        train(trainer)
        trainer.evaluate()
    assert_same(ours, own)
    assert_nothing_resident(ours.manager)


@pytest.mark.sweep
def test_new_trainers_resume(folder: str, tmp_path: Path) -> None:
    """TRL's own one resumes from what the placed one has saved, and the other way round."""
    manager = manager_for()
    of_both = ((trl.GRPOTrainer, {}), (placed.PlacedGRPOTrainer, {"manager": manager}))
    for cls, keywords in of_both:
        config = grpo_config(
            tmp_path / cls.__name__, max_steps=2, save_strategy="steps", save_steps=2
        )
        make(cls, config, folder, **keywords).train()
    resumed = []
    for (cls, keywords), other in zip(of_both, reversed(of_both), strict=True):
        resumed.append(
            make(cls, grpo_config(tmp_path / "resumed", max_steps=3), folder, **keywords)
        )
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


def generating(event: str) -> Any:
    """A callback that generates from the model, as TRL's `WeaveCallback` and people's samplers
    do."""
    from transformers import TrainerCallback

    class Sampler(TrainerCallback):  # type: ignore[misc, unused-ignore]
        calls = 0

    def generate(self: Any, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        model.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=2, do_sample=False)
        self.calls += 1

    setattr(Sampler, event, generate)
    return Sampler()


@pytest.mark.sweep
def test_callbacks_that_generate_after_an_evaluation(folder: str, tmp_path: Path) -> None:
    changes = {**SAVING, "max_steps": 2, "eval_on_start": True}
    events = ("on_prediction_step", "on_evaluate", "on_save", "on_epoch_end", "on_train_end")
    callbacks = [generating(event) for event in events]
    train_both(
        folder,
        tmp_path,
        lambda: {"eval_dataset": hf.prompts(), "callbacks": callbacks},
        **changes,
    )
    assert all(callback.calls > 1 for callback in callbacks)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "kind",
    ["PromptTuningConfig", "PrefixTuningConfig", "ShiraConfig"],
)
def test_adapters_whose_savers_read_past_the_state_dict(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("PLACEMENT_DEVICE", "simulated:16MiB")
    peft = pytest.importorskip("peft", reason="peft is not installed")
    shape: dict[str, Any] = {"r": 2, "target_modules": ["q_proj"]}
    if kind != "ShiraConfig":
        shape = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 4}
    files = []
    for cls in (trl.GRPOTrainer, placed.PlacedGRPOTrainer):
        out = tmp_path / cls.__name__
        trainer = make(
            cls,
            grpo_config(out, **{**SAVING, "max_steps": 2, "load_best_model_at_end": False}),
            folder,
            eval_dataset=hf.prompts(),
            peft_config=getattr(peft, kind)(**shape),
        )
        train(trainer)
        trainer.save_model(str(out / "end"))
        files.append([each.read_bytes() for each in sorted(out.rglob("adapter_model.*"))])
    assert len(files[0]) == 3
    assert files[0] == files[1]


# --- without a manager of the user's


@pytest.fixture
def _on_16_mib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLACEMENT_DEVICE", "simulated:16MiB")


@pytest.mark.sweep
@pytest.mark.usefixtures("_on_16_mib")
def test_after_training_a_script_goes_on_as_with_trl(
    folder: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The model is used, evaluated and trained again, and a trainer of another kind goes on with
    it and with the first one's reward model."""
    from transformers import Qwen2ForSequenceClassification

    caplog.set_level("INFO", "placement")
    ids = torch.tensor([[3, 4, 5]])
    made = []
    for grpo, rloo in (
        (trl.GRPOTrainer, trl.RLOOTrainer),
        (placed.PlacedGRPOTrainer, placed.PlacedRLOOTrainer),
    ):
        torch.manual_seed(3)
        judge = Qwen2ForSequenceClassification(hf.config(num_labels=1))
        out = tmp_path / grpo.__name__
        common = {
            "reward_funcs": judge,
            "reward_processing_classes": hf.tokenizer(),
            "eval_dataset": hf.prompts(),
        }
        changes = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
        first = make(grpo, grpo_config(out, **changes), folder, **common)
        train(first)
        used = [first.model.generate(ids, max_new_tokens=4, do_sample=False), judge(ids).logits]
        first.evaluate()
        first.save_model(str(out / "end"))
        train(first)
        train(first, resume_from_checkpoint=str(out / "checkpoint-1"))
        config = trl.RLOOConfig(**{**COMMON, "max_steps": 2}, output_dir=str(out))
        second = make(rloo, config, folder, **common, model=first.model)
        train(second)
        made.append((first, second, used, _values(out / "end" / "model.safetensors")))
    (own, own_next, own_used, own_saved), (ours, ours_next, used, saved) = made
    assert_same(ours, own)
    assert_same(ours_next, own_next)
    assert all(map(torch.equal, used, own_used))
    hf.assert_same_bytes(saved, own_saved)
    for trainer in (ours, ours_next):
        assert not trainer.manager.handles
        assert trainer.manager.snapshot().peak_bytes > 0
    assert (
        "PlacedGRPOTrainer trains under policy 'colocated' on simulated, with the handles actor, "
        "actor.optimizer, ref, reward"
    ) in caplog.messages


@pytest.mark.usefixtures("_on_16_mib")
def test_an_evaluation_after_training_takes_turns(folder: str, tmp_path: Path) -> None:
    trainer = make(
        placed.PlacedGRPOTrainer,
        grpo_config(tmp_path, max_steps=1),
        folder,
        eval_dataset=hf.prompts(),
    )
    trainer.evaluate()  # as TRL has it: nothing is placed before the first train()
    trainer.train()
    watch = Watch(trainer.manager)
    watch.around(trainer, "_generate_single_turn")
    trainer.evaluate()
    assert watch.seen == {"_generate_single_turn": {frozenset({"actor"})}}
    assert not trainer.manager.handles


@pytest.mark.usefixtures("_on_16_mib")
def test_what_the_user_registered_stays_registered(folder: str, tmp_path: Path) -> None:
    trainer = make(placed.PlacedGRPOTrainer, grpo_config(tmp_path, max_steps=1), folder)
    judge = torch.nn.Linear(2, 2)
    trainer.manager.register("judge", judge, role="reward", readonly=True)
    trainer.train()
    assert list(trainer.manager.handles) == ["judge"]


@pytest.mark.parametrize("kind", ["PlacedGRPOTrainer", "PlacedRLOOTrainer"])
def test_a_trainer_made_without_init(kind: str) -> None:
    """TRL's own tests make trainers so, to call one method. What it lacks is TRL's, never ours."""
    trainer = object.__new__(getattr(placed, kind))
    trainer.model = trainer.model_wrapped = torch.nn.Linear(2, 2)
    calls: dict[str, tuple[Any, ...]] = {
        "_generate": ([],),
        "_get_per_token_logps_and_entropies": (trainer.model, torch.ones(1, 2), None, 1),
        "_calculate_rewards": ([], [], [], []),
        "compute_loss": (trainer.model, {}),
        "evaluation_loop": ([], "Evaluation"),
        "log": ({},),
        "_load_from_checkpoint": ("nowhere",),
        "_load_best_model": (),
        "_save_checkpoint": (trainer.model, None),
    }
    for method, arguments in calls.items():
        with pytest.raises(Exception) as raised:  # noqa: PT011
            getattr(trainer, method)(*arguments)
        last = list(raised.traceback)[-1]
        assert "placement" not in str(last.path), f"{method}: {raised.value}"


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


INTERRUPTED = {"max_steps": 2, "steps_per_generation": 1, "num_iterations": 1}


@pytest.mark.sweep
@pytest.mark.usefixtures("_on_16_mib")
def test_after_an_interrupt_a_script_goes_on_as_with_trl(folder: str, tmp_path: Path) -> None:
    weights, trainers = [], []
    for cls in (trl.GRPOTrainer, placed.PlacedGRPOTrainer):
        config = grpo_config(tmp_path / cls.__name__, **INTERRUPTED)
        trainers.append(make(cls, config, folder, reward_funcs=Interrupting(at=4)))
        with pytest.raises(KeyboardInterrupt):
            train(trainers[-1])
        trainers[-1].model.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=4)
        weights.append(hf.weights_of(trainers[-1].model))
        train(trainers[-1])
    hf.assert_same_bytes(*weights)
    own, ours = trainers
    assert not ours.manager.handles
    assert_same(ours, own)


@pytest.mark.sweep
def test_an_interrupt_in_a_reward_function(folder: str, tmp_path: Path) -> None:
    """In the second backward pass of a step, with gradients of the first. TRL's own trainer,
    treated alike, says how it goes on."""
    manager = manager_for()
    trainers = []
    for cls, keywords in ((trl.GRPOTrainer, {}), (placed.PlacedGRPOTrainer, {"manager": manager})):
        config = grpo_config(tmp_path / cls.__name__, **INTERRUPTED)
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
        make(
            placed.PlacedGRPOTrainer,
            grpo_config(tmp_path, sync_ref_model=True),
            folder,
            manager=manager,
        )


def test_a_model_that_cannot_be_registered(folder: str, tmp_path: Path) -> None:
    from transformers import Qwen2ForSequenceClassification

    model, judge = hf.model_from(folder), Qwen2ForSequenceClassification(hf.config(num_labels=1))
    judge.model.embed_tokens.weight = model.model.embed_tokens.weight
    manager = manager_for()
    funcs = {"reward_funcs": judge, "reward_processing_classes": hf.tokenizer()}
    trainer = make(
        placed.PlacedGRPOTrainer,
        grpo_config(tmp_path),
        folder,
        manager=manager,
        **{"model": model, **funcs},
    )
    with pytest.raises(RegistrationError, match="'reward'"):
        trainer.train()
    assert not manager.handles
    assert torch.isfinite(model.model.embed_tokens.weight).all()


@pytest.mark.parametrize(
    ("flag", "advice"),
    [
        ("is_fsdp_enabled", "run one process or DDP"),
        ("is_deepspeed_enabled", "DeepSpeed's own offload"),
    ],
)
def test_what_places_models_itself_is_refused(
    folder: str, tmp_path: Path, flag: str, advice: str
) -> None:
    """accelerate turns neither of them on without a GPU, so the trainer is told afterwards that it
    did."""
    trainer = make(placed.PlacedGRPOTrainer, grpo_config(tmp_path), folder, manager=manager_for())
    setattr(trainer, flag, True)
    with pytest.raises(ValueError, match=rf"use TRL's own GRPOTrainer.*{advice}"):
        trainer._refuse_what_is_not_covered()


def test_continuous_batching_is_refused(folder: str, tmp_path: Path) -> None:
    config = grpo_config(tmp_path, use_transformers_continuous_batching=True)
    with pytest.raises(ValueError, match="use_transformers_continuous_batching is not covered"):
        make(placed.PlacedGRPOTrainer, config, folder, manager=manager_for())


# --- with vLLM

LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""The variables by which a launcher tells each rank who it is."""


@pytest.fixture
def engines(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], GeneratingLLM]:
    """Let TRL find vLLM installed: the next trainer's `LLM` is a stand-in, on the device of this
    file."""
    generation = importlib.import_module("trl.generation.vllm_generation")

    def next_on(shared: str) -> GeneratingLLM:
        for name in LAUNCHED:
            # TRL sets them for vLLM; the next trainer would take them for a launcher's
            monkeypatch.setenv(name, "")
            monkeypatch.delenv(name)
        made = GeneratingLLM(tmp_path / shared, folder)
        monkeypatch.setattr(generation, "is_vllm_available", lambda: True)
        monkeypatch.setattr(generation, "LLM", lambda **_: made, raising=False)
        monkeypatch.setattr(generation, "SamplingParams", SimpleNamespace, raising=False)
        return made

    return next_on


VLLM: dict[str, Any] = {
    "use_vllm": True,
    "vllm_mode": "colocate",
    "vllm_enable_sleep_mode": True,
    "max_steps": 2,
    "num_iterations": 1,
}


def on_device_of(tmp_path: Path, shared: str) -> Manager:
    return Manager(
        device=SimulatedDevice(
            standin.CAPACITY, chunk_bytes=standin.CHUNK, shared_with=tmp_path / shared
        ),
        phases=placed.PHASES,
    )


@pytest.mark.parametrize("is_given", few([True, False], False))
def test_vllm_that_sleeps(
    folder: str,
    tmp_path: Path,
    engines: Callable[[str], GeneratingLLM],
    monkeypatch: pytest.MonkeyPatch,
    is_given: bool,
) -> None:
    """With a manager of the user's, and with the trainer's own on the same device."""
    manager = on_device_of(tmp_path, "ours")
    device = manager.device
    monkeypatch.setattr("placement.manager.select_device", lambda name, **_: device)
    watch = Watch(manager)
    made = {}
    for whose, cls in (("own", trl.RLOOTrainer), ("ours", placed.PlacedRLOOTrainer)):
        llm = engines(whose)
        config = trl.RLOOConfig(**{**COMMON, **VLLM}, output_dir=str(tmp_path / "out"))
        keywords = {"manager": manager} if whose == "ours" and is_given else {}
        trainer = make(cls, config, folder, eval_dataset=hf.prompts(), **keywords)
        if whose == "ours":
            watch.manager = trainer.manager
            watch.around(llm, "generate")
        trainer.train()
        trainer.evaluate()
        assert llm.accidents == []
        made[whose] = trainer, llm
    (own, _), (ours, llm) = made["own"], made["ours"]
    assert_same(ours, own)
    assert watch.seen["generate"] == {frozenset({"rollout"})}  # all of the engine, and nothing else
    assert llm.memory.tags == set()
    assert_nothing_resident(manager)
    order = [call[0] if call[0] != "wake_up" else call for call in llm.calls]
    begun = order.index(("wake_up", ["weights"]))
    assert order[:begun] == ["sleep"]  # TRL's own, when it made the engine
    assert order[begun : begun + 5] == [
        ("wake_up", ["weights"]),
        "load_weights",
        ("wake_up", ["kv_cache"]),
        "generate",
        "sleep",
    ]


@pytest.mark.sweep
def test_vllm_that_does_not_sleep(
    folder: str, tmp_path: Path, engines: Callable[[str], GeneratingLLM]
) -> None:
    """The engine is TRL's alone. TRL merges adapters in the actor and takes the merge back, also
    with the rounding that this leaves."""
    made = []

    def keywords() -> dict[str, Any]:
        made.append(engines(f"engine {len(made)}"))
        return {"peft_config": lora()}

    train_both(
        folder,
        tmp_path,
        keywords,
        on_device_of(tmp_path, "engine 1"),
        **{**VLLM, "vllm_enable_sleep_mode": False},
    )
    assert [llm.accidents for llm in made] == [[], []]


@pytest.mark.sweep
def test_vllm_that_fails_and_goes_on(
    folder: str, tmp_path: Path, engines: Callable[[str], GeneratingLLM]
) -> None:
    llm, manager = engines("ours"), on_device_of(tmp_path, "ours")
    trainer = make(placed.PlacedGRPOTrainer, grpo_config(tmp_path, **VLLM), folder, manager=manager)
    generate = llm.generate

    def interrupted(*args: Any, **keywords: Any) -> Any:
        llm.generate = generate  # type: ignore[method-assign]
        raise KeyboardInterrupt

    llm.generate = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert llm.memory.tags == set()
    assert_nothing_resident(manager)
    trainer.train()
    assert trainer.state.global_step == 2
    manager.close()
    trainer.args.eval_strategy = "no"
    trainer.evaluate(hf.prompts())  # TRL sleeps and wakes the engine by itself again
    assert llm.accidents == []
    assert llm.memory.tags == set()
