"""A small Qwen2 with random weights, and the check that what was generated comes from an actor's
weights."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

VOCABULARY = 1024
CONTEXT = 4096
NUM_PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 8, 12, 24
MARGIN = 0.15
"""The logit of each generated token may be this much below the best, in standard deviations of the
logits. Computing in bfloat16 costs some hundredths; the token of a model with other weights is two
standard deviations below."""
EQUAL_SHARE = 0.9
"""The share of generated tokens that must be the actor's best one. In the others two logits are
nearly equal."""

Tokens = list[list[int]]


def config() -> Any:
    """About 200 MB in bfloat16: large enough that the driver's free memory shows where the weights
    are."""
    from transformers import Qwen2Config

    return Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=6,
        num_attention_heads=16,
        num_key_value_heads=8,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        use_sliding_window=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


def model(seed: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Any:
    from transformers import Qwen2ForCausalLM

    torch.manual_seed(seed)
    made = Qwen2ForCausalLM(config()).to(dtype)
    return made.to(device).eval()


def weights_bytes() -> int:
    from transformers import Qwen2ForCausalLM

    with torch.device("meta"):
        return 2 * sum(parameter.numel() for parameter in Qwen2ForCausalLM(config()).parameters())


def saved_for(package: str, version: str, folder: Path) -> str:
    """Save the model that an engine starts with. Returns the folder. Skips where the engine's
    package is not installed."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install {package}=={version}")
    with warnings.catch_warnings():
        # another version of transformers than that of the other tests
        warnings.simplefilter("ignore")
        made = model(0)
        made.config.dtype = torch.bfloat16
        made.to(torch.bfloat16).save_pretrained(folder / "model")
    return str(folder / "model")


def change(module: torch.nn.Module, seed: int) -> None:
    """Give every trained weight another value, of the same size, as many steps of training
    would."""
    with torch.no_grad():
        for number, parameter in enumerate(p for p in module.parameters() if p.requires_grad):
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            generator = torch.Generator(local.device).manual_seed(1000 * seed + number)
            noise = torch.randn(
                local.shape, generator=generator, device=local.device, dtype=local.dtype
            )
            if local.dim() > 1:
                local.lerp_(noise * max(float(local.std()), 0.02), 0.5).mul_(2**0.5)
            else:  # biases, and the scales of norms, which are all alike
                local.add_(noise, alpha=0.02)


def prompts(seed: int = 0) -> Tokens:
    generator = torch.Generator().manual_seed(seed)
    found: Tokens = torch.randint(
        0, VOCABULARY, (NUM_PROMPTS, PROMPT_TOKENS), generator=generator
    ).tolist()
    return found


def deficits(actor: Any, asked: Tokens, answered: Tokens) -> torch.Tensor:
    """For each generated token, how far its logit is below the best one, in standard deviations of
    the logits."""
    device = next(actor.parameters()).device
    whole = torch.tensor(
        [[*prompt, *answer] for prompt, answer in zip(asked, answered, strict=True)], device=device
    )
    with torch.no_grad():
        logits = actor(whole).logits.float()[:, len(asked[0]) - 1 : -1]
    chosen = torch.gather(logits, -1, whole[:, len(asked[0]) :, None])[..., 0]
    return (logits.amax(-1) - chosen) / logits.std(-1)


def assert_generated_by(actor: Any, asked: Tokens, answered: Sequence[Sequence[int]]) -> None:
    """Assert that greedy decoding with the actor's weights gives these tokens.

    The actor reads each answer token by token, so that one pair of nearly equal logits does not
    decide about all that follows.
    """
    found = deficits(actor, asked, [[*answer] for answer in answered])
    share = float((found == 0).float().mean())
    assert float(found.max()) < MARGIN, (
        f"a token is {float(found.max()):.3f} standard deviations below the best one; {share:.0%} "
        "are the best"
    )
    assert share >= EQUAL_SHARE, f"only {share:.0%} of the tokens are the actor's best"


def assert_not_generated_by(actor: Any, asked: Tokens, answered: Sequence[Sequence[int]]) -> None:
    found = deficits(actor, asked, [[*answer] for answer in answered])
    assert float((found < MARGIN).float().mean()) < 0.5, (
        "the actor has changed, and its tokens have not"
    )
