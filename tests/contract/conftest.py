"""Devices for the contract suite, and what its tests look at from outside."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from placement.devices.base import Device
from placement.testing import Faults, SimulatedDevice
from tests.support.poison import of_an_old_kernel

CHUNKS = 8
"""Capacity of the simulated devices, in full chunks."""


def simulated() -> Device:
    return SimulatedDevice(CHUNKS * 16384, chunk_bytes=16384, granularity=4096)


def wrapped() -> Device:
    return Faults(simulated())


def compared() -> Device:
    return of_an_old_kernel(simulated)


def cuda() -> Device:
    from placement.devices.cuda.device import CudaDevice

    return CudaDevice(0, chunk_bytes=8 << 20)


@pytest.fixture(
    params=[simulated, wrapped, compared, pytest.param(cuda, marks=pytest.mark.gpu)],
    ids=lambda factory: factory.__name__,
)
def device(request: pytest.FixtureRequest) -> Device:
    made: Device = request.param()
    return made


@pytest.fixture
def mappings() -> Callable[[], int]:
    """Counts this process's memory mappings."""
    return lambda: len(Path("/proc/self/maps").read_text().splitlines())
