"""A rollout that shares the worker's device is a handle of placement, although verl's driver puts it to sleep."""

from __future__ import annotations

import asyncio
import hashlib
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
from tests.integrations.verl import worker
from tests.integrations.verl.sglang_replica import BYTES, SglangReplica
from tests.integrations.verl.subject import GPU, OFF, logged
from tests.integrations.verl.worker import CAPACITY, batch
from tests.sharded.training import as_bytes
from tests.support.frameworks import needs
from tests.support.ranks import Ranks


def weights_sent(model: Path, file: Path) -> tuple[str, str]:
    job = Job("sglang", model, file)
    job.sync()
    weights, _ = job.actor.engine.get_per_tensor_param()
    digest = hashlib.sha256()
    for name, value in weights:
        digest.update(name.encode() + as_bytes(value))
    return job.replica.server.weights, digest.hexdigest()


def refused(model: Path, file: Path) -> dict[str, Any]:
    """A server that refuses to wake its KV cache once: the error, the calls, the state after it, and the calls of the next step."""
    job = Job("sglang", model, file)
    asyncio.run(job.adapter.resume(["weights"]))
    job.replica.refuse(True)
    with pytest.raises(PlacementError) as error:
        asyncio.run(job.adapter.resume(["kv_cache"]))
    found = {"error": str(error.value), "calls": list(job.replica.calls)}
    found |= {"state": job.states()["rollout"], "phase": job.manager.phase_name}
    found["held"] = sorted(job.replica.server.memory.tags)
    job.replica.refuse(False)
    job.actor.train_batch(batch(0))
    job.sync()
    return found | {"later": job.replica.calls[len(found["calls"]) :], "accidents": job.replica.server.accidents}


def killed(model: Path, file: Path) -> dict[str, Any]:
    """A server that dies while it is awake: the state in which the actor trains on, and the errors of the next two syncs."""
    job = Job("sglang", model, file)
    job.sync()
    job.replica.die(job.adapter)
    job.actor.train_batch(batch(0))
    found: dict[str, Any] = {"state": job.states()["rollout"], "errors": []}
    for _ in range(2):
        with pytest.raises(PlacementError) as error:
            job.sync()
        found["errors"].append(f"{type(error.value).__name__}: {error.value}")
    job.actor.train_batch(batch(1))
    return found | {"after": job.states(), "calls": job.replica.calls}


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
        self.actor = worker.build(model, placed=True)
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
    manager = worker.use_simulated()
    actor = worker.build(model, placed=True)
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


needs("verl")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return worker.write_model(tmp_path_factory.mktemp("model"))


SLEEP = {"vllm": "sleep", "sglang": "sleep kv_cache weights"}
"""The driver's call, and placement's where the driver has not made it. To SGLang the parts are named."""
each_rollout = pytest.mark.parametrize("rollout", SLEEP)


@each_rollout
def test_it_is_awake_in_the_phases_in_which_verl_wakes_it(one_rank: Ranks, model: Path, tmp_path: Path, rollout: str) -> None:
    (found,) = one_rank.run(steps, rollout, model, tmp_path / "capacity", {})
    asleep = {"actor": OFF, "actor.optimizer": OFF, "rollout": OFF}
    assert found["syncs"] == [["weights", "weights", "kv_cache weights"]] * 2
    assert found["awake"] == [({**asleep, "rollout": GPU}, "rollout", sum(BYTES.values()), True)] * 2
    assert found["asleep"] == [(asleep, "idle", 0, True)] * 2
    assert found["told"] == [
        f"placement knows the rollout as 'rollout' ({'PlacedAdapter' if rollout == 'vllm' else 'PlacedServerAdapter'})"
    ]
    assert found["calls"] == ["wake_up weights", "wake_up kv_cache", SLEEP[rollout]] * 4, "each call once"


def test_sglang_that_serves_an_adapter_keeps_its_base_weights(one_rank: Ranks, model: Path, tmp_path: Path) -> None:
    (found,) = one_rank.run(steps, "sglang", model, tmp_path / "capacity", {"lora_rank": 4})
    assert found["syncs"] == [["", "kv_cache"]] * 2
    assert [(states["rollout"], phase, nbytes) for states, phase, nbytes, _ in found["awake"]] == [(GPU, "rollout", BYTES["kv_cache"])] * 2
    assert [(states["rollout"], phase, nbytes) for states, phase, nbytes, _ in found["asleep"]] == [(OFF, "idle", 0)] * 2
    assert found["calls"] == ["wake_up kv_cache", "sleep kv_cache"] * 4


_WOKEN = ["wake_up weights", "wake_up kv_cache"]


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
def test_what_stays_verls_own(
    one_rank: Ranks, model: Path, tmp_path: Path, rollout: str, options: dict[str, Any], reason: str, calls: list[str]
) -> None:
    ((handles, told, made),) = one_rank.run(left_alone, rollout, model, tmp_path / "capacity", options)
    assert handles == ["actor", "actor.optimizer"]
    assert reason in told[0]
    assert made == calls


def test_a_budget_counts_it(one_rank: Ranks, model: Path, tmp_path: Path) -> None:
    ((error, calls, state),) = one_rank.run(too_little_budget, "sglang", model, tmp_path / "capacity")
    assert "rollout" in error
    assert calls[-2:] == ["wake_up weights", "sleep weights"], "the KV cache that does not fit was not asked for, and the weights went back"
    assert state == OFF


def test_the_weights_that_reach_sglang_are_the_actors(one_rank: Ranks, model: Path, tmp_path: Path) -> None:
    ((received, published),) = one_rank.run(weights_sent, model, tmp_path / "capacity")
    assert received == published


def test_an_sglang_that_refuses_to_wake_is_asleep_again(one_rank: Ranks, model: Path, tmp_path: Path) -> None:
    (found,) = one_rank.run(refused, model, tmp_path / "capacity")
    assert "400" in found["error"]
    assert found["calls"] == ["wake_up weights", "wake_up kv_cache", "sleep weights"]
    assert (found["state"], found["phase"], found["held"]) == (OFF, "idle", [])
    assert found["later"] == ["wake_up weights", "wake_up kv_cache"]
    assert found["accidents"] == []


def test_a_rollout_that_fails_in_a_sync_leaves_nothing_on_the_device(one_rank: Ranks, model: Path, tmp_path: Path) -> None:
    ((error, states, later),) = one_rank.run(refused_weights, model, tmp_path / "capacity")
    assert error == "no room for model.embed_tokens.weight"
    assert states == {"actor": OFF, "actor.optimizer": OFF, "rollout": OFF}
    assert later == ["weights", "weights", "kv_cache weights"]


def test_a_sync_that_fails_is_told_although_its_server_waits_for_the_rest_of_the_weights(
    one_rank: Ranks, model: Path, tmp_path: Path
) -> None:
    ((error, notes, states, later),) = one_rank.run(cut_off_server, model, tmp_path / "capacity")
    assert error == "no room for model.embed_tokens.weight"
    assert "no answer within 0.1 s" in "".join(notes)
    assert states["actor"] == OFF
    assert "no answer within 0.1 s" in later


def test_all_weights_that_are_open_end_with_a_sync_that_fails(one_rank: Ranks, model: Path, tmp_path: Path) -> None:
    """verl opens those of LoRA's adapters before it sends the base."""
    ((error, states, reading_on, later),) = one_rank.run(refused_base, model, tmp_path / "capacity")
    assert error == "no room for model.embed_tokens.weight"
    assert states == {"actor": OFF, "actor.optimizer": OFF, "rollout": OFF}
    assert reading_on == "these weights ended with the sync that failed: ask the engine for new ones"
    assert later == ["weights", "weights", "kv_cache weights"]


def test_an_error_of_verls_is_not_hidden_by_what_fails_after_it(one_rank: Ranks, model: Path, tmp_path: Path) -> None:
    ((error, notes),) = one_rank.run(failing_ends, model, tmp_path / "capacity")
    assert error == "no room for weight"
    assert notes == ["placement: OSError: the weights cannot be closed", "placement: OSError: the phase cannot be left"]


@pytest.mark.parametrize(("cancelled", "named"), [(False, "RuntimeError"), (True, "TimeoutError")], ids=["failed", "cancelled"])
def test_weights_that_a_checkpoint_engine_cannot_send(one_rank: Ranks, model: Path, tmp_path: Path, cancelled: bool, named: str) -> None:
    """No rollout tells placement of it: the task of verl's worker ends with the error."""
    ((error, states, told),) = one_rank.run(failed_sender, model, tmp_path / "capacity", cancelled)
    assert error.startswith(named)
    assert states == {"actor": OFF, "actor.optimizer": OFF, "rollout": OFF}
    assert len(told) == 1
    assert told[0].startswith("a sync of weights has failed, so the phase of its model ends")


def test_an_sglang_that_dies_is_not_asked_again(one_rank: Ranks, model: Path, tmp_path: Path) -> None:
    (found,) = one_rank.run(killed, model, tmp_path / "capacity")
    assert found["state"] == OFF, "its memory is free"
    first, second = found["errors"]
    assert first.startswith("EngineLost: verl's rollout failed in resume()")
    assert second.startswith("BrokenHandleError: 'rollout' is broken"), "nothing was sent"
    assert found["after"] == {"actor": OFF, "actor.optimizer": OFF, "rollout": OFF}
    assert found["calls"] == ["wake_up weights", "wake_up kv_cache"]


@each_rollout
def test_a_replica_over_two_ranks(two_ranks: Ranks, model: Path, tmp_path: Path, rollout: str) -> None:
    leader, follower = two_ranks.run(over_two_ranks, rollout, model, tmp_path / "capacity")
    asleep = {"actor": OFF, "actor.optimizer": OFF, "rollout": OFF}
    assert leader[0] == follower[0] == [{**asleep, "rollout": GPU}, asleep] * 2
    assert leader[1] == ["wake_up weights", "wake_up kv_cache", SLEEP[rollout]] * 2
    assert follower[1] == (["sleep"] * 2 if rollout == "vllm" else []), "the driver's"


def test_verl_finds_the_placed_adapter(one_rank: Ranks) -> None:
    (found,) = one_rank.run(placed_adapters)
    assert found == {"bases": ["PlacedRollout", "Adapter"], "same": True, "unknown": "('nowhere', 'async')"}
