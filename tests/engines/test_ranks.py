"""One engine over the devices of two ranks: it comes when every rank's actor is off, and every
rank's actor comes when it is off."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from placement import EngineError, GroupError, Manager, Plan
from placement.core.errors import DeviceMemoryError
from placement.devices.memory import Chunk
from placement.engines import Follower, TaggedEngine
from placement.group import StoreGroup
from placement.group.protocol import Decision, Stage
from placement.testing import SimulatedDevice, assert_nothing_resident
from tests.support.threads import on_all

CHUNK = 4096
CAPACITY = 32 * CHUNK
"""Of each rank's device: the actor and its optimizer take 9 to 26 chunks of it, the engine 28."""
TAGS = {"weights": 2 * CHUNK, "kv_cache": 26 * CHUNK}


class Spanning(TaggedEngine):
    """One engine on both devices, as tensor parallelism makes it: it fails wholly where one device
    has no room."""

    def __init__(self, folder: str) -> None:
        super().__init__(tag_bytes=TAGS, weights="discard")
        self._devices = [
            SimulatedDevice(CAPACITY, chunk_bytes=CHUNK, shared_with=Path(folder) / f"device{rank}")
            for rank in (0, 1)
        ]
        self._chunks: dict[str, list[tuple[SimulatedDevice, Chunk]]] = {}
        self.failing = 0
        self._take("weights")
        self._take("kv_cache")

    def _take(self, tag: str) -> None:
        taken = self._chunks[tag] = []
        for device in self._devices:
            taken.append((device, device.create(TAGS[tag])))

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
    """A rank that learns of each decision late: what it gives to the driver after it comes late as
    well."""

    def agree(self, plan: Plan, stage: Stage = "moved", lacks_engines: bool = False) -> Decision:
        reached = super().agree(plan, stage, lacks_engines)
        time.sleep(0.03)  # longer than the other rank needs to be ahead, if it were let
        return reached


class EngineRank:
    """A rank with its actor, as a thread. Rank 0 leads the engine."""

    def __init__(
        self,
        folder: Path,
        store: dist.Store,
        barrier: threading.Barrier,
        rank: int,
        second: type[StoreGroup] = Slow,
    ) -> None:
        self.engine = Spanning(str(folder)) if rank == 0 else Follower(tag_bytes=TAGS)
        barrier.wait()
        device = SimulatedDevice(CAPACITY, chunk_bytes=CHUNK, shared_with=folder / f"device{rank}")
        self.manager = Manager(
            device=device,
            group=(StoreGroup if rank == 0 else second)(store, rank, 2, 10.0),
            budget_bytes=CAPACITY,
        )
        self.handle = self.manager.register("rollout", self.engine, role="rollout")
        barrier.wait()  # the engine is off both devices
        self.module = torch.nn.Linear(128, 64)
        self.adam = torch.optim.SGD(self.module.parameters(), lr=0.1, momentum=0.9)
        self.actor = self.manager.register("actor", self.module, role="actor")
        self.manager.register("adam", self.adam)
        self.uneven = random.Random(rank)

    def late(self) -> None:
        """Ranks come to a phase transition at different times."""
        time.sleep(self.uneven.uniform(0, 0.03))

    def publish(self) -> None:
        for bucket in self.actor.weights(bucket_bytes=1 << 14):
            self.engine.update_weights(bucket)

    def step(self) -> None:
        with self.manager.phase("train") as step:
            self.module(torch.ones(2, 128)).square().mean().backward()
            self.adam.step()
            self.adam.zero_grad()
            self.late()
            step.switch("weight_sync")
            self.publish()
            for phase in ("rollout", "train", "log_prob"):
                self.late()
                step.switch(phase)


def on_both(folder: Path, body: Callable[[EngineRank], Any]) -> list[Any]:
    store, barrier = dist.HashStore(), threading.Barrier(2)
    return on_all(range(2), lambda rank: body(EngineRank(folder, store, barrier, rank)))


def test_the_engine_comes_only_when_every_rank_has_returned_its_memory(tmp_path: Path) -> None:
    """Rank 1 goes on from the proposal to load engines when the engine has answered."""
    has_answered = threading.Event()

    class Held(StoreGroup):
        def propose(self, action: str, *args: Any, **keywords: Any) -> Any:
            basis = super().propose(action, *args, **keywords)
            if action == "load engines":
                has_answered.wait(10)
            return basis

    def load(engine: Spanning, tags: Collection[str]) -> None:
        try:
            Spanning.load(engine, tags)
        finally:
            has_answered.set()

    store, barrier = dist.HashStore(), threading.Barrier(2)

    def publish_and_roll_out(number: int) -> frozenset[str]:
        rank = EngineRank(tmp_path, store, barrier, number, Held)
        if isinstance(rank.engine, Spanning):
            rank.engine.load = partial(load, rank.engine)  # type: ignore[method-assign]
        with rank.manager.phase("weight_sync") as step:
            rank.publish()
            has_answered.clear()
            step.switch("rollout")
            return rank.handle.storage.resident_tags

    assert on_all(range(2), publish_and_roll_out) == [frozenset(TAGS)] * 2


def test_no_rank_is_ahead_of_the_engine(tmp_path: Path) -> None:
    def steps_together(rank: EngineRank) -> int:
        for _ in range(2):
            rank.step()
        assert_nothing_resident(rank.manager)
        return rank.handle.counters.transitions.total()

    # it begins on the device, and comes and goes twice
    assert on_both(tmp_path, steps_together) == [6, 6]


def test_an_engine_that_cannot_be_loaded_is_everybodys(tmp_path: Path) -> None:
    """The leader's engine has no memory for its cache: nobody enters the rollout, and the next one
    succeeds."""

    def fails_to_load(rank: EngineRank) -> Any:
        told: dict[int, str] = {}
        with rank.manager.phase("weight_sync") as step:
            rank.publish()
            if isinstance(rank.engine, Spanning):
                rank.engine.failing = 1
            try:
                step.switch("rollout")
            except GroupError as error:
                told = dict(error.failures)
            name = step.name
        assert_nothing_resident(rank.manager)
        rank.step()
        return told, name

    assert (
        on_both(tmp_path, fails_to_load)
        == [({0: ("EngineError: out of memory in rank 1's worker")}, "weight_sync")] * 2
    )
