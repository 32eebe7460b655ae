"""What a reader in another thread sees in the memory of a handle while bytes arrive: poison or the right bytes, and nothing else ever."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch

from placement.devices.base import Device
from placement.devices.memory import Addresses, Chunk
from placement.policies import Colocated
from placement.storage.managed import ManagedStorage
from placement.storage.range import RANGES, Range
from placement.testing import InjectedFault, SimulatedDevice
from tests.support.early import Early, wait_for_copies
from tests.support.late_device import LateDevice
from tests.support.worker import CAPACITY, Worker, learn

CHUNK = 4096


class Reader(LateDevice):
    """Reads what has been mapped, right after each `map`. Copies come as late as they may, so nothing has arrived by then.

    Attributes:
        wrong: the tensors that showed anything but poison or the values of the host copy.
        num_poison: how many tensors showed poison, and nothing else.
    """

    def __init__(self) -> None:
        super().__init__(CAPACITY, chunk_bytes=CHUNK)
        self.wrong: list[str] = []
        self.num_poison = 0

    def map(self, addresses: Addresses, chunks: Sequence[Chunk], start: int = 0) -> None:
        super().map(addresses, chunks, start)
        owner: Any = RANGES.owner_of(addresses.base)
        if isinstance(owner, ManagedStorage):  # nobody knows the addresses of pages aside
            (r,) = [r for r in owner.ranges if r.layout.addresses is addresses]
            self._look(r, start, start + sum(chunk.nbytes for chunk in chunks))

    def _look(self, r: Range, start: int, end: int) -> None:
        for entry in r.placed:
            first, last = max(entry.offset, start), min(entry.offset + entry.nbytes, end)
            if first < last:
                shown = self.view(r.layout.addresses, first, last - first).view(torch.float32)
                values = r.host.view(first, last - first).view(torch.float32)
                self.num_poison += bool(shown.isnan().all())
                if not bool((shown.isnan() | (shown.view(torch.int32) == values.view(torch.int32))).all()):
                    self.wrong.append(entry.name)


def worker(**keywords: Any) -> tuple[Worker, Reader]:
    device = Reader()
    made = Worker(device=device, **keywords)
    for seed in range(2):
        with made.manager.phase("train"):
            learn(made.net, made.adam, seed)
            learn(made.critic_net, made.sgd, seed)
    return made, device


def test_in_loads_and_swaps() -> None:
    made, device = worker()
    with made.manager.phase("log_prob") as phase:
        phase.switch("train")
        phase.switch("values")
        phase.switch("log_prob", only=["ref"])
    assert device.num_poison
    assert not device.wrong


def test_in_streamed_steps() -> None:
    made, device = worker(policy=Colocated("streamed"), streamed_bucket_bytes=CHUNK)
    assert made.optimizer.counters.loaded_bytes
    assert device.num_poison
    assert not device.wrong


def test_of_what_arrived_early_with_the_rest() -> None:
    made, device = worker(policy=Early({"values": {"actor": 2 * CHUNK}}))
    with made.manager.phase("values") as phase:
        wait_for_copies(made.manager)
        assert made.actor.prefetched_bytes
        phase.switch("log_prob")
    assert device.num_poison
    assert not device.wrong


@pytest.mark.parametrize("operation", ["create", "map", "copy", "sync"])
def test_when_a_swap_goes_back(operation: str) -> None:
    made, device = worker()
    for at in (1, 2, 4, 7):
        with made.manager.phase("log_prob") as phase:
            device.fail(operation, at=at)
            with suppress(Exception):
                phase.switch("values")
            device.clear()
    assert not device.wrong
    with suppress(InjectedFault), made.manager.phase("train"):
        pass


def test_a_device_without_a_way_of_its_own() -> None:
    device = SimulatedDevice(CAPACITY, chunk_bytes=CHUNK)
    chunk = device.create(CHUNK)
    Device.wipe(device, (chunk,))
    addresses = device.reserve(CHUNK)
    device.map(addresses, (chunk,))
    assert device.view(addresses, 0, CHUNK).view(torch.float32).isnan().all()
    assert not device.heal_poison()
