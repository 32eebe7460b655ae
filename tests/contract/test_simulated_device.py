"""What only the simulated device promises: exact capacity, also of several processes, refused
misuse, and forks."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from placement.core.errors import DeviceMemoryError, PlacementError
from placement.devices.base import POISON_WORD, poison_bytes
from placement.devices.host import slab
from placement.devices.memory import Chunk, Copy
from placement.devices.simulated import device as device_module
from placement.testing import SimulatedDevice
from tests.support.forked import exit_code
from tests.support.poison import poison, reads_poison

SIZE = 16384
forks = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


def make(capacity: int = 8 * SIZE, **options: Any) -> SimulatedDevice:
    return SimulatedDevice(capacity, chunk_bytes=SIZE, granularity=4096, **options)


def bytes_in_memory() -> int:
    """The private memory of this process that the kernel cannot take at once."""
    counts = dict(re.findall(r"(\w+):\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text()))
    return (int(counts["Anonymous"]) - int(counts["LazyFree"])) << 10


def bytes_present(address: int, nbytes: int) -> int:
    """How much of this range is in memory."""
    pages = (ctypes.c_ubyte * (nbytes // 4096))()
    assert slab.libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), pages) == 0
    return 4096 * sum(page & 1 for page in pages)


def test_capacity_holds_to_the_byte_and_the_refusal_names_the_numbers() -> None:
    device = make(2 * SIZE + 4096)
    chunks = [device.create(SIZE), device.create(SIZE)]
    with pytest.raises(DeviceMemoryError, match=r"asked for 8,192 bytes, 4,096 free of 36,864"):
        device.create(8192)
    chunks.append(device.create(4096))
    memory = device.memory()
    assert (memory.free_bytes, memory.chunk_bytes, memory.poison_bytes) == (0, 36864, SIZE)
    assert memory.total_bytes == 36864 + SIZE
    with pytest.raises(DeviceMemoryError, match=r"asked for 4,096 bytes, 0 free"):
        device.create(4096)
    device.release(chunks[2])
    device.create(4096)


def page_out(address: int, nbytes: int) -> None:
    """Called on each core: a few pages that were just touched are still in the list of one, and the
    kernel empties only that of the caller."""
    cores = os.sched_getaffinity(0)
    try:
        for core in cores:
            os.sched_setaffinity(0, {core})
            assert slab.libc.madvise(address, nbytes, 21) == 0  # MADV_PAGEOUT
    finally:
        os.sched_setaffinity(0, cores)


@pytest.mark.parametrize("chunk_bytes", [15 << 20, 16 << 20])
def test_memory_goes_back_to_the_host(chunk_bytes: int) -> None:
    """Small pages and huge ones."""
    device = SimulatedDevice(4 * chunk_bytes, chunk_bytes=chunk_bytes)
    gc.collect()  # devices of earlier tests
    before = bytes_in_memory()

    def chunks_in_memory() -> float:
        return (bytes_in_memory() - before) / chunk_bytes

    addresses = device.reserve(4 * chunk_bytes)
    chunks = [device.create(chunk_bytes) for _ in range(4)]
    device.map(addresses, chunks)
    device.view(addresses, 0, 4 * chunk_bytes).fill_(1)
    assert chunks_in_memory() == pytest.approx(4, abs=0.5)
    device.unmap(addresses, 4 * chunk_bytes)
    device.release(chunks.pop())
    assert chunks_in_memory() == pytest.approx(3, abs=0.5)
    homes = [chunk.home.address for chunk in chunks]
    chunks.clear()
    device.memory()
    assert chunks_in_memory() == pytest.approx(0, abs=0.5)
    # As when memory is short. Without swap only what was given back can go.
    for home in homes:
        page_out(home, chunk_bytes)
        assert bytes_present(home, chunk_bytes) == 0


@pytest.mark.parametrize("flags_known", [True, False])
def test_values_move_with_their_chunk(flags_known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel before 5.7, and gVisor, do not know these flags, and refuse them like this one does
    others."""
    if not flags_known:
        monkeypatch.setattr(device_module, "_MOVE_PAGES", 0x80)
    device = make()
    here, there = device.reserve(2 * SIZE), device.reserve(2 * SIZE)
    chunks = [device.create(SIZE), device.create(SIZE)]
    device.map(here, chunks)
    device.view(here, 0, 2 * SIZE).copy_(torch.arange(2 * SIZE).to(torch.uint8))
    device.unmap(here, 2 * SIZE)
    assert reads_poison(device.view(here, 0, 2 * SIZE))
    device.map(there, chunks)
    assert torch.equal(device.view(there, 0, 2 * SIZE), torch.arange(2 * SIZE).to(torch.uint8))


def test_a_chunk_outlives_the_addresses_where_it_was() -> None:
    device = make()
    chunk = device.create(SIZE)
    device.map(device.reserve(SIZE), [chunk])
    gc.collect()
    again = device.reserve(SIZE)
    device.map(again, [chunk])
    device.view(again, 0, SIZE).fill_(7)
    device.unmap(again, SIZE)
    assert reads_poison(device.view(again, 0, SIZE))
    device.map(again, [chunk])
    assert device.view(again, 0, SIZE).eq(7).all()


def test_neighbours_take_one_mapping(mappings: Callable[[], int]) -> None:
    device = make(256 * SIZE)
    addresses = device.reserve(256 * SIZE)
    before = mappings()
    device.map(addresses, [device.create(SIZE) for _ in range(256)])
    assert mappings() <= before + 5


def test_more_chunks_than_the_kernel_has_mappings_are_refused_at_reserve() -> None:
    with pytest.raises(DeviceMemoryError, match=r"vm\.max_map_count"):
        make().reserve(SIZE << 30)


def test_misuse_is_refused() -> None:
    device, other = make(), make()
    addresses, chunk = device.reserve(2 * SIZE), device.create(SIZE)
    device.map(addresses, [chunk])
    with pytest.raises(ValueError, match="behind other addresses"):
        device.map(device.reserve(SIZE), [chunk])
    with pytest.raises(ValueError, match="still behind addresses"):
        device.release(chunk)
    with pytest.raises(ValueError, match="another device"):
        other.map(other.reserve(SIZE), [chunk])
    with pytest.raises(ValueError, match="another device"):
        other.unmap(addresses, SIZE)
    with pytest.raises(ValueError, match="not within"):
        device.view(addresses, 1, 2 * SIZE)
    with pytest.raises(ValueError, match="granularity"):
        device.create(100)
    device.unmap(addresses, 2 * SIZE)
    device.release(chunk)
    with pytest.raises(ValueError, match="does not hold the chunk: it was released"):
        device.map(addresses, [chunk])
    for options in (
        {"granularity": 100},
        {"chunk_bytes": 5000},
        {"capacity_bytes": -1},
        {"bandwidth_bytes_per_second": -1.0},
    ):
        with pytest.raises(ValueError, match=r"granularity|negative"):
            SimulatedDevice(**{"capacity_bytes": SIZE, **options})  # type: ignore[arg-type]


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which only sleeping moves on."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    return now


def test_memory_is_wiped_beside_copies_of_other_memory(now: list[float]) -> None:
    device = make(bandwidth_bytes_per_second=1024.0)
    addresses, slab = device.reserve(2 * SIZE), device.host(SIZE)
    device.map(addresses, [device.create(SIZE), device.create(SIZE)])
    device.copy([Copy(addresses.base, slab.address, 1024)], "to_host")
    device.wipe_mapped(addresses, SIZE, SIZE)
    assert now[0] == 100.0


def test_a_slow_link_makes_the_caller_wait_in_each_direction_for_the_copies_before_a_mark(
    now: list[float],
) -> None:
    device = make(bandwidth_bytes_per_second=1024.0)
    addresses, chunk, slab = device.reserve(SIZE), device.create(SIZE), device.host(SIZE)
    device.map(addresses, [chunk])
    run = Copy(addresses.base, slab.address, 1024)
    nothing = device.mark("to_host")
    device.copy([run], "to_device")
    first = device.mark("to_device")
    device.copy([run, run], "to_device")
    second = device.mark("to_device")
    device.copy([run] * 5, "to_host")
    assert now[0] == 100.0
    for mark, then in (
        (nothing, 100.0),
        (first, 101.0),
        (second, 103.0),
        (first, 103.0),
        (device.mark("to_host"), 105.0),
    ):
        device.wait(mark)
        assert now[0] == then
    device.copy([run, run], "to_device")
    device.copy([run], "to_host")
    device.order()
    assert now[0] == 107.0
    device.copy([run], "to_host")
    device.sync()
    device.sync()
    assert now[0] == 108.0


@forks
def test_a_forked_child_can_neither_use_nor_free_the_parents_memory() -> None:
    device = make()
    addresses, chunks = device.reserve(SIZE), [device.create(SIZE)]
    device.map(addresses, chunks)
    view = device.view(addresses, 0, SIZE)
    view.fill_(3)

    def child() -> int:
        operations: list[Callable[[], object]] = [
            lambda: device.create(SIZE),
            lambda: device.map(addresses, chunks),
            lambda: device.unmap(addresses, SIZE),
            lambda: device.release(chunks[0]),
            lambda: device.reserve(SIZE),
            device.memory,
        ]
        for operation in operations:
            try:
                operation()
            except PlacementError:
                continue
            return 1
        chunks.clear()
        device.close()
        return 0

    assert exit_code(child) == 0
    assert (view == 3).all()
    assert device.memory().chunk_bytes == SIZE
    assert exit_code(lambda: int(view[0].item())) == -signal.SIGSEGV


# --- poison


WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "mul_ of a quiet NaN": lambda t: t.view(torch.float32).mul_(0.9),
    "zero_": lambda t: t.zero_(),
    "the same bytes": lambda t: t.copy_(poison(0, 4096)),
    "one element": lambda t: t[3:4].fill_(POISON_WORD[3]),
    "numpy": lambda t: t.numpy().__setitem__(6, POISON_WORD[6]),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_any_write_is_found_whatever_it_wrote(write: Callable[[torch.Tensor], object]) -> None:
    device = make()
    device.unmap(addresses := device.reserve(2 * SIZE), 2 * SIZE)
    write(device.view(addresses, 8192, 4096))
    assert device.heal_poison()
    assert [(place.addresses, place.start, place.nbytes) for place in device.written_poison()] == [
        (addresses, 8192, 4096)
    ]
    assert reads_poison(device.view(addresses, 0, 2 * SIZE))
    assert not device.heal_poison()


def test_reading_poison_is_no_write() -> None:
    device = make()
    device.unmap(addresses := device.reserve(4 * SIZE), 4 * SIZE)
    floats = device.view(addresses, 0, 4 * SIZE).view(torch.float32)
    assert floats.isnan().all()
    assert floats.clone().mul_(2).isnan().all()
    assert floats.sum().isnan()
    assert floats.numpy().tobytes() == poison_bytes(0, 4 * SIZE)
    with open(os.devnull, "wb") as nowhere:
        torch.save(floats, nowhere)
    device.copy([Copy(addresses.base, (slab := device.host(SIZE)).address, SIZE)], "to_host")
    assert reads_poison(slab.view(0, SIZE))
    assert not device.heal_poison()


def test_each_run_of_pages_is_named_also_of_what_has_been_replaced() -> None:
    device = make()
    device.unmap(first := device.reserve(4 * SIZE + 4096), 4 * SIZE + 4096)
    device.unmap(second := device.reserve(SIZE), SIZE)
    device.map(first, [device.create(SIZE)], SIZE)
    device.view(first, 0, 4 * SIZE + 4096)[4095:4097].mul_(1)
    device.view(first, SIZE, SIZE).fill_(1)  # of the chunk
    device.view(first, 4 * SIZE, 4096)[4095:].fill_(POISON_WORD[7])
    device.view(second, 0, SIZE).fill_(7)
    device.map(second, [device.create(SIZE)])
    assert device.heal_poison()
    found = {(place.addresses, place.start, place.nbytes) for place in device.written_poison()}
    assert found == {(first, 0, 8192), (first, 4 * SIZE, 4096), (second, 0, SIZE)}
    assert (device.view(first, SIZE, SIZE) == 1).all()
    assert not device.heal_poison()


@forks
def test_a_forked_child_changes_nothing_of_what_the_kernel_says_of_poison() -> None:
    device = make()
    device.unmap(addresses := device.reserve(SIZE), SIZE)
    view = device.view(addresses, 0, SIZE)
    assert exit_code(lambda: 0) == 0
    assert not device.heal_poison()
    view[0] = POISON_WORD[0]
    assert exit_code(lambda: int(make().heal_poison())) == 0, (
        "a device of its own has a page map of its own"
    )
    assert device.heal_poison()


# --- processes that share the capacity of one device


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_processes_share_one_capacity_and_a_killed_one_leaves_nothing(tmp_path: Path) -> None:
    shared = tmp_path / "capacity"
    mine = make(shared_with=shared)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        theirs = make(shared_with=shared)
        held = [theirs.create(SIZE) for _ in range(5)]
        os.write(writer, bytes([len(held)]))
        signal.pause()
        os._exit(1)
    assert os.read(reader, 1) == b"\x05"
    assert mine.memory().free_bytes == 3 * SIZE
    chunks = [mine.create(SIZE) for _ in range(3)]
    with pytest.raises(
        DeviceMemoryError,
        match=rf"0 free of {8 * SIZE:,}, {5 * SIZE:,} held by other processes",
    ):
        mine.create(SIZE)
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # dead, but still to be collected
    chunks += [mine.create(SIZE) for _ in range(5)]
    assert mine.memory().free_bytes == 0
    os.waitpid(pid, 0)
    os.close(reader)
    os.close(writer)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_what_a_forked_child_drops_is_still_held(tmp_path: Path) -> None:
    shared = tmp_path / "capacity"
    devices = [make(shared_with=shared)]
    chunks = [devices[0].create(SIZE)]

    def child() -> int:
        chunks.clear()
        devices.clear()
        gc.collect()
        return 0

    assert exit_code(child) == 0
    assert make(shared_with=shared).memory().free_bytes == 7 * SIZE


def test_devices_of_one_process_share_too_and_give_back(tmp_path: Path) -> None:
    shared = tmp_path / "capacity"
    first, second = make(shared_with=shared), make(shared_with=shared)
    chunk: Chunk | None = first.create(4 * SIZE)
    assert chunk is not None
    with pytest.raises(DeviceMemoryError, match="held by other processes"):
        second.create(5 * SIZE)
    first.release(chunk)
    kept = second.create(8 * SIZE)
    assert first.memory().free_bytes == 0
    del kept
    second.close()
    chunk = first.create(8 * SIZE)
    del chunk, first
    second.create(8 * SIZE)
