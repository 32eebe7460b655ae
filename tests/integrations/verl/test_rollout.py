"""A rollout that shares the worker's device is a handle of placement, although verl's driver puts
it to sleep."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from placement import BrokenHandleError, DeviceMemoryError, EngineLost, Manager, PlacementError
from placement.devices.simulated.device import SharedCapacity, SimulatedDevice
from placement.integrations.verl import rollout as placed
from placement.integrations.verl.rollout import PlacedRollout
from tests.integrations.verl import worker
from tests.integrations.verl.sglang_replica import BYTES, SglangReplica
from tests.integrations.verl.subject import GPU, OFF, logged
from tests.integrations.verl.worker import CAPACITY, batch
from tests.support.frameworks import needs
from tests.support.ranks import on_ranks

needs("verl")
pytestmark = pytest.mark.sweep
placed._PATIENCE_SECONDS = 0.05  # what the driver gives back is free at once here


class Replica:
    """vLLM's server as another process would be: it holds memory of the same device, and verl's
    driver puts it to sleep.

    Args:
        leads: whether this rank leads it. The adapter on another rank sends nothing, as in verl.
    """

    def __init__(self, file: Path, model: Path, *, leads: bool = True, **options: Any) -> None:
        self._share, self._leads, self._options = SharedCapacity(file, CAPACITY), leads, options
        self.awake: set[str] = set()
        self.calls: list[str] = []
        self.taken: list[str] = []
        self.answers = True

    def _hold(self) -> None:
        self._share.claim(sum(BYTES[tag] for tag in self.awake), 0)

    async def wake_up(self, tags: list[str]) -> None:
        if not self._leads:
            return
        self.calls.append(f"wake_up {' '.join(tags)}")
        self.awake |= set(tags)
        self._hold()

    async def sleep(self) -> None:
        if not self._leads:
            return
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
        self.replica.taken = [name for name, _ in weights]


class PlacedAdapter(PlacedRollout, Adapter):
    """The class that `place` would make."""


REPLICAS: dict[str, Any] = {"vllm": Replica, "sglang": SglangReplica}


class Job:
    """A worker as verl's `ActorRolloutRefWorker` is one: a trained actor, and the adapter of a
    rollout."""

    def __init__(
        self,
        rollout: str,
        model: Path,
        file: Path,
        policy: str = "colocated",
        budget_bytes: int | None = None,
        **options: Any,
    ) -> None:
        from placement.integrations import verl as integration

        integration.close_manager()
        device = SimulatedDevice(CAPACITY, shared_with=file)
        self.manager = Manager(device=device, policy=policy, budget_bytes=budget_bytes)
        integration.use_manager(self.manager)
        self.actor = worker.build(model, placed=True)
        self.replica = REPLICAS[rollout](file, model, **options)
        with logged() as self.told:
            self.adapter = self.replica.adapter()

    def sync(self) -> list[str]:
        """`update_weights` of verl's worker. The tags that are on the device as each of its calls
        returns."""
        found = []

        async def update() -> None:
            # of SGLang: its base weights stay awake
            if getattr(self.adapter, "sleep_level", 2) != 1:
                await self.adapter.resume(["weights"])
                found.append(self.tags())
            weights, _ = self.actor.engine.get_per_tensor_param()
            await self.adapter.update_weights(
                weights, peft_config=None, base_sync_done=True, global_steps=1
            )
            found.append(self.tags())
            await self.adapter.resume(["kv_cache"])
            found.append(self.tags())

        asyncio.run(update())
        return found

    def sleep(self) -> None:
        """The driver puts the rollout to sleep, which nobody tells the worker."""
        asyncio.run(self.replica.sleep())

    def tags(self) -> str:
        return " ".join(sorted(self.adapter._colocated.residency.resident_tags))

    def seen(self) -> tuple[dict[str, str], str, int, bool]:
        """States, the phase, the rollout's bytes, and whether all is in order."""
        return (
            self.states(),
            self.manager.phase_name,
            self.manager.handles["rollout"].resident_bytes,
            self.manager.audit().ok,
        )

    def states(self) -> dict[str, str]:
        return {name: handle.state.value for name, handle in self.manager.handles.items()}


def _refusing() -> Any:
    async def refuse(_: Adapter, weights: Iterator[tuple[str, torch.Tensor]], **__: Any) -> None:
        raise RuntimeError(f"no room for {next(weights)[0]}")

    return mock.patch.object(Adapter, "update_weights", refuse)


SLEEP = {"vllm": "sleep", "sglang": "sleep kv_cache weights"}
"""The driver's call, and placement's where the driver has not made it. To SGLang the parts are
named."""
each_rollout = pytest.mark.parametrize("rollout", SLEEP)
_WOKEN = ["wake_up weights", "wake_up kv_cache"]
ASLEEP = {"actor": OFF, "actor.optimizer": OFF, "rollout": OFF}
SYNCED = ["weights", "weights", "kv_cache weights"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Of the capacity that the rollout shares with the worker."""
    return tmp_path / "capacity"


@pytest.mark.parametrize(
    ("rollout", "options", "synced", "awake_bytes", "calls"),
    [
        ("vllm", {}, SYNCED, sum(BYTES.values()), [*_WOKEN, SLEEP["vllm"]]),
        ("sglang", {}, SYNCED, sum(BYTES.values()), [*_WOKEN, SLEEP["sglang"]]),
        # It serves an adapter, and keeps its base weights.
        (
            "sglang",
            {"lora_rank": 4},
            ["", "kv_cache"],
            BYTES["kv_cache"],
            ["wake_up kv_cache", "sleep kv_cache"],
        ),
    ],
    ids=["vllm", "sglang", "adapter"],
)
@on_ranks("one_rank")
def test_it_is_awake_in_the_phases_in_which_verl_wakes_it(
    model: Path,
    file: Path,
    rollout: str,
    options: dict[str, Any],
    synced: list[str],
    awake_bytes: int,
    calls: list[str],
) -> None:
    """Two steps in which the driver puts it to sleep before the worker computes, a sync between
    which and the next nobody but the driver did anything, and an inference before which the driver
    does not put it to sleep."""
    job = Job(rollout, model, file, **options)
    for seed in range(2):
        assert job.sync() == synced
        assert job.seen() == ({**ASLEEP, "rollout": GPU}, "rollout", awake_bytes, True)
        job.sleep()
        job.actor.infer_batch(batch(seed))
        job.actor.train_batch(batch(seed))
        assert job.seen() == (ASLEEP, "idle", 0, True)
    job.sync()
    job.sleep()
    job.sync()
    job.actor.infer_batch(batch(0))
    assert job.states()["rollout"] == OFF
    moved_by = {handle.name: handle.moved_by for handle in job.manager.snapshot().handles}
    assert moved_by["rollout"] == (None if rollout == "vllm" else "torch_memory_saver")
    assert job.told == [f"placement knows the rollout as 'rollout' ({type(job.adapter).__name__})"]
    assert job.replica.calls == calls * 4, "each call once"


@pytest.mark.parametrize(
    ("rollout", "options", "reason", "calls"),
    [
        ("vllm", {"policy": "resident"}, "policy 'resident' may keep it", [*_WOKEN, "sleep"]),
        ("vllm", {"free_cache_engine": False}, "free_cache_engine=False", [*_WOKEN, "sleep"]),
        ("sglang", {"free_cache_engine": False}, "free_cache_engine=False", []),
        (
            "sglang",
            {"engine_kwargs": {"sglang": {"enable_memory_saver": False}}},
            "engine_kwargs.sglang.enable_memory_saver=False",
            [*_WOKEN, SLEEP["sglang"]],
        ),
    ],
    ids=["policy", "never sleeps", "never sleeps, sglang", "no memory saver"],
)
@on_ranks("one_rank")
def test_what_stays_verls_own(
    model: Path, file: Path, rollout: str, options: dict[str, Any], reason: str, calls: list[str]
) -> None:
    job = Job(rollout, model, file, **options)
    for tag in BYTES:
        asyncio.run(job.adapter.resume([tag]))
    asyncio.run(job.adapter.release())
    assert list(job.manager.handles) == ["actor", "actor.optimizer"]
    assert reason in job.told[0]
    assert job.replica.calls == calls


@on_ranks("one_rank")
def test_a_budget_counts_it(model: Path, file: Path) -> None:
    job = Job("sglang", model, file, budget_bytes=6 << 20)
    job.sync()  # measures them
    job.sleep()
    job.actor.infer_batch(batch(0))
    with pytest.raises(DeviceMemoryError, match="rollout"):  # 8 MiB, and the budget is 6 MiB
        job.sync()
    assert job.replica.calls[-2:] == ["wake_up weights", "sleep weights"], (
        "the KV cache that does not fit was not asked for"
    )
    assert job.states()["rollout"] == OFF


@on_ranks("one_rank")
def test_an_sglang_that_refuses_to_wake_is_asleep_again(model: Path, file: Path) -> None:
    job = Job("sglang", model, file)
    asyncio.run(job.adapter.resume(["weights"]))
    job.replica.refuse(True)
    with pytest.raises(PlacementError, match="400"):
        asyncio.run(job.adapter.resume(["kv_cache"]))
    assert job.replica.calls == [*_WOKEN, "sleep weights"]
    assert (job.states()["rollout"], job.manager.phase_name, job.replica.server.memory.tags) == (
        OFF,
        "idle",
        set(),
    )
    job.replica.refuse(False)
    job.actor.train_batch(batch(0))
    job.sync()
    assert job.replica.calls[3:] == _WOKEN
    assert job.replica.server.accidents == []


@on_ranks("one_rank")
def test_a_sync_that_fails_is_told_although_its_server_waits_for_the_rest_of_the_weights(
    model: Path, file: Path
) -> None:
    job = Job("vllm", model, file)
    job.replica.answers = False
    with (
        mock.patch.object(placed, "_LAST_SECONDS", 0.1),
        _refusing(),
        pytest.raises(RuntimeError, match=r"no room for model\.embed_tokens\.weight") as failed,
    ):
        job.sync()
    assert "no answer within 0.1 s" in "".join(failed.value.__notes__)
    assert job.states()["actor"] == OFF
    with pytest.raises(PlacementError, match=r"no answer within 0\.1 s"):
        job.sync()


@on_ranks("one_rank")
def test_all_weights_that_are_open_end_with_a_sync_that_fails(model: Path, file: Path) -> None:
    """verl opens those of LoRA's adapters before it sends the base."""
    job = Job("vllm", model, file)
    asyncio.run(job.adapter.resume(["weights"]))
    adapters, _ = job.actor.engine.get_per_tensor_param()
    base, _ = job.actor.engine.get_per_tensor_param()
    with (
        _refusing(),
        pytest.raises(RuntimeError, match=r"no room for model\.embed_tokens\.weight") as kept,
    ):
        asyncio.run(job.adapter.update_weights(base))
    assert job.states() == ASLEEP
    with pytest.raises(
        PlacementError,
        match="these weights ended with the sync that failed: ask the engine for new ones",
    ):
        next(adapters)  # half of the weights would have counted as all
    assert job.sync() == SYNCED
    assert len(job.replica.taken) == 27
    del kept


@on_ranks("one_rank")
def test_an_error_of_verls_is_not_hidden_by_what_fails_after_it(model: Path, file: Path) -> None:
    job = Job("vllm", model, file)

    def torn() -> Iterator[Any]:
        try:
            yield "weight", torch.zeros(1)
        finally:
            raise OSError("the weights cannot be closed")

    def stuck(_: BaseException | None) -> None:
        raise OSError("the phase cannot be left")

    job.adapter._open = SimpleNamespace(release=stuck)
    with _refusing(), pytest.raises(RuntimeError, match="no room for weight") as failed:
        asyncio.run(job.adapter.update_weights(torn()))
    assert failed.value.__notes__ == [
        ("placement: OSError: the weights cannot be closed"),
        ("placement: OSError: the phase cannot be left"),
    ]


@pytest.mark.parametrize(
    ("cancelled", "error"),
    [(False, RuntimeError), (True, TimeoutError)],
    ids=["failed", "cancelled"],
)
@on_ranks("one_rank")
def test_weights_that_a_checkpoint_engine_cannot_send(
    model: Path, file: Path, cancelled: bool, error: type[Exception]
) -> None:
    """verl's own worker sends them. No rollout tells placement of it: the task of the worker ends
    with the error."""
    from verl.workers.engine_workers import ActorRolloutRefWorker

    job = Job("vllm", model, file)

    async def send(weights: Iterator[tuple[str, torch.Tensor]], **_: Any) -> None:
        next(weights)
        if cancelled:
            await asyncio.sleep(60)
        raise RuntimeError("the other end is gone")

    engine, options = (
        SimpleNamespace(send_weights=send),
        SimpleNamespace(rollout=SimpleNamespace(checkpoint_engine=None)),
    )
    sender = SimpleNamespace(config=options, actor=job.actor, checkpoint_engine=engine)

    async def update() -> None:
        await asyncio.wait_for(
            ActorRolloutRefWorker.update_weights(sender, mode="nccl"), 0.1 if cancelled else None
        )

    with logged() as told, pytest.raises(error) as kept:
        asyncio.run(update())
    assert job.states() == ASLEEP
    assert len(told) == 1
    assert told[0].startswith("a sync of weights has failed, so the phase of its model ends")
    del kept


@on_ranks("one_rank")
def test_an_sglang_that_dies_is_not_asked_again(model: Path, file: Path) -> None:
    job = Job("sglang", model, file)
    job.sync()
    job.replica.die(job.adapter)
    job.actor.train_batch(batch(0))
    assert job.states()["rollout"] == OFF, "its memory is free"
    with pytest.raises(EngineLost, match=r"verl's rollout failed in resume\(\)"):
        job.sync()
    with pytest.raises(BrokenHandleError, match="'rollout' is broken"):  # nothing was sent
        job.sync()
    job.actor.train_batch(batch(1))
    assert job.states() == ASLEEP
    assert job.replica.calls == _WOKEN


@each_rollout
@on_ranks("two_ranks")
def test_a_replica_over_two_ranks(model: Path, file: Path, rollout: str) -> None:
    manager = worker.use_simulated()
    actor = worker.build(model, placed=True)
    leads = dist.get_rank() == 0
    replica = REPLICAS[rollout](file, model, leads=leads)
    adapter = replica.adapter()

    async def update() -> None:
        await adapter.resume(["weights"])
        weights, _ = actor.engine.get_per_tensor_param()
        await adapter.update_weights(weights)
        await adapter.resume(["kv_cache"])

    for seed in range(2):
        asyncio.run(update())
        assert {name: handle.state.value for name, handle in manager.handles.items()} == {
            **ASLEEP,
            "rollout": GPU,
        }
        asyncio.run(replica.sleep())
        actor.train_batch(batch(seed))
        assert {name: handle.state.value for name, handle in manager.handles.items()} == ASLEEP
    assert replica.calls == ([*_WOKEN, SLEEP[rollout]] * 2 if leads else [])
