"""Weights awake, published, actor off, KV cache awake, rollout, asleep: against every server, with the budget never exceeded."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from placement import EngineError, State
from placement.testing import assert_nothing_resident
from tests.engines.conftest import Job
from tests.engines.standin import TAG_BYTES, StandIn
from tests.engines.standin_sglang import Sglang0523, Sglang059
from tests.engines.standin_vllm import Vllm024, Vllm033

SERVERS: dict[str, Any] = {
    "vllm 0.33.0": Vllm033,
    "vllm 0.24.0": Vllm024,
    "sglang 0.5.23": Sglang0523,
    "sglang 0.5.9": Sglang059,
}
every_server = pytest.mark.parametrize("kind", [pytest.param(kind, id=name) for name, kind in SERVERS.items()])


def start(kind: Any, shared: Path, started: list[StandIn], weights: str = "discard", **options: Any) -> Job:
    job = unregistered(kind, shared, started, weights, **options)
    job.register()
    return job


def unregistered(kind: Any, shared: Path, started: list[StandIn], weights: str = "discard", **options: Any) -> Job:
    is_vllm = issubclass(kind, Vllm033)
    server = kind(shared) if is_vllm else kind(shared, keeps_weights=weights == "keep")
    started.append(server)
    return Job(server, shared, **({"weights": weights} if is_vllm else {}), **options)


@every_server
@pytest.mark.parametrize("weights", ["keep", "discard"])
def test_each_transition_has_on_the_device_what_it_says(kind: Any, weights: str, shared: Path, started: list[StandIn]) -> None:
    job = start(kind, shared, started, weights)
    handle, sizes = job.handle, {tag: TAG_BYTES[tag] for tag in job.engine.residency.tags}
    assert (handle.state, handle.num_bytes) == (State.CPU_OFFLOADED, sum(sizes.values()))  # measured
    assert job.server.memory.tags == set()
    for _ in range(2):
        with job.manager.phase("weight_sync") as step:
            assert job.server.memory.tags == {"weights"}
            assert (handle.state, job.actor.state) == (State.GPU_RESIDENT, State.SYNCING)
            assert handle.resident_bytes == TAG_BYTES["weights"]
            job.publish()
            step.switch("rollout")
            assert job.server.generate() == "actor"
            assert (job.actor.resident_bytes, job.server.is_paused) == (0, False)
            step.switch("weight_sync")  # the KV cache goes, the weights stay or come back
            assert job.server.memory.tags == {"weights"}
            job.publish()
            step.switch("rollout")
            assert job.server.generate() == "actor"
            step.switch("train")
            assert job.server.memory.tags == set()
            assert job.actor.state is State.TRAINING
        assert handle.resident_bytes == 0
        assert_nothing_resident(job.manager)
    assert job.engine.residency.bytes_by_tag() == sizes
    assert job.manager.audit().ok
    if weights == "keep":  # then an evaluation needs no sync
        with job.manager.phase("eval"):
            assert job.server.generate() == "actor"


@every_server
def test_the_sum_never_exceeds_a_budget_that_holds_no_two_of_them(kind: Any, shared: Path, started: list[StandIn]) -> None:
    """The engine whole and the actor do not fit together: the swap has to go through what is free."""
    sizes = {tag: TAG_BYTES[tag] for tag in ("weights", "kv_cache")}
    budget = sum(TAG_BYTES[tag] for tag in TAG_BYTES) + 4096
    job = start(kind, shared, started, tag_bytes=sizes, manager={"budget_bytes": budget})
    for _ in range(2):
        assert job.step() == "actor"
        with job.manager.phase("train"):
            pass
    assert job.manager.snapshot().peak_bytes <= budget


@every_server
def test_requests_in_flight_are_waited_for(kind: Any, shared: Path, started: list[StandIn]) -> None:
    job = start(kind, shared, started)
    with job.rolling_out() as step:
        job.server.in_flight = 3

        def finish() -> None:
            job.server.in_flight = 0

        timer = threading.Timer(0.05, finish)
        timer.start()
        step.switch("train")
        timer.join()
    assert job.server.aborted == 0
    assert job.server.memory.tags == set()


@pytest.mark.parametrize("kind", [Vllm033, Vllm024, Sglang0523])
def test_requests_that_never_finish_end_at_the_deadline_and_the_rollout_goes_on(kind: Any, shared: Path, started: list[StandIn]) -> None:
    job = start(kind, shared, started, deadline_seconds=0.2)
    with job.rolling_out() as step:
        job.server.in_flight = 1
        with pytest.raises(EngineError, match="in flight"):
            step.switch("train")
        assert step.name == "rollout"
        assert job.handle.state is State.GPU_RESIDENT
        assert not job.server.is_paused
        assert job.server.generate() == "actor"
        job.server.in_flight = 0
    assert job.server.memory.tags == set()


@pytest.mark.parametrize("kind", [Vllm033, Vllm024, Sglang0523])
def test_requests_in_flight_are_cut_off_where_that_is_wanted(kind: Any, shared: Path, started: list[StandIn]) -> None:
    job = start(kind, shared, started, in_flight="abort")
    with job.rolling_out():
        job.server.in_flight = 3
    assert job.server.aborted == 3
    assert job.server.memory.tags == set()
