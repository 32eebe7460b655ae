"""Forecasts against the real manager on a simulated device: every byte, and the seconds of a
simulated link."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import pytest
import torch

import placement
from placement.core.snapshot import Snapshot
from placement.devices.simulated import device as simulated
from placement.engines.tagged import TaggedEngine
from placement.forecasting import Rollout, Run
from placement.forecasting.description import CYCLES
from placement.forecasting.stand_ins import parts_of
from placement.phases import reconciler
from placement.policies import Colocated
from placement.testing import SimulatedDevice
from tests.support.early import Early
from tests.support.frameworks import needs
from tests.support.sweeps import few

transformers = needs("transformers")

MIB = 1 << 20
RATE = 1e8
DECODER = {
    "vocab_size": 768,
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
OPTIMIZERS: Mapping[str, Any] = {
    "adamw": torch.optim.AdamW,
    "sgd-momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
}
GRPO = {"actor": "adamw", "ref": None}
PPO = {"actor": "adamw", "critic": "adamw", "ref": None, "reward": None}


def qwen2() -> Any:
    return transformers.Qwen2Config(
        **DECODER,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        architectures=["Qwen2ForCausalLM"],
    )


def llama() -> Any:
    return transformers.LlamaConfig(
        **DECODER, tie_word_embeddings=False, architectures=["LlamaForCausalLM"]
    )


@dataclass(frozen=True)
class Case:
    make_config: Callable[[], Any] | None = None
    """None: a model of 2 MiB. Then AdamW has 4 MiB."""
    policy: Any = "colocated"
    cycle: Sequence[str] = CYCLES["grpo"]
    budget: int = 1 << 30
    roles: Mapping[str, str | None] = field(default_factory=lambda: GRPO)
    """The optimizer of each role."""
    engine: Mapping[str, int] | None = None
    dtype: torch.dtype = torch.bfloat16
    chunk_bytes: int = 64 << 10
    sleeps: Mapping[str, float] = field(default_factory=dict)
    """The seconds of the work in some phases."""

    def device(self, rate: float | None = None) -> SimulatedDevice:
        return SimulatedDevice(
            1 << 30, chunk_bytes=self.chunk_bytes, bandwidth_bytes_per_second=rate
        )


LLAMA_PPO: dict[str, Any] = {
    "make_config": llama,
    "cycle": CYCLES["ppo"],
    "roles": {**PPO, "critic": "sgd-momentum"},
}
CASES = {
    "GRPO, colocated": Case(qwen2),
    "PPO, resident, a budget": Case(policy="resident", budget=6_500_000, **LLAMA_PPO),
    "PPO, colocated": Case(**LLAMA_PPO),
    "weights are streamed": Case(qwen2, "colocated(stream_sync=True)", roles={"actor": "sgd"}),
    "an engine of its own, resident": Case(
        qwen2, "resident", budget=2_500_000, engine={"weights": 500_000, "kv_cache": 900_000}
    ),
    "the optimizer in its step": Case(
        None, "colocated(optimizer_in='optimizer_step')", ("log_prob", "train", "optimizer_step")
    ),
    "streamed steps, two optimizers": Case(
        None, "colocated('streamed')", ("checkpoint", "values", "reward", "train"), roles=PPO
    ),
}


class SleepingEngine(TaggedEngine):
    """An engine that does nothing, and says so at once."""

    def drain(self) -> None: ...
    def offload(self, tags: Collection[str]) -> None: ...
    def load(self, tags: Collection[str]) -> None: ...
    def admit(self) -> None: ...
    def receive(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> None: ...


class LinkClock:
    """A clock that only waiting moves on, so that a simulated link's seconds are measured without
    those of the processor."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let the simulated device wait by this clock, and phase transitions measure by it."""
        self.now = 1.0
        for module in (simulated, reconciler):
            monkeypatch.setattr(module, "time", self)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@dataclass(frozen=True)
class MeasuredPhase:
    """One phase: what the handles hold after the phase transition at its beginning, and what has
    moved when its work is done."""

    phase: str
    handle_bytes: Mapping[str, int]
    host_bytes: int
    stall_seconds: float
    moved: tuple[int, ...]
    """Bytes that were loaded, offloaded and skipped."""


def steps(
    manager: placement.Manager,
    cycle: Sequence[str],
    work: Mapping[str, Callable[[], object]],
    cycles: int = 3,
) -> list[list[MeasuredPhase]]:
    """Run the cycle several times, each as one open phase that switches, with the work of its
    phases."""
    found: list[list[MeasuredPhase]] = []
    for _ in range(cycles):
        found.append([])
        for index, phase in enumerate((*cycle, "idle")):
            before = manager.snapshot()
            manager.leave() if phase == "idle" else manager.switch(
                phase
            ) if index else manager.enter(phase)
            after = manager.snapshot()
            work.get(phase, lambda: None)()
            found[-1].append(_row(phase, before, after, manager.snapshot()))
    return found


def _row(phase: str, before: Snapshot, after: Snapshot, end: Snapshot) -> MeasuredPhase:
    counters = attrgetter("loaded_bytes", "offloaded_bytes", "skipped_bytes")
    then, now = (
        [sum(each) for each in zip(*map(counters, snapshot.handles), strict=True)]
        for snapshot in (before, end)
    )
    return MeasuredPhase(
        phase=phase,
        handle_bytes={handle.name: handle.resident_bytes for handle in after.handles},
        host_bytes=sum(handle.host_bytes for handle in after.handles),
        stall_seconds=after.phase_stall_seconds[phase] - before.phase_stall_seconds.get(phase, 0.0),
        moved=tuple(one - other for one, other in zip(now, then, strict=True)),
    )


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def net() -> torch.nn.Module:
    return torch.nn.Sequential(*(torch.nn.Linear(256, 256, bias=False) for _ in range(8)))


def model(case: Case, role: str) -> torch.nn.Module:
    if case.make_config is None:
        return net()
    config, auto = case.make_config(), transformers.AutoModelForCausalLM
    if role in ("critic", "reward"):
        config.num_labels, auto = 1, transformers.AutoModelForTokenClassification
    made = auto.from_config(config, dtype=case.dtype)
    assert isinstance(made, torch.nn.Module)
    return made


def register(
    manager: placement.Manager | Run,
    case: Case,
    engine: Any,
    trained: list[tuple[torch.nn.Module, torch.optim.Optimizer]],
) -> list[torch.nn.Module]:
    """Register a case's objects, with a manager and with a forecast alike. Returns its models;
    those that are trained go to `trained` with their optimizers."""
    models = []
    for role, name in case.roles.items():
        made = model(case, role)
        models.append(made)
        manager.register(role, made, role=role, readonly=name is None)
        if name is not None:
            optimizer = OPTIMIZERS[name](made.parameters())
            manager.register(f"{role}.optimizer", optimizer)
            trained.append((made, optimizer))
    if engine is not None:
        manager.register("rollout", engine, role="rollout")
    return models


def measure(
    case: Case, cycles: int = 3, clock: LinkClock | None = None
) -> tuple[list[list[MeasuredPhase]], int]:
    """Run the case for real. Returns its cycles, and the peak of device bytes."""
    device = case.device(None if clock is None else RATE)
    manager = placement.Manager(device=device, policy=case.policy, budget_bytes=case.budget)
    trained: list[tuple[torch.nn.Module, torch.optim.Optimizer]] = []
    engine: SleepingEngine | None = None
    if case.engine is not None:
        engine = SleepingEngine(
            tag_bytes=case.engine, verify="answer", offloaded=("weights", "kv_cache")
        )
    try:
        models = register(manager, case, engine, trained)

        def work() -> None:
            for made, optimizer in trained:
                train(made, optimizer)

        works: dict[str, Callable[[], object]] = {
            "optimizer_step" if "optimizer_step" in case.cycle else "train": work
        }
        for phase, seconds in case.sleeps.items():
            assert clock is not None
            works[phase] = functools.partial(clock.sleep, seconds)
        found = steps(manager, case.cycle, works, cycles)
        assert models
        return found, manager.snapshot().peak_bytes
    finally:
        while manager.phase_name != "idle":
            manager.leave()
        manager.close()


def forecast(case: Case) -> placement.Forecast:
    engine = None
    if case.engine is not None:
        engine = Rollout(case.engine["weights"], case.engine["kv_cache"])

    def worker(run: Run) -> None:
        with torch.device("meta"):
            register(run, case, engine, [])

    return placement.forecast(
        worker,
        policy=case.policy,
        cycle=case.cycle,
        budget_bytes=case.budget,
        device=case.device(),
        link=RATE,
        work_seconds=case.sleeps,
    )


@pytest.mark.parametrize(
    "name",
    few(
        CASES,
        *("PPO, resident, a budget", "weights are streamed", "the optimizer in its step"),
        "GRPO, colocated",
    ),
)
def test_a_forecast_is_what_the_manager_measures(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    told = forecast(case)
    cycles, peak = measure(case, 3, LinkClock(monkeypatch))
    assert told.fits
    assert told.peak_bytes == peak
    moved = attrgetter("loaded_bytes", "offloaded_bytes", "skipped_bytes")
    for measured, phases in ((cycles[-1], told.phases), (cycles[0], told.first_phases)):
        for has, phase in zip(measured, phases, strict=True):
            assert (has.phase, has.handle_bytes) == (phase.phase, phase.handle_bytes)
            assert has.moved == moved(phase), phase.phase
            assert has.host_bytes == phase.host_bytes
            # an engine's copies are its own, and take no time of the simulated link; a streamed
            # step is no stall of a phase transition
            if case.engine is None and not phase.streamed_bytes:
                assert has.stall_seconds == pytest.approx(phase.stall_seconds, rel=0.1, abs=1e-4), (
                    phase.phase
                )


def test_the_rows_of_a_forecast_that_stall_are_those_of_the_metric(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Going back to `idle` is a row of its own, and a phase to which nothing moves has none."""
    case = Case(cycle=("rollout", "ref_log_prob", "checkpoint", "train"))
    told = {each.phase for each in forecast(case).phases if each.stall_seconds}
    measured = measure(case, 3, LinkClock(monkeypatch))[0][-1]
    assert told == {each.phase for each in measured if each.stall_seconds}
    assert told == {"rollout", "ref_log_prob", "train", "idle"}


def test_a_phase_that_the_manager_refuses_is_told() -> None:
    case = Case(qwen2, budget=1_000_000)
    told = forecast(case)
    assert [phase.phase for phase in told.phases if not phase.fits] == ["train"]
    refused = told.phase("train")
    with pytest.raises(
        placement.DeviceMemoryError, match=rf"needs .*\({refused.wanted_bytes:,} bytes\)"
    ) as caught:
        measure(case)
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
        (0.005, aside("log_prob"), "log_prob", {"train"}),
        pytest.param(
            *(1.0, aside("weight_sync", "idle", "rollout"), "rollout", {"weight_sync"}),
            marks=pytest.mark.sweep,
        ),
    ],
)
def test_bytes_that_move_under_the_work_stall_nobody(
    seconds: float,
    policy: Colocated,
    phase: str,
    less: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case(qwen2, policy, dtype=torch.float32, chunk_bytes=512 << 10, sleeps={phase: seconds})
    told = forecast(case)
    measured = measure(case, 3, LinkClock(monkeypatch))[0][-1]
    for has, each in zip(measured, told.phases, strict=True):
        assert sum(has.handle_bytes.values()) == each.device_bytes, each.phase
        assert has.moved[0] == each.loaded_bytes, each.phase
        # The copies of whole chunks that have begun go on; the forecast cuts at a byte.
        assert has.stall_seconds == pytest.approx(
            each.stall_seconds, rel=0.1, abs=case.chunk_bytes / RATE
        ), each.phase
    assert told.fits
    stalls = {each.phase: each.stall_seconds for each in told.phases}
    colocated = forecast(replace(case, policy="colocated", sleeps={}))
    assert {
        each.phase
        for each in colocated.phases
        if (each.stall_seconds or 0) > (stalls[each.phase] or 0)
    } == less


@contextlib.contextmanager
def mesh_of(num_ranks: int, name: str) -> Iterator[Any]:
    """A mesh of ranks of which there is only the first."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (num_ranks,), mesh_dim_names=(name,))
    finally:
        torch.distributed.destroy_process_group()


def test_the_shards_of_a_model_are_those_of_fsdp2() -> None:
    from torch.distributed.fsdp import fully_shard

    made = transformers.AutoModelForCausalLM.from_config(llama(), dtype=torch.float32)
    told = parts_of(made, 7)
    with mesh_of(7, "dp") as mesh:
        for layer in made.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(made, mesh=mesh)
        has = [parameter.to_local().untyped_storage().nbytes() for parameter in made.parameters()]
    assert [part.nbytes for part in told if part.parameters] == has
