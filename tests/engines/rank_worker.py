"""An engine that spans the devices of two ranks, led by rank 0: what the tests of ranks call."""

from __future__ import annotations

import random
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from placement import EngineError, GroupError, Manager, Plan
from placement.core.errors import DeviceMemoryError
from placement.devices.memory import Chunk
from placement.engines import Follower, TaggedEngine
from placement.group import StoreGroup
from placement.group.protocol import Reached, Stage
from placement.testing import SimulatedDevice, assert_nothing_resident

CHUNK = 4096
CAPACITY = 32 * CHUNK
"""Of each rank's device: the actor and its optimizer take 9 to 26 chunks of it, the engine 28."""
TAGS = {"weights": 2 * CHUNK, "kv_cache": 26 * CHUNK}


class Spanning(TaggedEngine):
    """One engine on both devices, as tensor parallelism makes it: it fails wholly where one device has no room."""

    def __init__(self, folder: str) -> None:
        super().__init__(tag_bytes=TAGS, weights="discard")
        self._devices = [SimulatedDevice(CAPACITY, chunk_bytes=CHUNK, shared_with=Path(folder) / f"device{rank}") for rank in (0, 1)]
        self._chunks: dict[str, list[tuple[SimulatedDevice, Chunk]]] = {}
        self.failing = 0
        self._take("weights")
        self._take("kv_cache")

    def _take(self, tag: str) -> None:
        taken = self._chunks[tag] = []
        for device in self._devices:
            taken += [(device, device.create(CHUNK)) for _ in range(TAGS[tag] // CHUNK)]

    def drain(self) -> None:
        pass

    def admit(self) -> None:
        pass

    def offload(self, tags: Collection[str]) -> None:
        for tag in tags:
            for device, chunk in self._chunks.pop(tag):
                device.release(chunk)

    def load(self, tags: Collection[str]) -> None:
        if self.failing:
            self.failing -= 1
            raise EngineError("out of memory in rank 1's worker")
        for tag in tags:
            try:
                self._take(tag)
            except DeviceMemoryError as error:
                raise EngineError(f"no memory for {tag}: {error}") from error

    def receive(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> None:
        pass


class Slow(StoreGroup):
    """A rank that learns of each decision late: what it gives to the driver after it comes late as well."""

    def agree(self, plan: Plan, stage: Stage = "moved", lacks_engines: bool = False) -> Reached:
        reached = super().agree(plan, stage, lacks_engines)
        time.sleep(0.03)  # longer than the other rank needs to be ahead, if it were let
        return reached


class EngineRank:
    """A rank with its actor."""

    def __init__(self, folder: str, generation: int) -> None:
        rank = dist.get_rank()
        store = dist.distributed_c10d._get_default_store()
        group = (StoreGroup if rank == 0 else Slow)(store, rank, dist.get_world_size(), 10.0, generation=generation)
        self.engine = Spanning(folder) if rank == 0 else Follower(tag_bytes=TAGS)
        dist.barrier()
        device = SimulatedDevice(CAPACITY, chunk_bytes=CHUNK, shared_with=Path(folder) / f"device{rank}")
        self.manager = Manager(device=device, group=group, budget_bytes=CAPACITY)
        self.handle = self.manager.register("rollout", self.engine, role="rollout")
        dist.barrier()  # the engine is off both devices
        self.module = torch.nn.Linear(128, 64)
        self.adam = torch.optim.SGD(self.module.parameters(), lr=0.1, momentum=0.9)
        self.actor = self.manager.register("actor", self.module, role="actor")
        self.manager.register("adam", self.adam)
        self.uneven = random.Random(rank)

    def late(self) -> None:
        """Ranks come to a phase transition at different times."""
        time.sleep(self.uneven.uniform(0, 0.03))

    def step(self) -> None:
        with self.manager.phase("train") as step:
            self.module(torch.ones(2, 128)).square().mean().backward()
            self.adam.step()
            self.adam.zero_grad()
            self.late()
            step.switch("weight_sync")
            for bucket in self.actor.weights(bucket_bytes=1 << 14):
                self.engine.update_weights(bucket)
            self.late()
            step.switch("rollout")
            self.late()
            step.switch("train")
            self.late()
            step.switch("log_prob")


def steps_together(folder: str, generation: int) -> Any:
    worker = EngineRank(folder, generation)
    for _ in range(4):
        worker.step()
    assert_nothing_resident(worker.manager)
    return worker.handle.counters.transitions.total()


def engine_fails_to_load(folder: str, generation: int) -> Any:
    """The leader's engine has no memory for its cache: nobody enters the rollout, and the next one succeeds."""
    worker = EngineRank(folder, generation)
    told: dict[int, str] = {}
    with worker.manager.phase("weight_sync") as step:
        for bucket in worker.actor.weights(bucket_bytes=1 << 14):
            worker.engine.update_weights(bucket)
        if isinstance(worker.engine, Spanning):
            worker.engine.failing = 1
        try:
            step.switch("rollout")
        except GroupError as error:
            told = dict(error.failures)
        name = step.name
    assert_nothing_resident(worker.manager)
    worker.step()
    return told, name
