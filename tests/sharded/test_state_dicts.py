"""State dicts of sharded and wrapped modules: readable in every state, and following the handle for as long as they are held."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from placement import Manager
from placement.tensors.plain import align
from placement.testing import SimulatedDevice, assert_nothing_resident
from tests.sharded import state_dict_worker as worker
from tests.sharded.training import as_bytes, local_parts
from tests.support.ranks import Ranks


@pytest.mark.parametrize("kind", ["fsdp2", "tp", "tied", "lora"])
def test_a_held_state_dict_follows_a_sharded_handle(kind: str, two_ranks: Ranks) -> None:
    two_ranks.run(worker.held, kind)


@pytest.mark.parametrize("kind", ["fsdp2", "tp", "lora"])
def test_a_load_raises_the_counters_of_what_was_written(kind: str, two_ranks: Ranks) -> None:
    two_ranks.run(worker.versions, kind)


@pytest.mark.parametrize("kind", ["fsdp2", "tp"])
def test_what_is_handed_out_while_offloaded_can_be_gathered(kind: str, two_ranks: Ranks) -> None:
    two_ranks.run(worker.gathered, kind)


def test_a_forked_child_is_told_that_it_has_no_sharded_tensor(two_ranks: Ranks, tmp_path: Path) -> None:
    for told in two_ranks.run(worker.forked, str(tmp_path / "saved")):
        assert all("PlacementError" in each and "clone()" in each and each.endswith(" 0") for each in told), told


def test_what_hooks_compute_of_sharded_parameters(two_ranks: Ranks) -> None:
    two_ranks.run(worker.computed)


def test_an_optimizer_that_takes_over_what_it_had_shown(two_ranks: Ranks) -> None:
    two_ranks.run(worker.taken_over)


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_fsdp1_is_not_gathered_from_poison(use_orig_params: bool, two_ranks: Ranks, tmp_path: Path) -> None:
    """torch's FSDP1 itself."""
    for first, second, third in two_ranks.run(worker.fsdp1, use_orig_params, str(tmp_path)):
        for said in (first, second):
            assert "'actor' is CPU_OFFLOADED in phase 'idle' and cannot be asked for a state dict" in said
            assert "manager.phase('checkpoint')" in said
        assert "save it inside manager.phase('checkpoint')" in third
        assert "only=" in third
    assert not list(tmp_path.iterdir())


class Scaled(torch.Tensor):
    """A wrapper of two parts, of the shape of torchao's quantised tensors, that also says where it is."""

    data_: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: torch.Tensor, device: str | None = None) -> Scaled:
        made = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32, device=device or data.device)  # type: ignore[attr-defined]
        made.data_, made.scale = data, scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["data_", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], context: None, size: Any, stride: Any) -> Scaled:
        return Scaled(inner["data_"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Scaled(args[0].data_, args[0].scale)
        raise NotImplementedError(func)


def test_a_wrapper_says_where_its_parts_are() -> None:
    """pytorch#192441: outside and inside of a wrapper must change together. `.data =` changes the outside alone."""
    wrapper = Scaled(torch.ones(3, dtype=torch.int8), torch.ones(1), device="cuda:0")
    assert wrapper.device.type == "cuda"
    inside = wrapper.data_
    align(wrapper)
    assert wrapper.device == inside.device == torch.device("cpu")
    assert wrapper.data_ is inside


def test_a_quantised_module_is_dequantised_by_its_hooks() -> None:
    """As torchtune's hook for QLoRA: the state dict has the weights in full, computed from the parts."""
    quantization = pytest.importorskip("torchao.quantization")
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(32, 64))
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig(version=2))

    def dequantise(_: Any, found: dict[str, Any], *__: Any) -> None:
        found.update({name: value.dequantize() if hasattr(value, "dequantize") else value.clone() for name, value in found.items()})

    model._register_state_dict_hook(dequantise)
    wanted = _parts(copy.deepcopy(model.state_dict()))
    manager = Manager(device=SimulatedDevice(1 << 20, chunk_bytes=4096))
    handle = manager.register("ref", model, role="ref")
    assert _parts(handle.state_dict()) == wanted
    with manager.phase("log_prob"):
        assert _parts(handle.state_dict()) == wanted
    assert manager.audit().ok


@pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed:FutureWarning")
@pytest.mark.parametrize("phase", [None, "log_prob"])
def test_what_packages_save_of_an_offloaded_module(phase: str | None, tmp_path: Path) -> None:
    """transformers' `save_pretrained`, with tied weights, PEFT's, and its own state dict."""
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    safetensors = pytest.importorskip("safetensors.torch")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, vocab_size=32, tie_word_embeddings=True
    )
    base = transformers.LlamaForCausalLM(config)
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False))
    model.state_dict()
    wanted = _parts(copy.deepcopy(peft.get_peft_model_state_dict(model)))
    model.save_pretrained(tmp_path / "before")
    base.save_pretrained(tmp_path / "before" / "base")
    manager = Manager(device=SimulatedDevice(4 << 20, chunk_bytes=4096))
    manager.register("actor", model, role="actor")
    with manager.phase(phase) if phase is not None else nullcontext():
        assert _parts(peft.get_peft_model_state_dict(model)) == wanted
        model.save_pretrained(tmp_path / "after")
        base.save_pretrained(tmp_path / "after" / "base")
    for name in ("adapter_model.safetensors", "base/model.safetensors"):
        before, after = (_parts(safetensors.load_file(tmp_path / when / name)) for when in ("before", "after"))
        assert before == after
        assert before
    assert_nothing_resident(manager)


def _parts(values: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {f"{name}{path}": as_bytes(part) for name, value in values.items() for path, part in local_parts(value)}
