"""The parts of a forecast: link, layout, cycles, models, optimizers, text and chart, and the laws that hold for all."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import placement
from placement.cli.plan import comparison, table
from placement.core.snapshot import TransitionSeconds
from placement.core.states import PHASES
from placement.devices.memory import Copy
from placement.devices.select import select_device
from placement.forecasting import Layout, Link, Model, Rollout
from placement.forecasting.description import CYCLES, cycle_of
from placement.forecasting.device import SizesDevice
from placement.forecasting.job import OPTIMIZERS, state_of
from placement.forecasting.models import module_of, parts_of
from placement.testing import SimulatedDevice

MIB = 1 << 20


def mlp(width: int = 256) -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False))


def seconds(link: Link, to_device: int, to_host: int) -> float:
    device = SizesDevice(link)
    for direction, nbytes in (("to_device", to_device), ("to_host", to_host)):
        device.copy([Copy(0, 0, nbytes)], cast("Any", direction))
    device.sync()
    return device.seconds


def test_a_link_is_as_slow_as_its_slower_direction() -> None:
    link = Link(to_device_bytes_per_second=50, to_host_bytes_per_second=25, both_bytes_per_second=60)
    assert seconds(link, 100, 0) == 2
    assert seconds(link, 0, 100) == 4
    assert seconds(link, 0, 0) == 0
    assert seconds(Link.of(10.0), 100, 50) == 10
    # Both at once share 60 bytes a second as 40 and 20, until the shorter copy is through. Then the other one has the link alone.
    assert seconds(link, 100, 50) == pytest.approx(2.5)
    assert seconds(link, 100, 75) == pytest.approx(2.5 + 25 / 25)
    assert Link.of(link) is link


def test_copies_go_on_while_the_worker_computes() -> None:
    device = SizesDevice(Link.of(10.0))
    device.copy([Copy(0, 0, 100)], "to_device")
    device.work(4)
    device.sync()
    assert device.seconds == pytest.approx(10)
    device.work(1)
    assert device.seconds == pytest.approx(11)


def test_the_doctors_file_is_a_link(tmp_path: Path) -> None:
    from placement.cli.doctor import examine

    device = select_device("simulated:64MiB")
    found = examine(device, MIB)
    device.close()
    path = tmp_path / "doctor.json"
    path.write_text(found.model_dump_json())
    link = Link.of(path)
    assert link.to_host_bytes_per_second == found.link.to_host_bytes_per_second
    assert (link.free_bytes, link.chunk_bytes) == (found.free_bytes, found.chunk_bytes)
    assert found.transitions is not None
    assert link.transitions == found.transitions
    path.write_text(found.model_copy(update={"transitions": None}).model_dump_json())
    assert Link.of(path).transitions is None
    told = placement.forecast({"actor": Model(mlp())}, link=path)
    assert told.budget_bytes == int(found.free_bytes * 0.8)
    assert any("no budget was given" in note for note in told.notes)


RATES = ", ".join(f'"{name}_bytes_per_second": 1' for name in ("to_device", "to_host", "both"))


@pytest.mark.parametrize(
    "content",
    [
        *(None, "nothing", "{}", '{"link": {}}'),
        *(f'{{"link": {{{RATES}}}, "transitions": {transitions}}}' for transitions in ('"slow"', '{"moving": "slow"}')),
    ],
)
def test_what_is_no_link_says_how_to_make_one(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "doctor.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises((OSError, ValueError), match=r"(there is no file|has no link with rates).*placement doctor --json"):
        Link.of(path)


def test_rates_are_positive() -> None:
    with pytest.raises(ValueError, match=r"to_host_bytes_per_second\n.*greater than 0"):
        Link(to_device_bytes_per_second=1, to_host_bytes_per_second=0)


def test_what_transitions_take_beside_their_copies_is_in_the_stall() -> None:
    """Counted by hand: the reference comes; it leaves unchanged, and the actor comes; nothing moves; the actor leaves changed."""
    seconds = TransitionSeconds(alone=1.0, moving=5.0, loaded_byte=1e-7, offloaded_byte=2e-7, skipped_byte=3e-7)
    rates = {"to_device_bytes_per_second": 1e9, "to_host_bytes_per_second": 1e9}
    with torch.device("meta"):
        models = {name: nn.Linear(1024, 1024, bias=False) for name in ("actor", "ref")}
    handles = {"actor": Model(models["actor"], optimizer="sgd"), "ref": Model(models["ref"], readonly=True)}
    cycle, device = ["ref_log_prob", "train", "weight_sync"], SimulatedDevice(1 << 30, chunk_bytes=1 << 20)

    def stalls(link: Link) -> list[float]:
        told = placement.forecast(handles, cycle=cycle, device=device, link=link)
        return [each.stall_seconds or 0.0 for each in told.phases]

    measured = stalls(Link(transitions=seconds, **rates))
    more = [with_it - without for with_it, without in zip(measured, stalls(Link(**rates)), strict=True)]
    assert more == pytest.approx([5 + 0.1 * 4.194304, 5 + 0.4 * 4.194304, 1.0, 5 + 0.2 * 4.194304])


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"shards": 0}, "shards must be a whole number from 1 on"),
        ({"tensor_parallel": 1.5}, "tensor_parallel must be a whole number"),
        ({"shards": 12}, "12 ranks .* do not fill nodes of 8 GPUs"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(numbers: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Layout(**numbers)


def test_a_layout_divides_a_models_parameters_and_leaves_its_buffers() -> None:
    module = mlp(100)
    module.register_buffer("scale", torch.empty(50, device="meta"))
    names = {part.name: part.nbytes for part in parts_of(module, Layout(shards=8))}
    assert names == {"scale": 200, "0.weight": 50 * 100 * 4, "1.weight": 13 * 400 * 4}
    assert sum(part.nbytes for part in parts_of(module, dtype=torch.bfloat16)) == 200 + 2 * 2 * 100 * 400
    with pytest.raises(ValueError, match="has no tensor-parallel plan"):
        parts_of(module, Layout(tensor_parallel=2))
    module.tp_plan = {"0": "colwise", "1": "rowwise"}  # type: ignore[assignment]
    halves = {part.name: part.parameters[0].shape for part in parts_of(module, Layout(tensor_parallel=2)) if part.parameters}
    assert halves == {"0.weight": (200, 100), "1.weight": (100, 200)}
    with pytest.raises(ValueError, match=r"tensor_parallel 3 does not divide dimension 0 of '0.weight', of shape \(400, 100\)"):
        parts_of(module, Layout(tensor_parallel=3))
    module.tp_plan = {"0": "diagonal"}  # type: ignore[assignment]
    with pytest.raises(ValueError, match="the style 'diagonal'"):
        parts_of(module, Layout(tensor_parallel=2))


def test_tied_weights_count_once() -> None:
    module = mlp()
    module[1].weight = nn.Parameter(module[0].weight.detach())  # type: ignore[index,union-attr]
    assert sum(part.nbytes for part in parts_of(module)) == 4 * 256 * 1024


def config(**values: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    return {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": 96, **sizes, **values}


def test_a_configuration_is_divided_as_its_own_plan_says(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(config()))
    module = module_of(tmp_path, torch.bfloat16, "lm")
    whole = {part.name: part.nbytes for part in parts_of(module)}
    halves = {part.name: part.nbytes for part in parts_of(module, Layout(tensor_parallel=2))}
    assert halves["model.layers.0.mlp.down_proj.weight"] * 2 == whole["model.layers.0.mlp.down_proj.weight"] == 2 * 64 * 128
    assert halves["model.norm.weight"] == whole["model.norm.weight"]
    with pytest.raises(ValueError, match="tensor_parallel 4 does not divide the model's num_key_value_heads, 2"):
        parts_of(module, Layout(tensor_parallel=4))
    value = module_of(tmp_path, torch.bfloat16, "value")
    assert sum(part.nbytes for part in parts_of(value)) < sum(whole.values())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no model configuration"),
        ("{", "is not JSON"),
        ("[]", "names no model_type"),
        (json.dumps({"architectures": ["Qwen2ForCausalLM"]}), "names no model_type"),
        (json.dumps(config(model_type="no-such-model")), "cannot build a model"),
        (json.dumps(config(hidden_size=-64)), "cannot build a model .*: RuntimeError: .*negative dimension -64"),
        (json.dumps(config(hidden_size="wide")), "cannot build a model .*'hidden_size'"),
        (json.dumps(config(num_attention_heads=0)), "cannot build a model .*: ZeroDivisionError"),
        (json.dumps(config(hidden_act="no-such-function")), "cannot build a model .*: KeyError: 'no-such-function'"),
        (json.dumps(config(model_type="own", auto_map={"AutoConfig": "own.Config"})), "whose code comes with its checkpoint"),
    ],
)
def test_what_is_no_configuration_is_said(content: str | None, message: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises((OSError, ValueError), match=message):
        placement.forecast({"actor": Model(tmp_path / "config.json")})


def test_a_configuration_that_transformers_saves_before_there_is_a_model_is_enough(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")
    given = transformers.Qwen2Config(**{name: config()[name] for name in names})
    given.save_pretrained(tmp_path)
    assert "architectures" not in json.loads((tmp_path / "config.json").read_text())
    made = transformers.AutoModelForCausalLM.from_config(given, dtype=torch.float32)
    assert [part.nbytes for part in parts_of(module_of(tmp_path, None, "lm"))] == [part.nbytes for part in parts_of(made)]
    (note,) = placement.forecast({"actor": Model(tmp_path)}).notes
    assert note.endswith("has no dtype; the weights of models that keep its dtype are counted in float32")
    assert not placement.forecast({"actor": Model(tmp_path, dtype="bf16")}).notes


def test_weights_of_a_quantized_configuration_are_counted_whole_and_the_forecast_says_so(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    found = []
    for more in ({}, {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}}):
        (tmp_path / "config.json").write_text(json.dumps(config(dtype="bfloat16", **more)))
        found.append(placement.forecast({name: Model(tmp_path, readonly=True) for name in ("ref", "reward")}))
    assert found[0].host_bytes == found[1].host_bytes
    assert not found[0].notes
    assert len(found[1].notes) == 1
    assert "quantization_config (gptq)" in found[1].notes[0]


def test_the_models_of_a_head(tmp_path: Path) -> None:
    """Not every architecture has every class: which one is taken, and what is said where there is none."""
    pytest.importorskip("transformers")
    sizes = {"d_model": 64, "d_ff": 128, "d_kv": 16, "num_layers": 1, "num_heads": 4, "vocab_size": 96}
    kinds = {
        "t5": {"model_type": "t5", **sizes},
        "gemma": {**config(head_dim=16), "model_type": "gemma3_text"},
        "mamba": {"model_type": "mamba", "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 1},
    }
    for name, content in kinds.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    assert type(module_of(tmp_path / "t5.json", None, "lm")).__name__ == "T5ForConditionalGeneration"
    assert type(module_of(tmp_path / "gemma.json", None, "value")).__name__ == "Gemma3TextForSequenceClassification"
    with pytest.raises(ValueError, match=r"no class with one number a token .* for model_type 'mamba'") as caught:
        module_of(tmp_path / "mamba.json", None, "value")
    assert len(str(caught.value)) < 300  # transformers' own message names every architecture that it has


def test_a_plan_that_leaves_most_weights_whole_is_noted() -> None:
    module = mlp()
    module.tp_plan = {"0": "colwise"}  # type: ignore[assignment]
    assert not placement.forecast({"actor": Model(module)}, layout=Layout(tensor_parallel=2)).notes
    module.append(nn.Linear(256, 1024, bias=False, device="meta"))
    (note,) = placement.forecast({"actor": Model(module)}, layout=Layout(tensor_parallel=2)).notes
    assert note.startswith("tensor parallelism divides 33% of the weights of Sequential, ")
    assert not placement.forecast({"actor": Model(module)}).notes


def test_without_transformers_it_is_said_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config()))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install transformers"):
        module_of(tmp_path, None, "lm")


def test_cycles() -> None:
    assert [phase.name for phase in cycle_of("ppo")] == list(CYCLES["ppo"])
    last, idle, only = cycle_of(["train", "idle", "log_prob[actor + ref]", "idle"])
    assert (last.only, idle.name, only.name, only.only) == (None, "idle", "log_prob", ("actor", "ref"))
    assert cycle_of(["distill"], {"distill": ("actor",)})[0].name == "distill"
    for wrong, message in (
        ("grop", "unknown phase 'grop', did you mean 'grpo'"),
        (["trian"], "did you mean 'train'"),
        (["train["], "is no phase"),
        (["idle"], "has no phase"),
    ):
        with pytest.raises(ValueError, match=message):
            cycle_of(cast("Any", wrong))


def test_the_state_of_optimizers() -> None:
    (parameter, *_) = [each for part in parts_of(mlp(), dtype=torch.bfloat16) for each in part.parameters]

    def sizes(*optimizer: Any) -> list[int]:
        return [each.nbytes // parameter.numel() for each in state_of(*optimizer)(parameter).values() if each.dim()]

    assert {name: sizes(name) for name in OPTIMIZERS} == {
        "adamw": [2, 2],
        "adamw-fp32": [4, 4],
        "adamw-master": [4, 4, 4],
        "sgd": [],
        "sgd-momentum": [2],
    }
    assert sizes("adamw", {"fused": True}) == [2, 2]
    assert sizes(torch.optim.Adam, {"amsgrad": True}) == sizes("torch.optim:Adam", {"amsgrad": True}) == [2, 2, 2]
    for wrong, message in (
        ("adamv", "did you mean 'adamw'"),
        ("torch.optim:Nothing", "cannot be imported"),
        ("torch:manual_seed", "not a class"),
    ):
        with pytest.raises(ValueError, match=message):
            state_of(wrong)
    with pytest.raises(ValueError, match="cannot be made with options"):
        state_of("adamw", {"speed": 3})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Model(mlp(), readonly=True, optimizer="sgd"), "a readonly model has no optimizer"),
        (lambda: Model(mlp(), replicated=True), "replicated models that are not trained"),
        (lambda: Model(mlp(), role="judge"), "role 'judge' is none of"),
        (lambda: Model(mlp(), gradients=cast("Any", "lost")), "gradients must be one of"),
        (lambda: placement.forecast({}), "there is no handle"),
        (lambda: placement.forecast({"actor": Model(mlp(), dtype="bf17")}), "'bf17' is no dtype"),
        (lambda: placement.forecast({"actor": Model(mlp())}, work_seconds={"eval": 1}), "'eval', which the cycle does not have"),
        (lambda: placement.forecast({"actor": Model(mlp())}, work_seconds={"train": -1}), "must be 0 or more"),
        (lambda: placement.forecast({"actor": Model(mlp())}, steps={"eval": 1}), "steps of 'eval', which the cycle does not have"),
        (lambda: placement.forecast({"actor": Model(mlp())}, budget_bytes="lots"), "not a number of bytes"),
        (lambda: placement.forecast({"actor": Model(nn.Identity())}), "has no tensors"),
        (lambda: placement.forecast({"actor": Model(mlp())}, budget_bytes=-1), "budget_bytes must be 0 or more, not -1"),
        (lambda: placement.forecast({"actor": Model(mlp())}, worker_role="boss"), "worker_role must be one of trainer"),
        (lambda: placement.forecast({"actor": Model(mlp())}, phases={"distill": ("boss",)}), "unknown role 'boss'"),
        (lambda: placement.forecast({"actor": Model(mlp(), dtype=cast("Any", 3))}), "3 is no dtype"),
        (lambda: placement.forecast({"a": Model(mlp(), optimizer="sgd"), "a.optimizer": Model(mlp())}), "becomes the handle 'a.optimizer'"),
        (lambda: Model(mlp(), head=cast("Any", "tail")), "head must be one of lm, value"),
        (lambda: Model(mlp(), optimizer=cast("Any", torch.optim.SGD([torch.zeros(1)]))), "an object of SGD; give its class"),
        (lambda: Rollout(1, 1, role="boss"), "role 'boss' is none of"),
    ],
)
def test_what_cannot_be_forecast_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_module_instead_of_a_model_is_refused() -> None:
    with pytest.raises(TypeError, match=r"'actor' is described by an object of Sequential; give a Model"):
        placement.forecast({"actor": cast("Any", mlp())})


def test_only_is_for_handles_that_there_are() -> None:
    with pytest.raises(placement.PhaseError, match="did you mean 'actor'"):
        placement.forecast({"actor": Model(mlp(), optimizer="sgd")}, cycle=["train[actro]"])
    told = placement.forecast(
        {"actor": Model(mlp(), optimizer="adamw"), "critic": Model(mlp(), optimizer="adamw")}, cycle=["train[critic]"]
    )
    assert [name for name, nbytes in told.phase("train").handle_bytes.items() if nbytes] == ["critic", "critic.optimizer"]


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, lambda: torch.device("meta")])
def test_modes_of_the_caller_change_nothing(mode: Any) -> None:
    expected = placement.forecast({"actor": Model(mlp(), optimizer="adamw")}, link=1e9)
    with mode():
        assert placement.forecast({"actor": Model(mlp(), optimizer="adamw")}, link=1e9) == expected


def test_a_cuda_device_counts_in_its_own_chunks() -> None:
    told = placement.forecast({"actor": Model(mlp(1000))})
    assert told.handles[0].num_bytes == 2 * 8 * MIB * 2  # 32,000,000 bytes, in multiples of 2 MiB
    assert told.budget_bytes is None
    assert told.stall_seconds is None
    assert told.fits


def test_a_replicated_model_is_loaded_by_all_ranks_of_a_node(tmp_path: Path) -> None:
    layout, sizing = Layout(shards=8), SimulatedDevice(1 << 30)
    ways = {"whole": Model(mlp(), readonly=True, sharded=False), "replicated": Model(mlp(), readonly=True, replicated=True)}
    told = {name: placement.forecast({"ref": model}, layout=layout, cycle=["log_prob"], device=sizing) for name, model in ways.items()}
    assert told["whole"].peak_bytes == told["replicated"].peak_bytes
    assert told["whole"].loaded_bytes == 8 * told["replicated"].loaded_bytes
    assert told["whole"].host_bytes == 8 * told["replicated"].host_bytes
    assert told["whole"].node_host_bytes == 8 * told["replicated"].node_host_bytes


def test_an_engine_that_discards_its_weights_copies_nothing() -> None:
    for keeps_weights, copied in ((True, MIB), (False, 0)):
        told = placement.forecast({"rollout": Rollout(MIB, "3MiB", keeps_weights)}, cycle=["rollout"])
        assert told.phase("rollout").device_bytes == 4 * MIB
        assert (told.loaded_bytes, told.offloaded_bytes) == (copied, copied)


def test_an_engines_mirror_is_host_memory_of_its_node(tmp_path: Path) -> None:
    actor, layout = Model(mlp()), Layout(data_parallel=4)
    alone = placement.forecast({"actor": actor}, layout=layout, cycle=["rollout"])
    for keeps_weights, mirror in ((True, MIB), (False, 0)):
        told = placement.forecast({"actor": actor, "rollout": Rollout(MIB, "3MiB", keeps_weights)}, layout=layout, cycle=["rollout"])
        assert told.handles[1].mirror_bytes == told.handles[1].host_bytes == mirror
        assert (told.host_bytes, told.node_host_bytes) == (alone.host_bytes + mirror, alone.node_host_bytes + 4 * mirror)
        assert told.node_mirror_bytes == 4 * mirror
    limit = alone.host_bytes + MIB // 2  # the mirror stays, so the actor's host copy leaves
    kept, discarded = (
        placement.forecast({"actor": actor, "rollout": Rollout(MIB, MIB, keeps)}, cycle=["rollout"], host_limit_bytes=limit)
        for keeps in (True, False)
    )
    assert (kept.disk_bytes, discarded.disk_bytes) == (alone.host_bytes, 0)
    refused = placement.forecast({"rollout": Rollout(MIB, MIB)}, cycle=["rollout"], host_limit_bytes=MIB - 1)
    assert "'rollout' needs" in refused.refused_registrations[0]


@pytest.mark.parametrize(
    ("cycle", "keeps", "told"),
    [("weight_sync,rollout,train", True, 1), ("rollout,train,weight_sync", True, 0), ("weight_sync,rollout,train", False, 0)],
)
def test_a_mirror_that_every_sync_overwrites_is_noted(cycle: str, keeps: bool, told: int) -> None:
    handles = {"actor": Model(mlp(), optimizer="sgd"), "rollout": Rollout(MIB, MIB, keeps)}
    found = placement.forecast(handles, cycle=cycle.split(","))
    assert sum("weight_sync fills them anew" in note for note in found.notes) == told


def test_what_a_node_has_too_little_of_is_told() -> None:
    link = Link(
        to_device_bytes_per_second=1e9,
        to_host_bytes_per_second=1e9,
        host_available_bytes=3 * MIB,
        disk_free_bytes=MIB,
        pageable_reason="no",
    )
    layout, handles = Layout(data_parallel=4), {"actor": Model(mlp()), "rollout": Rollout(MIB, MIB)}
    told = placement.forecast(handles, layout=layout, cycle=["log_prob"], link=link)
    assert told.over_host_bytes == told.node_host_bytes - 3 * MIB > 0 == told.over_disk_bytes
    assert "pageable (no), 4 MiB engines' mirrors, 0 on disk; does not fit: " in table(told)
    roomy = placement.forecast(handles, layout=layout, cycle=["log_prob"], link=1e9)
    assert "page-locked, 4 MiB engines' mirrors, 0 on disk\n" in table(roomy)
    limited = placement.forecast(handles, layout=layout, cycle=["log_prob"], link=link, host_limit_bytes=MIB + MIB // 2)
    assert limited.over_disk_bytes == max(0, limited.node_disk_bytes - MIB) > 0


# --- laws

SIZES = st.lists(st.integers(1, 40), min_size=2, max_size=5)


def told(sizes: Sequence[int], policy: str, budget: int, cycle: Sequence[str]) -> placement.Forecast:
    """An actor with its optimizer, a readonly ref, and what more there are sizes for, in MiB."""
    handles = {}
    for name, size in zip(("actor", "ref", "critic", "reward"), sizes, strict=False):
        with torch.device("meta"):
            module = nn.Linear(1 << 10, size << 8, bias=False)
        handles[name] = Model(module, optimizer="sgd-momentum" if name == "actor" else None, readonly=name in ("ref", "reward"))
    device = SizesDevice(chunk_bytes=8 * MIB, granularity=MIB)
    return placement.forecast(handles, policy=policy, cycle=cycle, budget_bytes=budget * MIB, link=1e9, device=device)


PHASE_NAMES = st.lists(st.sampled_from([name for name in PHASES if name != "idle"]), min_size=1, max_size=6)


@given(sizes=SIZES, policy=st.sampled_from(["colocated", "resident"]), budget=st.integers(1, 200), cycle=PHASE_NAMES)
@settings(max_examples=40, deadline=None)
def test_sums_agree(sizes: Sequence[int], policy: str, budget: int, cycle: Sequence[str]) -> None:
    found = told(sizes, policy, budget, cycle)
    assert found.fits is (found.over_bytes == 0)
    held = 0
    for index, phase in enumerate((*found.phases, *found.phases)):
        assert phase.device_bytes == sum(phase.handle_bytes.values()) <= budget * MIB
        assert phase.wanted_bytes - phase.over_bytes in (phase.wanted_bytes, budget * MIB)
        if index:  # what was there, and came, and did not leave
            assert phase.device_bytes == held + phase.loaded_bytes - phase.offloaded_bytes - phase.skipped_bytes
        held = phase.device_bytes
    assert found.loaded_bytes == found.offloaded_bytes + found.skipped_bytes
    assert found.peak_bytes >= max(phase.device_bytes for phase in found.phases)
    assert found.stall_seconds == pytest.approx(sum(phase.stall_seconds or 0 for phase in found.phases))


@given(sizes=SIZES, budget=st.integers(1, 200), cycle=st.sampled_from(list(CYCLES.values())))
@settings(max_examples=20, deadline=None)
def test_resident_stalls_less_than_colocated_and_not_at_all_where_everything_fits(
    sizes: Sequence[int], budget: int, cycle: Sequence[str]
) -> None:
    resident, colocated = told(sizes, "resident", budget, cycle), told(sizes, "colocated", budget, cycle)
    if colocated.fits:
        assert (resident.stall_seconds or 0) <= (colocated.stall_seconds or 0)
    if sum(sizes) + sizes[0] <= budget:
        assert resident.stall_seconds == 0


@given(sizes=SIZES, budget=st.integers(1, 200))
@settings(max_examples=8, deadline=None)
def test_the_text_shows_every_phase(sizes: Sequence[int], budget: int) -> None:
    forecasts = [told(sizes, policy, budget, CYCLES["grpo"]) for policy in ("colocated", "resident")]
    for text in (table(forecasts[0]), comparison(forecasts, ["colocated", "resident"])):
        assert all(phase in text for phase in (*CYCLES["grpo"], "idle"))
    assert placement.Forecast.model_validate_json(forecasts[0].model_dump_json()) == forecasts[0]
