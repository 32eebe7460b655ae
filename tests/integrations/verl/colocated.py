"""What one rank does with an actor of verl and a rollout that shares its device."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from placement import DeviceMemoryError, Manager, PlacementError
from placement.devices.simulated.device import SharedCapacity, SimulatedDevice
from placement.integrations.verl import rollout
from placement.integrations.verl.rollout import PlacedRollout
from tests.integrations.verl import worker as workers
from tests.integrations.verl.sglang_replica import BYTES, SglangReplica
from tests.integrations.verl.subject import OFF, logged
from tests.integrations.verl.worker import CAPACITY, batch

rollout._PATIENCE_SECONDS = 0.05  # what the driver gives back is free at once here


class Replica:
    """vLLM's server as another process would be: it holds memory of the same device, and verl's driver puts it to sleep."""

    def __init__(self, file: Path, model: Path, **options: Any) -> None:
        self._share, self._options = SharedCapacity(file, CAPACITY), options
        self.awake: set[str] = set()
        self.calls: list[str] = []
        self.answers = True

    def _hold(self) -> None:
        self._share.claim(sum(BYTES[tag] for tag in self.awake), 0)

    async def wake_up(self, tags: list[str]) -> None:
        self.calls.append(f"wake_up {' '.join(tags)}")
        self.awake |= set(tags)
        self._hold()

    async def sleep(self) -> None:
        self.calls.append("sleep")
        if not self.answers:
            await asyncio.Event().wait()
        self.awake.clear()
        self._hold()

    def adapter(self) -> Any:
        return PlacedAdapter(self, **self._options)


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


REPLICAS: dict[str, Any] = {"vllm": Replica, "sglang": SglangReplica}


class Job:
    """A worker as verl's `ActorRolloutRefWorker` is one: a trained actor, and the adapter of a rollout."""

    def __init__(
        self, rollout: str, model: Path, file: Path, policy: str = "colocated", budget_bytes: int | None = None, **options: Any
    ) -> None:
        from placement.integrations import verl as integration

        integration.close_manager()
        device = SimulatedDevice(CAPACITY, shared_with=file)
        self.manager = Manager(device=device, policy=policy, budget_bytes=budget_bytes)
        integration.use_manager(self.manager)
        self.actor = workers.build(model, placed=True)
        self.replica = REPLICAS[rollout](file, model, **options)
        with logged() as self.told:
            self.adapter = self.replica.adapter()

    def sync(self) -> list[str]:
        """`update_weights` of verl's worker. The tags that are on the device as each of its calls returns."""
        found = []

        async def update() -> None:
            if getattr(self.adapter, "sleep_level", 2) != 1:  # of SGLang: its base weights stay awake
                await self.adapter.resume(["weights"])
                found.append(self.tags())
            weights, _ = self.actor.engine.get_per_tensor_param()
            await self.adapter.update_weights(weights, peft_config=None, base_sync_done=True, global_steps=1)
            found.append(self.tags())
            await self.adapter.resume(["kv_cache"])
            found.append(self.tags())

        asyncio.run(update())
        return found

    def sleep(self) -> None:
        """The driver puts the rollout to sleep, which nobody tells the worker."""
        asyncio.run(self.replica.sleep())

    def tags(self) -> str:
        return " ".join(sorted(self.adapter._colocated.residency.resident))

    def states(self) -> dict[str, str]:
        return {name: handle.state.value for name, handle in self.manager.handles.items()}


def steps(rollout: str, model: Path, file: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Two steps in which the driver puts the rollout to sleep before the worker computes, a sync between which and the next nobody but
    the driver did anything, and an inference before which the driver does not put it to sleep."""
    job = Job(rollout, model, file, **options)
    found: dict[str, Any] = {"syncs": [], "awake": [], "asleep": []}
    for seed in range(2):
        found["syncs"].append(job.sync())
        found["awake"].append((job.states(), job.manager.phase_name, job.manager.handles["rollout"].resident_bytes, job.manager.audit().ok))
        job.sleep()
        job.actor.infer_batch(batch(seed))
        job.actor.train_batch(batch(seed))
        found["asleep"].append(
            (job.states(), job.manager.phase_name, job.manager.handles["rollout"].resident_bytes, job.manager.audit().ok)
        )
    job.sync()
    job.sleep()
    job.sync()
    job.actor.infer_batch(batch(0))
    assert job.states()["rollout"] == OFF
    return found | {"calls": job.replica.calls, "told": job.told}


class Follower(Adapter):
    """The adapter on a rank that does not lead the replica: as in verl it sends nothing."""

    async def resume(self, tags: list[str]) -> None: ...

    async def release(self) -> None: ...


class PlacedFollower(PlacedRollout, Follower):
    """The class that `place` would make."""


def over_two_ranks(rollout: str, model: Path, file: Path) -> tuple[list[dict[str, str]], list[str]]:
    """Two steps with one replica over both ranks; the states after each sync and each training, and the replica's calls."""
    manager = workers.use_simulated()
    actor = workers.build(model, placed=True)
    leads = dist.get_rank() == 0
    if rollout == "sglang":
        replica: Any = SglangReplica(file, model, leads=leads)
        adapter = replica.adapter()
    else:
        replica = Replica(file, model)
        adapter = replica.adapter() if leads else PlacedFollower(replica)
    states = []

    async def update() -> None:
        await adapter.resume(["weights"])
        weights, _ = actor.engine.get_per_tensor_param()
        await adapter.update_weights(weights)
        await adapter.resume(["kv_cache"])

    for seed in range(2):
        asyncio.run(update())
        states.append({name: handle.state.value for name, handle in manager.handles.items()})
        asyncio.run(replica.sleep())
        actor.train_batch(batch(seed))
        states.append({name: handle.state.value for name, handle in manager.handles.items()})
    return states, replica.calls


def left_alone(rollout: str, model: Path, file: Path, options: dict[str, Any]) -> tuple[list[str], list[str], list[str]]:
    """A rollout that is no handle: the handles, what was logged, and the calls of a sync."""
    job = Job(rollout, model, file, **options)
    for tag in BYTES:
        asyncio.run(job.adapter.resume([tag]))
    asyncio.run(job.adapter.release())
    return list(job.manager.handles), job.told, job.replica.calls


def too_little_budget(rollout: str, model: Path, file: Path) -> tuple[str, list[str], str]:
    """The error where the rollout's measured parts are more than the handles may hold, the calls, and the state after it."""
    job = Job(rollout, model, file, budget_bytes=6 << 20)
    job.sync()  # measures them
    job.sleep()
    job.actor.infer_batch(batch(0))
    with pytest.raises(DeviceMemoryError) as refused:  # 8 MiB, and the budget is 6 MiB
        job.sync()
    return str(refused.value), job.replica.calls, job.states()["rollout"]


def refused_weights(model: Path, file: Path) -> tuple[str, dict[str, str], list[str]]:
    """A rollout that fails while it reads the weights, and somebody who keeps the error: the states then, and the tags of the next sync."""
    job = Job("vllm", model, file)
    with _refusing(), pytest.raises(RuntimeError) as kept:  # and with it the frames, which have the weights
        job.sync()
    states = job.states()
    assert job.manager.phase_name == "idle"
    return str(kept.value), states, job.sync()


def cut_off_server(model: Path, file: Path) -> tuple[str, list[str], dict[str, str], str]:
    """A sync that fails while the server waits for the rest of the weights, so that it answers nothing: the error with its notes, the
    states then, and the error of the next sync."""
    job = Job("vllm", model, file)
    job.replica.answers = False
    with mock.patch.object(rollout, "_LAST_SECONDS", 0.1), _refusing(), pytest.raises(RuntimeError) as failed:
        job.sync()
    with pytest.raises(PlacementError) as later:
        job.sync()
    return str(failed.value), failed.value.__notes__, job.states(), str(later.value)


def refused_base(model: Path, file: Path) -> tuple[str, dict[str, str], str, list[str]]:
    """A rollout that fails in the first of two syncs whose weights are open, as verl's worker has them for LoRA that is not merged.

    The error, the states while somebody keeps it, the error of reading on, and the tags of the next sync.
    """
    job = Job("vllm", model, file)
    asyncio.run(job.adapter.resume(["weights"]))
    adapters, _ = job.actor.engine.get_per_tensor_param()
    base, _ = job.actor.engine.get_per_tensor_param()
    with _refusing(), pytest.raises(RuntimeError) as kept:
        asyncio.run(job.adapter.update_weights(base))
    states = job.states()
    with pytest.raises(PlacementError) as later:  # half of the weights would have counted as all
        next(adapters)
    return str(kept.value), states, str(later.value), job.sync()


def failing_ends(model: Path, file: Path) -> tuple[str, list[str]]:
    """The error of a sync, with its notes, where neither the weights nor the phase can be ended."""
    job = Job("vllm", model, file)

    def torn() -> Iterator[Any]:
        try:
            yield "weight", torch.zeros(1)
        finally:
            raise OSError("the weights cannot be closed")

    def stuck(_: BaseException | None) -> None:
        raise OSError("the phase cannot be left")

    job.adapter._open = SimpleNamespace(release=stuck)
    with _refusing(), pytest.raises(RuntimeError) as failed:
        asyncio.run(job.adapter.update_weights(torn()))
    return str(failed.value), failed.value.__notes__


def failed_sender(model: Path, file: Path, cancelled: bool) -> tuple[str, dict[str, str], list[str]]:
    """verl's own worker sends the weights through a checkpoint engine, which fails in the middle, or is cancelled.

    The error, the states while somebody keeps it, and what was logged.
    """
    from verl.workers.engine_workers import ActorRolloutRefWorker

    job = Job("vllm", model, file)

    async def send(weights: Iterator[tuple[str, torch.Tensor]], **_: Any) -> None:
        next(weights)
        if cancelled:
            await asyncio.sleep(60)
        raise RuntimeError("the other end is gone")

    engine, options = SimpleNamespace(send_weights=send), SimpleNamespace(rollout=SimpleNamespace(checkpoint_engine=None))
    worker = SimpleNamespace(config=options, actor=job.actor, checkpoint_engine=engine)

    async def update() -> None:
        await asyncio.wait_for(ActorRolloutRefWorker.update_weights(worker, mode="nccl"), 0.1 if cancelled else None)

    with logged() as told, pytest.raises((RuntimeError, TimeoutError)) as kept:
        asyncio.run(update())
    return repr(kept.value), job.states(), told


@contextmanager
def _refusing() -> Iterator[None]:
    """The rollout fails while it reads the weights."""

    async def refuse(_: Adapter, weights: Iterator[tuple[str, torch.Tensor]], **__: Any) -> None:
        raise RuntimeError(f"no room for {next(weights)[0]}")

    take = Adapter.update_weights
    Adapter.update_weights = refuse  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Adapter.update_weights = take  # type: ignore[method-assign]


def placed_adapters() -> dict[str, Any]:
    """The class that verl gets for a rollout that `place` was called for, twice; and for one of no name."""
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY, get_rollout_class

    _ROLLOUT_REGISTRY["nearby", "async"] = f"{__name__}.Adapter"
    try:
        rollout.place("nearby")
        rollout.place("nearby")
        found = get_rollout_class("nearby")
        again = get_rollout_class("nearby")
        with pytest.raises(KeyError) as unknown:
            rollout.place("nowhere")
        return {"bases": [base.__name__ for base in found.__bases__], "same": found is again, "unknown": str(unknown.value)}
    finally:
        del _ROLLOUT_REGISTRY["nearby", "async"]
