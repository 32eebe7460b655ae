"""The names that Python blocks about TRL, transformers and accelerate run with, see `contexts`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from placement.testing import assert_nothing_resident
from tests.docs.contexts import WIDTH, Names, Tools, simulated
from tests.support import huggingface


@contextmanager
def trl(tools: Tools) -> Iterator[Names]:
    """What a script that trains with TRL has: a model, a tokenizer, prompts and a reward function."""
    pytest.importorskip("trl", reason="TRL is not installed")
    from trl import GRPOConfig

    tools.take_for_gpu(simulated())
    warnings.simplefilter("ignore")  # pytest sets the filters anew for each test
    tools.monkeypatch.setenv("CI", "1")  # TRL sends telemetry otherwise
    where = {"output_dir": str(tools.folder), "use_cpu": True, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    sizes = {"per_device_train_batch_size": 2, "num_generations": 2, "max_completion_length": 4, "max_steps": 1, "learning_rate": 1e-2}
    names: Names = {
        "model": huggingface.model_from(huggingface.saved_model(tools.folder / "model")),
        "tokenizer": huggingface.tokenizer(),
        "prompts": huggingface.prompts(),
        "reward": lambda completions, **_: [sum(map(ord, text)) / 100 for text in completions],
        "config": GRPOConfig(**where, **sizes, beta=0.1),
        "question": {"input_ids": torch.tensor([[3, 4, 5]])},
    }
    first = huggingface.weights_of(names["model"])
    yield names
    if names["trainer"].manager.handles:  # it is not closed
        assert_nothing_resident(names["trainer"].manager)
    assert any(not torch.equal(value, first[name]) for name, value in huggingface.weights_of(names["model"]).items()), "nothing was trained"


@contextmanager
def trainer(tools: Tools) -> Iterator[Names]:
    """A trainer of transformers whose loss uses a reward model."""
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    from transformers import Qwen2ForSequenceClassification, Trainer, TrainingArguments

    class RewardedTrainer(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            outputs = model(**inputs)
            loss = outputs.loss * names["reward_model"](inputs["input_ids"]).logits.mean()
            return (loss, outputs) if return_outputs else loss

    tools.take_for_gpu(simulated())
    where = {"output_dir": str(tools.folder), "use_cpu": True, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    ids = huggingface.tokenizer()(["1+1=2"])["input_ids"][0]
    names: Names = {
        "RewardedTrainer": RewardedTrainer,
        "model": huggingface.model_from(huggingface.saved_model(tools.folder / "model")),
        "reward_model": Qwen2ForSequenceClassification(huggingface.config(num_labels=1)).requires_grad_(False),
        "args": TrainingArguments(**where, per_device_train_batch_size=1, max_steps=1, eval_strategy="steps", eval_steps=1),
        "examples": [{"input_ids": ids, "labels": ids}],
    }
    yield names
    assert names["trainer"].state.global_step == 1
    assert not names["callback"].manager.handles


@contextmanager
def accelerate_loop(tools: Tools) -> Iterator[Names]:
    """A loop that accelerate prepares, with a reward model."""
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    tools.take_for_gpu(simulated())
    model = torch.nn.Linear(WIDTH, WIDTH)
    names: Names = {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "reward_model": torch.nn.Linear(WIDTH, WIDTH),
        "batches": [torch.ones(4, WIDTH)],
        "judge": lambda reward_model, batch: reward_model(batch).detach(),
        "loss_of": lambda model, batch, rewards: ((model(batch) - rewards) ** 2).mean(),
    }
    first = model.weight.detach().clone()
    yield names
    assert_nothing_resident(names["manager"])
    assert not torch.equal(names["manager"].handles["actor"].state_dict()["weight"], first)


CONTEXTS: dict[str, Callable[[Tools], Any]] = {each.__name__: each for each in (trl, trainer, accelerate_loop)}
