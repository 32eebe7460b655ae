"""The tiniest models, tokenizer and prompts that trainers of transformers and TRL train. Nothing is
downloaded."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import torch

_WORDS = [*"0123456789+="]


def tokenizer() -> Any:
    """One token a character, with padding on the left."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "<eos>": 1} | {
        word: number for number, word in enumerate(_WORDS, start=2)
    }
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    characters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=characters, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def config(**changes: Any) -> Any:
    from transformers import Qwen2Config

    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    ids = {
        "vocab_size": len(_WORDS) + 2,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
    }
    return Qwen2Config(
        **{**sizes, **ids, "max_position_embeddings": 64, "tie_word_embeddings": True, **changes}
    )


def saved_model(folder: Path, **changes: Any) -> str:
    """Save a causal language model with random weights. Returns the folder, from which TRL also
    makes the reference."""
    from transformers import Qwen2ForCausalLM

    torch.manual_seed(1)
    Qwen2ForCausalLM(config(**changes)).save_pretrained(folder)
    return str(folder)


def model_from(folder: str) -> Any:
    """What is in a folder that does not change: a copy costs a tenth of a load."""
    return copy.deepcopy(_loaded(folder))


@functools.cache
def _loaded(folder: str) -> Any:
    from transformers import Qwen2ForCausalLM

    return Qwen2ForCausalLM.from_pretrained(folder)


def prompts() -> Any:
    """Four prompts, two of each length."""
    from datasets import Dataset

    return Dataset.from_dict({"prompt": ["1+1=", "2+3=", "12+1=", "20+4="]})


def weights_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def moments_of(optimizer: Any) -> dict[str, torch.Tensor]:
    return {
        name: value.detach().clone() for name, value in tensors_in(optimizer.state_dict()).items()
    }


def tensors_in(tree: Any, path: str = "") -> dict[str, torch.Tensor]:
    """Every tensor inside dicts and lists, by its path."""
    if isinstance(tree, torch.Tensor):
        return {path: tree}
    children = (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree)
        if isinstance(tree, list)
        else ()
    )
    found: dict[str, torch.Tensor] = {}
    for key, child in children:
        found |= tensors_in(child, f"{path}/{key}")
    return found


def assert_same_bytes(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    different = [
        name for name in first if not torch.equal(_bytes(first[name]), _bytes(second[name]))
    ]
    assert different == []


def _bytes(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous().view(-1).view(torch.uint8)


def logged(trainer: Any) -> list[dict[str, float]]:
    """What a trainer has logged, without times and without placement's figures."""
    is_time = ("runtime", "per_second", "step_time", "time")
    rows = [
        {key: value for key, value in row.items() if not key.startswith("placement/")}
        for row in trainer.state.log_history
    ]
    return [{key: value for key, value in row.items() if not key.endswith(is_time)} for row in rows]
