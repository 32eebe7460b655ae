"""Every causal language model of transformers, tiny: one way to shrink any configuration, and what
that does not fit."""

from __future__ import annotations

import re
from typing import Any

import torch

_SIZES = {
    r".*layers|n_layer|depth|num_blocks": 2,
    r".*(experts_per_tok|shared_experts|moe_top_?k|moe_k).*|topk_group|n_groups?|mamba_n_?groups|num_expert_group": 1,  # noqa: E501
    r".*experts|zero_expert_num": 4,
    r".*heads|n_head": 2,
    r".*head_dim|d_kv|dim_head|kv_channels|mamba_(d_head|headdim)|rotary_dim": 16,
    r"(.*_)?hidden_size|d_model|n_embd|(embedding|embed|emb)_(size|dim)|word_embed_proj_dim|lru_width": 32,  # noqa: E501
    r".*intermediate_size.*|.*ffn.*_(dim|size)|d_ff|dim_ff|dff": 32,
    r"(.*_)?vocab_size.*": 256,
    r".*rank": 8,
    r".*max_position_embeddings|n_positions|n_ctx|max_seq_len|model_max_length|max_source_positions": 64,  # noqa: E501
    r".*window_size|.*sliding_window.*|.*chunk_size|block_size|local_attention.*": 4,
}
"""Names of attributes, and the largest value that each keeps; the first that matches counts."""
_ALSO_WHERE_NONE = re.compile(
    "head_dim|num_key_value_heads|n_routed_experts|num_experts_per_tok|n_group|topk_group"
)
"""What some configurations leave open, and their models need."""
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")

_ROTARY = {"rope_type": "default", "rope_theta": 10000.0}
_LONG = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 4,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
}
_INDEXER = {"head_dim": 16, "n_heads": 2, "kv_heads": 1, "budget": 4, "compress_ratio": 2}
_HYBRID = {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2}
_ATTENTION = {"attention_hidden_size": 64, "attention_head_dim": 32}
MORE: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_n_heads": 4, "attn_layer_indices": [1]},
    "codegen": {"n_embd": 64, "n_head": 4},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": _ROTARY, "sliding_attention": _ROTARY}
    },
    "dbrx": {"attn_config": {"kv_n_heads": 1, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "dots1": {"n_shared_experts": 1},
    "gemma3n_text": {"num_kv_shared_layers": 0, "intermediate_size": 32},
    "granitemoehybrid": {"mamba_n_heads": 4},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"qk_head_dim": 32, "moe_topk": 2},
    "mamba2": {"num_heads": 4},
    "mimo_v2_flash": {"num_key_value_heads": 1},
    "phi3": {"rope_parameters": _ROTARY | _LONG},
    "qwen4_exp_text": {f"indexer_{name}": size for name, size in _INDEXER.items()},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "xlstm": {"chunk_size": 64},
    "xmod": {"default_language": "en_XX"},
    "zamba": _HYBRID | _ATTENTION,
    "zamba2": _ATTENTION | {"mamba_headdim": 32},
}
"""By model type: what a model needs beside small numbers. Phi3's rotary frequencies change with the
length of a sequence."""

LEFT_OUT: dict[str, str] = {
    "blt": "its hash embeddings have three million rows, whatever the vocabulary",
    "dots3_note": "its adapters have the widths of the large model",
    "dots3_note_text": "its sliding layers have the heads of the large model",
    "gemma3n": "timm is not among what tests install",
    "gemma4_assistant": "its configuration has no default that is valid",
    "gemma4_unified_assistant": "all its layers read the cache of another model",
    "musicgen": "its configuration needs those of two other models",
    "musicgen_melody": "its configuration needs those of two other models",
    "reformer": "it seeds its hashes anew in each training step: two runs without placement differ",
    "qwen4_exp": "its configuration leaves open what its indexer needs; qwen4_exp_text says it",
}
"""By model type: why there is no tiny one."""


def model_types() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def build(model_type: str) -> torch.nn.Module:
    """A model with one to four layers, of each kind that its configuration has, and random
    values."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type)
    config = type(config)(**{**_small(config), **MORE.get(model_type, {})})
    model: torch.nn.Module = AutoModelForCausalLM.from_config(config)
    return model


def _small(config: Any) -> dict[str, Any]:
    """The arguments in which a small configuration differs from this one."""
    values = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    found: dict[str, Any] = {}
    for name, value in values.items():
        size = next((size for pattern, size in _SIZES.items() if re.fullmatch(pattern, name)), None)
        if hasattr(value, "to_dict"):
            found[name] = _small(value)
        elif value is None and _ALSO_WHERE_NONE.fullmatch(name):
            found[name] = size
        elif isinstance(value, int) and not isinstance(value, bool):
            if size is not None and value > size:
                found[name] = size
            elif name.endswith("_token_id") and value >= 256:
                found[name] = 3
    number = next((values[name] for name in _LAYERS if isinstance(values.get(name), int)), 0)
    by_layer = {
        name: value
        for name, value in values.items()
        if isinstance(value, list) and len(value) == number > 1
    }
    if by_layer:
        kinds = {
            (name, str(kind)): at
            for name, value in by_layer.items()
            for at, kind in reversed(list(enumerate(value)))
        }
        kept = sorted({0, 1, *kinds.values()})[:4]
        found |= {name: [value[at] for at in kept] for name, value in by_layer.items()}
        found |= {name: len(kept) for name in _LAYERS if name in values}
    return found
