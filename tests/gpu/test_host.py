"""Host slabs on a CUDA device: pinned in the background, right at every moment, unpinned before
they go."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from placement.devices.cuda.device import CudaDevice
from placement.devices.host import slab as host
from placement.devices.inspection import inspect
from placement.devices.memory import Copy

pytestmark = pytest.mark.gpu

MIB, GIB = 1 << 20, 1 << 30
LONG = 120
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def device() -> CudaDevice:
    return CudaDevice(0)


def pattern(nbytes: int, seed: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randint(0, 255, (nbytes,), dtype=torch.uint8, device="cuda", generator=generator)


def round_trip(device: CudaDevice, address: int, source: torch.Tensor) -> bool:
    back = torch.zeros_like(source)
    device.copy([Copy(source.data_ptr(), address, source.nbytes)], "to_host")
    device.sync()
    device.copy([Copy(back.data_ptr(), address, source.nbytes)], "to_device")
    device.order()
    return torch.equal(back, source)


def is_registered(device: CudaDevice, address: int) -> bool:
    with device.driver:
        return device.driver.failed("cuMemHostGetFlags", address) is None


def test_a_slab_becomes_pinned_in_the_background_and_copies_are_exact_at_every_moment(
    device: CudaDevice,
) -> None:
    nbytes = 4 * GIB + 3 * MIB + 5
    source = pattern(nbytes, 1)
    slab = device.host(nbytes)
    assert not slab.ready.is_set(), "the constructor waits for nothing"
    slab.view(0, 1000).fill_(9)  # written before it is registered
    assert round_trip(device, slab.address, source)  # begins while most of it is not
    assert slab.ready.wait(LONG)
    assert (slab.pinned, slab.pageable_bytes, slab.pageable_reason) == (True, 0, None)
    assert all(is_registered(device, slab.address + start) for start in range(0, nbytes, GIB))
    assert torch.equal(slab.view(nbytes - 1000, 1000), source[-1000:].cpu())
    assert round_trip(device, slab.address, source.flip(0))


def test_a_dead_slab_leaves_addresses_that_can_be_registered_again(device: CudaDevice) -> None:
    nbytes = GIB + 64 * MIB
    slab = device.host(nbytes)
    assert slab.ready.wait(LONG)
    address = slab.address
    del slab
    assert device._pinning.pinned_bytes == 0
    fixed = 0x100000 | 0x22  # MAP_FIXED_NOREPLACE, private, anonymous
    assert host.libc.mmap(address, nbytes, host.READ_WRITE, fixed, -1, 0) == address
    try:
        with device.driver:
            assert device.driver.failed("cuMemHostRegister", address, nbytes, 0) is None
            assert device.driver.failed("cuMemHostUnregister", address) is None
    finally:
        host.libc.munmap(ctypes.c_void_p(address), nbytes)


def test_what_dies_half_registered_is_unregistered(device: CudaDevice) -> None:
    for _ in range(5):
        device.host(3 * GIB)
    last = device.host(MIB)
    assert last.ready.wait(LONG)
    assert last.pinned
    assert (torch.ones(10, device="cuda") + 1).sum().item() == 20, "no error is left behind"


def test_beyond_the_limit_a_slab_is_pageable_and_works(device: CudaDevice) -> None:
    device.pinned_limit_bytes = GIB
    nbytes = 2 * GIB + 7
    slab = device.host(nbytes)
    assert slab.ready.wait(LONG)
    assert (slab.pinned, slab.pageable_bytes) == (False, nbytes)
    assert "pinned_limit_bytes is" in str(slab.pageable_reason)
    assert round_trip(device, slab.address, pattern(nbytes, 3))


def test_what_the_driver_refuses_is_pageable_and_leaves_no_error(device: CudaDevice) -> None:
    slab = device.host(64 * MIB)
    assert slab.ready.wait(LONG)
    other = CudaDevice(0)._pinning  # knows nothing of what the first has registered
    reason = other.pin(slab.address, 64 * MIB)
    assert "ALREADY_REGISTERED" in str(reason)
    assert other.pinned_bytes == 0
    assert (torch.ones(10, device="cuda") + 1).sum().item() == 20
    assert round_trip(device, slab.address, pattern(64 * MIB, 4))


def test_registration_in_the_background_does_not_spoil_a_capture(device: CudaDevice) -> None:
    x = torch.ones(1024, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        y = x * 2
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    slab = device.host(2 * GIB)
    with torch.cuda.graph(graph, stream=stream):  # other threads' unsafe calls would fail it
        y = x * 2
        assert slab.ready.wait(LONG)
    assert slab.pinned, slab.pageable_reason
    x.fill_(5)
    graph.replay()
    torch.cuda.synchronize()
    assert (y == 10).all()


def test_torch_copies_any_part_of_a_slab(device: CudaDevice) -> None:
    """A state dict's tensor lies where its range has it, across any multiple of addresses, and a
    user copies it by torch's own means."""
    slab = device.host(2 * GIB)
    source = pattern(2 * GIB, 5)
    view = slab.view(0, 2 * GIB).copy_(source)
    for _ in range(2):  # while it is being registered, and when it is
        for start in range(0, 2 * GIB, 64 * MIB - 3):
            assert torch.equal(
                view[start : start + 96 * MIB].to("cuda", non_blocking=True),
                source[start : start + 96 * MIB],
            )
        assert slab.ready.wait(LONG)
    assert torch.equal(view.cuda(), source)
    assert torch.equal(host.upload(torch.empty_like(source), view), source)


def test_the_process_may_end_while_memory_is_being_registered() -> None:
    program = """
from placement.devices.cuda.device import CudaDevice
device = CudaDevice(0)
slabs = [device.host(8 << 30), device.host(8 << 30)]
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=LONG,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_device_is_inspected_and_nothing_of_it_stays(device: CudaDevice) -> None:
    before = device.memory()
    found = inspect(device, 256 << 20)
    after = device.memory()
    assert (found.pageable_reason, found.uuid, found.total_bytes) == (
        None,
        device.uuid,
        before.total_bytes,
    )
    assert re.fullmatch(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.0", device.pci_address)
    assert found.link.both_bytes_per_second > 0
    assert after.chunk_bytes == before.chunk_bytes == 0
    assert found.versions["nccl"]
