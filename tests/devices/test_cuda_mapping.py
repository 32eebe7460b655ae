"""What the CUDA device asks of the driver, on a driver of our own that refuses what the real one
refuses."""

from __future__ import annotations

import gc
import random
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from placement import Manager
from placement.core.errors import DeviceMemoryError, PlacementError
from placement.devices.cuda import device as cuda
from placement.devices.cuda import pool
from placement.devices.cuda.answers import NUM_BYTES, Answers
from placement.devices.cuda.device import CudaDevice
from placement.devices.cuda.driver import Driver
from placement.devices.host.slab import PAGE
from placement.devices.memory import Addresses, Chunk, HostSlab
from placement.devices.select import select_device
from placement.testing import SimulatedDevice
from tests.devices.fake_driver import POISON, STEP, FakeDriver, Result

SIZE = 4 * STEP


class UnwatchedPoison:
    """Poison without the GPU that compares it."""

    def __init__(
        self, driver: Driver, large: Chunk, small: Chunk, view: Addresses, answer: None
    ) -> None:
        driver.api.fill_with_poison(view)
        self.chunks = SimpleNamespace(large=large, small=small)
        self.nbytes = large.nbytes + small.nbytes
        self._view = view


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    fake = FakeDriver()
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", fake)
    for name, value in {
        "init": None,
        "synchronize": None,
        "device_count": 1,
        "can_device_access_peer": True,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=value: answer)
    monkeypatch.setattr(cuda, "Poison", UnwatchedPoison)
    monkeypatch.setattr(cuda, "kernel_of", lambda device: None)
    monkeypatch.setattr(cuda, "own_stream", lambda index, purpose: None)
    monkeypatch.setattr(CudaDevice, "view", lambda self, addresses, offset, nbytes: addresses)
    monkeypatch.setattr(
        CudaDevice, "_words", lambda self, nbytes: SimpleNamespace(host=torch.empty(0), device=None)
    )
    monkeypatch.setattr(CudaDevice, "is_capturing", lambda self: False)
    monkeypatch.setattr(pool, "reap", lambda: None)
    return fake


@pytest.fixture
def device(driver: FakeDriver) -> CudaDevice:
    return CudaDevice(0, chunk_bytes=SIZE)


def poisoned(device: CudaDevice, nbytes: int) -> Addresses:
    addresses = device.reserve(nbytes)
    device.unmap(addresses, nbytes)
    return addresses


def four(device: CudaDevice) -> list[Chunk]:
    return [*(device.create(SIZE) for _ in range(3)), device.create(2 * STEP)]


def expected(chunks: list[Chunk | None]) -> list[tuple[int, int | str]]:
    """What must be behind a range of three full slots and two steps."""
    found: list[tuple[int, int | str]] = []
    for chunk in chunks:
        found.append((SIZE, POISON) if chunk is None else (chunk.nbytes, chunk.handle))  # type: ignore[attr-defined]
    return found


def test_a_partial_call_costs_its_own_slots_in_three_kinds_of_calls(
    device: CudaDevice, driver: FakeDriver
) -> None:
    addresses, other = poisoned(device, 3 * SIZE + 2 * STEP), poisoned(device, 3 * SIZE + 2 * STEP)
    chunks = four(device)
    device.map(addresses, chunks)
    steps: list[tuple[Callable[[], object], int]] = [
        (lambda: device.unmap(addresses, 2 * SIZE, SIZE), 2),
        (lambda: device.map(other, chunks[1:3], SIZE), 2),
        (lambda: device.unmap(addresses, 2 * STEP, 3 * SIZE), 1),
        (lambda: device.map(other, chunks[3:], 3 * SIZE), 1),
    ]
    for call, maps in steps:
        driver.calls.clear()
        call()
        assert driver.calls == {
            "cuCtxPushCurrent": 1,
            "cuCtxPopCurrent": 1,
            "cuMemUnmap": 1,
            "cuMemMap": maps,
            "cuMemSetAccess": 1,
        }
    driver.calls.clear()
    for _ in range(2):
        device.unmap(addresses, 3 * SIZE + 2 * STEP)
        assert driver.calls["cuMemMap"] == 1, "what is poison already stays"
    assert driver.behind(addresses) == expected([None] * 4)
    assert driver.behind(other) == expected([None, *chunks[1:]])
    assert driver.errors == 0


def test_random_changes_break_no_rule_and_everything_goes_back(
    device: CudaDevice, driver: FakeDriver
) -> None:
    rng = random.Random(0)
    ranges, chunks = [poisoned(device, 3 * SIZE + 2 * STEP) for _ in range(2)], four(device)
    model: list[list[Chunk | None]] = [[None] * 4, [None] * 4]
    for _ in range(500):
        which, slot = rng.randrange(2), rng.randrange(4)
        last = rng.randrange(slot, 4)
        if rng.random() < 0.5:
            device.unmap(
                ranges[which], sum((SIZE, SIZE, SIZE, 2 * STEP)[slot : last + 1]), slot * SIZE
            )
            model[which][slot : last + 1] = [None] * (last + 1 - slot)
        else:
            free = [
                chunk
                for chunk in chunks
                if chunk not in model[0] + model[1] and (chunk.nbytes == SIZE) == (slot < 3)
            ]
            taken = free[: min(last, 2 if slot < 3 else 3) + 1 - slot]
            if any(model[which][slot : slot + len(taken)]):
                with pytest.raises(ValueError, match="other memory is behind"):
                    device.map(ranges[which], taken, slot * SIZE)
            else:
                device.map(ranges[which], taken, slot * SIZE)
                model[which][slot : slot + len(taken)] = taken
        assert [driver.behind(addresses) for addresses in ranges] == [
            expected(row) for row in model
        ]
    assert driver.errors == 0
    del ranges, model, chunks, free, taken
    device.close()
    assert (driver.mapped, driver.memory, driver.reserved) == ({}, {}, {})
    assert driver.errors == 0


def test_a_short_chunk_before_poison_and_growth_of_a_range(
    device: CudaDevice, driver: FakeDriver
) -> None:
    addresses, short, full = device.reserve(SIZE + STEP), device.create(STEP), device.create(SIZE)
    device.unmap(addresses, STEP)
    device.unmap(addresses, 3 * STEP)
    assert driver.behind(addresses) == [(STEP, POISON)] * 3
    device.map(addresses, [short])
    assert driver.behind(addresses)[0] == (STEP, short.handle)  # type: ignore[attr-defined]
    device.unmap(addresses, SIZE + STEP)
    assert driver.behind(addresses) == [(SIZE, POISON), (SIZE, POISON)]
    device.map(addresses, [short])
    assert driver.behind(addresses)[1:] == [(STEP, POISON)] * 3 + [(SIZE, POISON)]
    device.unmap(addresses, STEP)
    device.map(addresses, [full])
    assert driver.behind(addresses) == [(SIZE, full.handle), (SIZE, POISON)]  # type: ignore[attr-defined]
    assert addresses.nbytes == SIZE + STEP, "nobody is told of addresses that nobody asked for"
    for nbytes, why in ((STEP, "in two"), (SIZE + 2 * STEP, "not within")):
        with pytest.raises(ValueError, match=why):
            device.unmap(addresses, nbytes)
    device.unmap(addresses, SIZE)
    device.release(full, full)
    device.release(full)
    assert driver.errors == 0


def test_a_small_piece_of_poison_is_mapped_several_times_behind_a_chunk(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "_POISON_BYTES", 3 * STEP)
    device = CudaDevice(0, chunk_bytes=SIZE)
    addresses, full, short = device.reserve(2 * SIZE), device.create(SIZE), device.create(STEP)
    device.unmap(addresses, 2 * SIZE)
    pieces = [(3 * STEP, POISON), (STEP, POISON)]
    assert driver.behind(addresses) == pieces * 2
    device.map(addresses, [full, short])
    device.unmap(addresses, SIZE)
    assert driver.behind(addresses) == [*pieces, (STEP, short.handle), (3 * STEP, POISON)]  # type: ignore[attr-defined]
    device.unmap(addresses, 2 * SIZE)
    assert driver.behind(addresses) == pieces * 2
    assert device._poisoned().nbytes == 4 * STEP
    assert driver.errors == 0


def test_memory_is_wiped_where_it_is_in_the_context_of_the_device(
    device: CudaDevice, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another device may be current on the calling thread, or none."""
    stream = SimpleNamespace(cuda_stream=1, synchronize=lambda: None)
    monkeypatch.setattr(cuda, "own_stream", lambda index, purpose: stream)
    addresses = poisoned(device, 3 * SIZE + 2 * STEP)
    device.map(addresses, four(device))
    device.wipe_mapped(addresses, 2 * SIZE, SIZE)
    assert driver.calls["cuMemsetD8Async"] == 1
    assert driver.errors == driver.num_contexts == 0


def test_the_poison_of_a_device_takes_66_mib(driver: FakeDriver) -> None:
    device = CudaDevice(0)
    device.create(STEP)
    assert device._poisoned().nbytes == 66 << 20


@pytest.mark.parametrize("function", ["cuMemMap", "cuMemSetAccess"])
def test_what_the_driver_refuses_leaves_poison(
    device: CudaDevice, driver: FakeDriver, function: str
) -> None:
    addresses, chunks = poisoned(device, 3 * SIZE + 2 * STEP), four(device)
    device.map(addresses, chunks[:1])
    driver.refused = function
    with pytest.raises(DeviceMemoryError, match="OUT_OF_MEMORY"):
        device.map(addresses, chunks[1:3], SIZE)
    driver.refused = ""
    device.unmap(addresses, 2 * SIZE, SIZE)
    assert driver.behind(addresses) == expected([chunks[0], None, None, None])
    device.map(addresses, chunks[1:], SIZE)
    assert driver.behind(addresses) == expected([*chunks])


@pytest.mark.parametrize("call", ["cuMemUnmap", "cuMemMap", "cuMemSetAccess"])
def test_an_unmap_that_a_signal_cut_short_is_made_once_more(
    device: CudaDevice, driver: FakeDriver, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses = poisoned(device, 2 * SIZE)
    chunks = [device.create(SIZE), device.create(SIZE)]
    device.map(addresses, chunks)
    making = Driver.outcomes

    def cut_short(driver: Driver, name: str, *arguments: Any) -> Any:
        outcomes = making(driver, name, *arguments)
        if name == call:
            raise SystemExit
        return outcomes

    with monkeypatch.context() as patched:
        patched.setattr(Driver, "outcomes", cut_short)
        with pytest.raises(SystemExit):
            device.unmap(addresses, 2 * SIZE)
    device.unmap(addresses, 2 * SIZE)
    assert driver.behind(addresses) == expected([None, None])
    device.map(addresses, chunks)
    assert driver.behind(addresses) == expected(chunks)


def test_peers_may_access_what_is_mapped(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(
        torch.cuda,
        "can_device_access_peer",
        lambda peer, index: (peer, index) in {(0, 1), (2, 1), (1, 3)},
    )
    driver.in_use = {0, 1, 3}
    device = CudaDevice(1, chunk_bytes=SIZE)
    addresses = poisoned(device, SIZE + STEP)
    device.map(addresses, [device.create(SIZE)])
    assert len(driver.behind(addresses, devices=2)) == 2
    assert [each.location.id for each in device.driver.access] == [1, 0], (
        "not 2, which nobody uses; not 3, which cannot reach it"
    )


def test_a_range_that_dies_during_a_capture_goes_later(
    driver: FakeDriver, device: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses = poisoned(device, SIZE)
    base = addresses.base
    monkeypatch.setattr(CudaDevice, "is_capturing", lambda self: True)
    driver.calls.clear()
    del addresses
    assert not driver.calls, "a call of the driver may spoil the capture"
    monkeypatch.setattr(CudaDevice, "is_capturing", lambda self: False)
    device.create(STEP)
    assert base not in driver.reserved


def test_pinning_keeps_the_limit_and_gives_it_back(device: CudaDevice, driver: FakeDriver) -> None:
    nbytes = 12 * PAGE
    device.pinned_limit_bytes = nbytes

    def slab() -> HostSlab:
        made = device.host(nbytes)
        assert made.ready.wait(60)
        return made

    first, second = slab(), slab()
    assert (first.pinned, driver.pinned) == (True, {first.address: nbytes})
    assert second.pageable_bytes == nbytes
    assert (f"pinned_limit_bytes is {nbytes:,}: {nbytes:,} bytes are pinned") in str(
        second.pageable_reason
    )
    del first
    assert driver.pinned == {}
    assert slab().pinned
    assert (driver.pinned, getattr(driver.capture_mode, "value", "global"), driver.errors) == (
        {},
        "global",
        0,
    )


@pytest.mark.parametrize(("is_tight", "chunk_bytes"), [(False, 256 << 20), (True, 128 << 20)])
def test_where_memory_was_portioned_out_chunks_are_smaller(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, is_tight: bool, chunk_bytes: int
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert select_device("cuda:0", is_tight=is_tight).chunk_bytes == chunk_bytes


@pytest.mark.parametrize("sees_a_gpu", [True, False])
def test_on_rocm_nobody_is_told_to_install_something_for_cuda(
    monkeypatch: pytest.MonkeyPatch, sees_a_gpu: bool
) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0.1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: sees_a_gpu)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: int(sees_a_gpu))
    attempts = (
        Manager,
        lambda: Manager(device="cuda:0"),
        lambda: select_device("cuda"),
        lambda: CudaDevice(0),
    )
    for attempt in attempts:
        with pytest.raises(
            PlacementError,
            match=r"ROCm 7\.0\.1.*does not support AMD GPUs yet.*SimulatedDevice",
        ) as caught:
            attempt()
        assert "install" not in str(caught.value)
    with pytest.raises(ValueError, match="is not known"):
        select_device("rocm:0")
    Manager(device=SimulatedDevice(capacity_bytes=1 << 20)).close()


def test_a_machine_without_what_it_takes_is_told_what_to_install(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PlacementError, match=r"no device cuda:5: .* sees 1 CUDA device"):
        CudaDevice(5)
    driver.has_virtual_memory = False
    with pytest.raises(
        PlacementError,
        match=r"cuda:0: no virtual memory management .*NVIDIA driver",
    ):
        CudaDevice(0)
    monkeypatch.setattr(
        driver, "cuDeviceGetAttribute", lambda *_: (Result.CUDA_ERROR_INVALID_VALUE,), raising=False
    )
    with pytest.raises(PlacementError, match=r"CUDA_ERROR_INVALID_VALUE.*NVIDIA driver"):
        Driver(0)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(PlacementError, match=r"pip install 'cuda-bindings==12\.\*'"):
        CudaDevice(0)


class Holder:
    """Somebody's object that is part of a cycle."""

    me: Holder
    held: object


@pytest.mark.parametrize(
    "order", ["all at once", "the device first", ("closed, then the last tensor")]
)
def test_what_dies_after_or_with_its_device_is_given_back(driver: FakeDriver, order: str) -> None:
    def used() -> tuple[CudaDevice, Addresses]:
        device = CudaDevice(0, chunk_bytes=SIZE)
        addresses = poisoned(device, SIZE)
        if order.startswith("closed"):
            device.close()
        else:
            device.map(addresses, [device.create(SIZE)])
        return device, addresses

    if order == "all at once":
        holder = Holder()
        holder.me, holder.held = holder, used()
        del holder
    else:
        addresses = used()[1]
        gc.collect()
        del addresses
    gc.collect()
    assert len(driver.memory) == 2, "the poison's alone"
    assert len(driver.reserved) == 1
    assert driver.errors == 0


@pytest.mark.parametrize("function", ["cuMemRelease", "cuCtxSynchronize"])
def test_two_threads_never_give_the_same_thing_back(
    device: CudaDevice, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    """Driver calls let other threads run: here one that looks for the dead, too, while the first is
    in the driver."""
    addresses, chunk = poisoned(device, SIZE), device.create(SIZE)
    real, others = getattr(driver, function), []

    def call(*arguments: object) -> object:
        answer = real(*arguments)
        if not others:
            others.append(threading.Thread(target=device._collect))
            others[0].start()
            others[0].join()
        return answer

    monkeypatch.setattr(driver, function, call, raising=False)
    before = driver.calls["cuMemAddressFree"], driver.calls["cuMemRelease"]
    del addresses, chunk
    kept = device.create(STEP)  # a call of the device looks for the dead once more
    assert others
    assert kept.nbytes == STEP
    assert (driver.calls["cuMemAddressFree"], driver.calls["cuMemRelease"]) == (
        before[0] + 1,
        before[1] + 1,
    )
    assert driver.errors == 0


# --- which part of host memory carries which answer; what kernels wrote shows when the event is
# waited for

NUM = NUM_BYTES // 8


class Words:
    """What the device wrote and what the host sees of it by now."""

    def __init__(self) -> None:
        self.host = torch.zeros(NUM_BYTES // 8, dtype=torch.int64)
        self.device: torch.Tensor | None = self.host.clone()

    def record_event(self) -> Any:
        return SimpleNamespace(synchronize=lambda: self.host.copy_(self.device))


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch) -> Iterator[Words]:
    made = Words()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: made)
    return made


def numbers(count: int, seed: int) -> torch.Tensor:
    return torch.randint(
        -(2**63), 2**63 - 1, (count,), generator=torch.Generator().manual_seed(seed)
    )


def test_answers_are_right_in_any_order_while_their_memory_is_used_again(words: Words) -> None:
    answers, draw = Answers(words), random.Random(0)  # type: ignore[arg-type]
    waiting: list[Any] = []
    read_again = []
    for seed in range(500):
        values = numbers(draw.choice([1, 114, 1024]), seed)
        waiting.append((values, answers.ask(values)))
        draw.shuffle(waiting)
        while len(waiting) > draw.randrange(60):
            values, read = waiting.pop()
            if draw.random() < 0.1:
                continue  # nobody reads it, and it leaves its place
            answer = read()
            assert answer.equal(values)
            read_again.append((values, answer))
    assert all(answer.equal(values) for values, answer in read_again), (
        "an answer that was read belongs to the caller"
    )


@pytest.mark.parametrize(("count", "can_be_written"), [(0, True), (NUM + 1, True), (114, False)])
def test_what_does_not_fit_or_cannot_be_written_goes_another_way(
    words: Words, count: int, can_be_written: bool
) -> None:
    words.device = words.device if can_be_written else None
    answers, values = Answers(words), numbers(count, 0)  # type: ignore[arg-type]
    assert answers.ask(values)().equal(values)
    assert words.device is None or not words.device.any()
    full = numbers(NUM, 99)
    assert answers.ask(full)().equal(full)
    assert words.host.equal(full) is can_be_written, "all of the memory is there"
