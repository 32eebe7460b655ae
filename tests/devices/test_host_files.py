"""Host copies that are mappings of files: which ones, their values, and what happens when the disk
has no room."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import placement
from placement import HostMemoryError, Manager, State
from placement.devices.host import file_slab
from placement.devices.host.file_slab import FileSlab, LimitedHost, read_ahead
from placement.devices.host.slab import MADV_DONTNEED, PAGE, cut, libc
from placement.policies import Colocated
from placement.testing import SimulatedDevice, assert_nothing_resident
from tests.checkpoint.test_saving import late_worker
from tests.planning.test_prefetch import ALL
from tests.registration.test_streamed_optimizer import Pair, adamw
from tests.support.forked import exit_code
from tests.support.programs import Programs
from tests.support.threads import until
from tests.support.worker import CAPACITY, Worker, assert_same, batch, learn, net

MIB = 1 << 20
_MS_SYNC = 4


@contextlib.contextmanager
def full_disk(room_bytes: int = 0) -> Iterator[None]:
    """The kernel refuses files of this process that are larger."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def in_files(folder: Path, **keywords: Any) -> dict[str, Any]:
    """Settings with which every host copy is in a file."""
    return {"host_limit_bytes": 1, "disk_directory": folder, **keywords}


def disk_bytes(manager: Manager) -> dict[str, int]:
    return {name: handle.disk_bytes for name, handle in manager.handles.items()}


# --- a slab


def test_a_slab_in_a_file_keeps_its_bytes_and_is_gone_with_its_last_tensor(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    slab = FileSlab(str(tmp_path), 3 * PAGE + 1)
    assert (slab.held_bytes, slab.file_bytes, slab.pageable_bytes) == (0, 3 * PAGE + 1, 0)
    assert [*tmp_path.iterdir()] == []  # a killed process leaves nothing
    assert len(os.listdir("/proc/self/fd")) == before
    view = slab.view(PAGE - 3, 8)
    assert view.tolist() == [0] * 8
    view.fill_(7)
    address = slab.address
    del slab
    assert view.tolist() == [7] * 8
    assert f"{address:x}-" in Path("/proc/self/maps").read_text()
    del view
    assert f"{address:x}-" not in Path("/proc/self/maps").read_text()


def test_parts_of_a_slab_in_a_file_are_in_the_file(tmp_path: Path) -> None:
    first, rest = cut(FileSlab(str(tmp_path), 2 * PAGE), PAGE)
    assert rest is not None
    assert (first.held_bytes, first.file_bytes) == (0, PAGE)
    assert (rest.held_bytes, rest.file_bytes) == (0, PAGE)


def test_a_full_disk_is_an_error_before_a_byte_is_written(tmp_path: Path) -> None:
    with pytest.raises(
        HostMemoryError,
        match=rf"disk_directory '{tmp_path}' cannot take a host copy of 1,152,921,504,606,846,976 "
        r"bytes: .*; [\d,]+ bytes are free\. Free space there, set disk_directory",
    ):
        FileSlab(str(tmp_path), 1 << 60)
    assert [*tmp_path.iterdir()] == []


def test_a_folder_that_is_gone_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(HostMemoryError, match=r"nowhere' cannot take .* No such file"):
        FileSlab(str(tmp_path / "nowhere"), PAGE)


def test_what_is_not_in_memory_is_read_ahead() -> None:
    slab = FileSlab("/var/tmp", 4 * MIB)
    slab.view(0, 4 * MIB).fill_(3)
    libc.msync(ctypes.c_void_p(slab.address), ctypes.c_size_t(4 * MIB), _MS_SYNC)
    libc.madvise(slab.address, 4 * MIB, MADV_DONTNEED)
    with contextlib.suppress(PermissionError):  # else the kernel has forgotten nothing
        path = f"/proc/self/map_files/{slab.address:x}-{slab.address + 4 * MIB:x}"
        file = os.open(path, os.O_RDWR)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)
    read_ahead(slab.address + MIB + 5, 2 * MIB)
    until(lambda: file_slab._is_in_memory(slab.address + MIB, 2 * MIB + PAGE))
    assert (slab.view(0, 4 * MIB) == 3).all()


def test_a_forked_child_does_not_have_the_memory(tmp_path: Path) -> None:
    slab = FileSlab(str(tmp_path), PAGE)
    view = slab.view(0, PAGE).fill_(1)

    def touch() -> int:
        view.fill_(2)
        return 0

    assert exit_code(touch) == -signal.SIGSEGV
    assert view.eq(1).all()


# --- which host copies are in files


def test_slabs_are_in_memory_up_to_the_limit_and_then_in_files(tmp_path: Path) -> None:
    host = LimitedHost(SimulatedDevice(MIB), 3 * PAGE, str(tmp_path))
    first, second = host.slab(2 * PAGE), host.slab(PAGE)
    assert (first.file_bytes, second.file_bytes) == (0, 0)
    assert host.slab(1).file_bytes == 1
    del first
    assert host.slab(PAGE).file_bytes == 0


def test_what_is_registered_first_has_the_host_memory(tmp_path: Path) -> None:
    model_bytes = 64 * 64 * 4
    manager = Manager(
        device=SimulatedDevice(CAPACITY),
        host_limit_bytes=3 * model_bytes,
        disk_directory=tmp_path,
    )
    models = {name: nn.Linear(64, 64, bias=False) for name in ("actor", "ref", "reward", "critic")}
    for name, model in models.items():
        manager.register(name, model, role=name)
    assert disk_bytes(manager) == {"actor": 0, "ref": 0, "reward": 0, "critic": model_bytes}
    assert [handle.host_bytes for handle in manager.handles.values()] == [*[model_bytes] * 3, 0]
    manager.unregister("ref")
    gc.collect()
    models["teacher"] = nn.Linear(64, 64, bias=False)
    manager.register("teacher", models["teacher"], role="teacher")
    assert disk_bytes(manager)["teacher"] == 0
    assert disk_bytes(manager)["critic"] == model_bytes  # where it is, it stays
    assert [each.disk_bytes for each in manager.snapshot().handles] == [0, 0, model_bytes, 0]
    manager.close()


def test_a_folder_that_cannot_be_used_is_refused_with_the_manager(tmp_path: Path) -> None:
    for folder, words in (
        (tmp_path / "nowhere", r"nowhere' is no folder; set disk_directory to a folder on a local"),
        ("/proc", r"disk_directory '/proc' cannot take .*; set disk_directory to a folder"),
    ):
        with pytest.raises(ValueError, match=words):
            Manager(device=SimulatedDevice(CAPACITY), host_limit_bytes=MIB, disk_directory=folder)


# --- a run


@pytest.mark.parametrize("optimizer_in", ["train", "streamed"])
@pytest.mark.parametrize("limit_bytes", [1, 40_000])
def test_a_job_runs_bit_by_bit_with_host_copies_in_files(
    tmp_path: Path, optimizer_in: Any, limit_bytes: int
) -> None:
    settings = {"policy": Colocated(optimizer_in), "verify": "always"}
    worker = Worker(**in_files(tmp_path, host_limit_bytes=limit_bytes, **settings))
    actor, critic = net(), net()
    actor.load_state_dict(worker.net.state_dict())
    critic.load_state_dict(worker.critic_net.state_dict())
    adam = torch.optim.AdamW(actor.parameters(), lr=1e-2)
    sgd = torch.optim.SGD(critic.parameters(), lr=1e-2, momentum=0.9)
    for seed in range(4):
        with worker.manager.phase("ref_log_prob") as step:
            assert worker.ref_net(batch()).isfinite().all()
            step.switch("train")
            learn(worker.net, worker.adam, seed)
            learn(worker.critic_net, worker.sgd, seed)
        learn(actor, adam, seed)
        learn(critic, sgd, seed)
        assert_nothing_resident(worker.manager)
        assert_same(dict(worker.actor.state_dict()), dict(actor.state_dict()))
        assert_same(dict(worker.critic.state_dict()), dict(critic.state_dict()))
        assert_same(worker.optimizer.state_dict(), adam.state_dict())
        assert_same(worker.critic_optimizer.state_dict(), sgd.state_dict())
        assert_same(dict(worker.ref.state_dict()), dict(worker.ref_values))
    assert sum(handle.host_bytes for handle in worker.manager.handles.values()) <= limit_bytes
    assert sum(disk_bytes(worker.manager).values()) > 0
    assert worker.manager.audit().ok
    worker.manager.check_integrity()
    worker.manager.close()
    assert_same(dict(worker.net.state_dict()), dict(actor.state_dict()))


def test_streamed_state_is_in_a_file_from_its_first_step_on(tmp_path: Path) -> None:
    pair = Pair(adamw, **in_files(tmp_path))
    for step in range(3):
        pair.step(step)
        assert pair.handle.host_bytes == 0
        assert pair.handle.disk_bytes > 0
        pair.check()
    pair.manager.close()


def test_pages_arrive_early_from_a_file(tmp_path: Path) -> None:
    worker = late_worker({"log_prob": {"critic": ALL}}, **in_files(tmp_path))
    with worker.manager.phase("values"):
        wanted = copy.deepcopy(worker.critic_net.state_dict())
    with worker.manager.phase("log_prob") as step:
        assert worker.critic.storage.prefetched_bytes == worker.critic.num_bytes
        step.switch("values")
        assert_same(dict(worker.critic_net.state_dict()), dict(wanted))
    worker.manager.close()


def test_readers_and_checkpoints_use_the_mapping(tmp_path: Path) -> None:
    disk, saved = tmp_path / "disk", tmp_path / "saved"
    disk.mkdir()
    worker = Worker(**in_files(disk))
    with worker.manager.phase("train"):
        learn(worker.net, worker.adam)
    wanted = copy.deepcopy((dict(worker.net.state_dict()), worker.adam.state_dict()))
    r = worker.actor.storage.ranges[0]
    for value in worker.actor.state_dict().values():
        assert r.host.address <= value.data_ptr() < r.host.address + r.host.nbytes
    writing = placement.checkpoint.async_save(worker.manager, saved)
    with worker.manager.phase("train"):  # waits for the writer before it overwrites the files
        learn(worker.net, worker.adam, 1)
    writing.result()
    placement.checkpoint.load(worker.manager, saved)
    assert_same((dict(worker.net.state_dict()), worker.adam.state_dict()), wanted)
    worker.manager.close()


# --- a disk without room


def test_a_registration_without_room_on_the_disk_changes_nothing(tmp_path: Path) -> None:
    manager = Manager(device=SimulatedDevice(CAPACITY), **in_files(tmp_path))
    model = net()
    values = copy.deepcopy(dict(model.state_dict()))
    words = rf"disk_directory '{tmp_path}' cannot take a host copy of [\d,]+ bytes: File too large"
    with full_disk(PAGE), pytest.raises(HostMemoryError, match=words):
        manager.register("actor", model, role="actor")
    assert [*manager.handles] == []
    assert_same(dict(model.state_dict()), values)
    actor = manager.register("actor", model, role="actor")
    with manager.phase("log_prob"):
        assert_same(dict(model.state_dict()), values)
    # the parameters have a host copy, and the state of the optimizer finds no room
    with full_disk(PAGE), pytest.raises(HostMemoryError, match=words):
        manager.register("adam", torch.optim.AdamW(model.parameters()))
    assert [*manager.handles] == ["actor"]
    assert_same(dict(actor.state_dict()), values)
    manager.close()


class Unforeseen(torch.optim.Optimizer):
    """Its steps create state of a size that is not known before."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            noise = float(parameter.detach().abs().sum().item() >= 0)
            self.state[parameter]["sum"] = torch.full_like(parameter, noise)


def test_state_that_is_born_later_and_finds_no_room_stays_on_the_device(tmp_path: Path) -> None:
    manager = Manager(device=SimulatedDevice(CAPACITY), **in_files(tmp_path))
    model = net()
    optimizer = Unforeseen(model.parameters())
    manager.register("actor", model, role="actor")
    handle = manager.register("optimizer", optimizer)
    before = handle.disk_bytes
    phase = manager.phase("train")
    phase.__enter__()
    learn(model, optimizer)
    optimizer.zero_grad()
    values = copy.deepcopy(optimizer.state_dict())
    with full_disk(PAGE), pytest.raises(HostMemoryError, match="cannot take a host copy"):
        phase.__exit__(None, None, None)
    assert handle.state is State.GPU_RESIDENT
    assert_same(handle.state_dict(), values)
    with manager.phase("values"):  # there is room again
        assert handle.state is State.CPU_OFFLOADED
        assert handle.disk_bytes > before
        assert_same(handle.state_dict(), values)
    manager.close()


# --- the end of a process


def test_a_killed_process_leaves_nothing(programs: Programs, tmp_path: Path) -> None:
    program = f"""
import os, signal, torch, placement
from placement.testing import SimulatedDevice
manager = placement.Manager(
    device=SimulatedDevice("64MiB"), host_limit_bytes=1, disk_directory={str(tmp_path)!r}
)
handle = manager.register("actor", torch.nn.Linear(256, 256), role="actor")
assert handle.disk_bytes > 256 * 256 * 4
os.kill(os.getpid(), signal.SIGKILL)
"""
    ended = programs.run(program)
    assert ended.status == -signal.SIGKILL, ended.errors
    assert [*tmp_path.iterdir()] == []


def test_a_forked_child_leaves_the_handles_of_its_parent_alone(tmp_path: Path) -> None:
    worker = Worker(**in_files(tmp_path))
    values = copy.deepcopy(dict(worker.actor.state_dict()))

    def drop() -> int:
        nonlocal worker
        del worker
        gc.collect()
        return 0

    assert exit_code(drop) == 0
    assert_same(dict(worker.actor.state_dict()), values)
    with worker.manager.phase("log_prob"):
        assert worker.net(batch()).isfinite().all()
    worker.manager.close()
