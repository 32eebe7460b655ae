"""What kills an SGLang server, and must not happen: each trap, against a stand-in that dies of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from placement import EngineError, EngineLost, State
from placement.testing import assert_nothing_resident
from tests.engines.conftest import Job
from tests.engines.standin import StandIn
from tests.engines.standin_sglang import Sglang0523, Sglang059
from tests.engines.test_choreography import start

every_sglang = pytest.mark.parametrize("kind", [Sglang0523, Sglang059])
ALL = {"weights", "kv_cache", "cuda_graph"}


@every_sglang
def test_what_is_sent_for_one_step(kind: Any, shared: Path, started: list[StandIn]) -> None:
    job = start(kind, shared, started)
    pause = 'POST /pause_generation {"mode": "abort"}'
    release = 'POST /release_memory_occupation {"tags": ["cuda_graph", "kv_cache", "weights"]}'
    assert job.server.sent == [pause, release]
    job.server.sent.clear()
    job.step()
    assert job.server.sent == [
        'POST /resume_memory_occupation {"tags": ["weights"]}',
        'POST /resume_memory_occupation {"tags": ["kv_cache"]}',
        'POST /resume_memory_occupation {"tags": ["cuda_graph"]}',
        "POST /continue_generation {}",
        pause,
        release,
    ]
    with job.manager.phase("weight_sync"):
        job.publish()
        assert job.server.is_paused  # until every tag is back: a prefill in between would touch memory that was given away (sglang#24123)
    assert job.server.sent[-1] == 'POST /release_memory_occupation {"tags": ["weights"]}'


def test_without_its_memory_saver(shared: Path, started: list[StandIn]) -> None:
    server = Sglang0523(shared, has_saver=False)
    started.append(server)
    job = Job(server, shared)
    with pytest.raises(EngineError, match="--enable-memory-saver"):
        job.register()
    assert server.sent == []


def test_a_server_that_was_restarted_has_released_nothing(shared: Path, started: list[StandIn]) -> None:
    job = start(Sglang0523, shared, started)
    job.server.restart()  # type: ignore[attr-defined]
    sent = [*job.server.sent]
    with pytest.raises(EngineLost, match="was restarted since it was registered"):
        job.manager.phase("weight_sync").__enter__()
    assert job.server.sent == sent
    assert job.handle.broken is not None
    job.engine.assume(offloaded=[])
    assert job.step() == "actor"
    assert job.server.memory.tags == set()


def test_the_trainer_goes_on_without_a_server_that_has_ended(shared: Path, started: list[StandIn]) -> None:
    """What it held is free, and nobody can be asked. It never comes back under this registration, whoever answers at its address."""
    job = start(Sglang0523, shared, started)
    with job.rolling_out() as step:
        job.server.is_dead = True
        with pytest.raises(EngineLost):
            step.switch("train")
        assert job.handle.broken is not None
        job.engine.assume(offloaded=ALL)
        step.switch("train")
        assert job.handle.state is State.CPU_OFFLOADED
    with pytest.raises(EngineError, match=r"nobody answers there|connection broke"):
        job.manager.phase("weight_sync").__enter__()
    job.server.is_dead = False
    job.server.restart()  # type: ignore[attr-defined]
    with pytest.raises(EngineLost, match="was restarted since it was registered"):
        job.manager.phase("weight_sync").__enter__()
    job.engine.assume(offloaded=ALL)
    job.manager.unregister("rollout")
    with job.manager.phase("log_prob"):
        assert job.manager.handles["actor"].state is State.GPU_RESIDENT
    assert_nothing_resident(job.manager)


@pytest.mark.parametrize("route", ["/release_memory_occupation", "/resume_memory_occupation"])
@pytest.mark.parametrize("trap", ["500", "hang"])
def test_no_answer_that_tells_what_happened(route: str, trap: str, shared: Path, started: list[StandIn]) -> None:
    job = start(Sglang0523, shared, started, deadline_seconds=0.2)
    with job.manager.phase("weight_sync") as step:
        job.publish()
        is_release = route.startswith("/release")
        if is_release:
            step.switch("rollout")
        if trap == "hang":
            job.server.hanging.add(route)
        else:
            job.server.failing[route] = 500, "Internal Server Error"
        with pytest.raises(EngineLost, match="is not known"):
            step.switch("train" if is_release else "rollout")
        job.server.hanging.clear()
        job.server.failing.clear()
        sent = [*job.server.sent]
        with pytest.raises(Exception, match="broken"):
            step.switch("reward")
        assert job.server.sent == sent  # it is never told anything again, until somebody knows what is the case
        assert job.handle.broken is not None
        job.engine.assume(offloaded=sorted(ALL - job.server.memory.tags))
    assert_nothing_resident(job.manager)
    assert job.server.memory.tags == set()


def test_a_refusal_changes_nothing(shared: Path, started: list[StandIn]) -> None:
    job = start(Sglang0523, shared, started)
    with job.rolling_out() as step:
        job.server.failing["/release_memory_occupation"] = 400, {"error": {"message": "no"}}
        with pytest.raises(EngineError, match=r"answered with 400 .*'no'|answered with 400"):
            step.switch("train")
        assert (job.handle.state, job.handle.broken) == (State.GPU_RESIDENT, None)
        assert not job.server.is_paused
        del job.server.failing["/release_memory_occupation"]
        step.switch("train")
    assert job.server.memory.tags == set()
