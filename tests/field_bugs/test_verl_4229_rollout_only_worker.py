"""volcengine/verl#4229: a worker that only generates held a full copy of the trainer, and the
engine did not find its memory.

`worker_role="rollout"` with the policy `async_rollout`, and the trainer registered as `Lazy`: its
factories are never called. Every public call works on what was never built. How much that saves:
`bench/rollout_only.py`, which tests/project/test_bench.py runs.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import placement
from placement import Lazy, Manager, NotResidentError, PhaseError, State
from placement.testing import SimulatedDevice, assert_nothing_resident
from tests.support.worker import batch, net

TRAINER = ("actor", "ref", "critic", "reward", "teacher", "actor.optimizer", "critic.optimizer")


def never() -> Any:
    raise AssertionError("a rollout-only worker has built a trainer's object")


@pytest.fixture
def manager() -> Manager:
    made = Manager(device=SimulatedDevice(64 << 20), policy="async_rollout", worker_role="rollout")
    for role in ("actor", "ref", "critic", "reward", "teacher"):
        made.register(role, Lazy(never), role=role, readonly=role in ("ref", "reward", "teacher"))
    for owner in ("actor", "critic"):
        made.register(f"{owner}.optimizer", Lazy(never, kind="optimizer"), owner=owner)
    return made


@pytest.fixture
def engine(manager: Manager) -> torch.nn.Module:
    module = net()
    manager.register("rollout", module, role="rollout")
    return module


def assert_unbuilt(manager: Manager) -> None:
    for name in TRAINER:
        handle = manager.handles[name]
        assert (handle.state, handle.is_built, handle.object) == (State.CPU_OFFLOADED, False, None)
        assert (handle.resident_bytes, handle.num_bytes, handle.host_bytes) == (0, 0, 0)


def test_no_phase_builds_the_trainer_and_the_engine_works(
    manager: Manager, engine: torch.nn.Module
) -> None:
    wanted = engine(batch())
    rollout = manager.handles["rollout"]
    for _ in range(2):
        for name in placement.PHASES:
            with manager.phase(name) as phase:
                for keep in ("actor", "actor.optimizer"):
                    phase.keep(manager.handles[keep])
                assert_unbuilt(manager)
        with manager.phase("rollout") as step:
            assert torch.equal(engine(batch()), wanted)
            for name in placement.PHASES:
                step.switch(name)
            step.switch("train", only=["actor", "ref"])
            step.switch("weight_sync", only=["rollout"])
    assert_unbuilt(manager)
    assert rollout.host_bytes == manager.snapshot().model_dump()["handles"][-1]["host_bytes"] > 0
    assert sum(handle.host_bytes for handle in manager.handles.values()) == rollout.host_bytes
    assert_nothing_resident(manager, except_for=["rollout"])


def test_every_public_call_on_what_was_never_built(
    manager: Manager, engine: torch.nn.Module, tmp_path: Any
) -> None:
    for name in TRAINER:
        handle = manager.handles[name]
        assert handle.kind == ("optimizer" if name.endswith("optimizer") else "module")
        assert handle.role == name.split(".")[0] or name.endswith("optimizer")
        assert (handle.external, handle.external_reason, handle.broken) == (False, None, None)
        assert handle.weights_info() == []
        with pytest.raises(PhaseError, match="CPU_OFFLOADED"):
            handle.weights()
        with pytest.raises(NotResidentError, match="is not built yet"):
            handle.state_dict()
        assert name in repr(handle)
    manager.check_integrity()
    audit = manager.audit()
    assert audit.ok, audit.report
    assert all(name in audit.report for name in TRAINER)
    snapshot = json.loads(manager.snapshot().model_dump_json())
    assert {handle["name"]: handle["built"] for handle in snapshot["handles"]} == {
        **dict.fromkeys(TRAINER, False),
        "rollout": True,
    }
    with manager.serve() as server:
        import urllib.request

        with urllib.request.urlopen(f"{server.url}/metrics", timeout=10) as answer:
            metrics = answer.read().decode()
    assert 'placement_resident_bytes{handle="actor",kind="module",memory="host"} 0.0' in metrics
    for name in reversed(TRAINER):
        manager.unregister(name)
    assert list(manager.handles) == ["rollout"]
    manager.close()
