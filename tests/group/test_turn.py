"""Turns: managers that have one GPU one after the other, in several processes and in one."""

from __future__ import annotations

import errno
import fcntl
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from filelock import FileLock, Timeout
from torch import nn

from placement import Manager, PlacementError, PolicyError, State
from placement.core.errors import DeviceMemoryError, EngineLost, GroupError
from placement.devices.memory import DeviceMemory
from placement.engines.tagged import TaggedEngine
from placement.group import StoreGroup
from placement.group import turn as turns
from placement.group.turn import Turn
from placement.planning.planner import HEADROOM
from placement.testing import SimulatedDevice, assert_nothing_resident
from tests.group.processes import Process, Processes
from tests.group.turn_processes import CAPACITY, CHUNK, Sharer, print_into, turn_of
from tests.support.forked import exit_code
from tests.support.forked import processes as forked_processes
from tests.support.threads import on_all


@pytest.fixture
def sharer(tmp_path: Path) -> Iterator[Sharer]:
    made = Sharer(str(tmp_path))
    yield made
    made.manager.close()


def another(sharer: Sharer, deadline_seconds: float = 0.05) -> Turn:
    """What another process would have: a turn on the same GPU, which is not taken yet."""
    mine = turn_of(sharer.manager)
    return Turn(mine.gpu, str(Path(mine._lock.lock_file).parent), deadline_seconds)


def until_one_waits(folder: Path) -> None:
    """Return once a manager waits for its turn."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        for file in folder.glob("*.next"):
            try:
                with FileLock(file, timeout=0):
                    pass
            except Timeout:
                return
        time.sleep(0.001)
    raise AssertionError("no manager waits")


def waiting(process: Process, folder: Path) -> None:
    """Let a process enter, and return when it waits."""
    process.begin("enter")
    until_one_waits(folder / "turns")
    assert process.is_busy(0)


def in_thread(work: Callable[[], Any]) -> Future[Any]:
    return ThreadPoolExecutor(1).submit(work)


# --- several processes


def test_a_phase_waits_until_the_other_process_has_left(
    processes: Processes, tmp_path: Path
) -> None:
    first, second = (processes.start(Sharer, str(tmp_path)) for _ in range(2))
    first.call("enter")
    waiting(second, tmp_path)
    first.call("leave")
    second.answer()
    second.call("leave")
    for process in (first, second):
        process.begin("work", 20)
    assert [process.answer() for process in (first, second)] == [True, True]


def test_a_process_that_has_just_left_is_behind_the_one_that_waits(
    processes: Processes, tmp_path: Path
) -> None:
    first, second = (processes.start(Sharer, str(tmp_path)) for _ in range(2))
    first.call("enter")
    waiting(second, tmp_path)
    first.begin("leave_and_enter")
    second.answer()
    assert first.is_busy(0)
    second.call("leave")
    first.answer()
    first.call("leave")


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("forks", [False, True])
def test_a_killed_process_loses_its_turn(processes: Processes, tmp_path: Path, forks: bool) -> None:
    """Also where a child lives on that was forked in the phase."""
    doomed, second = (processes.start(Sharer, str(tmp_path)) for _ in range(2))
    child = doomed.call("enter_and_fork" if forks else "enter")
    waiting(second, tmp_path)
    doomed.kill()
    second.answer()
    second.call("leave")
    if forks:
        os.kill(child, signal.SIGKILL)


def test_a_turn_begins_when_the_process_that_had_it_has_ended(tmp_path: Path) -> None:
    """The kernel ends the lock of a killed process before its memory may be free."""
    ending = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    turn = Turn("GPU-1", str(tmp_path), deadline_seconds=60)
    turn._holder_file.write_text(f"process {ending.pid} has it since it entered phase 'train'")
    with ThreadPoolExecutor() as threads:
        taken = threads.submit(turn.take, "log_prob")
        with pytest.raises(TimeoutError):
            taken.result(0.1)
        ending.kill()
        taken.result(30)
    assert turn.is_held
    turn.give_back()
    ending.wait()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_has_no_part_in_the_turn(sharer: Sharer) -> None:
    other = another(sharer)
    holders = [sharer]

    def child() -> int:
        turn = turn_of(holders[0].manager)
        is_held = turn.is_held
        turn.give_back()
        holders.clear()
        gc.collect()
        return int(is_held)

    with sharer.manager.phase("log_prob"):
        assert exit_code(child) == 0
        with pytest.raises(DeviceMemoryError):
            other.take("train")
        assert sharer.has_turn


# --- waiting


def test_the_deadline_names_the_holder_and_moves_nothing(
    processes: Processes, tmp_path: Path
) -> None:
    holder = processes.start(Sharer, str(tmp_path))
    late = Sharer(str(tmp_path), turn_deadline_seconds=0.05)
    holder.call("enter", "weight_sync")
    with (
        pytest.raises(
            DeviceMemoryError,
            match=rf"phase 'log_prob' waited 0.05 s for its turn on simulated.*: process "
            rf"{holder.pid} has it since it entered phase 'weight_sync'.*turn_deadline_seconds",
        ),
        late.manager.phase("log_prob"),
    ):
        raise AssertionError("entered")
    assert late.manager.phase_name == "idle"
    assert_nothing_resident(late.manager)
    holder.call("leave")
    assert late.work()
    late.manager.close()


def test_two_managers_of_one_process_take_turns(tmp_path: Path, sharer: Sharer) -> None:
    other = Sharer(str(tmp_path), turn_deadline_seconds=0.05)
    with sharer.manager.phase("log_prob"):
        with pytest.raises(DeviceMemoryError, match=rf"process {os.getpid()} has it"):
            other.manager.enter("log_prob")
        assert sharer.has_turn
    assert other.work()
    with other.manager.phase("log_prob"):
        entered = in_thread(sharer.work)
        until_one_waits(tmp_path / "turns")
        assert not entered.done()
    assert entered.result(30)
    other.manager.close()


def test_an_interrupt_ends_the_wait(sharer: Sharer, tmp_path: Path) -> None:
    other = another(sharer)
    other.take("train")

    def interrupt() -> None:
        until_one_waits(tmp_path / "turns")
        os.kill(os.getpid(), signal.SIGINT)

    interrupting = in_thread(interrupt)
    with pytest.raises(KeyboardInterrupt), sharer.manager.phase("log_prob"):
        raise AssertionError("entered")
    interrupting.result(30)
    assert sharer.manager.phase_name == "idle"
    other.give_back()
    other.take("train")  # the wait has left nothing locked
    other.give_back()
    assert sharer.work()


def test_a_long_wait_is_logged_once_and_counts_as_a_stall(
    sharer: Sharer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(turns, "_QUIET_SECONDS", 0.0)
    caplog.set_level(logging.INFO, "placement")
    other = another(sharer)
    other.take("train")

    def said() -> list[str]:
        return [each.getMessage() for each in caplog.records if "waits" in each.getMessage()]

    entered = in_thread(sharer.work)
    began = time.monotonic()
    while not said():
        assert time.monotonic() - began < 30
        time.sleep(0.001)
    began = time.monotonic()
    threading.Event().wait(0.1)  # several looks
    waited = time.monotonic() - began
    other.give_back()
    assert entered.result(30)
    holder = f"process {os.getpid()} has it since it entered phase 'train'"
    assert said() == [f"phase log_prob waits for its turn on {other.gpu}: {holder}"]
    assert sharer.manager.snapshot().phase_stall_seconds["log_prob"] >= waited


# --- when a turn begins and ends


def test_a_turn_is_of_the_outermost_phase(sharer: Sharer) -> None:
    assert not sharer.has_turn
    with sharer.manager.phase("log_prob") as step:
        assert sharer.has_turn
        budget_bytes = int(CAPACITY * (1 - HEADROOM))
        assert sharer.manager.snapshot().budget_bytes == budget_bytes  # of what is free
        with sharer.manager.phase("checkpoint"):
            assert sharer.has_turn
        assert sharer.has_turn
        step.switch("weight_sync")
        assert sharer.has_turn
        assert sharer.manager.audit().ok
    assert not sharer.has_turn
    with pytest.raises(ZeroDivisionError), sharer.manager.phase("log_prob"):
        raise ZeroDivisionError
    assert not sharer.has_turn
    with sharer.manager.phase("idle"):
        for _ in range(2):
            with sharer.manager.phase("log_prob"):
                assert sharer.has_turn
    assert not sharer.has_turn


def test_a_phase_that_is_called_idle_keeps_the_turn_while_it_is_open(sharer: Sharer) -> None:
    manager = sharer.manager
    with manager.phase("train"), manager.phase("idle"):
        with manager.phase("log_prob"):
            pass
        assert sharer.has_turn
        sharer.device.fail("create", at=1)
        with pytest.raises(DeviceMemoryError, match="injected"), manager.phase("log_prob"):
            raise AssertionError("entered")
        assert sharer.has_turn
    assert not sharer.has_turn


def test_an_entry_that_fails_gives_the_turn_back(sharer: Sharer) -> None:
    sharer.device.fail("create", at=3)
    with pytest.raises(DeviceMemoryError, match="injected"), sharer.manager.phase("log_prob"):
        raise AssertionError("entered")
    assert sharer.device.fired == 1
    assert not sharer.has_turn
    assert_nothing_resident(sharer.manager)
    assert sharer.work()


def test_what_cannot_be_offloaded_keeps_the_turn(tmp_path: Path) -> None:
    sharer = Sharer(str(tmp_path))
    sgd = torch.optim.SGD(sharer.actor.parameters(), lr=0.5)
    sharer.manager.register("sgd", sgd)
    sharer.manager.enter("train")
    sharer.actor(torch.ones(1, 256)).sum().backward()
    sgd.step()
    sgd.zero_grad()
    after = sharer.actor.weight.numpy(force=True).tobytes()
    sharer.device.fail("copy", forever=True)
    with pytest.raises(Exception, match="injected"):
        sharer.manager.leave()
    assert sharer.has_turn
    with pytest.raises(DeviceMemoryError, match="has it since it entered phase 'train'"):
        another(sharer).take("train")
    findings = {each.what: each.detail for each in sharer.manager.audit().findings}
    assert findings["turn"].endswith("does not end while actor is on the device")

    sharer.device.clear()  # copies work again
    with sharer.manager.phase("checkpoint"):
        pass
    assert not sharer.has_turn
    assert sharer.manager.handles["actor"].state is State.CPU_OFFLOADED
    with sharer.manager.phase("log_prob"):
        assert sharer.actor.weight.numpy(force=True).tobytes() == after
    sharer.manager.close()


class Silent(TaggedEngine):
    """An engine that does not answer when it is to load."""

    def load(self, tags: Collection[str]) -> None:
        raise EngineLost("no answer")

    def drain(self) -> None: ...
    def offload(self, tags: Collection[str]) -> None: ...
    def admit(self) -> None: ...
    def receive(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> None: ...


def test_an_engine_that_does_not_answer_keeps_the_turn(sharer: Sharer) -> None:
    """It may have the memory by now."""
    engine = Silent(
        tags=["weights"], tag_bytes={"weights": CHUNK}, offloaded=["weights"], verify="answer"
    )
    sharer.manager.register("rollout", engine, role="rollout")
    with pytest.raises(EngineLost), sharer.manager.phase("rollout"):
        raise AssertionError("entered")
    assert sharer.has_turn
    sharer.manager.unregister("rollout")
    assert not sharer.has_turn


def test_a_device_that_fails_does_not_keep_the_turn(tmp_path: Path) -> None:
    device = Caching(CAPACITY, chunk_bytes=CHUNK, shared_with=tmp_path / "capacity")
    manager = Manager(device=device, turns=str(tmp_path / "turns"))
    with pytest.raises(RuntimeError, match="illegal access"), manager.phase("rollout"):
        device.error = RuntimeError("illegal access")
    assert not turn_of(manager).is_held
    device.error = None
    manager.close()


def test_a_kept_handle_keeps_the_turn_until_the_next_phase_has_ended(sharer: Sharer) -> None:
    with sharer.manager.phase("log_prob") as phase:
        phase.keep("actor")
    assert sharer.has_turn
    assert sharer.manager.audit().ok
    with sharer.manager.phase("log_prob"):
        assert sharer.has_turn
    assert not sharer.has_turn


def test_a_kept_handle_that_is_unregistered_ends_the_turn(sharer: Sharer) -> None:
    with sharer.manager.phase("log_prob") as phase:
        phase.keep("actor")
    sharer.manager.unregister("actor")
    assert not sharer.has_turn


def test_close_gives_the_turn_back(tmp_path: Path) -> None:
    sharer = Sharer(str(tmp_path))
    other = another(sharer)
    with sharer.manager.phase("log_prob") as phase:
        phase.keep("actor")
    sharer.manager.close()
    other.take("train")
    other.give_back()


def test_what_is_handed_back_on_the_device_waits_for_the_turn(tmp_path: Path) -> None:
    sharer = Sharer(str(tmp_path), turn_deadline_seconds=0.05)
    other = another(sharer)
    other.take("train")
    with pytest.raises(DeviceMemoryError, match="waited"):
        sharer.manager.close(on_device=["actor"])
    assert_nothing_resident(sharer.manager)
    other.give_back()
    sharer.device.fail("create", at=3)
    with pytest.raises(DeviceMemoryError, match="injected"):
        sharer.manager.unregister("actor", on_device=True)
    assert not sharer.has_turn
    sharer.manager.unregister("actor", on_device=True)
    assert not sharer.has_turn
    assert torch.equal(sharer.actor.weight, sharer.before)
    sharer.manager.close()


def test_a_policy_that_loads_outside_every_phase_is_refused_at_register(tmp_path: Path) -> None:
    with pytest.raises(
        PolicyError, match=r"'resident' has actor on the device outside every phase.*turn would"
    ):
        Sharer(str(tmp_path), policy="resident")


def test_a_policy_that_keeps_outside_every_phase_is_refused_when_the_first_ends(
    tmp_path: Path,
) -> None:
    sharer = Sharer(str(tmp_path), policy="cyclic")
    with (
        pytest.raises(PolicyError, match="'cyclic' has actor on the device outside every phase"),
        sharer.manager.phase("log_prob"),
    ):
        assert sharer.has_turn
    assert_nothing_resident(sharer.manager)
    assert not sharer.has_turn
    sharer.manager.close()


def test_cyclic_with_nothing_in_idle_takes_turns(tmp_path: Path) -> None:
    sharer = Sharer(str(tmp_path), policy='cyclic(idle="empty")')
    assert sharer.work(5)
    sharer.manager.close()


class Caching(SimulatedDevice):
    """A device whose torch keeps what it has freed, as on a GPU."""

    cached_bytes = 0
    error: Exception | None = None

    def memory(self) -> DeviceMemory:
        if self.error is not None:
            raise self.error
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


def test_the_end_of_a_turn_empties_torchs_cache(tmp_path: Path) -> None:
    device = Caching(CAPACITY, chunk_bytes=CHUNK, shared_with=tmp_path / "capacity")
    manager = Manager(device=device, turns=str(tmp_path / "turns"), phases={"away": ()})
    model = nn.Linear(8, 8)
    manager.register("actor", model, role="actor")
    with manager.phase("log_prob") as step:
        device.cached_bytes = 3 * CHUNK
        step.switch("away")
        assert device.cached_bytes == 3 * CHUNK
    assert device.cached_bytes == 0
    manager.close()


# --- ranks of a group


def test_ranks_all_refuse_if_one_does_not_get_its_turn(tmp_path: Path) -> None:
    store = dist.HashStore()
    ranks = []
    for rank in range(2):
        folder = tmp_path / f"gpu{rank}"
        group = StoreGroup(store, rank, 2, 20.0)
        ranks.append(Sharer(str(folder), group=group, turn_deadline_seconds=0.05))
    other = another(ranks[1])
    other.take("rollout")

    def refused(sharer: Sharer) -> dict[int, str]:
        with pytest.raises(GroupError) as caught:
            sharer.manager.enter("log_prob")
        assert not sharer.has_turn
        assert_nothing_resident(sharer.manager)
        return dict(caught.value.failures)

    for failures in on_all(ranks, refused):
        assert [*failures] == [1]
        assert "waited 0.05 s for its turn" in failures[1]
        assert "has it since it entered phase 'rollout'" in failures[1]
    other.give_back()
    assert on_all(ranks, Sharer.work) == [True, True]
    on_all(ranks, lambda rank: rank.manager.close())


def test_a_rank_that_waits_in_vain_says_so_before_the_others_give_up(tmp_path: Path) -> None:
    group = StoreGroup(dist.HashStore(), 0, 1, 10.0)
    sharer = Sharer(str(tmp_path), group=group, turn_deadline_seconds=600.0)
    assert turn_of(sharer.manager).deadline_seconds == 9.0
    sharer.manager.rejoin(StoreGroup(dist.HashStore(), 0, 1, 5.0))
    assert turn_of(sharer.manager).deadline_seconds == 4.5
    sharer.manager.close()


# --- names and folders


def test_a_device_that_no_other_process_can_use_has_no_turns(tmp_path: Path) -> None:
    with pytest.raises(
        PlacementError, match="device 'simulated' is private to this process; give a SimulatedD"
    ):
        Manager(device=SimulatedDevice(1 << 20), turns=str(tmp_path))


def test_a_folder_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PlacementError, match="cannot make the folder"):
        Turn("GPU-1", str(tmp_path / "file" / "turns"), 1.0)
    turn = Turn("GPU-1", str(tmp_path / "links"), 1.0)
    Path(turn._lock.lock_file).symlink_to(tmp_path / "file")
    with pytest.raises(PlacementError, match="cannot lock"):
        turn.take("train")
    monkeypatch.setattr(turns, "TURNS_FOLDER", str(tmp_path))
    monkeypatch.setattr(turns.os, "getuid", lambda: 12345)
    with pytest.raises(PlacementError, match="belongs to another user"):
        Turn("GPU-1", str(tmp_path), 1.0)


def test_a_file_system_that_does_not_answer_is_no_other_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ETIMEDOUT, "Connection timed out")

    turn = Turn("GPU-1", str(tmp_path), 1.0)
    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(PlacementError, match=r"cannot lock .*Connection timed out"):
        turn.take("train")


def test_a_gpus_name_is_no_path_and_never_that_of_another(tmp_path: Path) -> None:
    names = ["../../GPU/1", "..-..-GPU-1", "/tmp/" + "x" * 500 + "/a", "/tmp/" + "x" * 500 + "-a"]
    held = [Turn(name, str(tmp_path / "turns"), 1.0) for name in names]
    for turn in held:
        turn.take("train")
    files = [path.relative_to(tmp_path) for path in tmp_path.rglob("*.turn")]
    assert len(files) == 4
    assert all(len(path.parts) == 2 and len(path.name) < 80 for path in files)
    for turn in held:
        turn.give_back()


def test_a_holder_file_that_is_damaged_costs_a_name(sharer: Sharer) -> None:
    other = another(sharer)
    with sharer.manager.phase("log_prob"):
        other._holder_file.write_bytes(b"\xff\xfe")
        with pytest.raises(DeviceMemoryError, match="another process has it"):
            other.take("train")


@pytest.mark.sweep
def test_the_example_of_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It spawns its processes for CUDA's sake. These have their imports already."""
    from examples.shared_gpu import main

    printed = tmp_path / "printed"
    printed.touch()
    context = SimpleNamespace(
        Barrier=forked_processes.Barrier,
        Process=lambda target, args: forked_processes.Process(
            target=print_into, args=(printed, target, *args)
        ),
    )
    monkeypatch.setattr("multiprocessing.get_context", lambda _: context)
    assert main() == [0, 0]
    lines = sorted(printed.read_text().splitlines())
    assert [line.split(",")[0] for line in lines] == ["rollout: 3 phases", "trainer: 3 phases"]
    stood = [float(line.split()[4]) for line in lines]
    assert max(stood) >= 0.1  # the other works for that long
