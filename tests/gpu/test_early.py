"""Early chunks on a real device: copies under kernels, values, memory by the driver, a busy
interpreter, and torch out of memory."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

import placement
from placement.planning.prefetcher import BURST_CHUNKS
from placement.testing import assert_nothing_resident
from tests.support.early import Early, wait_for_copies

pytestmark = pytest.mark.gpu

MIB = 1 << 20
ALL = 1 << 50


Nets = dict[str, torch.nn.Linear]


def pattern(net: torch.nn.Linear, seed: int) -> None:
    generator = torch.Generator("cuda").manual_seed(seed)
    with torch.no_grad():
        net.weight.copy_(torch.randn(net.weight.shape, generator=generator, device="cuda"))


@pytest.fixture
def worker() -> Iterator[tuple[placement.Manager, Nets]]:
    """An actor and a critic of more than two bursts each, on a device with small chunks, so that a
    thread starts most of the copies."""
    from placement.devices.cuda.device import CudaDevice

    device = CudaDevice(0, chunk_bytes=16 * MIB)
    early = {"log_prob": {"critic": ALL}, "values": {"actor": ALL}}
    manager = placement.Manager(device=device, policy=Early(early))
    width = 16 * MIB * BURST_CHUNKS * 5 // 4 // 1024
    nets = {
        name: torch.nn.Linear(1024, width, bias=False, device="cuda")
        for name in ("actor", "critic")
    }
    for seed, (name, net) in enumerate(nets.items()):
        pattern(net, seed)
        manager.register(name, net, role=name)
    torch.cuda.empty_cache()
    yield manager, nets
    assert_nothing_resident(manager)
    manager.close()


def busy(milliseconds: float) -> None:
    torch.cuda._sleep(int(milliseconds * 1.5e6))


def loads(manager: placement.Manager, name: str) -> list[tuple[int, int]]:
    return [
        (each.nbytes, each.prefetched_bytes)
        for each in manager.journal
        if each.handle == name and each.trigger == "load"
    ]


def test_what_arrived_under_a_kernel_is_what_the_load_finds(
    worker: tuple[placement.Manager, Nets],
) -> None:
    manager, nets = worker
    values = {}
    for name in nets:
        with manager.phase("log_prob" if name == "actor" else "values"):
            values[name] = nets[name].weight.detach().clone()
    with manager.phase("log_prob") as step:
        for turn in range(6):
            here, there = ("actor", "critic") if turn % 2 == 0 else ("critic", "actor")
            busy(30)
            # poison, whatever has arrived
            assert not torch.isfinite(nets[there].weight[::4096]).any()
            wait_for_copies(manager)
            step.switch("values" if here == "actor" else "log_prob")
            assert torch.equal(nets[there].weight, values[there])
            copied, early = loads(manager, there)[-1]
            assert (copied, early) == (0, nets[there].weight.nbytes)


def test_a_load_in_the_middle_of_the_copies_brings_the_rest(
    worker: tuple[placement.Manager, Nets],
) -> None:
    manager, nets = worker
    with manager.phase("values"):
        wanted = nets["critic"].weight.detach().clone()
    for milliseconds in (0, 1, 3, 6, 10):
        with manager.phase("log_prob") as step:
            time.sleep(milliseconds / 1e3)  # the thread starts copies meanwhile
            step.switch("values")
            copied, early = loads(manager, "critic")[-1]
            assert copied + early == wanted.nbytes
            assert early > 0
            assert torch.equal(nets["critic"].weight, wanted)


def test_the_thread_keeps_up_beside_a_busy_interpreter(
    worker: tuple[placement.Manager, Nets],
) -> None:
    manager, _ = worker
    with manager.phase("log_prob") as step:
        deadline, number = time.monotonic() + 1.0, 0
        while time.monotonic() < deadline:
            number += 1  # never gives up the interpreter by itself
        step.switch("values")
        copied, _ = loads(manager, "critic")[-1]
        assert copied == 0


def test_trained_values_are_saved_under_the_next_phase(
    worker: tuple[placement.Manager, Nets],
) -> None:
    """Writes on the device, then an offload that leaves its chunks: whoever reads the host copy
    reads the new values."""
    manager, nets = worker
    early = Early(
        {"log_prob": {"critic": ALL}, "values": {"actor": ALL}, "ref_log_prob": {"actor": ALL}}
    )
    manager.policy.wanted = early.wanted  # type: ignore[attr-defined]
    for seed in range(3):
        with manager.phase("log_prob", only=["actor"]) as step:
            pattern(nets["actor"], 10 + seed)
            wanted = nets["actor"].weight.detach().clone()
            busy(20)
            step.switch("values")
            assert manager.handles["actor"].prefetched_bytes > 0
            assert torch.equal(manager.handles["actor"].state_dict()["weight"], wanted.cpu())
            step.switch("log_prob", only=["actor"])
            assert torch.equal(nets["actor"].weight, wanted)


def test_nothing_is_left_and_nothing_early_is_hidden_from_the_driver(
    worker: tuple[placement.Manager, Nets],
) -> None:
    manager, nets = worker
    with manager.phase("log_prob"):
        # what CUDA and torch keep after their first use is there from now on
        manager.check_integrity()
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    with manager.phase("log_prob"):
        used = before - torch.cuda.mem_get_info()[0]
        assert (
            used
            >= manager.handles["actor"].resident_bytes + manager.handles["critic"].prefetched_bytes
        )
        manager.check_integrity()
    torch.cuda.synchronize()
    assert torch.cuda.mem_get_info()[0] == before
    assert nets


def test_an_allocation_that_finds_no_memory_gets_what_arrived_early_at_the_second_try(
    worker: tuple[placement.Manager, Nets],
) -> None:
    manager, nets = worker
    with manager.phase("values"):
        wanted = nets["critic"].weight.detach().clone().cpu()
    torch.cuda.empty_cache()
    with manager.phase("log_prob") as step:
        early = manager.handles["critic"].prefetched_bytes
        assert early
        wait_for_copies(manager)
        torch.cuda.synchronize()
        free = torch.cuda.mem_get_info()[0]
        nbytes = free + early // 2
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(nbytes, dtype=torch.uint8, device="cuda")
        assert manager.handles["critic"].prefetched_bytes == 0
        mine = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
        del mine
        torch.cuda.empty_cache()
        step.switch("values")
        assert torch.equal(nets["critic"].weight.cpu(), wanted)
