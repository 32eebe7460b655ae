"""What one rank does with an actor of verl and a rollout that shares its device."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from placement import DeviceMemoryError, Manager, PlacementError
from placement.devices.simulated.device import SimulatedDevice
from placement.devices.simulated.shared_capacity import SharedCapacity
from placement.integrations.verl.rollout import PlacedRollout
from tests.integrations.verl import worker as workers
from tests.integrations.verl.subject import logged
from tests.integrations.verl.worker import CAPACITY, batch

BYTES = {"weights": 3 << 20, "kv_cache": 5 << 20}


class Replica:
    """The rollout's server as another process would be: it holds memory of the same device, and verl's driver puts it to sleep."""

    def __init__(self, file: Path) -> None:
        self._share = SharedCapacity(file, CAPACITY)
        self.awake: set[str] = set()
        self.calls: list[str] = []
        self.fails = False

    def _hold(self) -> None:
        self._share.claim(sum(BYTES[tag] for tag in self.awake), 0)

    async def wake_up(self, tags: list[str]) -> None:
        self.calls.append(f"wake_up {' '.join(tags)}")
        if self.fails:
            raise RuntimeError("no memory left on the device")
        self.awake |= set(tags)
        self._hold()

    async def sleep(self) -> None:
        self.calls.append("sleep")
        self.awake.clear()
        self._hold()


class Adapter:
    """verl's end of it, as `verl.workers.rollout.base.BaseRollout` has it."""

    def __init__(self, replica: Replica, free_cache_engine: bool = True) -> None:
        self.replica, self.config = replica, SimpleNamespace(free_cache_engine=free_cache_engine)

    async def resume(self, tags: list[str]) -> None:
        await self.replica.wake_up(tags)

    async def release(self) -> None:
        await self.replica.sleep()

    async def update_weights(self, weights: Iterator[tuple[str, torch.Tensor]], **_: Any) -> None:
        for _name, _weight in weights:
            pass


class PlacedAdapter(PlacedRollout, Adapter):
    """The class that `place` would make."""


class Job:
    """A worker as verl's `ActorRolloutRefWorker` is one: a trained actor, and the adapter."""

    def __init__(self, model: Path, file: Path, policy: str = "colocated", budget_bytes: int | None = None, **options: Any) -> None:
        from placement.integrations import verl as integration

        integration.close_manager()
        device = SimulatedDevice(CAPACITY, shared_with=file)
        self.manager = Manager(device=device, policy=policy, budget_bytes=budget_bytes)
        integration.use_manager(self.manager)
        self.actor = workers.build(model, placed=True)
        self.replica = Replica(file)
        with logged() as self.told:
            self.adapter = PlacedAdapter(self.replica, **options)

    def sync(self) -> list[str]:
        """`update_weights` of verl's worker. The tags that are on the device as each of its calls returns."""
        found = []

        async def update() -> None:
            await self.adapter.resume(["weights"])
            found.append(self.tags())
            weights, _ = self.actor.engine.get_per_tensor_param()
            await self.adapter.update_weights(weights)
            found.append(self.tags())
            await self.adapter.resume(["kv_cache"])
            found.append(self.tags())

        asyncio.run(update())
        return found

    def sleep(self) -> None:
        """The driver puts the rollout to sleep, which nobody tells the worker."""
        asyncio.run(self.replica.sleep())

    def tags(self) -> str:
        return " ".join(sorted(self.adapter._engine.residency.resident))

    def states(self) -> dict[str, str]:
        return {name: handle.state.value for name, handle in self.manager.handles.items()}


def steps(model: Path, file: Path) -> dict[str, Any]:
    """Three steps in which the driver puts the rollout to sleep before the worker computes."""
    job = Job(model, file)
    found: dict[str, Any] = {"syncs": [], "awake": [], "asleep": []}
    for seed in range(3):
        found["syncs"].append(job.sync())
        found["awake"].append((job.states(), job.manager.phase_name, job.manager.handles["rollout"].resident_bytes, job.manager.audit().ok))
        job.sleep()
        job.actor.infer_batch(batch(seed))
        job.actor.train_batch(batch(seed))
        found["asleep"].append(
            (job.states(), job.manager.phase_name, job.manager.handles["rollout"].resident_bytes, job.manager.audit().ok)
        )
    return found | {"calls": job.replica.calls, "told": job.told}


class Follower(Adapter):
    """The adapter on a rank that does not lead the replica: as in verl it sends nothing."""

    async def resume(self, tags: list[str]) -> None: ...

    async def release(self) -> None: ...


class PlacedFollower(PlacedRollout, Follower):
    """The class that `place` would make."""


def over_two_ranks(model: Path, file: Path) -> tuple[list[dict[str, str]], list[str]]:
    """Two steps with one replica over both ranks; the states after each sync and each training, and the replica's calls."""
    manager = workers.use_simulated()
    actor = workers.build(model, placed=True)
    adapter: Any = (PlacedAdapter if dist.get_rank() == 0 else PlacedFollower)(Replica(file))
    states = []

    async def update() -> None:
        await adapter.resume(["weights"])
        weights, _ = actor.engine.get_per_tensor_param()
        await adapter.update_weights(weights)
        await adapter.resume(["kv_cache"])

    for seed in range(2):
        asyncio.run(update())
        states.append({name: handle.state.value for name, handle in manager.handles.items()})
        asyncio.run(adapter.replica.sleep())
        actor.train_batch(batch(seed))
        states.append({name: handle.state.value for name, handle in manager.handles.items()})
    return states, adapter.replica.calls


def left_awake(model: Path, file: Path) -> tuple[list[str], str]:
    """A driver that does not put the rollout to sleep."""
    job = Job(model, file)
    job.sync()
    job.actor.infer_batch(batch(0))
    return job.replica.calls, job.states()["rollout"]


def left_alone(model: Path, file: Path, options: dict[str, Any]) -> tuple[list[str], list[str], list[str]]:
    """A rollout that is no handle: the handles, what was logged, and the calls of a sync."""
    job = Job(model, file, **options)
    asyncio.run(job.adapter.resume(["weights"]))
    asyncio.run(job.adapter.release())
    return list(job.manager.handles), job.told, job.replica.calls


def too_little_budget(model: Path, file: Path) -> tuple[str, list[str], str]:
    """The error where the rollout's measured parts are more than the handles may hold, the calls, and the state after it."""
    job = Job(model, file, budget_bytes=6 << 20)
    job.sync()  # measures them
    job.sleep()
    job.actor.infer_batch(batch(0))
    try:
        job.sync()
    except DeviceMemoryError as error:
        return str(error), job.replica.calls, job.states()["rollout"]
    raise AssertionError("8 MiB were loaded although the budget is 6 MiB")


def failure(model: Path, file: Path) -> str:
    """The error of a rollout that cannot wake."""
    job = Job(model, file)
    job.replica.fails = True
    try:
        job.sync()
    except PlacementError as error:
        return str(error)
    raise AssertionError("a rollout that failed to wake was taken for awake")


def placed_adapters() -> dict[str, Any]:
    """The class that verl gets for a rollout that `place` was called for, twice; and for one of no name."""
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY, get_rollout_class

    from placement.integrations.verl import rollout

    _ROLLOUT_REGISTRY["nearby", "async"] = f"{__name__}.Adapter"
    try:
        rollout.place("nearby")
        rollout.place("nearby")
        found = get_rollout_class("nearby")
        again = get_rollout_class("nearby")
        try:
            rollout.place("nowhere")
        except KeyError as error:
            unknown = str(error)
        return {"bases": [base.__name__ for base in found.__bases__], "same": found is again, "unknown": unknown}
    finally:
        del _ROLLOUT_REGISTRY["nearby", "async"]
