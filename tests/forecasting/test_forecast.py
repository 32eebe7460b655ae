"""The parts of a forecast: link, shards, cycles, models, optimizers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

import placement
from placement.cli.plan import table
from placement.core.snapshot import TransitionSeconds, readable
from placement.devices.memory import Copy
from placement.devices.select import select_device
from placement.forecasting import Link, Rollout, Run
from placement.forecasting.config import OPTIMIZERS, module_of
from placement.forecasting.description import CYCLES, PhaseForecast, cycle_of
from placement.forecasting.device import SizesDevice
from placement.forecasting.stand_ins import parts_of
from placement.policies import Colocated, Cyclic
from placement.testing import SimulatedDevice

MIB = 1 << 20


def mlp(width: int = 256) -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(
            nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        )


def worker(optimizer: str | None = None, *beside: nn.Module | Rollout) -> Callable[[Run], None]:
    """An actor, its optimizer where one is named, and a reference or an engine."""

    def register(run: Run) -> None:
        model = mlp()
        run.register("actor", model, role="actor")
        if optimizer is not None:
            run.register("actor.optimizer", OPTIMIZERS[optimizer](model.parameters()))
        for target in beside:
            is_engine = isinstance(target, Rollout)
            role = "rollout" if is_engine else "ref"
            run.register(role, target, role=role, readonly=not is_engine)

    return register


@pytest.mark.parametrize("policy", [Colocated("streamed"), Cyclic(optimizer_in="streamed")])
def test_a_forecast_logs_no_error_at_its_end(
    policy: placement.Policy, caplog: pytest.LogCaptureFixture
) -> None:
    register = worker("adamw", mlp())
    placement.forecast(register, policy=policy, cycle=("ref_log_prob", "train", "weight_sync"))
    assert caplog.text == ""


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
    assert Link.of("50GB") == Link.of(50e9)
    with pytest.raises(ValueError, match="0 bytes a second is no rate"):
        Link.of("0")


def test_the_doctors_file_is_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from placement.cli import doctor
    from placement.devices import inspection

    # whoever looks at figures waits until they have settled
    monkeypatch.setattr(inspection, "_MOST_SECONDS", 0.0)
    monkeypatch.setattr(doctor, "_PAUSE_SECONDS", 0.0)
    device = select_device("simulated:256MiB")  # with smaller chunks than a GPU
    found = doctor.examine(device, MIB)
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
    told = placement.forecast(worker(), link=path)
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
    """Counted by hand: the reference comes; it leaves unchanged while the actor comes; nothing
    moves; the actor leaves changed."""
    seconds = TransitionSeconds(
        alone=1.0, moving=5.0, loaded_byte=1e-7, offloaded_byte=2e-7, skipped_byte=3e-7
    )
    rates = {"to_device_bytes_per_second": 1e9, "to_host_bytes_per_second": 1e9}

    def register(run: Run) -> None:
        with torch.device("meta"):
            actor, ref = (nn.Linear(1024, 1024, bias=False) for _ in range(2))
        run.register("actor", actor, role="actor")
        run.register("actor.optimizer", torch.optim.SGD(actor.parameters()))
        run.register("ref", ref, role="ref", readonly=True)

    cycle, device = (
        ["ref_log_prob", "train", "weight_sync"],
        SimulatedDevice(1 << 30, chunk_bytes=1 << 20),
    )

    def stalls(link: Link) -> list[float]:
        told = placement.forecast(register, cycle=cycle, device=device, link=link)
        return [each.stall_seconds or 0.0 for each in told.phases]

    measured = stalls(Link(transitions=seconds, **rates))
    more = [
        with_it - without for with_it, without in zip(measured, stalls(Link(**rates)), strict=True)
    ]
    megabytes = 4.194304
    assert more == pytest.approx(
        [5 + 0.1 * megabytes, 5 + (0.1 + 0.3 - 0.001) * megabytes, 1.0, 5 + 0.2 * megabytes]
    )


def test_what_streamed_steps_take_beside_their_copies_is_in_the_stall() -> None:
    rates = {"to_device_bytes_per_second": 1e9, "to_host_bytes_per_second": 1e9}
    beside = TransitionSeconds(
        alone=0, moving=0, loaded_byte=0, offloaded_byte=0, skipped_byte=0, streamed_byte=1e-6
    )

    def register(run: Run) -> None:
        with torch.device("meta"):
            actor = nn.Linear(1024, 1024, bias=False)
        run.register("actor", actor, role="actor")
        run.register("actor.optimizer", torch.optim.AdamW(actor.parameters()))

    def train(transitions: TransitionSeconds | None) -> PhaseForecast:
        told = placement.forecast(
            register,
            policy="colocated('streamed')",
            cycle=("log_prob", "train"),
            link=Link(transitions=transitions, **rates),
            device=SimulatedDevice(1 << 30, chunk_bytes=1 << 20),
        )
        return told.phase("train")

    without, with_it = train(None), train(beside)
    assert without.streamed_bytes == with_it.streamed_bytes > 0
    assert without.stall_seconds is not None
    assert with_it.stall_seconds == pytest.approx(
        without.stall_seconds + 1e-6 * with_it.streamed_bytes
    )


def test_shards_divide_a_models_parameters_and_leave_its_buffers() -> None:
    module = mlp(100)
    module.register_buffer("scale", torch.empty(50, device="meta"))
    assert [part.nbytes for part in parts_of(module, 8)] == [200, 50 * 100 * 4, 13 * 400 * 4]
    assert sum(part.nbytes for part in parts_of(module)) == 200 + 4 * 2 * 100 * 400
    module.register_parameter("scalar", nn.Parameter(torch.empty((), device="meta")))
    with pytest.raises(ValueError, match="without a dimension cannot be sharded"):
        parts_of(module, 2)


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
        ("{", "cannot build a model"),
        ("[]", "cannot build a model"),
        (json.dumps(config(model_type="no-such-model")), "cannot build a model"),
        (
            json.dumps(config(hidden_size=-64)),
            ("cannot build a model .*RuntimeError: .*negative dimension -64"),
        ),
        (
            json.dumps(config(hidden_act="no-such-function")),
            ("cannot build a model .*KeyError: 'no-such-function'"),
        ),
        (
            json.dumps(config(model_type="own", auto_map={"AutoConfig": "own.Config"})),
            "cannot build a model .*trust_remote_code",
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
        module_of(tmp_path / "config.json", None)


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
    assert [part.nbytes for part in parts_of(module_of(tmp_path, None))] == [
        part.nbytes for part in parts_of(made)
    ]


def test_quantized_weights_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    quantization = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    quantized = config(dtype="bfloat16", quantization_config=quantization)
    (tmp_path / "config.json").write_text(json.dumps(quantized))
    with pytest.raises(ValueError, match="the bytes of quantized weights are not known"):
        module_of(tmp_path, None)


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
        match=r"no class with one number a token for model_type 'mamba'",
    ) as caught:
        module_of(tmp_path / "mamba.json", None, "value")
    # transformers' own message names every architecture that it has
    assert len(str(caught.value)) < 400


def test_without_transformers_it_is_said_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config()))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install transformers"):
        module_of(tmp_path, None)


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
        (["train]actor"], "unknown phase 'train]actor'"),
        ("log_prob[actor,train", r"phase 'log_prob\[actor': write handles as in"),
        (["train]"], "phase 'train]': write handles as in"),
        (["idle"], "has no phase"),
    ):
        with pytest.raises(ValueError, match=message):
            cycle_of(cast("Any", wrong))


def state_bytes(make: Callable[[Any], torch.optim.Optimizer]) -> float:
    """Bytes of an optimizer's state for each element of a parameter in bfloat16."""

    def register(run: Run) -> None:
        module = mlp().bfloat16()
        run.register("actor", module, role="actor")
        run.register("actor.optimizer", make(module.parameters()))

    told = placement.forecast(register, cycle=["train"], device=SimulatedDevice(1 << 30))
    return told.handles[1].num_bytes / (2 * 4 * 256 * 256)


def test_the_state_of_optimizers() -> None:
    assert {name: state_bytes(make) for name, make in OPTIMIZERS.items()} == {
        "adamw": 2 + 2,
        "adamw-fp32": 4 + 4,
        "adamw-master": 4 + 4 + 4,
        "sgd": 0,
        "sgd-momentum": 2,
    }
    assert state_bytes(lambda parameters: torch.optim.AdamW(parameters, capturable=True)) == 2 + 2
    assert state_bytes(lambda parameters: torch.optim.Adam(parameters, amsgrad=True)) == 2 + 2 + 2


class NeedsValues(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        if self.param_groups[0]["params"][0].sum() > 0:
            super().step(closure)


def test_each_group_of_an_optimizer_has_the_state_of_its_options() -> None:
    module = mlp()

    def register(run: Run) -> None:
        first, second = module.parameters()
        groups = [{"params": [first], "momentum": 0.9}, {"params": [second]}]
        run.register("actor", module, role="actor")
        run.register("actor.optimizer", torch.optim.SGD(groups, lr=0.1))

    told = placement.forecast(register, cycle=["train"], device=SimulatedDevice(1 << 30))
    actor, optimizer = told.handles
    assert 2 * optimizer.num_bytes == actor.num_bytes == 2 * MIB


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (nn.Identity(), "'new' has no tensors"),
        (torch.optim.SGD(mlp().parameters()), "steps parameters of no registered module"),
        ("Qwen2.5-7B", "'new' is an object of str"),
        (Rollout("lots", 1), "weights_bytes: 'lots' is not a number of bytes"),
        (Rollout(1, -1), "kv_cache_bytes must be 0 or more, not -1"),
    ],
)
def test_what_cannot_be_registered_is_refused(target: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        placement.forecast(lambda run: run.register("new", target))


def test_an_optimizer_whose_step_needs_values_is_refused() -> None:
    model = mlp()

    def register(run: Run) -> None:
        run.register("actor", model, role="actor")
        run.register("actor.optimizer", NeedsValues(model.parameters()))

    with pytest.raises(
        ValueError, match=r"the state of 'actor\.optimizer', a NeedsValues, is not known"
    ):
        placement.forecast(register)


def test_a_worker_registers_with_the_keywords_of_a_manager() -> None:
    def register(run: Run) -> None:
        actor, ref, moved = mlp(), mlp(), mlp()
        run.register("actor", actor, role="actor")
        run.register("sgd", torch.optim.SGD(actor.parameters()), owner="actor")
        run.register("ref", ref, role="ref", readonly=True, replicated=True)
        run.register("moved", moved, role="critic", external=True)

    told = placement.forecast(register)
    host = {handle.name: handle.host_bytes for handle in told.handles}
    assert host["ref"] == host["actor"] > host["moved"] == 0


def test_a_handles_name_and_role_are_checked_as_a_manager_does() -> None:
    with pytest.raises(placement.RegistrationError, match="role 'judge' is none of actor"):
        placement.forecast(lambda run: run.register("judge", mlp(), role="judge"))
    with pytest.raises(placement.RegistrationError, match="'actor'"):
        placement.forecast(lambda run: [worker()(run), worker()(run)])


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"work_seconds": {"eval": 1}}, "'eval', which the cycle does not have"),
        ({"work_seconds": {"train": -1}}, "of phase 'train' must be 0 or more, not -1"),
        ({"budget_bytes": "lots"}, "not a number of bytes"),
        ({"budget_bytes": -1}, "budget_bytes must be 0 or more, not -1"),
        ({"worker_role": "boss"}, "worker_role: Input should be 'trainer'"),
        ({"phases": {"distill": ("boss",)}}, "unknown role 'boss'"),
        ({"shards": 0}, "shards must be a whole number from 1 on"),
    ],
)
def test_what_cannot_be_forecast_is_refused(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        placement.forecast(worker(), **keywords)


def test_a_job_without_a_handle_is_refused() -> None:
    with pytest.raises(ValueError, match="there is no handle to forecast"):
        placement.forecast(lambda run: None)


def test_only_is_for_handles_that_there_are() -> None:
    with pytest.raises(placement.PhaseError, match="did you mean 'actor'"):
        placement.forecast(worker("sgd"), cycle=["train[actro]"])

    def register(run: Run) -> None:
        for role in ("actor", "critic"):
            model = mlp()
            run.register(role, model, role=role)
            run.register(f"{role}.optimizer", torch.optim.AdamW(model.parameters()))

    told = placement.forecast(register, cycle=["train[critic]"])
    assert [name for name, nbytes in told.phase("train").handle_bytes.items() if nbytes] == [
        "critic",
        "critic.optimizer",
    ]


def test_a_cuda_device_counts_in_its_own_chunks() -> None:
    told = placement.forecast(lambda run: run.register("actor", mlp(1000), role="actor"))
    assert told.handles[0].num_bytes == 2 * 8 * MIB * 2  # 32,000,000 bytes, in multiples of 2 MiB
    assert told.budget_bytes is None
    assert told.stall_seconds is None
    assert told.fits


@pytest.mark.parametrize(("keeps_weights", "mirror"), [(True, MIB), (False, 0)])
def test_an_engines_mirror_is_host_memory(keeps_weights: bool, mirror: int) -> None:
    alone = placement.forecast(worker(), cycle=["rollout"])
    engine = Rollout(MIB, "3MiB", keeps_weights)
    told = placement.forecast(worker(None, engine), cycle=["rollout"])
    assert told.handles[1].host_bytes == mirror
    assert told.host_bytes == alone.host_bytes + mirror
    assert f"host memory           {readable(told.host_bytes)} a rank" in table(told)
    assert told.phase("rollout").handle_bytes["rollout"] == 4 * MIB


def test_a_first_streamed_step_only_sends_and_later_ones_go_both_ways() -> None:
    def register(run: Run) -> None:
        with torch.device("meta"):
            layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(12)))
        run.register("actor", layers, role="actor")
        run.register("actor.optimizer", torch.optim.AdamW(layers.parameters()))

    def streamed(*cycle: str) -> placement.Forecast:
        device = SimulatedDevice(1 << 30, chunk_bytes=16 << 10)
        return placement.forecast(
            register, policy="colocated('streamed')", cycle=cycle, device=device
        )

    told = streamed("log_prob", "train")
    state_bytes = told.phase("train").streamed_bytes // 2
    assert state_bytes > 2 * 12 * 64 * 64 * 4
    assert sum(phase.streamed_bytes for phase in told.first_phases) == state_bytes
    # in the phase that is nested, where there is one
    told = streamed("log_prob", "train", "optimizer_step")
    assert [told.phase(name).streamed_bytes for name in ("train", "optimizer_step")] == [
        0,
        2 * state_bytes,
    ]
