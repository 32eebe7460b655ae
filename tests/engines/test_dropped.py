"""An engine that a suspension drops: it sleeps without a copy of its weights on the host, and needs
a weight sync before it generates again."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from placement import EngineError, GroupError, Manager, PhaseError
from placement.engines import Follower
from placement.engines.mirror import PLACEMENT
from placement.engines.vllm import VllmServer
from placement.observe.discovery import ask
from placement.testing import SimulatedDevice, assert_nothing_resident
from tests.engines.conftest import Job, Start, beside, publish
from tests.engines.standin import CAPACITY, CHUNK, TAG_BYTES, Sglang0523, Vllm024, Vllm033
from tests.group.manager_ranks import groups_of
from tests.support.threads import on_all, until

every_vllm = pytest.mark.parametrize("kind", [Vllm033, Vllm024])
SLEEP = {level: f"POST /sleep?level={level}&mode=wait" for level in (1, 2)}


def sleeps_of(job: Job) -> list[str]:
    return [sent for sent in job.server.sent if sent.startswith("POST /sleep")]


@every_vllm
def test_host_memory_is_given_back_and_a_sync_brings_the_weights(kind: Any, start: Start) -> None:
    job = start(kind, weights="keep")
    assert job.step() == "actor"
    assert job.handle.host_bytes == TAG_BYTES["weights"]
    free_bytes = job.device.memory().free_bytes
    status = job.manager.suspend(drop=["rollout"])
    assert (status.suspended, status.resident_bytes) == (True, 0)
    assert job.device.memory().free_bytes == free_bytes
    assert job.server.host_copy is None  # type: ignore[attr-defined]
    assert (job.handle.host_bytes, job.handle.storage.mirror_bytes) == (0, TAG_BYTES["weights"])
    assert sleeps_of(job)[-1] == SLEEP[2]
    job.manager.resume()
    loaded_bytes = job.handle.counters.loaded_bytes
    with pytest.raises(EngineError, match=r"mean nothing now, .*: they were discarded"):
        job.manager.phase("rollout").__enter__()
    assert job.step() == "actor"
    assert job.handle.counters.loaded_bytes == loaded_bytes  # none came from the host
    assert sleeps_of(job)[-1] == SLEEP[1]  # afterwards they are kept as before
    assert job.server.host_copy == "actor"  # type: ignore[attr-defined]
    with job.manager.phase("rollout"):
        assert job.server.generate() == "actor"


def test_over_http(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLACEMENT_CONTROL_TOKEN", "a-token")
    job = start(Vllm033, weights="keep")
    job.step()
    server = job.manager.serve()
    ask(f"{server.url}/suspend", post=b'{"drop": ["rollout"]}', token="a-token", timeout_seconds=60)
    assert job.handle.host_bytes == 0
    ask(f"{server.url}/resume", post=b"{}", token="a-token", timeout_seconds=60)
    assert job.step() == "actor"
    job.manager.close()


def test_what_was_dropped_does_not_wake_again(start: Start) -> None:
    job = start(Vllm033, weights="keep")
    job.step()
    for _ in range(2):
        job.manager.suspend(drop=["rollout"])
        job.manager.resume()
    assert sleeps_of(job).count(SLEEP[2]) == 1


def test_it_leaves_with_what_else_is_on_the_device(start: Start) -> None:
    """It comes back only when everything else has left."""
    job = start(Vllm033, weights="keep", manager={"policy": "resident"})
    job.step()
    large = torch.nn.Linear(1, job.device.memory().free_bytes // 10)
    ref = job.manager.register("ref", large, role="ref", readonly=True)
    assert job.actor.is_on_device
    assert ref.is_on_device
    job.manager.suspend(drop=[job.handle])
    assert_nothing_resident(job.manager)
    assert job.server.memory.tags == set()
    assert job.handle.host_bytes == 0
    job.manager.resume()
    job.manager.unregister("ref")
    assert job.step() == "actor"


@pytest.mark.parametrize("kind", [Vllm033, Sglang0523])
def test_an_engine_that_keeps_no_copy_is_dropped_already(kind: Any, start: Start) -> None:
    job = start(kind, weights="discard")
    job.step()
    sent = [*job.server.sent]
    assert job.manager.suspend(drop=["rollout"]).suspended
    assert job.server.sent == sent
    job.manager.resume()
    assert job.step() == "actor"


class PluggedVllm(Vllm033):
    """With placement's plug-in, which has other bytes on the host at both levels."""

    def workers(self, method: str) -> list[Any]:
        return [{PLACEMENT: {"host_bytes": CHUNK, "is_spoilt": False}}]


def test_an_engine_with_other_bytes_on_the_host_goes_on_discarding_its_weights(
    start: Start,
) -> None:
    job = start(PluggedVllm, weights="discard")
    job.step()
    sent = [*job.server.sent]
    job.manager.suspend(drop=["rollout"])
    assert job.server.sent == sent
    job.manager.resume()
    assert job.step() == "actor"
    assert {*sleeps_of(job)} == {SLEEP[2]}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("actor", "drop: 'actor' is no engine whose weights a sync brings again"),
        ("adam", "drop: 'adam' is no engine"),
        ("rollout", "drop: 'rollout' is no engine whose weights a sync brings"),
        ("rolout", "drop: no handle 'rolout', did you mean 'rollout'"),
    ],
)
def test_other_names_are_refused_before_anything_moves(
    name: str, message: str, start: Start
) -> None:
    """SGLang keeps its weights or not, as its server was started. The open phase is not waited
    for."""
    job = start(Sglang0523, weights="keep")
    job.step()
    with job.manager.phase("train"):
        asking = ThreadPoolExecutor(1).submit(job.manager.suspend, 3600.0, drop=[name])
        with pytest.raises(PhaseError, match=message):
            asking.result(30)
        assert job.actor.is_on_device
    assert not job.manager.snapshot().suspended
    assert job.step() == "actor"


def test_an_engine_that_cannot_wake_refuses_it(start: Start) -> None:
    job = start(Vllm033, weights="keep")
    job.step()
    job.server.failing["/wake_up"] = (500, "out of memory")
    with pytest.raises(PhaseError, match="out of memory"):
        job.manager.suspend(drop=["rollout"])
    assert not job.manager.snapshot().suspended
    job.server.failing.clear()
    assert job.step() == "actor"
    assert job.manager.suspend(drop=["rollout"]).suspended
    job.manager.resume()


def test_a_suspension_that_has_dropped_less_is_no_answer(start: Start) -> None:
    job = start(Vllm033, weights="keep")
    job.step()
    job.manager.suspend()
    refusal = "another one cannot begin: the last one, 1, dropped nothing and is on"
    with pytest.raises(PhaseError, match=refusal):
        job.manager.suspend(drop=["rollout"])
    job.manager.resume()
    assert job.manager.suspend(drop=["rollout"]).epoch == 2
    assert job.manager.suspend(drop=["rollout"]).epoch == job.manager.suspend().epoch == 2


def test_a_dropped_engine_waits_for_its_turn(shared: Path, tmp_path: Path) -> None:
    """It comes back to the device for a moment, which is another process's."""
    server = Vllm033(shared)
    engine = VllmServer(server.url, weights="keep", deadline_seconds=5.0)
    settings: Any = {"turns": str(tmp_path / "turns"), "turn_deadline_seconds": 0.1}
    manager, _, handle = beside(engine, shared, **settings)
    other = Manager(
        device=SimulatedDevice(CAPACITY, chunk_bytes=CHUNK, shared_with=shared), **settings
    )
    with other.phase("train"), pytest.raises(PhaseError, match=r"waited 0\.1 s for its turn"):
        manager.suspend(drop=["rollout"])
    assert manager.suspend(drop=["rollout"]).suspended
    assert handle.host_bytes == 0
    with other.phase("train"):  # it has given its turn back
        pass
    manager.close()
    other.close()
    server.close()


def test_all_ranks_of_an_engine_drop_it(shared: Path) -> None:
    server = Vllm033(shared)
    engine = VllmServer(
        server.url,
        weights="keep",
        deadline_seconds=5.0,
        send=lambda _: setattr(server, "weights", "actor"),
    )
    groups = groups_of(2)
    ranks = [
        beside(engine, shared, group=groups[0], policy="resident"),
        beside(Follower(weights="keep"), shared.with_name("other"), group=groups[1]),
    ]

    def step(rank: Any) -> None:
        manager, actor, handle = rank
        with manager.phase("weight_sync") as phases:
            publish(actor, handle.object)
            phases.switch("rollout")

    on_all(ranks, step)
    other = ranks[1][0]
    with ThreadPoolExecutor(3) as pool:
        asking = pool.submit(other.suspend, 30.0, drop=["rollout"])
        until(lambda: other._stack.suspension.asked)
        entering = [pool.submit(manager.phase("rollout").__enter__) for manager, *_ in ranks]
        assert asking.result(30).suspended
        assert server.host_copy is None
        assert [handle.host_bytes for *_, handle in ranks] == [0, 0]
        other.resume()
        for future in entering:
            with pytest.raises(GroupError, match="mean nothing now"):
                future.result(30)
    on_all(ranks, step)
    assert server.weights == "actor" or server.host_copy == "actor"
    for manager, *_ in ranks:
        manager.close()
    server.close()
    assert server.accidents == []
