"""Forecasts against the real manager on a simulated device: every byte, and the seconds of a simulated link."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import placement
from placement.engines.tagged import TaggedEngine
from placement.forecasting import Layout, Model, Rollout
from placement.forecasting.description import CYCLES
from placement.forecasting.job import parts_of
from placement.policies import Colocated
from placement.testing import SimulatedDevice
from tests.support.early import Early
from tests.support.measured_steps import LinkClock, MeasuredPhase, steps, train

transformers = pytest.importorskip("transformers")

RATE = 1e8
CHUNK_BYTES = 64 << 10
DECODER = {"vocab_size": 768, "hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
QWEN2 = transformers.Qwen2Config(**DECODER, num_key_value_heads=2, tie_word_embeddings=True, architectures=["Qwen2ForCausalLM"])
LLAMA = transformers.LlamaConfig(**DECODER, tie_word_embeddings=False, architectures=["LlamaForCausalLM"])
OPTIMIZERS: Mapping[str, Any] = {
    "adamw": torch.optim.AdamW,
    "sgd-momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
}


@dataclass(frozen=True)
class Case:
    config: Any = field(default_factory=lambda: QWEN2)
    policy: str = "colocated"
    cycle: Sequence[str] = CYCLES["grpo"]
    dtype: torch.dtype = torch.bfloat16
    budget: int = 1 << 30
    roles: Mapping[str, str | None] = field(default_factory=lambda: {"actor": "adamw", "ref": None})
    """The optimizer of each role."""
    keeps_gradients: bool = False
    engine: Mapping[str, int] | None = None


PPO_ROLES = {"actor": "adamw", "critic": "sgd-momentum", "ref": None, "reward": None}
CASES = {
    "GRPO, colocated": Case(),
    "PPO, resident, a budget": Case(LLAMA, "resident", CYCLES["ppo"], budget=6_500_000, roles=PPO_ROLES),
    "PPO, gradients move with their model": Case(LLAMA, keeps_gradients=True, cycle=CYCLES["ppo"], roles=PPO_ROLES),
    "gradients are dropped": Case(policy="colocated(drop_gradients=True)", keeps_gradients=True),
    "weights are streamed": Case(policy="colocated(stream_sync=True)", roles={"actor": "sgd"}),
    "an engine of its own, resident": Case(policy="resident", budget=2_500_000, engine={"weights": 500_000, "kv_cache": 900_000}),
}


class SleepingEngine(TaggedEngine):
    """An engine that does nothing, and says so at once."""

    def drain(self) -> None: ...
    def offload(self, tags: Collection[str]) -> None: ...
    def load(self, tags: Collection[str]) -> None: ...
    def admit(self) -> None: ...
    def receive(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> None: ...


def model(case: Case, role: str) -> torch.nn.Module:
    if role in ("critic", "reward"):
        case.config.num_labels = 1
        made = transformers.AutoModelForTokenClassification.from_config(case.config, dtype=case.dtype)
    else:
        made = transformers.AutoModelForCausalLM.from_config(case.config, dtype=case.dtype)
    assert isinstance(made, torch.nn.Module)
    return made


def measure(case: Case, device: SimulatedDevice) -> tuple[list[list[MeasuredPhase]], int]:
    """Run the case for real. Returns its cycles, and the peak of device bytes."""
    manager = placement.Manager(device=device, policy=case.policy, budget_bytes=case.budget)
    trained = []
    for role, name in case.roles.items():
        made = model(case, role)
        manager.register(role, made, role=role, readonly=name is None)
        if name is not None:
            optimizer = OPTIMIZERS[name](made.parameters())
            manager.register(f"{role}.optimizer", optimizer)
            trained.append((made, optimizer))
        else:
            trained.append((made, None))  # kept alive
    if case.engine is not None:
        engine = SleepingEngine(tag_bytes=case.engine, verify="answer", offloaded=("weights", "kv_cache"))
        manager.register("rollout", engine, role="rollout")

    def work() -> None:
        for made, optimizer in trained:
            if optimizer is not None:
                train(made, optimizer, keeps_gradients=case.keeps_gradients)

    found = steps(manager, case.cycle, {"train": work})
    peak = manager.snapshot().peak_bytes
    manager.close()
    return found, peak


def forecast(case: Case, device: SimulatedDevice, folder: Path) -> placement.Forecast:
    case.config.save_pretrained(folder)
    handles: dict[str, Model | Rollout] = {
        role: Model(
            folder,
            optimizer=name,
            dtype=case.dtype,
            readonly=name is None,
            gradients="kept" if case.keeps_gradients and name else "cleared",
        )
        for role, name in case.roles.items()
    }
    if case.engine is not None:
        handles["rollout"] = Rollout(case.engine["weights"], case.engine["kv_cache"])
    return placement.forecast(handles, policy=case.policy, cycle=case.cycle, budget_bytes=case.budget, device=device, link=RATE)


@pytest.mark.parametrize("name", CASES)
def test_a_forecast_is_what_the_manager_measures(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    told = forecast(case, SimulatedDevice(1 << 30, chunk_bytes=CHUNK_BYTES), tmp_path)
    LinkClock().install(monkeypatch)
    device = SimulatedDevice(1 << 30, chunk_bytes=CHUNK_BYTES, bandwidth_bytes_per_second=RATE)
    cycles, peak = measure(case, device)
    assert told.fits
    assert told.peak_bytes == peak
    for measured, phases in ((cycles[0], told.first_phases), (cycles[-1], told.phases)):
        for has, phase in zip(measured, phases, strict=True):
            assert (has.phase, has.handle_bytes) == (phase.phase, phase.handle_bytes)
            assert (has.loaded_bytes, has.offloaded_bytes, has.skipped_bytes) == (
                phase.loaded_bytes,
                phase.offloaded_bytes,
                phase.skipped_bytes,
            ), phase.phase
            assert has.host_bytes == phase.host_bytes
            engine = phase.handle_bytes.get("rollout") is not None
            if not engine:  # an engine's copies are its own, and take no time of the simulated link
                assert has.stall_seconds == pytest.approx(phase.stall_seconds, rel=0.1, abs=1e-4), phase.phase


def test_a_phase_that_the_manager_refuses_is_told(tmp_path: Path) -> None:
    case = Case(budget=1_000_000)
    device = SimulatedDevice(1 << 30, chunk_bytes=CHUNK_BYTES)
    told = forecast(case, device, tmp_path)
    assert [phase.phase for phase in told.phases if not phase.fits] == ["train"]
    refused = told.phase("train")
    with pytest.raises(placement.DeviceMemoryError, match=rf"needs .*\({refused.wanted_bytes:,} bytes\)") as caught:
        measure(case, device)
    assert caught.value.wanted_bytes == refused.wanted_bytes
    assert refused.wanted_bytes - refused.over_bytes == case.budget
    assert told.over_bytes == refused.over_bytes
    assert not told.fits


def aside(*phases: str) -> Early:
    """The optimizer arrives or is saved while these phases compute."""
    return Early({phase: {"actor.optimizer": 1 << 30} for phase in phases})


@pytest.mark.parametrize(
    ("seconds", "policy", "phase", "less"),
    [
        (0.0, aside("log_prob"), "log_prob", set()),
        (0.005, aside("log_prob"), "log_prob", {"train"}),
        (0.0, aside("weight_sync"), "weight_sync", {"weight_sync"}),  # the next phase transition waits instead
        (1.0, aside("weight_sync", "idle", "rollout"), "rollout", {"weight_sync"}),
    ],
)
def test_bytes_that_move_under_the_work_stall_nobody(
    seconds: float, policy: Colocated, phase: str, less: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, chunk_bytes = QWEN2, 512 << 10
    config.save_pretrained(tmp_path)
    handles = {"actor": Model(tmp_path, optimizer="adamw", dtype="fp32"), "ref": Model(tmp_path, readonly=True, dtype="fp32")}
    clock = LinkClock()
    clock.install(monkeypatch)
    device = SimulatedDevice(1 << 30, chunk_bytes=chunk_bytes, bandwidth_bytes_per_second=RATE)
    told = placement.forecast(handles, policy=policy, budget_bytes=1 << 30, device=device, link=RATE, work_seconds={phase: seconds})
    manager = placement.Manager(device=device, policy=policy, budget_bytes=1 << 30)
    actor, ref = (transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32) for _ in range(2))
    optimizer = torch.optim.AdamW(actor.parameters())
    manager.register("actor", actor, role="actor")
    manager.register("actor.optimizer", optimizer)
    manager.register("ref", ref, role="ref", readonly=True)
    measured = steps(manager, CYCLES["grpo"], {"train": lambda: train(actor, optimizer), phase: lambda: clock.sleep(seconds)})[-1]
    manager.close()
    for has, each in zip(measured, told.phases, strict=True):
        assert has.device_bytes == each.device_bytes, each.phase
        assert has.loaded_bytes == each.loaded_bytes, each.phase
        # The copies of whole chunks that have begun go on; the forecast cuts at a byte.
        assert has.stall_seconds == pytest.approx(each.stall_seconds, rel=0.1, abs=chunk_bytes / RATE), each.phase
    assert told.fits
    stalls = {each.phase: each.stall_seconds for each in told.phases}
    colocated = placement.forecast(handles, budget_bytes=1 << 30, device=device, link=RATE)
    assert {each.phase for each in colocated.phases if (each.stall_seconds or 0) > (stalls[each.phase] or 0)} == less


def test_the_shards_of_a_model_are_those_of_fsdp2() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    made = transformers.AutoModelForCausalLM.from_config(LLAMA, dtype=torch.float32)
    told = parts_of(made, Layout(shards=7, gpus_per_node=7))
    torch.distributed.init_process_group("fake", rank=0, world_size=7, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (7,))
        for layer in made.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(made, mesh=mesh)
        has = [parameter.to_local().untyped_storage().nbytes() for parameter in made.parameters()]
    finally:
        torch.distributed.destroy_process_group()
    assert [part.nbytes for part in told if part.parameters] == has


@pytest.mark.parametrize(
    "config",
    [
        transformers.GPTNeoXConfig(**DECODER),
        transformers.MixtralConfig(**DECODER, num_key_value_heads=2, num_local_experts=4),
    ],
    ids=lambda config: config.model_type,
)
def test_the_parts_of_tensor_parallelism_are_those_of_transformers(config: Any) -> None:
    """Dense models and fused experts."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    ours = pytest.importorskip("transformers.distributed.tensor_parallel")
    distributed = pytest.importorskip("transformers.distributed.configuration_utils")
    if not hasattr(ours, "apply_tensor_parallelism") or not hasattr(transformers.PreTrainedModel, "_resolve_parallel_plans"):
        pytest.skip("this transformers has no functions that plan and apply tensor parallelism, so there is nothing to compare with")
    with torch.device("meta"):
        made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    told = [each.shape for part in parts_of(made, Layout(tensor_parallel=2)) for each in part.parameters]
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        plan, _, _ = made._resolve_parallel_plans(distributed.DistributedConfig(tp_size=2))
        with torch.device("meta"):
            ours.apply_tensor_parallelism(made, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), plan)
        has = [each.to_local().shape if isinstance(each, DTensor) else each.shape for each in made.parameters()]
    finally:
        torch.distributed.destroy_process_group()
    assert told == has
