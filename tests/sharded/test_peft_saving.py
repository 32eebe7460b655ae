"""PEFT saves and makes adapters while the model is offloaded: as without placement, or refused before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from placement import Manager, NotResidentError
from placement.testing import SimulatedDevice, assert_nothing_resident
from tests.sharded.training import bytes_of
from tests.support.frameworks import needs
from tests.support.worker import make_manager

peft = needs("peft")
transformers = needs("transformers")
load_file = needs("safetensors.torch").load_file

pytestmark = pytest.mark.filterwarnings("ignore")
"""transformers and PEFT warn of each other."""

_TINY = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
_Q = {"target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
_PROMPT = {"num_virtual_tokens": 4, "task_type": "CAUSAL_LM"}
_READ_IN_STATE_DICT = {
    "lora": lambda: peft.LoraConfig(r=4, bias="all", modules_to_save=["lm_head"], **_Q),
    "dora with tokens": lambda: peft.LoraConfig(r=4, use_dora=True, trainable_token_indices=[1, 2], **_Q),
    "vera": lambda: peft.VeraConfig(r=4, **_Q),
    "vblora": lambda: peft.VBLoRAConfig(r=2, vector_length=4, num_vectors=16, save_only_topk_weights=True, **_Q),
    "randlora": lambda: peft.RandLoraConfig(r=4, **_Q),
    "fourier": lambda: peft.FourierFTConfig(n_frequency=8, **_Q),
    "tokens": lambda: peft.TrainableTokensConfig(token_indices=[1, 2], task_type="CAUSAL_LM"),
}
_READ_PAST_IT = {
    "shira": lambda: peft.ShiraConfig(r=4, **_Q),
    "multitask prompt": lambda: peft.MultitaskPromptTuningConfig(num_tasks=2, **_PROMPT),
    "prompt": lambda: peft.PromptTuningConfig(**_PROMPT),
    "prompt for inference": lambda: peft.PromptTuningConfig(inference_mode=True, **_PROMPT),
    "prefix": lambda: peft.PrefixTuningConfig(**_PROMPT),
}


def _adapted(config: Any) -> Any:
    torch.manual_seed(0)
    return peft.get_peft_model(transformers.LlamaForCausalLM(transformers.LlamaConfig(**_TINY)), config)


def _registered(model: Any) -> Manager:
    manager = make_manager(device=SimulatedDevice(1 << 26))
    manager.register("actor", model, role="actor")
    return manager


def _saved(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    model.save_pretrained(folder)
    return dict(load_file(folder / "adapter_model.safetensors"))


@pytest.mark.parametrize("config", [pytest.param(each, id=name) for name, each in _READ_IN_STATE_DICT.items()])
def test_an_adapter_is_saved_while_offloaded(config: Callable[[], Any], tmp_path: Path) -> None:
    model = _adapted(config())
    true, true_state = _saved(model, tmp_path / "true"), {k: v.clone() for k, v in peft.get_peft_model_state_dict(model).items()}
    _registered(model)
    assert bytes_of(_saved(model, tmp_path / "found")) == bytes_of(true)
    assert bytes_of(peft.get_peft_model_state_dict(model)) == bytes_of(true_state)


@pytest.mark.parametrize("config", [pytest.param(each, id=name) for name, each in _READ_PAST_IT.items()])
def test_what_peft_reads_past_the_state_dict_is_saved_in_a_phase(config: Callable[[], Any], tmp_path: Path) -> None:
    model = _adapted(config())
    true, values = _saved(model, tmp_path / "true"), {name: value.clone() for name, value in model.state_dict().items()}
    manager = _registered(model)
    for folder in ({"save_directory": tmp_path / "refused"}, {"save_directory": tmp_path / "refused", "safe_serialization": False}):
        with pytest.raises(NotResidentError, match=r"'actor' .* cannot be saved by PEFT, .*phase\('log_prob'\)"):
            model.save_pretrained(**folder)
    assert not (tmp_path / "refused").exists()
    with pytest.raises(NotResidentError, match="cannot be saved by PEFT"):
        peft.get_peft_model_state_dict(model)
    assert bytes_of(manager.handles["actor"].state_dict()) == bytes_of(values)
    with manager.phase("log_prob"):
        assert bytes_of(_saved(model, tmp_path / "found")) == bytes_of(true)
    assert_nothing_resident(manager)


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_2", "mica", True, "gaussian"])
def test_an_adapter_made_by_a_decomposition_is_refused_before_anything_changed(init: str | bool) -> None:
    model = _adapted(peft.LoraConfig(r=4, **_Q))
    manager = _registered(model)
    names = list(model.state_dict())
    if init in (True, "gaussian"):
        model.add_adapter("more", peft.LoraConfig(r=4, init_lora_weights=init, **_Q))
    else:
        with pytest.raises(NotResidentError, match=r"cannot be given an adapter that is computed from its weights: .*'log_prob'"):
            model.add_adapter("more", peft.LoraConfig(r=4, init_lora_weights=init, **_Q))
        assert list(model.state_dict()) == names
        with manager.phase("log_prob"):
            model.add_adapter("more", peft.LoraConfig(r=4, init_lora_weights=init, **_Q))
    with manager.phase("log_prob"):
        assert all(value.isfinite().all() for value in model.state_dict().values())
    assert len(model.state_dict()) > len(names)


def test_a_close_takes_the_guards_off() -> None:
    model = _adapted(peft.ShiraConfig(r=4, **_Q))
    _registered(model).close()
    assert not any({"save_pretrained", "inject_adapter", "merge"} & set(vars(part)) for part in model.modules())
    assert not any(part._state_dict_pre_hooks for part in model.modules())
