"""Models in the shape of Qwen2.5 with random weights, as files that transformers, verl and vLLM
read."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from bench import _decoder
from bench._decoder import Shape

SHAPES = {
    "0.5B": Shape(896, 4864, 24, 14, 2, 64, 151936, tied=True),
    "1.5B": _decoder.SHAPES["1.5B"],
    # vLLM's Qwen2 has heads as wide as a share of the hidden state
    "4B": replace(_decoder.SHAPES["4B"], head_width=80),
    "7.6B": _decoder.SHAPES["7.6B"],
}


def write_model(folder: Path, shape: Shape, device: torch.device) -> Path:
    """Write a model in bf16, a file for each layer. The weights are made on `device`, and the host
    holds those of one layer at a time. Returns `folder`, which is made if it does not exist."""
    from safetensors.torch import save_file
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.feed_forward,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_value_heads,
        max_position_embeddings=4096,
        tie_word_embeddings=shape.tied,
        architectures=["Qwen2ForCausalLM"],
        dtype=torch.bfloat16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = Qwen2ForCausalLM(config)
    generator = torch.Generator(device).manual_seed(7)
    files = {}
    nbytes = 0
    parts = itertools.groupby(model.named_parameters(), lambda item: _part(item[0]))
    for part, parameters in parts:
        weights = {name: _first_values(name, empty, generator) for name, empty in parameters}
        file = f"{part}.safetensors"
        save_file(weights, folder / file, metadata={"format": "pt"})
        for name, weight in weights.items():
            files[name] = file
            nbytes += weight.nbytes
    index = {"metadata": {"total_size": nbytes}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


def _part(name: str) -> str:
    """The layer that a weight belongs to: `model.layers.3` of `model.layers.3.mlp.up_proj.weight`.
    Other weights are parts of their own."""
    return ".".join(name.split(".")[:3])


def _first_values(name: str, empty: Tensor, generator: torch.Generator) -> Tensor:
    """The values of a weight in host memory, as the initialization of Qwen2 has them."""
    weight = torch.empty(empty.shape, dtype=torch.bfloat16, device=generator.device)
    if empty.ndim == 1:
        weight.fill_(1.0 if "norm" in name else 0.0)
    else:
        weight.normal_(std=0.02, generator=generator)
    return weight.cpu()
