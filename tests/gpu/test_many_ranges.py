"""Hundreds of ranges on a real device: handles that are many, and handles that grow at every step, bit for bit."""

from __future__ import annotations

import random

import pytest
import torch

from placement.devices.cuda.device import CudaDevice
from tests.contract.growing import SIDES, Scene, sizes

pytestmark = pytest.mark.gpu

MIB = 1 << 20


@pytest.fixture
def device() -> CudaDevice:
    torch.cuda.empty_cache()
    return CudaDevice(0, chunk_bytes=4 * MIB)


def test_many_handles_that_grow_swap_every_bit(device: CudaDevice) -> None:
    chance, drawn = random.Random(0), sizes(device.granularity // 8, device.chunk_bytes // 2)
    names = [f"{side}.{index}" for side in SIDES for index in range(40)]
    scene = Scene(device, {name: chance.choices(drawn, k=2) for name in names}, names[::3])
    for _ in range(3):
        with scene.manager.phase(SIDES[0]) as phase:
            scene.check(SIDES[0])
            scene.grow(SIDES[0], chance, drawn)
            phase.switch(SIDES[1])
            scene.check(SIDES[1])
            scene.grow(SIDES[1], chance, drawn)
        scene.check(None)
    assert sum(each.num_ranges for each in scene.all.values()) > 200
    scene.leave()
    assert device.memory().chunk_bytes == 0
