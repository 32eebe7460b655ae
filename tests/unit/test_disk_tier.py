"""Host copies beyond the limit are on disk: values, bytes, what a reader sees, and what happens
when the disk fails."""

from __future__ import annotations

import errno
import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import placement
from placement import State
from placement.core.errors import (
    BrokenHandleError,
    HostMemoryError,
    IntegrityError,
    RegistrationError,
)
from placement.devices.host import disk_file
from placement.testing import SimulatedDevice
from tests.support.disk import damage, send_to_disk, settle
from tests.support.threads import until
from tests.support.worker import assert_same

PAGE = 4096
CHUNK = 8 * PAGE
MIB = 1 << 20
MODEL_BYTES = 4 * 128 * 128 * 4
LIMIT_BYTES = 9 * MODEL_BYTES // 2
"""What moves at once at the beginning of `train` (four models), and not all five."""


def model(seed: int, width: int = 128) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(4)))


class Worker:
    """An actor with its optimizer, a reference and a critic."""

    def __init__(self, **settings: Any) -> None:
        self.manager = placement.Manager(
            device=SimulatedDevice(8 * MIB, chunk_bytes=CHUNK, granularity=PAGE), **settings
        )
        self.has_tier = settings.get("host_copies") != "reserved"
        self.models = {name: model(seed) for seed, name in enumerate(("actor", "ref", "critic"))}
        self.adam = torch.optim.AdamW(self.models["actor"].parameters(), lr=1e-2)
        for name, each in self.models.items():
            self.manager.register(name, each, role=name, readonly=name == "ref")
        self.manager.register("adam", self.adam)
        self.handles = self.manager.handles
        self.twin = model(0)
        self.twin_adam = torch.optim.AdamW(self.twin.parameters(), lr=1e-2)

    @property
    def host_bytes(self) -> int:
        return sum(handle.host_bytes for handle in self.handles.values())

    def settle(self) -> None:
        """Wait for the background work."""
        if self.has_tier:
            settle(self.manager)

    def step(self) -> None:
        tokens = torch.ones(2, 128)
        with self.manager.phase("log_prob") as step:
            with torch.no_grad():
                self.models["actor"](tokens)
                assert torch.equal(self.models["ref"](tokens), model(1)(tokens))
            step.switch("values")
            with torch.no_grad():
                assert torch.equal(self.models["critic"](tokens), model(2)(tokens))
            step.switch("train")
            self.learn()
        self.settle()

    def learn(self) -> None:
        for net, adam in ((self.models["actor"], self.adam), (self.twin, self.twin_adam)):
            net(torch.ones(2, 128)).square().mean().backward()
            adam.step()
            adam.zero_grad()

    def check_values(self) -> None:
        for name, twin in (("actor", self.twin), ("ref", model(1)), ("critic", model(2))):
            assert_same(dict(self.handles[name].state_dict()), dict(twin.state_dict()))
        assert_same(self.adam.state_dict()["state"], self.twin_adam.state_dict()["state"])


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_file, "BLOCK_BYTES", CHUNK)


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    made = Worker(host_limit_bytes=LIMIT_BYTES, disk_directory=tmp_path)
    yield made
    made.manager.close()
    assert [*tmp_path.iterdir()] == []


# --- a run


def test_a_job_runs_bit_by_bit_with_less_host_memory_than_its_host_copies_take(
    worker: Worker,
) -> None:
    for _ in range(5):
        worker.step()
        assert worker.host_bytes <= LIMIT_BYTES
        assert sum(handle.disk_bytes for handle in worker.handles.values()) > 0
    for name in ("ref", "critic"):  # what does not change is written once
        assert worker.handles[name].counters.spilled_bytes <= MODEL_BYTES
    assert (
        worker.handles["ref"].counters.disk_read_bytes
        + worker.handles["critic"].counters.disk_read_bytes
        > MODEL_BYTES
    )
    snapshot = worker.manager.snapshot()
    assert sum(handle.spilled_bytes for handle in snapshot.handles) > 0
    assert (
        snapshot.since(snapshot)["placement/disk_bytes"]
        == sum(handle.disk_bytes for handle in snapshot.handles)
        > 0
    )
    worker.check_values()
    worker.manager.check_integrity()
    assert worker.manager.audit().ok


# --- readers


def test_readers_in_other_threads_get_the_values_while_phases_run(tmp_path: Path) -> None:
    """With less host memory than any two of them need."""
    worker = Worker(host_limit_bytes=3 * MODEL_BYTES, disk_directory=tmp_path)
    is_over = threading.Event()
    counts = {"ref": 0, "critic": 0}
    wrong: list[str] = []

    def read(name: str, want: dict[str, torch.Tensor]) -> None:
        while not is_over.is_set():
            shown = worker.handles[name].state_dict()
            wrong.extend(
                name for key, value in want.items() if not torch.equal(shown[key].cpu(), value)
            )
            del shown
            counts[name] += 1

    # The values are made here, because threads share torch's generator.
    threads = [
        threading.Thread(target=read, args=(name, model(seed).state_dict()))
        for name, seed in (("ref", 1), ("critic", 2))
    ]
    for thread in threads:
        thread.start()
    for _ in range(6):
        with worker.manager.phase("train"):
            worker.learn()
    is_over.set()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert wrong == []
    assert all(counts.values())
    worker.check_values()
    worker.manager.close()


# --- what a limit means


def test_a_handle_that_never_fits_beside_what_it_steps_is_refused_with_a_table(
    tmp_path: Path,
) -> None:
    manager = placement.Manager(
        device=SimulatedDevice(8 * MIB),
        host_limit_bytes=3 * MODEL_BYTES - 1,
        disk_directory=tmp_path,
    )
    actor = model(0)
    with pytest.raises(
        HostMemoryError,
        match=r"'large' needs .* host_limit_bytes is .*\n  handle +in host memory",
    ):
        manager.register("large", model(0, width=256), role="ref")
    # before others would make room for it
    with pytest.raises(RegistrationError, match="shared memory"):
        manager.register("large", model(0, width=256).share_memory(), role="ref")
    assert manager.handles == {}
    manager.register("actor", actor, role="actor")
    with pytest.raises(HostMemoryError, match="'adam' together with actor, which it steps"):
        manager.register("adam", torch.optim.AdamW(actor.parameters()))
    assert [*manager.handles] == ["actor"]
    manager.check_integrity()
    manager.close()


def test_what_is_needed_at_once_goes_over_the_limit_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Worker(host_limit_bytes=3 * MODEL_BYTES, disk_directory=tmp_path)
    shown = [worker.handles[name].state_dict() for name in worker.handles]
    assert worker.host_bytes > 3 * MODEL_BYTES
    assert [record.getMessage().count("goes over it") for record in caplog.records] == [1]
    del shown
    gc.collect()
    worker.step()
    worker.check_values()
    worker.manager.close()


# --- a disk that fails


@pytest.mark.parametrize("reader", ["phase", "unregister"])
def test_other_bytes_than_were_written_are_an_error_that_names_them(
    worker: Worker, reader: str
) -> None:
    (spill,) = send_to_disk(worker.manager, "critic")
    path = spill._file.path
    damage(spill, CHUNK + PAGE)
    words = (
        rf"chunk 1 of {MODEL_BYTES // CHUNK} of the host copy of 'critic' came "
        r"back "
        r"from "
        rf"{path} "
        r"with other bytes"
    )

    def read() -> None:
        if reader == "phase":
            worker.manager.phase("values").__enter__()
        else:
            worker.manager.unregister("critic")

    for _ in range(2 if reader != "unregister" else 1):
        with pytest.raises((IntegrityError, BrokenHandleError), match=words):
            read()
    assert worker.handles["critic"].storage.lost is not None
    with worker.manager.phase("log_prob"):  # the others are as they were
        assert worker.handles["ref"].state is State.GPU_RESIDENT
    if "critic" in worker.manager.handles:  # else the phase has completed what was begun
        worker.manager.unregister("critic")
    weights = [*worker.models["critic"].parameters()]
    # nobody takes the lost values for good ones
    assert any(weight.isnan().any() for weight in weights)
    assert any(
        torch.equal(weight, good)
        for weight, good in zip(weights, model(2).parameters(), strict=True)
    )
    worker.models["critic"].load_state_dict(model(2).state_dict())
    worker.manager.register("critic", worker.models["critic"], role="critic")
    worker.handles = worker.manager.handles
    worker.step()
    worker.check_values()


def test_a_read_for_which_the_kernel_lacks_memory_loses_nothing(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    send_to_disk(worker.manager, "critic")

    def refused(*_: Any) -> int:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", refused)
        with pytest.raises(HostMemoryError, match="'critic' cannot be read from the disk now"):
            worker.handles["critic"].state_dict()
    assert worker.handles["critic"].broken is None
    with worker.manager.phase("values"):
        assert worker.handles["critic"].state is State.GPU_RESIDENT
    worker.step()
    worker.check_values()


def test_early_chunks_make_way_for_a_registration(tmp_path: Path) -> None:
    """A host copy some of whose chunks are early stays in host memory, so none would have had room
    for the third model."""
    limit_bytes = 5 * MODEL_BYTES - PAGE
    manager = placement.Manager(
        device=SimulatedDevice(8 * MIB, chunk_bytes=CHUNK),
        policy="cyclic",
        host_limit_bytes=limit_bytes,
        disk_directory=tmp_path,
    )
    models = [model(seed) for seed in range(3)]
    optimizers = [torch.optim.AdamW(each.parameters()) for each in models]
    for index in range(2):
        manager.register(f"model{index}", models[index], role="actor")
        manager.register(f"adam{index}", optimizers[index])
        with manager.phase("train", only=[f"model{index}"]):
            models[index](torch.ones(2, 128)).square().mean().backward()
            optimizers[index].step()
            optimizers[index].zero_grad()
    assert (
        sum(handle.storage.prefetched_bytes for handle in manager.handles.values())
        >= 2 * MODEL_BYTES
    )
    manager.register("model2", models[2], role="actor")
    assert sum(handle.host_bytes for handle in manager.handles.values()) <= limit_bytes
    with manager.phase("log_prob", only=["model2"]):
        assert torch.equal(models[2](torch.ones(2, 128)), model(2)(torch.ones(2, 128)))
    manager.close()


# --- host copies that are given back while the device has the bytes


class Staying(Worker):
    """A worker whose models all stay on the device, under `resident`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(
            **{
                "policy": "resident",
                "budget_bytes": 8 * MIB,
                "host_copies": "while_needed",
                **settings,
            }
        )

    def sizes(self) -> dict[str, int]:
        return {name: handle.host_bytes for name, handle in self.handles.items()}

    def rest(self) -> dict[str, int]:
        """Steps until the cycle is known, and the host memory that is left then."""
        for _ in range(4):
            self.step()
        until(lambda: not any(self.sizes()[name] for name in ("actor", "critic", "adam")))
        return self.sizes()


def test_what_stays_on_the_device_gives_its_host_copy_back() -> None:
    reserved = Staying(host_copies="reserved")
    for _ in range(4):
        reserved.step()
    assert all(reserved.sizes().values())
    reserved.manager.close()
    worker = Staying()
    before = worker.sizes()
    # a readonly one is never copied back
    assert worker.rest() == {"actor": 0, "ref": before["ref"], "critic": 0, "adam": 0}
    for _ in range(2):
        worker.step()
    assert worker.manager.snapshot().disk_wait_seconds == 0
    assert sum(handle.counters.offloaded_bytes for handle in worker.handles.values()) == 0
    worker.manager.check_integrity()
    assert worker.manager.audit().ok
    worker.check_values()  # a state dict reads the device
    assert worker.sizes()["actor"] == 0
    worker.manager.close()
    assert_same(dict(worker.models["actor"].state_dict()), dict(worker.twin.state_dict()))


def test_who_needs_it_all_at_once_waits_for_it_and_that_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "placement")
    worker = Staying()
    worker.rest()
    large = nn.Linear(1024, 1980, bias=False)
    # so large that trained models have to leave for it
    worker.manager.register("large", large, role="reward")
    with worker.manager.phase("reward"):
        away = [
            handle
            for name, handle in worker.handles.items()
            if name != "large" and handle.state is State.CPU_OFFLOADED
        ]
        assert {"actor", "critic", "adam"} & {handle.name for handle in away}
        assert all(handle.host_bytes for handle in away)
        worker.check_values()
    assert worker.manager.snapshot().disk_wait_seconds > 0
    assert any(
        "host memory that had been given back" in record.getMessage() for record in caplog.records
    )
    # from the second time on it is expected, and taken again in the background
    for repeat in range(5):
        if repeat == 2:
            waited = worker.manager.snapshot().disk_wait_seconds
        with worker.manager.phase("train") as step:
            worker.settle()
            worker.learn()
            step.switch("reward")
            worker.settle()
        worker.settle()
        worker.check_values()
    assert worker.manager.snapshot().disk_wait_seconds == waited
    worker.manager.close()
