"""Hundreds of ranges in one phase transition: handles that are many, or that grew at every step. Every byte comes back, and no memory
stays."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Sequence

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from placement import Manager
from placement.devices.memory import Addresses, Chunk
from placement.storage.transfer.exchange import WINDOW
from placement.testing import Faults, SimulatedDevice, assert_nothing_resident
from tests.contract.growing import SIDES, Scene, sizes

PAGE = 4096


class Mapped(Faults):
    """Notes how many chunks each call maps."""

    def __init__(self, chunk_bytes: int) -> None:
        super().__init__(SimulatedDevice(1 << 24, chunk_bytes=chunk_bytes, granularity=PAGE))
        self.mapped: list[int] = []

    def map(self, addresses: Addresses, chunks: Sequence[Chunk], start: int = 0) -> None:
        super().map(addresses, chunks, start)
        self.mapped.append(len(chunks))


def mapped_by_a_load(*sizes_bytes: int) -> list[int]:
    device = Mapped(chunk_bytes=PAGE)
    manager = Manager(device=device)
    modules = [nn.ParameterList([nn.Parameter(torch.randn(nbytes // 4))]) for nbytes in sizes_bytes]
    for index, module in enumerate(modules):
        manager.register(f"m{index}", module, role="actor")
    with manager.phase("log_prob"):
        found = list(device.mapped)
    assert_nothing_resident(manager)
    return found


# --- bursts


def test_a_burst_grows_under_the_copies_of_the_one_before() -> None:
    assert mapped_by_a_load(300 * PAGE) == [1, 16, 256, 27]


def test_a_burst_goes_over_the_boundaries_of_ranges() -> None:
    assert mapped_by_a_load(*[10 * PAGE] * 5) == [1, 9, 7, 3, 10, 10, 10]


# --- growing handles


COUNTS = st.sampled_from([1, 2, 9, 17, 30])


@settings(max_examples=100 if os.environ.get("SWEEP") == "all" else 8, deadline=None)
@given(
    counts=st.tuples(COUNTS, COUNTS),
    chunk_pages=st.sampled_from([1, 2, 5, 64]),
    spare_chunks=st.sampled_from([0, 1, WINDOW, 1000]),
    steps=st.integers(1, 6),
    seed=st.integers(0, 1 << 32),
)
def test_swaps_between_handles_that_grow(counts: tuple[int, int], chunk_pages: int, spare_chunks: int, steps: int, seed: int) -> None:
    chance, chunk_bytes = random.Random(seed), chunk_pages * PAGE
    torch.manual_seed(seed)
    drawn = sizes(PAGE, min(chunk_bytes, 5 * PAGE))  # with large chunks everything is a tail
    names = [f"{side}.{index}" for side, count in zip(SIDES, counts, strict=True) for index in range(count)]
    device = SimulatedDevice(1 << 30, chunk_bytes=chunk_bytes, granularity=PAGE)
    trained = [name for name in names if chance.random() < 0.3]
    scene = Scene(device, {name: chance.choices(drawn, k=chance.randint(1, 3)) for name in names}, trained)
    turns = itertools.cycle(SIDES)
    with scene.manager.phase(side := next(turns)) as phase:
        for _ in range(steps):
            scene.check(side)
            scene.grow(side, chance, drawn)
            gone, side = side, next(turns)
            device.capacity_bytes = max(scene.needs(gone), scene.needs(side)) + spare_chunks * chunk_bytes
            phase.switch(side)
            scene.check(side)
    scene.leave()
