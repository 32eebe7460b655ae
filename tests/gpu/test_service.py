"""What others see of a worker with a real GPU: it gives the device to another process and takes it
back, and its incidents say who held what."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import placement
from placement.cli import main
from placement.group import StoreGroup
from placement.testing import assert_nothing_resident
from tests.group.processes import Processes, SpawnedProcess, StoreService
from tests.group.suspension_processes import TOKEN, Service, post

pytestmark = pytest.mark.gpu

GIB = 1 << 30
WIDTH = 16384
"""Two layers take 2 GiB, and as much each of their gradients and both moments."""
FOREIGN_BYTES = GIB
"""At most so much of the device is taken by contexts, and by what else the driver needs."""


class Job(Service):
    """A job that trains on one GPU, and may be suspended over HTTP. It is a rank of a group where
    the port of a store is given."""

    def __init__(self, store: int = 0, rank: int = 0, world: int = 1) -> None:
        torch.manual_seed(0)
        group = None
        if store:
            served = dist.TCPStore("127.0.0.1", store, None, False, wait_for_workers=False)
            group = StoreGroup(served, rank, world, 20.0)
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        self.manager = placement.Manager(device=device, group=group)
        layers = [nn.Linear(WIDTH, WIDTH, device=device) for _ in range(2)]
        self.actor = nn.Sequential(*layers)
        self.adam = torch.optim.AdamW(self.actor.parameters(), lr=1e-3)
        self.batch = torch.randn(4, WIDTH, device=device)
        self.manager.register("actor", self.actor, role="actor")
        self.manager.register("adam", self.adam)
        self.server = self.manager.serve(control=TOKEN)

    def enter(self) -> float:
        self.manager.enter("train")
        loss = self.actor(self.batch).square().mean()
        self.adam.zero_grad()
        loss.backward()
        self.adam.step()
        return float(loss.detach())

    def is_suspended(self) -> bool:
        return self.manager.snapshot().suspended

    def close(self) -> None:
        assert_nothing_resident(self.manager)
        self.manager.close()


class Other:
    """A process without a manager on the same GPU."""

    def __init__(self) -> None:
        self.memory: torch.Tensor | None = None
        torch.zeros(1, device="cuda")  # the context

    def take(self, nbytes: int) -> bool:
        """Take so much of the GPU in one piece, and write to all of it."""
        try:
            self.memory = torch.full((nbytes,), 7, dtype=torch.uint8, device="cuda")
            torch.cuda.synchronize()
        except torch.OutOfMemoryError:
            return False
        return True

    def give_back(self) -> None:
        self.memory = None
        torch.cuda.empty_cache()


@pytest.fixture
def processes() -> Iterator[Processes]:
    made = Processes(SpawnedProcess)
    yield made
    made.clear()


def test_another_process_has_the_gpu_between_suspend_and_resume(processes: Processes) -> None:
    alone = processes.start(Job)
    wanted = [alone.call("enter"), alone.call("leave_and_enter")]
    alone.call("leave")
    alone.call("close")
    alone.end()
    torch.cuda.empty_cache()  # earlier tests of this process may have left memory there
    whole = torch.cuda.mem_get_info(0)[0] - 2 * FOREIGN_BYTES
    job, other = processes.start(Job), processes.start(Other)
    port = job.call("port")
    losses = [job.call("enter")]
    assert not other.call("take", whole)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(post, port, "/suspend", deadline_seconds=60)
        job.call("until_asked")
        assert not answer.done()  # the phase is open
        job.begin("leave_and_enter")
        status, body = answer.result(60)
    assert (status, body["suspended"], body["resident_bytes"]) == (200, True, 0)
    assert other.call("take", whole)
    assert job.is_busy()  # it waits
    other.call("give_back")
    assert post(port, "/resume", epoch=body["epoch"])[0] == 200
    losses.append(job.answer())
    assert losses == wanted
    job.call("leave")
    job.call("close")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_asked_of_one_of_two_gpus_both_ranks_suspend(processes: Processes) -> None:
    store = StoreService()
    try:
        with ThreadPoolExecutor(2) as pool:
            ranks = list(pool.map(lambda rank: processes.start(Job, store.port, rank, 2), range(2)))
        call_all(ranks, "enter")
        ports = call_all(ranks, "port")
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(post, ports[1], "/suspend", epoch=7)
            ranks[1].call("until_asked")
            call_all(ranks, "leave")
            assert answer.result(60)[0] == 200
        assert call_all(ranks, "is_suspended") == [True, True]
        for gpu in range(2):
            free, total = torch.cuda.mem_get_info(gpu)
            assert total - free < 3 * FOREIGN_BYTES
        for rank in ranks:
            rank.begin("enter")
        assert all(rank.is_busy() for rank in ranks)
        assert post(ports[0], "/resume", epoch=7)[0] == 200
        losses = [rank.answer() for rank in ranks]
        assert losses[0] == losses[1]
        call_all(ranks, "leave")
        call_all(ranks, "close")
    finally:
        store.kill()


def call_all(ranks: list[Any], method: str) -> list[Any]:
    for rank in ranks:
        rank.begin(method)
    return [rank.answer() for rank in ranks]


def test_an_incident_says_who_held_the_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both kinds: a plan that the driver has no memory for, and an allocation of the user's own."""
    torch.cuda.empty_cache()
    manager = placement.Manager(device="cuda:0", incidents=tmp_path)
    actor = nn.Linear(WIDTH, WIDTH, device="cuda")
    ref = nn.Linear(WIDTH, WIDTH, device="cuda")
    manager.register("actor", actor, role="actor")
    manager.register("ref", ref, role="ref", readonly=True)

    torch.cuda.memory._record_memory_history(max_entries=1000)
    try:
        with pytest.raises(torch.OutOfMemoryError) as caught, manager.phase("log_prob"):
            torch.empty(1 << 45, dtype=torch.uint8, device="cuda")
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    folder = tmp_path / next(tmp_path.iterdir()).name
    assert str(folder) in caught.value.__notes__[-1]
    assert "torch_memory.pickle" in {file.name for file in folder.iterdir()}
    assert main(["status", "--incident", str(folder)]) == 0
    text = capsys.readouterr().out
    assert "32768.00 GiB" in text
    assert "actor" in text
    assert "GPU_RESIDENT" in text

    free, _ = torch.cuda.mem_get_info()
    foreign = torch.empty(free - GIB, dtype=torch.uint8, device="cuda")
    with pytest.raises(placement.DeviceMemoryError) as refused, manager.phase("log_prob"):
        pass
    assert "placement: incident: " in refused.value.__notes__[-1]
    del foreign
    torch.cuda.empty_cache()
    with manager.phase("log_prob"):  # and nothing is lost
        assert torch.isfinite(actor.weight).all()
    assert_nothing_resident(manager)
    manager.close()
