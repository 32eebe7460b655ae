"""Workers of verl as its trainers build them, on the CPU, with a tiny Qwen2: under placement, or
with verl's own offloading."""

from __future__ import annotations

import functools
import importlib
import os
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.distributed.fsdp import CPUOffloadPolicy

from placement import Manager
from placement.devices.base import Device

CAPACITY = 64 << 20
LENGTHS = (5, 7, 4, 6)
VOCABULARY = 64


@functools.cache
def import_verl() -> None:
    """verl with placement's plugin, on the CPU. The plugin is imported by name: the tests may run
    from a checkout that is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("verl")

        from tests.integrations.verl.cpu_platform import use_cpu

        use_cpu()
        importlib.import_module("placement.integrations.verl.plugin")
        assert "verl.workers.engine" not in sys.modules, "the engines would not be on the CPU"
        importlib.import_module("verl.workers.engine_workers")
        leave_out_what_needs_a_gpu()


def leave_out_what_needs_a_gpu() -> None:
    """verl asks for pinned memory under FSDP2's CPUOffloadPolicy, and for flash attention in value
    models.

    Where TRL is installed, verl 0.9.1 also looks there for a model with a value head, which TRL
    1.16 does not have any more.
    """
    from transformers import AutoModelForTokenClassification
    from verl.models.transformers import monkey_patch
    from verl.utils import model
    from verl.workers.engine.fsdp import transformer_impl, utils

    monkey_patch.is_trl_available = model.is_trl_available = lambda: False
    utils.get_device_name = lambda: "cpu"  # of meshes, for torch
    transformer_impl.CPUOffloadPolicy = lambda pin_memory: CPUOffloadPolicy(pin_memory=False)
    read = AutoModelForTokenClassification.from_pretrained
    AutoModelForTokenClassification.from_pretrained = lambda *where, **keywords: read(
        *where, **keywords | {"attn_implementation": "eager"}
    )


def write_model(folder: Path, *, width: int = 32, layers: int = 2) -> Path:
    """A model with random values, as files that transformers reads; of 20,000 parameters as it is
    by default."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(7)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=width * 3 // 2,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def use_simulated(device: Device | None = None, policy: str = "colocated") -> Manager:
    """A fresh manager for the engines of this process, on a simulated device: where no device is
    given, the one that they make."""
    from placement.integrations import verl as integration

    integration.close_manager()
    if device is not None:
        integration.use_manager(Manager(device=device))
        return integration.manager()
    settings = {"PLACEMENT_DEVICE": f"simulated:{CAPACITY}", "PLACEMENT_POLICY": policy}
    os.environ.update(settings)
    try:
        return integration.manager()
    finally:
        for name in settings:
            del os.environ[name]


def unpinned() -> Any:
    """FSDP1 pins what it offloads itself, which needs an accelerator."""
    return mock.patch.object(torch.Tensor, "pin_memory", lambda tensor, device=None: tensor)


def build(
    model: Path,
    *,
    placed: bool,
    strategy: str = "fsdp2",
    model_type: str = "language_model",
    offload: tuple[bool, bool] = (True, True),
    forward_only: bool = False,
    lora: dict[str, Any] | None = None,
    contents: tuple[str, ...] = ("model", "optimizer", "extra"),
    lr: float = 1e-2,
    **engine: Any,
) -> Any:
    """verl's `TrainingWorker`, initialised by `reset()`; for `placed` its engine is the one that
    placement registers.

    Args:
        offload: `param_offload` and `optimizer_offload` of the recipe.
    """
    import_verl()
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import (
        FSDPEngineConfig,
        FSDPOptimizerConfig,
        HFModelConfig,
        TrainingWorkerConfig,
    )
    from verl.workers.engine_workers import TrainingWorker

    os.environ["VERL_ENGINE_DEVICE"] = "cuda"  # the name under which verl registers its engines
    os.environ.pop("VERL_ENGINE_VENDOR", None)
    if placed:
        os.environ["VERL_ENGINE_VENDOR"] = "placement"
    torch.manual_seed(3)
    config = TrainingWorkerConfig(
        model_type=model_type,
        model_config=HFModelConfig(
            path=str(model),
            load_tokenizer=False,
            override_config={"attn_implementation": "eager"},
            use_remove_padding=False,
            enable_gradient_checkpointing=False,
            **(lora or {}),
        ),
        engine_config=FSDPEngineConfig(
            strategy=strategy,
            param_offload=offload[0],
            optimizer_offload=offload[1],
            forward_only=forward_only,
            use_dynamic_bsz=False,
            micro_batch_size_per_gpu=2,
            infer_micro_batch_size_per_gpu=2,
            use_torch_compile=False,
            mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
            **engine,
        ),
        optimizer_config=FSDPOptimizerConfig(lr=lr, total_training_steps=10),
        checkpoint_config=CheckpointConfig(
            save_contents=list(contents),
            load_contents=[each for each in contents if each != "hf_model"],
        ),
    )
    worker = TrainingWorker(config)
    worker.reset()
    worker.set_loss_fn(value_loss if model_type == "value_model" else language_loss)
    return worker


def language_loss(
    model_output: dict[str, Any], data: Any, dp_group: Any = None
) -> tuple[torch.Tensor, dict[str, Any]]:
    from verl.workers.utils.losses import sft_loss

    return sft_loss(None, model_output, data, dp_group)  # type: ignore[no-any-return, unused-ignore]


def value_loss(
    model_output: dict[str, Any], data: Any, dp_group: Any = None
) -> tuple[torch.Tensor, dict[str, Any]]:
    values = model_output["values"].values()
    return (values - 1.0).square().mean(), {}


def batch(seed: int) -> Any:
    """Four sequences of different lengths, as verl's trainer sends them to a worker."""
    from verl.utils import tensordict_utils as tu

    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(3, VOCABULARY, (length,), generator=generator) for length in LENGTHS]
    nested = functools.partial(torch.nested.as_nested_tensor, layout=torch.jagged)
    tensors = {
        "input_ids": nested(ids),
        "position_ids": nested([torch.arange(length) for length in LENGTHS]),
        "loss_mask": nested([torch.ones(length, dtype=torch.int64) for length in LENGTHS]),
    }
    options = {
        "global_token_num": list(LENGTHS),
        "temperature": 1.0,
        "pad_token_id": 0,
        "update_lr_scheduler": True,
    }
    return tu.get_tensordict(tensors, options)
