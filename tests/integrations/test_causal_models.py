"""Every causal language model of transformers, and every tuner of PEFT, computes under placement
what it computes without, bit for bit.

The models are tiny (tests/support/causal_models.py). Each is built, evaluated, trained, saved and
published twice with the same seeds: once under placement, which offloads it between phases, and
once alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from placement import Manager
from placement.testing import assert_nothing_resident
from tests.sharded.training import as_bytes
from tests.support import causal_models
from tests.support.frameworks import needs
from tests.support.huggingface import tensors_in
from tests.support.seeds import seed
from tests.support.worker import OFF, make_manager

needs("transformers")

UNLIKE_OTHERS = ("phi3", "bart", "gpt_oss", "mamba2", "zamba", "gemma3n_text")
"""Rotary frequencies that change, tied weights, a decoder alone, experts, state spaces, shared
layers, a part of a larger model."""

DIVERGING = ("gpt2", "bloom", "bart", "glm4", "llama")
MORE_DIVERGING = (
    *("gpt_neo", "gpt_neox", "gptj", "falcon", "bert", "gemma", "granite", "mistral", "opt"),
    *("phi", "qwen2"),
)

_TUNER = {
    "task_type": "CAUSAL_LM",
    "target_modules": ["q_proj", "v_proj"],
    "r": 4,
    "num_virtual_tokens": 4,
}
_TUNERS: dict[str, dict[str, Any]] = {
    "ADALORA": {"total_step": 10},
    "ADAPTION_PROMPT": {"adapter_layers": 2, "adapter_len": 4, "target_modules": None},
    "C3A": {"block_size": 8},
    "MULTITASK_PROMPT_TUNING": {"num_tasks": 2},
    "OFT": {"oft_block_size": 0},
    "POLY": {"n_tasks": 2},
    "ROAD": {"group_size": 8},
    "SHADOW": {"target_modules": None},
    "TRAINABLE_TOKENS": {"token_indices": [4, 5], "target_modules": None},
    "VBLORA": {"vector_length": 8},
    "WAVEFT": {"n_frequency": 8},
}
"""What a tuner needs beside `_TUNER`, or instead."""
_NO_TUNER = {
    "ADAMSS": ("scikit-learn is not among what tests install"),
    "XLORA": ("it needs adapters that were saved before"),
}


def part_of(number: int) -> Any:
    """Every so many-th model in a test of its own, of which one runs without --slow."""
    parts = [
        pytest.param(
            slice(at, None, number), id=f"part {at}", marks=[pytest.mark.slow] if at else []
        )
        for at in range(number)
    ]
    return pytest.mark.parametrize("part", parts)


def outcome(
    make: Callable[[], Any], manager: Manager | None, publishes: bool = True, **inputs: Any
) -> dict[str, bytes]:
    """What a model computes, its gradients, and what can be read of it and its optimizer
    afterwards, by name and as bytes."""
    seed(1)
    model = make()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    if manager is not None:
        actor, adam = (
            manager.register("actor", model, role="actor"),
            manager.register("actor.optimizer", optimizer),
        )
    found: dict[str, bytes] = {}

    def note(what: str, values: dict[str, Any]) -> None:
        found.update({f"{what} {name}": as_bytes(value.detach()) for name, value in values.items()})

    def phase(name: str) -> Any:
        return contextlib.nullcontext() if manager is None else manager.phase(name)

    def logits(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        seed(number)
        ids = torch.randint(4, 100, (2, 8))
        # without those of prompts
        return model(input_ids=ids, use_cache=False, **inputs).logits[:, -8:].float(), ids

    for step in range(2):
        with phase("log_prob"), torch.no_grad():
            model.eval()
            note("logits", {str(step): logits(step)[0]})
        with phase("train"):
            model.train()
            optimizer.zero_grad()  # the gradients of the last phase
            values, ids = logits(10 + step)
            loss = torch.nn.functional.cross_entropy(values.flatten(0, -2), ids.flatten())
            loss.backward()
            note(
                f"gradient {step}",
                {str(at): each.grad for at, each in enumerate(trained) if each.grad is not None},
            )
            optimizer.step()
        if manager is not None:
            assert actor.state is adam.state is OFF
    note(
        "saved",
        tensors_in({"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()}),
    )
    with phase("log_prob"):
        note("buffer", dict(model.named_buffers()))
        note("parameter", dict(model.named_parameters()))
    if manager is not None:
        assert_nothing_resident(manager)
        assert manager.audit().ok, manager.audit().report
        with manager.phase("weight_sync"):
            for bucket in actor.weights() if publishes else ():
                note("published", dict(bucket))
        manager.close()
    elif publishes:
        note("published", published_by_hand(model))
    return found


def published_by_hand(model: Any) -> dict[str, torch.Tensor]:
    """Every saved value once, with adapters merged by PEFT."""
    model = model.merge_and_unload() if hasattr(model, "peft_config") else model
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - {
        name for name, _ in model.named_parameters()
    }
    return {name: value for name, value in model.state_dict().items() if name not in tied}


def problems(makers: dict[str, Callable[[], Any]], **inputs: Any) -> dict[str, object]:
    """What differs under placement, and errors of either run, by the name of a model."""
    found: dict[str, object] = {}
    for name, make in makers.items():
        try:
            alone = outcome(make, None, **inputs)
            placed = outcome(make, make_manager(), **inputs)
            found[name] = sorted(alone.keys() ^ placed.keys()) or [
                key for key, value in alone.items() if placed[key] != value
            ]
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return {name: problem for name, problem in found.items() if problem}


@pytest.mark.sweep
def test_models_unlike_others() -> None:
    assert problems({name: partial(causal_models.build, name) for name in UNLIKE_OTHERS}) == {}


def in_half_precision(name: str) -> Any:
    return causal_models.build(name).half()


@pytest.mark.sweep
@pytest.mark.parametrize("names", [DIVERGING, MORE_DIVERGING], ids=["few", "more"])
def test_models_that_diverge(names: tuple[str, ...]) -> None:
    """AdamW's epsilon is zero in float16, so the first step makes most weights NaN."""
    makers = {name: partial(in_half_precision, name) for name in names}
    plain = outcome(partial(in_half_precision, "gpt2"), None)
    weight = bytearray(plain["saved /model/transformer.wte.weight"])
    assert torch.frombuffer(weight, dtype=torch.float16).isnan().all()
    assert problems(makers) == {}


@part_of(48)
def test_all_models(part: slice, counted: Callable[[str], None]) -> None:
    names = causal_models.model_types()
    assert {*causal_models.LEFT_OUT, *causal_models.MORE} <= set(names)
    for name in names[part]:
        if name in causal_models.LEFT_OUT:
            counted(f"causal language models: not {name}: {causal_models.LEFT_OUT[name]}")
    assert (
        problems(
            {
                name: partial(causal_models.build, name)
                for name in names[part]
                if name not in causal_models.LEFT_OUT
            }
        )
        == {}
    )


def tuned(tuner: str) -> Any:
    from peft import get_peft_model
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    config = PEFT_TYPE_TO_CONFIG_MAPPING[tuner]
    known = {field.name for field in dataclasses.fields(config)}
    options = {
        name: value for name, value in {**_TUNER, **_TUNERS.get(tuner, {})}.items() if name in known
    }
    return get_peft_model(causal_models.build("llama"), config(**options))


def can_merge(tuner: str) -> bool:
    try:
        tuned(tuner).merge_and_unload()
    except (AttributeError, NotImplementedError, ValueError):
        return False
    return True


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore:::peft.*", "ignore:::transformers.*")
@part_of(8)
def test_all_tuners(part: slice, counted: Callable[[str], None]) -> None:
    needs("peft")
    from peft import PeftType

    found: dict[str, object] = {}
    for tuner in sorted(each.value for each in PeftType)[part]:
        if tuner in _NO_TUNER:
            counted(f"PEFT's tuners: not {tuner}: {_NO_TUNER[tuner]}")
            continue
        inputs = (
            {"task_ids": torch.zeros(2, dtype=torch.long)}
            if tuner in ("POLY", "MULTITASK_PROMPT_TUNING")
            else {}
        )
        found |= problems({tuner: partial(tuned, tuner)}, publishes=can_merge(tuner), **inputs)
    assert found == {}
