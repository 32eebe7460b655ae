"""Managers that share a GPU under leases: what a phase waits for, what it holds in the meantime,
and what is left when it does not get it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from placement import Manager, PlacementError, State
from placement.core.errors import DeviceMemoryError
from placement.devices.ledger import Ledger
from placement.devices.memory import DeviceMemory
from placement.group import Lease
from placement.group import lease as leases
from placement.observe.collector import make_registry
from placement.planning import planner
from placement.testing import Faults, SimulatedDevice, assert_nothing_resident
from tests.engines.standin import CAPACITY as ENGINES_CAPACITY
from tests.engines.standin import TAG_BYTES
from tests.engines.test_tagged import Own
from tests.group.lease_processes import CAPACITY, CHUNK, GpuSharer, lease_of

ACTOR = 33 * CHUNK
"""The actor of a `GpuSharer`: its weights, and a chunk for the bias."""
GPU, OFF, TRAIN = State.GPU_RESIDENT, State.CPU_OFFLOADED, State.TRAINING


@pytest.fixture(autouse=True)
def _no_headroom(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "HEADROOM", 0.0)


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[GpuSharer]:
    """A trainer that knows its momentum: the actor takes 33 chunks of 100, with its optimizer
    66."""
    # a test that fails in the middle must end
    trainer = GpuSharer(str(tmp_path), lease_deadline_seconds=20.0)
    trainer.work()
    yield trainer
    if not trainer.manager.snapshot().phases:
        trainer.manager.close()


def other(tmp_path: Path, nbytes: int = 0) -> Lease:
    """What another process there would have, which uses none of it."""
    lease = Lease(
        f"simulated{tmp_path / 'capacity'}", CAPACITY, folder=tmp_path / "leases", name="other"
    )
    lease.settle(nbytes)
    return lease


def states(worker: GpuSharer) -> list[State]:
    return [handle.state for handle in worker.manager.handles.values()]


def impatient(worker: GpuSharer) -> None:
    """Does not wait longer than it takes to look twice."""
    lease = worker.manager._stack.reconciler.lease_client._lease
    assert lease is not None
    lease.deadline_seconds = 0.05


def in_thread(work: Callable[[], None]) -> Future[None]:
    return ThreadPoolExecutor(1).submit(work)


def until_waiting(worker: GpuSharer) -> int:
    """Returns what the worker leases while it waits."""
    while True:
        lease = lease_of(worker.manager)
        if lease.wanted_bytes:
            return lease.held_bytes


def test_a_phase_leases_what_it_holds_and_gives_it_back(worker: GpuSharer, tmp_path: Path) -> None:
    assert worker.held_bytes() == (0, 0)
    assert [(each.name, each.is_mine) for each in lease_of(worker.manager).holders] == [
        ("trainer node0/rank0", True)
    ]
    with worker.manager.phase("log_prob") as step:
        assert worker.held_bytes() == (ACTOR, ACTOR)
        assert worker.manager.snapshot().budget_bytes <= ACTOR
        step.switch("train")
        assert worker.held_bytes() == (2 * ACTOR, 2 * ACTOR)
        with worker.manager.phase("away", only=[]):
            assert worker.held_bytes() == (2 * ACTOR, 2 * ACTOR)
        step.switch("log_prob")
        assert worker.held_bytes() == (ACTOR, ACTOR)
    assert worker.held_bytes() == (0, 0)
    worker.manager.close()
    assert Ledger.of(tmp_path / "leases", f"simulated{tmp_path / 'capacity'}").claims() == []


def test_a_first_step_has_the_lease_for_the_state_that_it_creates(tmp_path: Path) -> None:
    worker = GpuSharer(str(tmp_path), lease_deadline_seconds=20.0)
    with worker.manager.phase("train") as step:
        assert worker.held_bytes() == (2 * ACTOR, ACTOR)
        with worker.manager.phase("away", only=[]):
            assert worker.held_bytes() == (2 * ACTOR, ACTOR)
        step.switch("log_prob")
        assert worker.held_bytes() == (ACTOR, ACTOR)
    assert worker.held_bytes() == (0, 0)
    lease = other(tmp_path, CAPACITY - 2 * ACTOR + CHUNK)
    impatient(worker)
    with pytest.raises(DeviceMemoryError), worker.manager.phase("train"):
        raise AssertionError("entered")
    assert worker.held_bytes() == (0, 0)
    lease.close()
    worker.manager.close()


def test_what_is_not_granted_in_time_leaves_everything_as_it_was(
    worker: GpuSharer, tmp_path: Path
) -> None:
    lease = other(tmp_path, 60 * CHUNK)
    impatient(worker)
    with worker.manager.phase("log_prob") as step:
        with pytest.raises(
            DeviceMemoryError,
            match=r"phase 'train' waited 0.05 "
            r"s "
            r"for "
            r"270,336 "
            r"bytes.*\n.*\n.*\n +other ",
        ) as caught:
            step.switch("train")
        assert not getattr(caught.value, "__notes__", [])
        assert step.name == "log_prob"
        assert states(worker) == [GPU, OFF]
        assert torch.equal(worker.model.weight, worker.expected)
        assert worker.held_bytes() == (ACTOR, ACTOR)
        lease.settle(0)
        step.switch("train")
    worker.manager.check_integrity()
    assert_nothing_resident(worker.manager)


def test_what_others_took_meanwhile_is_not_there_to_go_back_to(
    worker: GpuSharer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = other(tmp_path, 60 * CHUNK)
    impatient(worker)
    refusal = Lease._refusal

    def grab(self: Lease, *arguments: Any) -> str:
        lease.settle(90 * CHUNK)
        return refusal(self, *arguments)

    monkeypatch.setattr(Lease, "_refusal", grab)
    with worker.manager.phase("log_prob") as step:
        with pytest.raises(DeviceMemoryError, match="waited") as caught:
            step.switch("train")
        assert "other processes have the memory of actor" in caught.value.__notes__[0]
        assert step.name == "log_prob"
        assert states(worker) == [OFF, OFF]
        assert worker.held_bytes() == (0, 0)
        lease.settle(0)
        step.switch("train")
        assert states(worker) == [TRAIN, TRAIN]
        assert torch.equal(worker.model.weight, worker.expected)
    assert_nothing_resident(worker.manager)


def test_a_way_back_that_gave_way_in_vain_loads_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it had on the device before it gave way does not come back either: another process has
    leased that memory meanwhile."""
    device = SimulatedDevice(CAPACITY, chunk_bytes=CHUNK, shared_with=tmp_path / "capacity")
    phases = {"both": ("actor", "ref"), "one": ("actor",)}
    manager = Manager(
        device=device, leases=str(tmp_path / "leases"), lease_deadline_seconds=0.3, phases=phases
    )
    models = [nn.Linear(32 * CHUNK // 1024, 256) for _ in range(2)]
    for name, model in zip(("actor", "ref"), models, strict=True):
        manager.register(name, model, role=name)
    taken, refusal = other(tmp_path), Lease._refusal
    monkeypatch.setattr(
        Lease, "_refusal", lambda *given: (taken.settle(CAPACITY * 9 // 10), refusal(*given))[1]
    )
    with manager.phase("both"):
        with pytest.raises(PlacementError), manager.phase("one", only=["ref", "actor"]):
            taken.settle(CAPACITY * 6 // 10)
        assert [handle.state for handle in manager.handles.values()] == [OFF, OFF]
    taken.close()
    manager.close()


def test_an_inner_phase_lets_others_work_and_its_end_waits_for_them(tmp_path: Path) -> None:
    worker = GpuSharer(str(tmp_path))
    lease = other(tmp_path)
    with worker.manager.phase("log_prob"):
        with worker.manager.phase("away"):
            assert worker.held_bytes() == (0, 0)
            lease.wait(90 * CHUNK)
            timer = threading.Timer(0.1, lease.settle, (0,))
            timer.start()
        timer.join()
        assert states(worker) == [GPU, OFF]
        assert lease_of(worker.manager).waited_seconds > 0
        impatient(worker)
        away = worker.manager.phase("away")
        away.__enter__()
        lease.wait(90 * CHUNK)
        with pytest.raises(DeviceMemoryError, match="back to phase 'log_prob' waited"):
            away.__exit__(None, None, None)
        assert worker.manager.phase_name == "log_prob"
        assert states(worker) == [OFF, OFF]
        with pytest.raises(ZeroDivisionError) as caught, worker.manager.phase("away"):
            raise ZeroDivisionError
        assert "back to phase 'log_prob' waited" in caught.value.__notes__[0]
        with pytest.raises(SystemExit) as ended, worker.manager.phase("away"):
            raise SystemExit
        assert "other processes have the memory of actor" in ended.value.__notes__[0]
        lease.settle(0)
    assert_nothing_resident(worker.manager)
    worker.manager.close()


@pytest.mark.parametrize("gives_way", [False, True])
def test_a_move_that_fails_gives_back_what_it_had_leased(tmp_path: Path, gives_way: bool) -> None:
    device = Faults(SimulatedDevice(CAPACITY, chunk_bytes=CHUNK, shared_with=tmp_path / "capacity"))
    manager = Manager(device=device, leases=str(tmp_path / "leases"))
    model = nn.Linear(256, 128)
    before = model.weight.detach().clone()
    manager.register("actor", model, role="actor")
    lease = other(tmp_path, CAPACITY if gives_way else 0)
    timer = threading.Timer(0.05, lease.settle, (0,))
    timer.start()
    device.fail("create", at=3)
    with pytest.raises(DeviceMemoryError, match="injected"), manager.phase("log_prob"):
        pass
    assert device.fired == 1
    timer.join()
    assert lease.grow(CAPACITY)
    lease.close()
    with manager.phase("log_prob"):
        assert torch.equal(model.weight, before)
    assert_nothing_resident(manager)
    manager.close()


def test_an_interrupt_while_it_waits_leaves_nothing_behind(
    worker: GpuSharer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = other(tmp_path, CAPACITY)

    def interrupt() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(leases.interrupts, "check", interrupt)
        with pytest.raises(KeyboardInterrupt), worker.manager.phase("train"):
            pass
    assert worker.manager.phase_name == "idle"
    assert worker.held_bytes() == (0, 0)
    assert lease.snapshot().holders[0].wanted_bytes == 0
    lease.close()
    worker.work()


def test_what_a_lease_says_and_the_driver_does_not_have_is_waited_for(
    worker: GpuSharer, tmp_path: Path
) -> None:
    kept_by_framework = SimulatedDevice(
        CAPACITY, chunk_bytes=CHUNK, shared_with=tmp_path / "capacity"
    )
    # a process that takes no lease, or one that is still being cleared away
    chunks = [kept_by_framework.create(CHUNK) for _ in range(50)]
    working = in_thread(worker.work)
    assert until_waiting(worker) == 0
    chunks.clear()
    kept_by_framework.close()
    working.result(30)
    chunks = [kept_by_framework.create(CHUNK) for _ in range(50)]
    impatient(worker)
    with (
        pytest.raises(DeviceMemoryError, match="a process without a lease uses it"),
        worker.manager.phase("train"),
    ):
        pass
    chunks.clear()


class Caching(SimulatedDevice):
    """A device whose torch keeps what it has freed, as on a GPU."""

    cached_bytes = 0

    def memory(self) -> DeviceMemory:
        real = super().memory()
        return DeviceMemory(
            total_bytes=real.total_bytes,
            free_bytes=real.free_bytes - self.cached_bytes,
            torch_reserved_bytes=self.cached_bytes,
            chunk_bytes=real.chunk_bytes,
            poison_bytes=real.poison_bytes,
        )

    def trim(self) -> None:
        self.cached_bytes = 0


def test_memory_for_activations_is_leased_with_the_handles_and_given_back_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "HEADROOM", 0.25)
    device = Caching(CAPACITY, chunk_bytes=CHUNK, shared_with=tmp_path / "capacity")
    device.cached_bytes = 5 * CHUNK
    manager = Manager(device=device, leases=str(tmp_path / "leases"))
    model = nn.Linear(256, 128)

    assert lease_of(manager).held_bytes == 5 * CHUNK  # what torch had before the manager
    manager.register("actor", model, role="actor")
    with manager.phase("log_prob") as step:
        assert lease_of(manager).held_bytes == ACTOR + CAPACITY // 4  # the first time: the headroom
        device.cached_bytes = 10 * CHUNK
        step.switch("weight_sync")
        step.switch("log_prob")
        assert lease_of(manager).held_bytes == ACTOR + 10 * CHUNK  # what it came to
        assert manager.snapshot().budget_bytes == ACTOR + 10 * CHUNK
    assert device.cached_bytes == 0
    assert lease_of(manager).held_bytes == 0
    lease = other(tmp_path, CAPACITY - ACTOR - 10 * CHUNK)
    with manager.phase("log_prob") as step:
        assert lease_of(manager).held_bytes == ACTOR + 10 * CHUNK
        device.cached_bytes = 12 * CHUNK
        step.switch("weight_sync")  # the cache goes before anybody is waited for
        assert device.cached_bytes == 0
        assert lease_of(manager).held_bytes == ACTOR + 10 * CHUNK
        lease.settle(0)
        step.switch("log_prob")
        assert device.cached_bytes == 0  # the end of a sync gives the memory of its buckets back
        device.cached_bytes = 12 * CHUNK
        step.switch("log_prob")
        assert device.cached_bytes == 12 * CHUNK
        assert lease_of(manager).held_bytes == ACTOR + 12 * CHUNK
    lease.close()
    manager.close()


def test_a_phase_that_moves_nothing_and_waits_for_more_memory_has_its_handles_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "HEADROOM", 0.25)
    device = SimulatedDevice(CAPACITY, chunk_bytes=CHUNK, shared_with=tmp_path / "capacity")
    manager = Manager(device=device, leases=str(tmp_path / "leases"), phases={"again": ("actor",)})
    model, lease = nn.Linear(256, 128), other(tmp_path)
    manager.register("actor", model, role="actor")
    with manager.phase("log_prob"):
        pass
    # now it is known that it needs nothing beside its handles
    with manager.phase("log_prob") as step:
        lease.settle(CAPACITY - ACTOR)
        threading.Timer(0.1, lease.settle, (0,)).start()
        step.switch("again")  # for the headroom of this one it has to give way
        assert manager.handles["actor"].state is GPU
        model(torch.ones(1, 256))
    manager.close()


def test_who_waits_keeps_the_weights_of_an_engine_that_would_discard_them(tmp_path: Path) -> None:
    shared = tmp_path / "capacity"
    sizes = {tag: TAG_BYTES[tag] for tag in ("weights", "kv_cache")}
    engine, model = Own(shared, weights="discard", tag_bytes=sizes), nn.Linear(8, 8)
    device = SimulatedDevice(ENGINES_CAPACITY, chunk_bytes=CHUNK, shared_with=shared)
    manager = Manager(device=device, leases=str(tmp_path / "leases"), lease_deadline_seconds=20.0)
    actor = manager.register("actor", model, role="actor")
    manager.register("rollout", engine, role="rollout")
    other = Lease(f"simulated{shared}", ENGINES_CAPACITY, folder=tmp_path / "leases")
    both = sum(sizes.values())

    manager.enter("weight_sync")
    assert lease_of(manager).held_bytes == TAG_BYTES["weights"] + actor.resident_bytes
    engine.weights_filled()
    other.settle(ENGINES_CAPACITY - both + CHUNK)
    working = in_thread(lambda: manager.switch("rollout"))
    while not lease_of(manager).wanted_bytes:
        assert not working.done()
    assert lease_of(manager).held_bytes == TAG_BYTES["weights"]
    other.settle(0)
    working.result(30)
    assert lease_of(manager).held_bytes == both
    assert engine.residency.stale is None
    with manager.phase("weight_sync"):  # its KV cache goes, and others take that
        assert lease_of(manager).held_bytes == TAG_BYTES["weights"] + actor.resident_bytes
        engine.weights_filled()
        other.settle(ENGINES_CAPACITY - lease_of(manager).held_bytes)
        with pytest.raises(KeyboardInterrupt) as caught, manager.phase("weight_sync"):
            raise KeyboardInterrupt
        assert not getattr(caught.value, "__notes__", [])
        threading.Timer(0.1, other.settle, (0,)).start()
    assert other.held_bytes == 0  # it was waited for
    assert lease_of(manager).held_bytes == both
    manager.leave()
    assert lease_of(manager).held_bytes == 0
    assert_nothing_resident(manager)


def test_a_lease_is_seen_in_the_metrics(worker: GpuSharer, tmp_path: Path) -> None:
    lease = other(tmp_path, 90 * CHUNK)
    working = in_thread(worker.work)
    until_waiting(worker)
    value_of = make_registry(worker.manager.snapshot).get_sample_value
    found = {
        name: value_of(f"placement_lease_{name}")
        for name in ("wanted_bytes", "others_bytes", "bytes", "capacity_bytes", "processes")
    }
    assert [*found.values()] == [ACTOR, 90 * CHUNK, 0, CAPACITY, 2]
    lease.close()
    working.result(30)
    assert (value_of("placement_lease_wait_seconds_total") or 0) > 0
    assert value_of("placement_lease_wanted_bytes") == 0
    alone = make_registry(Manager(device=SimulatedDevice(1 << 20)).snapshot)
    assert alone.get_sample_value("placement_lease_bytes") is None


def test_a_device_that_nobody_else_can_use_has_no_leases(tmp_path: Path) -> None:
    with pytest.raises(
        PlacementError,
        match=r"device 'simulated' is private to "
        r"this "
        r"process; "
        r"give "
        r"a SimulatedDevice shared_with=",
    ):
        Manager(device=SimulatedDevice(1 << 20), leases=str(tmp_path))


def test_the_example_of_two_processes(capfd: pytest.CaptureFixture[str]) -> None:
    from examples.shared_gpu import main

    assert main() == [0, 0]
    lines = sorted(capfd.readouterr().out.splitlines())
    assert [line.split(",")[0] for line in lines] == ["rollout: 3 phases", "trainer: 3 phases"]
    assert all(line.endswith("leases 0 bytes at the end") for line in lines)
    assert any(float(line.split()[4]) > 0 for line in lines)  # somebody waited
