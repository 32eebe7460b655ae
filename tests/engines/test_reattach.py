"""A server that was restarted comes back in the state in which it is found, and not in the one that
was recorded."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from placement import (
    BrokenHandleError,
    DeviceMemoryError,
    EngineError,
    EngineLost,
    PhaseError,
    State,
)
from placement.testing import assert_nothing_resident
from tests.engines.conftest import Start
from tests.engines.standin import Sglang0523, Sglang059, Vllm024, Vllm033
from tests.support.sweeps import few

every_server = pytest.mark.parametrize(
    "kind", few([Vllm033, Vllm024, Sglang0523], Vllm033, Sglang0523)
)
ON_RESTART = "was restarted; on the device: ["


@every_server
def test_it_is_taken_back_by_the_next_phase(
    kind: Any, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    job = start(kind)
    with job.rolling_out() as step:
        job.server.is_dead = True
        with pytest.raises(EngineLost):
            step.switch("train")
        job.server.restart()  # type: ignore[attr-defined]
        everything = {*job.engine.residency.tags}
        assert job.server.memory.tags == everything
        with caplog.at_level(logging.INFO, logger="placement"):
            step.switch("train")  # which wants it off the device
        assert ON_RESTART in caplog.text
        assert (job.handle.broken, job.handle.state) == (None, State.CPU_OFFLOADED)
        assert job.server.memory.tags == set()
        assert job.actor.state is State.TRAINING
        with pytest.raises(EngineError, match="mean nothing now"):
            step.switch("rollout")  # it has the weights of its disk
        step.switch("weight_sync")
        job.publish()
        step.switch("rollout")
        assert job.server.generate() == "actor"
    assert_nothing_resident(job.manager)
    job.manager.check_integrity()


@every_server
def test_it_was_off_the_device_and_is_on_it_now(kind: Any, start: Start) -> None:
    """The load finds out, and the next one goes on from what is there."""
    job = start(kind)
    assert job.server.memory.tags == set()
    job.server.restart()  # type: ignore[attr-defined]
    with pytest.raises(EngineLost, match="restarted"):
        job.manager.phase("weight_sync").__enter__()
    with job.manager.phase("weight_sync") as step:
        assert job.server.memory.tags == {"weights"}  # the rest has left
        job.publish()
        step.switch("rollout")
        assert job.server.generate() == "actor"
    assert job.server.memory.tags == set()


@every_server
def test_the_same_process_is_not_taken_back(kind: Any, start: Start) -> None:
    """It may have done half of what it was told, and does not say so."""
    job = start(kind)
    with job.rolling_out() as step:
        job.server.is_dead = True
        with pytest.raises(EngineLost):
            step.switch("train")
        job.server.is_dead = False
        sent = [*job.server.sent]
        for _ in range(2):
            with pytest.raises(BrokenHandleError, match="Restart the engine"):
                step.switch("train")
        assert job.server.sent == sent
        with pytest.raises(EngineError, match="was not restarted"):
            job.engine.reattach()
        job.engine.assume(offloaded=sorted({*job.engine.residency.tags} - job.server.memory.tags))
    assert_nothing_resident(job.manager)


@pytest.mark.parametrize("kind", [Vllm033, Sglang059])
def test_one_that_does_not_say_when_it_was_started_was_seen_to_end(kind: Any, start: Start) -> None:
    """The port refused in between: whoever answers now is another process."""
    job = start(kind)
    if kind is Vllm033:
        job.server.started = None  # type: ignore[attr-defined]
        job.manager.unregister("rollout")
        job.register()
    with job.rolling_out() as step:
        job.server.end()
        with pytest.raises(EngineLost, match="nobody answers there"):
            step.switch("train")
        with pytest.raises(BrokenHandleError):
            step.switch("train")  # nobody answers yet
        job.server.listen(job.server.port)
        job.server.restart()  # type: ignore[attr-defined]
        step.switch("train")
        assert job.server.memory.tags == set()
    assert job.step() == "actor"


def test_by_hand_and_asleep(start: Start) -> None:
    """Another program has put the new server to sleep."""
    job = start(Vllm033)
    with job.rolling_out() as step:
        job.server.is_dead = True
        with pytest.raises(EngineLost):
            step.switch("train")
        job.server.restart()  # type: ignore[attr-defined]
        job.server.executor_sleep(1)  # type: ignore[attr-defined]
        job.engine.reattach()
        assert job.engine.residency.resident_tags == frozenset()
        assert job.engine.needs_weights
        step.switch("train")
        assert (job.handle.broken, job.handle.state) == (None, State.CPU_OFFLOADED)
    assert job.step() == "actor"


def test_a_server_that_hangs_holds_no_phase(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("placement.engines.http._ANSWER_SECONDS", 0.05)
    job = start(Vllm033, deadline_seconds=1000.0)
    with job.rolling_out() as step:
        job.server.is_dead = True
        with pytest.raises(EngineLost):
            step.switch("train")
        job.server.is_dead = False
        job.server.hanging.add("/metrics")
        with pytest.raises(BrokenHandleError):
            step.switch("train")
        job.server.hanging.clear()
        job.engine.assume(offloaded=[])
    assert job.server.memory.tags == set()


def test_a_suspension_asks_an_engine_that_was_off_the_device(start: Start) -> None:
    """It was restarted meanwhile, and the other process would find its memory taken."""
    job = start(Vllm033)
    free_bytes = job.device.memory().free_bytes
    job.server.restart()  # type: ignore[attr-defined]
    assert job.device.memory().free_bytes < free_bytes
    assert job.manager.suspend().suspended
    assert job.server.memory.tags == set()
    assert job.device.memory().free_bytes == free_bytes
    job.manager.resume()
    assert job.step() == "actor"


def test_a_suspension_is_refused_while_an_engine_is_lost(start: Start) -> None:
    job = start(Vllm033)
    with pytest.raises(EngineLost), job.rolling_out():
        job.server.is_dead = True
    with pytest.raises(PhaseError, match="'rollout' is broken and cannot offload"):
        job.manager.suspend()
    job.server.is_dead = False
    job.server.restart()  # type: ignore[attr-defined]
    assert job.manager.suspend().suspended
    assert job.server.memory.tags == set()


def test_memory_that_a_restarted_engine_has_is_named_and_given_back(start: Start) -> None:
    """It was off the device, so that its memory counts as that of others, and the plan does not
    fit."""
    job = start(Vllm033)
    whole_bytes = job.device.memory().free_bytes
    job.server.restart()  # type: ignore[attr-defined]
    large = torch.nn.Linear(1, whole_bytes * 6 // 80)  # six tenths of what was free
    job.manager.register("ref", large, role="ref", readonly=True)
    with pytest.raises(DeviceMemoryError) as caught:
        job.manager.phase("ref_log_prob").__enter__()
    assert "engine 'rollout' was restarted" in caught.value.__notes__[-1]
    assert job.server.memory.tags == set()
    with job.manager.phase("ref_log_prob"):
        pass
