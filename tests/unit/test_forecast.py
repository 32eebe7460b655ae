"""The parts of a forecast: link, layout, cycles, models, optimizers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

import placement
from placement.cli.plan import table
from placement.core.snapshot import TransitionSeconds
from placement.devices.memory import Copy
from placement.devices.select import select_device
from placement.forecasting import Layout, Link, Model, Rollout
from placement.forecasting.description import CYCLES, cycle_of
from placement.forecasting.device import SizesDevice
from placement.forecasting.job import OPTIMIZERS, module_of, parts_of, state_of
from placement.testing import SimulatedDevice

MIB = 1 << 20


def mlp(width: int = 256) -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(
            nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        )


def seconds(link: Link, to_device: int, to_host: int) -> float:
    device = SizesDevice(link)
    for direction, nbytes in (("to_device", to_device), ("to_host", to_host)):
        device.copy([Copy(0, 0, nbytes)], cast("Any", direction))
    device.sync()
    return device.seconds


def test_a_link_is_as_slow_as_its_slower_direction() -> None:
    with pytest.raises(ValueError, match=r"to_host_bytes_per_second\n.*greater than 0"):
        Link(to_device_bytes_per_second=1, to_host_bytes_per_second=0)
    link = Link(
        to_device_bytes_per_second=50, to_host_bytes_per_second=25, both_bytes_per_second=60
    )
    assert seconds(link, 100, 0) == 2
    assert seconds(link, 0, 100) == 4
    assert seconds(link, 0, 0) == 0
    assert seconds(Link.of(10.0), 100, 50) == 10
    # Both at once share 60 bytes a second as 40 and 20, until the shorter copy is through. Then the
    # other one has the link alone.
    assert seconds(link, 100, 50) == pytest.approx(2.5)
    assert seconds(link, 100, 75) == pytest.approx(2.5 + 25 / 25)
    assert Link.of(link) is link


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
        *(None, "nothing", '{"link": {}}'),
        f'{{"link": {{{RATES}}}, "transitions": {{"moving": "slow"}}}}',
    ],
)
def test_what_is_no_link_says_how_to_make_one(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "doctor.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(
        (OSError, ValueError),
        match=r"(there is no file|has no link with rates).*placement doctor --json",
    ):
        Link.of(path)


def test_what_transitions_take_beside_their_copies_is_in_the_stall() -> None:
    """Counted by hand: the reference comes; it leaves unchanged, and the actor comes; nothing
    moves; the actor leaves changed."""
    seconds = TransitionSeconds(
        alone=1.0, moving=5.0, loaded_byte=1e-7, offloaded_byte=2e-7, skipped_byte=3e-7
    )
    rates = {"to_device_bytes_per_second": 1e9, "to_host_bytes_per_second": 1e9}
    with torch.device("meta"):
        models = {name: nn.Linear(1024, 1024, bias=False) for name in ("actor", "ref")}
    handles = {
        "actor": Model(models["actor"], optimizer="sgd"),
        "ref": Model(models["ref"], readonly=True),
    }
    cycle, device = (
        ["ref_log_prob", "train", "weight_sync"],
        SimulatedDevice(1 << 30, chunk_bytes=1 << 20),
    )

    def stalls(link: Link) -> list[float]:
        told = placement.forecast(handles, cycle=cycle, device=device, link=link)
        return [each.stall_seconds or 0.0 for each in told.phases]

    measured = stalls(Link(transitions=seconds, **rates))
    more = [
        with_it - without for with_it, without in zip(measured, stalls(Link(**rates)), strict=True)
    ]
    assert more == pytest.approx([5 + 0.1 * 4.194304, 5 + 0.4 * 4.194304, 1.0, 5 + 0.2 * 4.194304])


def test_a_layout_divides_a_models_parameters_and_leaves_its_buffers() -> None:
    with pytest.raises(ValueError, match=r"12 ranks .* do not fill nodes of 8 GPUs"):
        Layout(shards=12)
    module = mlp(100)
    module.register_buffer("scale", torch.empty(50, device="meta"))
    assert [part.nbytes for part in parts_of(module, Layout(shards=8))] == [
        200,
        50 * 100 * 4,
        13 * 400 * 4,
    ]
    assert (
        sum(part.nbytes for part in parts_of(module, dtype=torch.bfloat16))
        == 200 + 2 * 2 * 100 * 400
    )
    with pytest.raises(ValueError, match="has no tensor-parallel plan"):
        parts_of(module, Layout(tensor_parallel=2))
    module.tp_plan = {"0": "colwise", "1": "rowwise"}  # type: ignore[assignment]
    halves = [
        part.parameters[0].shape
        for part in parts_of(module, Layout(tensor_parallel=2))
        if part.parameters
    ]
    assert halves == [(200, 100), (100, 200)]
    with pytest.raises(
        ValueError,
        match=r"tensor_parallel 3 does not divide "
        r"dimension "
        r"0 "
        r"of "
        r"'0.weight', of shape \(400, 100\)",
    ):
        parts_of(module, Layout(tensor_parallel=3))
    module.tp_plan = {"0": "diagonal"}  # type: ignore[assignment]
    with pytest.raises(ValueError, match="the style 'diagonal'"):
        parts_of(module, Layout(tensor_parallel=2))


def config(**values: Any) -> dict[str, Any]:
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "vocab_size": 96,
        **sizes,
        **values,
    }


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no model configuration"),
        ("{", "is not JSON"),
        ("[]", "names no model_type"),
        (json.dumps(config(model_type="no-such-model")), "cannot build a model"),
        (
            json.dumps(config(hidden_size=-64)),
            ("cannot build a model .*: RuntimeError: .*negative dimension -64"),
        ),
        (
            json.dumps(config(hidden_act="no-such-function")),
            ("cannot build a model .*: KeyError: 'no-such-function'"),
        ),
        (
            json.dumps(config(model_type="own", auto_map={"AutoConfig": "own.Config"})),
            ("whose code comes with its checkpoint"),
        ),
    ],
)
def test_what_is_no_configuration_is_said(
    content: str | None, message: str, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises((OSError, ValueError), match=message):
        placement.forecast({"actor": Model(tmp_path / "config.json")})


def test_a_configuration_that_transformers_saves_before_there_is_a_model_is_enough(
    tmp_path: Path,
) -> None:
    transformers = pytest.importorskip("transformers")
    names = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
    )
    given = transformers.Qwen2Config(**{name: config()[name] for name in names})
    given.save_pretrained(tmp_path)
    assert "architectures" not in json.loads((tmp_path / "config.json").read_text())
    made = transformers.AutoModelForCausalLM.from_config(given, dtype=torch.float32)
    assert [part.nbytes for part in parts_of(module_of(tmp_path, None, "lm"))] == [
        part.nbytes for part in parts_of(made)
    ]
    (note,) = placement.forecast({"actor": Model(tmp_path)}).notes
    assert note.endswith(
        "has no dtype; the weights of models that keep its dtype are counted in float32"
    )
    assert not placement.forecast({"actor": Model(tmp_path, dtype="bf16")}).notes


def test_weights_of_a_quantized_configuration_are_counted_whole_and_the_forecast_says_so(
    tmp_path: Path,
) -> None:
    pytest.importorskip("transformers")
    found = []
    for more in (
        {},
        {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}},
    ):
        (tmp_path / "config.json").write_text(json.dumps(config(dtype="bfloat16", **more)))
        found.append(
            placement.forecast({name: Model(tmp_path, readonly=True) for name in ("ref", "reward")})
        )
    assert found[0].host_bytes == found[1].host_bytes
    assert not found[0].notes
    (note,) = found[1].notes
    assert "quantization_config (gptq)" in note


def test_the_models_of_a_head(tmp_path: Path) -> None:
    """Not every architecture has every class: which one is taken, and what is said where there is
    none."""
    pytest.importorskip("transformers")
    kinds = {
        "gemma": {**config(head_dim=16), "model_type": "gemma3_text"},
        "mamba": {
            "model_type": "mamba",
            "vocab_size": 96,
            "hidden_size": 64,
            "num_hidden_layers": 1,
        },
    }
    for name, content in kinds.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    assert (
        type(module_of(tmp_path / "gemma.json", None, "value")).__name__
        == "Gemma3TextForSequenceClassification"
    )
    with pytest.raises(
        ValueError,
        match=r"no class with one number a token .* for model_type 'mamba'",
    ) as caught:
        module_of(tmp_path / "mamba.json", None, "value")
    # transformers' own message names every architecture that it has
    assert len(str(caught.value)) < 300


def test_a_plan_that_leaves_most_weights_whole_is_noted() -> None:
    module = mlp()
    module.tp_plan = {"0": "colwise"}  # type: ignore[assignment]
    assert not placement.forecast({"actor": Model(module)}, layout=Layout(tensor_parallel=2)).notes
    module.append(nn.Linear(256, 1024, bias=False, device="meta"))
    (note,) = placement.forecast({"actor": Model(module)}, layout=Layout(tensor_parallel=2)).notes
    assert note.startswith("tensor parallelism divides 33% of the weights of Sequential, ")
    assert not placement.forecast({"actor": Model(module)}).notes


def test_without_transformers_it_is_said_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config()))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install transformers"):
        module_of(tmp_path, None, "lm")


def test_cycles() -> None:
    assert [phase.name for phase in cycle_of("ppo")] == list(CYCLES["ppo"])
    last, idle, only = cycle_of(["train", "idle", "log_prob[actor + ref]", "idle"])
    assert (last.only, idle.name, only.name, only.only) == (
        None,
        "idle",
        "log_prob",
        ("actor", "ref"),
    )
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
    (parameter, *_) = [
        each for part in parts_of(mlp(), dtype=torch.bfloat16) for each in part.parameters
    ]

    def sizes(*optimizer: Any) -> list[int]:
        return [
            each.nbytes // parameter.numel()
            for each in state_of(*optimizer)(parameter).values()
            if each.dim()
        ]

    assert {name: sizes(name) for name in OPTIMIZERS} == {
        "adamw": [2, 2],
        "adamw-fp32": [4, 4],
        "adamw-master": [4, 4, 4],
        "sgd": [],
        "sgd-momentum": [2],
    }
    assert sizes("adamw", {"fused": True}) == [2, 2]
    assert (
        sizes(torch.optim.Adam, {"amsgrad": True})
        == sizes("torch.optim:Adam", {"amsgrad": True})
        == [2, 2, 2]
    )
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
        (lambda: Model(mlp(), role="judge"), "role must be one of actor, .*, not 'judge'"),
        (lambda: Model(mlp(), gradients=cast("Any", "lost")), "gradients must be one of"),
        (lambda: placement.forecast({}), "there is no handle"),
        (lambda: placement.forecast({"actor": Model(mlp(), dtype="bf17")}), "'bf17' is no dtype"),
        (
            lambda: placement.forecast({"actor": Model(mlp())}, work_seconds={"eval": 1}),
            ("'eval', which the cycle does not have"),
        ),
        (
            lambda: placement.forecast({"actor": Model(mlp())}, budget_bytes="lots"),
            "not a number of bytes",
        ),
        (lambda: placement.forecast({"actor": Model(nn.Identity())}), "has no tensors"),
        (
            lambda: placement.forecast({"actor": Model(mlp())}, budget_bytes=-1),
            ("budget_bytes must be 0 or more, not -1"),
        ),
        (
            lambda: placement.forecast({"actor": Model(mlp())}, worker_role="boss"),
            ("worker_role must be one of trainer"),
        ),
        (
            lambda: placement.forecast({"actor": Model(mlp())}, phases={"distill": ("boss",)}),
            "unknown role 'boss'",
        ),
        (
            lambda: placement.forecast({"actor": Model(mlp(), dtype=cast("Any", 3))}),
            "3 is no dtype",
        ),
        (
            lambda: placement.forecast(
                {"a": Model(mlp(), optimizer="sgd"), "a.optimizer": Model(mlp())}
            ),
            ("becomes the handle 'a.optimizer'"),
        ),
        (lambda: Model(mlp(), head=cast("Any", "tail")), "head must be one of lm, value"),
        (
            lambda: placement.forecast({"actor": cast("Any", mlp())}),
            ("'actor' is described by an object of Sequential; give a Model"),
        ),
        (
            lambda: Model(mlp(), optimizer=cast("Any", torch.optim.SGD([torch.zeros(1)]))),
            ("an object of SGD; give its class"),
        ),
        (lambda: Rollout(1, 1, role="boss"), "role must be one of actor, .*, not 'boss'"),
    ],
)
def test_what_cannot_be_forecast_is_refused(make: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make()


def test_only_is_for_handles_that_there_are() -> None:
    with pytest.raises(placement.PhaseError, match="did you mean 'actor'"):
        placement.forecast({"actor": Model(mlp(), optimizer="sgd")}, cycle=["train[actro]"])
    told = placement.forecast(
        {"actor": Model(mlp(), optimizer="adamw"), "critic": Model(mlp(), optimizer="adamw")},
        cycle=["train[critic]"],
    )
    assert [name for name, nbytes in told.phase("train").handle_bytes.items() if nbytes] == [
        "critic",
        "critic.optimizer",
    ]


def test_a_cuda_device_counts_in_its_own_chunks() -> None:
    told = placement.forecast({"actor": Model(mlp(1000))})
    assert told.handles[0].num_bytes == 2 * 8 * MIB * 2  # 32,000,000 bytes, in multiples of 2 MiB
    assert told.budget_bytes is None
    assert told.stall_seconds is None
    assert told.fits


def test_a_replicated_model_is_loaded_by_all_ranks_of_a_node(tmp_path: Path) -> None:
    layout, sizing = Layout(shards=8), SimulatedDevice(1 << 30)
    ways = {
        "whole": Model(mlp(), readonly=True, sharded=False),
        "replicated": Model(mlp(), readonly=True, replicated=True),
    }
    told = {
        name: placement.forecast(
            {"ref": model}, layout=layout, cycle=["log_prob"], device=sizing, link=1e9
        )
        for name, model in ways.items()
    }
    assert told["whole"].peak_bytes == told["replicated"].peak_bytes
    assert told["whole"].loaded_bytes == 8 * told["replicated"].loaded_bytes
    assert told["whole"].stall_seconds == pytest.approx(8 * (told["replicated"].stall_seconds or 0))
    assert told["whole"].host_bytes == 8 * told["replicated"].host_bytes
    assert told["whole"].node_host_bytes == 8 * told["replicated"].node_host_bytes


def test_an_engines_mirror_is_host_memory_of_its_node(tmp_path: Path) -> None:
    actor, layout = Model(mlp()), Layout(data_parallel=4)
    alone = placement.forecast({"actor": actor}, layout=layout, cycle=["rollout"])
    for keeps_weights, mirror in ((True, MIB), (False, 0)):
        told = placement.forecast(
            {"actor": actor, "rollout": Rollout(MIB, "3MiB", keeps_weights)},
            layout=layout,
            cycle=["rollout"],
        )
        assert told.handles[1].mirror_bytes == told.handles[1].host_bytes == mirror
        assert (told.host_bytes, told.node_host_bytes) == (
            alone.host_bytes + mirror,
            alone.node_host_bytes + 4 * mirror,
        )
        assert told.node_mirror_bytes == 4 * mirror


@pytest.mark.parametrize(
    ("cycle", "keeps", "told"),
    [
        ("weight_sync,rollout,train", True, 1),
        ("rollout,train,weight_sync", True, 0),
        ("weight_sync,rollout,train", False, 0),
    ],
)
def test_a_mirror_that_every_sync_overwrites_is_noted(cycle: str, keeps: bool, told: int) -> None:
    handles = {"actor": Model(mlp(), optimizer="sgd"), "rollout": Rollout(MIB, "3MiB", keeps)}
    found = placement.forecast(handles, cycle=cycle.split(","))
    assert sum("weight_sync fills them anew" in note for note in found.notes) == told
    assert found.phase("rollout").handle_bytes["rollout"] == 4 * MIB


def test_what_a_node_has_too_little_of_is_told() -> None:
    link = Link(
        to_device_bytes_per_second=1e9,
        to_host_bytes_per_second=1e9,
        host_available_bytes=3 * MIB,
        pageable_reason="no",
    )
    layout, handles = Layout(data_parallel=4), {"actor": Model(mlp()), "rollout": Rollout(MIB, MIB)}
    told = placement.forecast(handles, layout=layout, cycle=["log_prob"], link=link)
    assert told.over_host_bytes == told.node_host_bytes - 3 * MIB > 0
    assert "pageable (no), 4 MiB engines' mirrors; does not fit: " in table(told)
    roomy = placement.forecast(handles, layout=layout, cycle=["log_prob"], link=1e9)
    assert "page-locked, 4 MiB engines' mirrors\n" in table(roomy)


def test_a_first_streamed_step_only_sends_and_later_ones_go_both_ways() -> None:
    layers, device = (
        nn.Sequential(*(nn.Linear(64, 64) for _ in range(12))),
        SimulatedDevice(1 << 30, chunk_bytes=16 << 10),
    )

    def streamed(
        cycle: tuple[str, ...] = ("log_prob", "train"), **keywords: Any
    ) -> placement.Forecast:
        handles = {"actor": Model(layers, optimizer="adamw")}
        return placement.forecast(
            handles, policy="colocated('streamed')", cycle=cycle, device=device, **keywords
        )

    state_bytes = streamed().phase("train").streamed_bytes // 2
    told = streamed(steps={"train": 3})
    assert told.phase("train").streamed_bytes == 6 * state_bytes
    assert sum(phase.streamed_bytes for phase in told.first_phases) == 5 * state_bytes
    assert streamed(steps={"train": 0}).phase("train").streamed_bytes == 0
    # in the phase that is nested, where there is one
    told = streamed(("log_prob", "train", "optimizer_step"))
    assert [told.phase(name).streamed_bytes for name in ("train", "optimizer_step")] == [
        0,
        2 * state_bytes,
    ]
