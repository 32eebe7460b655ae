"""`names="checkpoint"` publishes what `save_pretrained` writes: names, shapes and bytes, also where
transformers packs experts."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from placement import Manager
from placement.testing import SimulatedDevice, assert_nothing_resident
from tests.support.frameworks import needs
from tests.support.worker import assert_same

transformers = needs("transformers", at_least="5")
safetensors = pytest.importorskip("safetensors.torch")

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def _qwen3_moe() -> Any:
    more = {
        "num_experts": 4,
        "moe_intermediate_size": 8,
        "head_dim": 8,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": True,
    }
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SIZES, **more))


def _mixtral() -> Any:
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES, num_local_experts=4))


def _deepseek_v3() -> Any:
    heads = {
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    }
    experts = {
        "n_routed_experts": 4,
        "moe_intermediate_size": 8,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
    }
    config = transformers.DeepseekV3Config(
        **SIZES, **heads, **experts, first_k_dense_replace=1, n_shared_experts=1
    )
    return transformers.DeepseekV3ForCausalLM(config)


def _glm4v_moe() -> Any:
    """A vision-language model with packed experts."""
    text = {
        **SIZES,
        "head_dim": 8,
        "n_routed_experts": 4,
        "moe_intermediate_size": 8,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
    }
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 16,
        "image_size": 28,
    }
    config = transformers.Glm4vMoeConfig(text_config=text, vision_config=vision)
    return transformers.Glm4vMoeForConditionalGeneration(config)


def _qwen2_vl() -> Any:
    """A vision-language model whose module names are not those of its checkpoint."""
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2}
    return transformers.Qwen2VLForConditionalGeneration(
        transformers.Qwen2VLConfig(text_config=SIZES, vision_config=vision)
    )


def _t5() -> Any:
    """An encoder-decoder, whose tied embedding has four names."""
    config = transformers.T5Config(
        vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2
    )
    return transformers.T5ForConditionalGeneration(config)


MODELS = (_qwen3_moe, _mixtral, _deepseek_v3, _glm4v_moe, _qwen2_vl, _t5)


def _written(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    model.save_pretrained(folder)
    return {
        name: value
        for file in folder.glob("*.safetensors")
        for name, value in safetensors.load_file(file).items()
    }


def managed(model: Any) -> tuple[Manager, Any]:
    manager = Manager(device=SimulatedDevice(capacity_bytes=64 << 20))
    return manager, manager.register("actor", model, role="actor")


@pytest.mark.parametrize("make", MODELS)
def test_names_and_bytes_are_those_of_save_pretrained(
    make: Callable[[], Any], tmp_path: Path
) -> None:
    model = make()
    wanted = _written(model, tmp_path)
    manager, actor = managed(model)
    infos = actor.weights_info(names="checkpoint")
    published = {}
    with manager.phase("weight_sync"):
        for bucket in actor.weights(names="checkpoint", bucket_bytes=1000):
            published |= {weight: value.clone() for weight, value in bucket}
    assert published.keys() == wanted.keys()
    assert_same(published, {weight: wanted[weight] for weight in published})
    assert [(info.name, info.shape, info.dtype) for info in infos] == [
        (n, tuple(v.shape), v.dtype) for n, v in published.items()
    ]
    layers = [weight.partition("layers.")[2].split(".")[0] or weight for weight in published]
    # an engine can finish one layer after the other
    assert len(list(itertools.groupby(layers))) == len(set(layers))
    assert_nothing_resident(manager)
    manager.close()


def test_a_cast_and_weights_that_keep_their_dtype() -> None:
    model = _deepseek_v3()
    manager, actor = managed(model)
    dtypes = {
        info.name: info.dtype for info in actor.weights_info(names="checkpoint", dtype="bfloat16")
    }
    assert dtypes["model.layers.1.mlp.experts.3.up_proj.weight"] is torch.bfloat16
    assert dtypes["model.layers.1.mlp.gate.e_score_correction_bias"] is torch.float32
    with manager.phase("weight_sync"):
        assert {
            n: v.dtype
            for bucket in actor.weights(names="checkpoint", dtype="bfloat16")
            for n, v in bucket
        } == dtypes
    manager.close()


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # that PEFT reads
def test_adapters_are_merged_into_packed_experts_before_they_are_taken_apart(
    tmp_path: Path,
) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(
        target_modules=["q_proj"],
        target_parameters=["mlp.experts.down_proj"],
        r=2,
        init_lora_weights=False,
    )
    model = peft.get_peft_model(_qwen3_moe(), config)
    manager, actor = managed(model)
    with manager.phase("weight_sync"):
        published = {
            n: v.clone() for bucket in actor.weights(names="checkpoint") for n, v in bucket
        }
    manager.close()
    wanted = _written(model.merge_and_unload(), tmp_path)
    assert published.keys() == wanted.keys()
    assert all(torch.allclose(value, wanted[name], atol=1e-6) for name, value in published.items())


def test_a_model_that_is_not_of_transformers_has_no_such_names() -> None:
    manager, actor = managed(torch.nn.Linear(2, 2))
    with pytest.raises(
        ValueError, match="models of transformers, not for Linear; publish names='module'"
    ):
        actor.weights_info(names="checkpoint")
    with pytest.raises(ValueError, match="names='hf' must be one of module, checkpoint"):
        actor.weights_info(names="hf")
    with pytest.raises(ValueError, match="have PEFT's names"):
        actor.weights_info(names="checkpoint", adapters="separate")
    manager.close()
