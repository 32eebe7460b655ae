"""Host copies on disk, beside everything else that reads or writes a host copy: nothing reads what
is not there, nothing is lost."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import placement
from placement import IntegrityError, Manager, State
from placement.core.interrupts import BackgroundThread
from placement.planning.host_tier import DiskTier
from placement.storage.disk import Place
from placement.testing import SimulatedDevice, assert_nothing_resident
from tests.support.disk import damage, send_to_disk, settle, spills_of, tier_of
from tests.support.threads import until
from tests.support.worker import CAPACITY, Worker, assert_same, learn, net
from tests.unit.test_prefetch import ALL, early_bytes
from tests.unit.test_saving import late_worker
from tests.unit.test_streamed_optimizer import Pair, adamw

ROOM = 64 << 20
"""A limit within which everything fits: only what a test sends to the disk is there."""


def disk_worker(folder: Path, wanted: Mapping[str, Mapping[str, int]], **keywords: Any) -> Worker:
    """A worker that has learnt for a step, on a device whose copies happen when somebody waits for
    them."""
    return late_worker(wanted, **{"host_limit_bytes": ROOM, "disk_directory": folder, **keywords})


def end(worker: Worker, folder: Path) -> None:
    worker.manager.check_integrity()
    worker.manager.close()
    assert [*folder.iterdir()] == []


# --- pages aside


def test_what_is_on_disk_does_not_arrive_early_and_nobody_waits_for_it(tmp_path: Path) -> None:
    worker = disk_worker(tmp_path, {"log_prob": {"critic": ALL}})
    with worker.manager.phase("values"):
        wanted = copy.deepcopy(worker.critic_net.state_dict())
    send_to_disk(worker.manager, "critic")
    waited = worker.manager.snapshot().disk_wait_seconds
    with worker.manager.phase("log_prob") as step:
        assert early_bytes(worker) == {}
        assert worker.manager.snapshot().disk_wait_seconds == waited
        settle(worker.manager)  # it is read ahead meanwhile
        assert all(spill.is_here for spill in spills_of(worker.manager, "critic"))
        step.switch("values")
        assert_same(dict(worker.critic_net.state_dict()), dict(wanted))
        step.switch("log_prob")
        assert early_bytes(worker) == {"critic": worker.critic.num_bytes}
        # as long as chunks of it are early
        assert not any(spill.may_leave for spill in spills_of(worker.manager, "critic"))
    end(worker, tmp_path)


# --- streamed steps


def test_a_streamed_step_of_state_that_came_back_wrong_is_refused_and_names_it(
    tmp_path: Path,
) -> None:
    pair = Pair(adamw, host_limit_bytes=ROOM, disk_directory=tmp_path)
    pair.step(0)
    with pair.manager.phase("train"):
        (spill,) = send_to_disk(pair.manager, "adam")
        damage(spill, 0)
        before = {name: tensor.clone() for name, tensor in pair.net.state_dict().items()}
        pair.net(torch.tensor([1])).backward()
        problem = (
            r"of the host copy of 'adam' came back from .* with other bytes "
            r"than "
            r"were "
            r"written "
            r"there"
        )
        for _ in range(2):
            with pytest.raises(IntegrityError, match=problem):
                pair.optimizer.step()
        assert_same(dict(pair.net.state_dict()), before)
        pair.manager.unregister("adam")
    assert_same(dict(pair.actor.state_dict()), before)
    pair.manager.close()
    assert [*tmp_path.iterdir()] == []


# --- readers and writers of the host copy


def test_a_checkpoint_while_the_bytes_are_on_the_device_alone(tmp_path: Path) -> None:
    """The host copies were dropped. The background writer has them made again."""
    folder, saved = tmp_path / "disk", tmp_path / "saved"
    folder.mkdir()
    worker = disk_worker(folder, {})
    with worker.manager.phase("train"):
        learn(worker.net, worker.adam, 5)
        wanted = copy.deepcopy((worker.net.state_dict(), worker.adam.state_dict()))
        assert {
            spill.place for spill in send_to_disk(worker.manager, "actor", "actor.optimizer")
        } == {Place.NOWHERE}
        writing = placement.checkpoint.async_save(worker.manager, saved)
        learn(worker.net, worker.adam, 6)
        writing.result()
    with worker.manager.phase("train"):
        learn(worker.net, worker.adam, 7)
    send_to_disk(worker.manager, "actor", "actor.optimizer")
    placement.checkpoint.load(worker.manager, saved)
    assert_same((worker.net.state_dict(), worker.adam.state_dict()), wanted)
    end(worker, folder)


# --- the folder


def test_a_folder_that_is_missing_or_not_writable_is_refused_before_anything_is_made(
    tmp_path: Path,
) -> None:
    before = threading.active_count()
    with pytest.raises(
        ValueError,
        match=r"disk_directory .*nowhere' is no "
        r"folder; "
        r"set "
        r"disk_directory "
        r"to a folder on a local disk",
    ):
        Manager(
            device=SimulatedDevice(CAPACITY),
            host_limit_bytes=ROOM,
            disk_directory=tmp_path / "nowhere",
        )
    with pytest.raises(
        ValueError,
        match=r"disk_directory '/proc': .*set disk_directory "
        r"to "
        r"a "
        r"folder on a local disk that this "
        r"process may",
    ):
        Manager(device=SimulatedDevice(CAPACITY), host_limit_bytes=ROOM, disk_directory="/proc")
    assert threading.active_count() <= before
    manager = Manager.from_settings(
        {"device": "simulated:1MiB", "host_limit_bytes": "1GiB", "disk_directory": str(tmp_path)}
    )
    assert isinstance(tier_of(manager), DiskTier)
    manager.close()


# --- a manager that nobody closed


def test_a_manager_that_is_collected_on_the_keepers_own_thread_is_closed_beside_it(
    tmp_path: Path,
) -> None:
    """Closing needs what is on disk, which the thread on which the collection happens would have to
    read."""
    worker = disk_worker(tmp_path, {})
    send_to_disk(worker.manager, "ref")
    reference, wanted = worker.ref_net, copy.deepcopy(worker.ref_values)
    keeper = tier_of(worker.manager)._keeper
    gc.disable()
    try:
        was_collected = threading.Event()

        def collect(*_: Any) -> bool:
            gc.collect()
            was_collected.set()
            return False

        keeper._step = collect  # type: ignore[method-assign]
        cycle: list[Any] = [worker]
        cycle.append(cycle)
        del worker, cycle
        with keeper._changed:
            keeper._is_due = True
            keeper._changed.notify()
        assert was_collected.wait(20)
        del keeper._step
    finally:
        gc.enable()
    until(lambda: not keeper._thread.is_alive())
    assert_same(dict(reference.state_dict()), dict(wanted))


def test_an_abandoned_phase_is_left_later_where_it_is_collected_on_such_a_thread() -> None:
    manager = Manager(device=SimulatedDevice(CAPACITY))
    model = net()
    actor = manager.register("actor", model, role="actor")
    phases = [manager.phase("log_prob")]
    phases[0].__enter__()
    thread = BackgroundThread("placement-test", phases.clear)
    thread.start()
    thread.join()
    assert actor.state is State.GPU_RESIDENT
    with manager.phase("values"):
        assert actor.state is State.CPU_OFFLOADED
    assert_nothing_resident(manager)
