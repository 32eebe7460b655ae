"""TRL's trainers under placement against TRL's own: the same rewards, losses and weights, bit for bit, and an empty device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from placement import Manager
from placement.testing import SimulatedDevice, assert_nothing_resident
from tests.support import huggingface as hf
from tests.support.frameworks import needs

trl = needs("trl")
placed = needs("placement.integrations.trl")

pytestmark = pytest.mark.filterwarnings("ignore", r"error:::placement\.")
"""The frameworks warn of one another: TRL's defaults name arguments that transformers calls deprecated, datasets pickles what dill cannot."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return hf.saved_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "1")  # TRL sends telemetry otherwise


def digits(completions: list[str], **_: Any) -> list[float]:
    """A reward that depends on every token."""
    return [sum(ord(character) for character in text) / 100 for text in completions]


def manager_for(**settings: Any) -> Manager:
    return Manager(device=SimulatedDevice(capacity_bytes=16 << 20, chunk_bytes=4096), phases=placed.PHASES, **settings)


def grpo_config(out: Path, **changes: Any) -> Any:
    return trl.GRPOConfig(**{**COMMON, "beta": 0.1, "num_iterations": 2, "max_steps": 4, **changes}, output_dir=str(out))


COMMON: dict[str, Any] = {
    "use_cpu": True,
    "report_to": "none",
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "num_generations": 2,
    "max_completion_length": 4,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_strategy": "no",
    "disable_tqdm": True,
    "activation_checkpointing": False,
    "bf16": False,
    "seed": 7,
}


def make(cls: Any, config: Any, folder: str, **keywords: Any) -> Any:
    return cls(
        model=hf.model_from(folder), reward_funcs=digits, args=config, train_dataset=hf.prompts(), processing_class=hf.tokenizer(), **keywords
    )


def test_grpo_with_a_reference(folder: str, tmp_path: Path) -> None:
    own = make(trl.GRPOTrainer, grpo_config(tmp_path / "own"), folder)
    own.train()
    manager = manager_for()
    ours = make(placed.PlacedGRPOTrainer, grpo_config(tmp_path / "ours"), folder, manager=manager)
    ours.train()
    assert_nothing_resident(manager)
    assert hf.logged(ours) == hf.logged(own)
    hf.assert_same_bytes(hf.weights_of(ours.model), hf.weights_of(own.model))
    hf.assert_same_bytes(hf.weights_of(ours.ref_model), hf.weights_of(own.ref_model))
