"""A manager with an actor beside a server of an engine, on one simulated device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from placement import Handle, Manager
from placement.engines.sglang import SglangServer
from placement.engines.tagged import TaggedEngine
from placement.engines.vllm import VllmServer
from placement.testing import SimulatedDevice
from tests.engines.standin import CAPACITY, CHUNK, StandIn, Vllm033


class Job:
    """An actor, its optimizer, and an engine whose server is a stand-in."""

    def __init__(self, server: StandIn, shared: Path, **options: Any) -> None:
        self.server = server
        self.device = SimulatedDevice(CAPACITY, chunk_bytes=CHUNK, shared_with=shared)
        self.manager = Manager(device=self.device, **options.pop("manager", {}))
        self.module = torch.nn.Linear(64, 64)
        self.adam = torch.optim.SGD(self.module.parameters(), lr=0.1, momentum=0.9)
        self.actor = self.manager.register("actor", self.module, role="actor")
        self.manager.register("adam", self.adam)
        kind = VllmServer if isinstance(server, Vllm033) else SglangServer
        options = {"deadline_seconds": 5.0, "send": self.send} | options
        if kind is SglangServer:
            options = {"tags": ("weights", "kv_cache", "cuda_graph")} | options
        self.engine: TaggedEngine = kind(server.url, **options)
        self.received: list[str] = []
        self.handle: Any = None

    def send(self, bucket: Any) -> None:
        if self.server.memory.is_moving and "weights" not in self.server.memory.tags:
            self.server.accidents.append("weights written to memory that was given away")
        self.received += [name for name, _ in bucket]
        self.server.weights = "actor"

    def register(self) -> Handle:
        self.handle = self.manager.register("rollout", self.engine, role="rollout")
        return self.handle

    def publish(self, bucket_bytes: int = 1 << 14) -> None:
        publish(self.actor, self.engine, bucket_bytes)

    @contextmanager
    def rolling_out(self) -> Iterator[Any]:
        with self.manager.phase("weight_sync") as step:
            self.publish()
            step.switch("rollout")
            yield step

    def step(self) -> str:
        with self.rolling_out():
            return self.server.generate()


def publish(actor: Any, engine: TaggedEngine, bucket_bytes: int = 1) -> None:
    for bucket in actor.weights(bucket_bytes=bucket_bytes):
        engine.update_weights(bucket)


def beside(engine: Any, shared: Path, **options: Any) -> tuple[Manager, Any, Any]:
    """A manager with an actor and an engine on one simulated device, and the handles of both."""
    manager = Manager(
        device=SimulatedDevice(CAPACITY, chunk_bytes=CHUNK, shared_with=shared), **options
    )
    module = torch.nn.Linear(64, 64)
    actor = manager.register("actor", module, role="actor")
    manager.module = module  # type: ignore[attr-defined] # a handle keeps no model alive
    return manager, actor, manager.register("rollout", engine, role="rollout")


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    return tmp_path / "capacity"


Start = Callable[..., Job]


@pytest.fixture
def unregistered(shared: Path) -> Iterator[Start]:
    """Starts a server of a kind, and makes a job beside it. `at`: the name of another device."""
    servers: list[StandIn] = []

    def begin(kind: Any, weights: str = "discard", at: str = "capacity", **options: Any) -> Job:
        is_vllm = isinstance(kind, type) and issubclass(kind, Vllm033)
        place = shared.with_name(at)
        servers.append(kind(place) if is_vllm else kind(place, keeps_weights=weights == "keep"))
        return Job(servers[-1], place, **({"weights": weights} if is_vllm else {}), **options)

    yield begin
    for server in servers:
        server.close()
        assert server.accidents == []


@pytest.fixture
def start(unregistered: Start) -> Start:
    def begin(*which: Any, **options: Any) -> Job:
        job = unregistered(*which, **options)
        job.register()
        return job

    return begin
