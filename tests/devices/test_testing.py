"""The public test helpers: faults that fire where they are told to, and the assertion that nothing
is resident."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import placement
from placement.core.errors import DeviceMemoryError, HostMemoryError
from placement.devices.base import Device
from placement.testing import Faults, InjectedFault, SimulatedDevice, assert_nothing_resident
from tests.support.early import Early

SIZE = 16384


@pytest.fixture
def faults() -> Faults:
    return Faults(SimulatedDevice(4 * SIZE, chunk_bytes=SIZE))


def call(device: Faults, operation: str) -> object:
    operations = {
        "host": lambda: device.host(10),
        "reserve": lambda: device.reserve(SIZE),
        "create": lambda: device.create(SIZE),
        "map": lambda: device.map(device.device.reserve(SIZE), [device.device.create(SIZE)]),
        "copy": lambda: device.copy([], "to_host"),
        "sync": device.sync,
    }
    return operations[operation]()


@pytest.mark.parametrize("operation", ["host", "reserve", "create", "map", "copy", "sync"])
def test_the_nth_call_from_now_fails_once(faults: Faults, operation: str) -> None:
    call(faults, operation)
    faults.fail(operation, at=2)
    call(faults, operation)
    error = {"host": HostMemoryError, "copy": InjectedFault, "sync": InjectedFault}.get(
        operation, DeviceMemoryError
    )
    with pytest.raises(error, match=f"injected fault: {operation}, call 3"):
        call(faults, operation)
    call(faults, operation)
    assert (faults.fired, faults.calls[operation]) == (1, 4)


def test_or_from_there_on_until_cleared(faults: Faults) -> None:
    faults.fail("sync", at=2, forever=True)
    faults.sync()
    for _ in range(3):
        with pytest.raises(InjectedFault):
            faults.sync()
    faults.clear()
    faults.sync()
    assert (faults.fired, faults.calls["sync"]) == (3, 5)


def test_every_method_and_property_of_a_device_is_passed_on() -> None:
    for name, member in vars(Device).items():
        if callable(member) or isinstance(member, property):
            assert name.startswith("_") or getattr(Faults, name) is not member, name


def test_unknown_operations_and_points_are_refused(faults: Faults) -> None:
    with pytest.raises(ValueError, match="host, reserve, create, map, copy, sync"):
        faults.fail("release")
    with pytest.raises(ValueError, match="at=0, but it must be at least 1"):
        faults.fail("sync", at=0)


def managed(device: Faults, policy: Any = "colocated") -> tuple[placement.Manager, torch.nn.Linear]:
    manager, model = placement.Manager(device=device, policy=policy), torch.nn.Linear(8, 8)
    manager.register("actor", model, role="actor")
    return manager, model


def test_assert_nothing_resident_names_who_is(faults: Faults) -> None:
    manager, _model = managed(faults)
    assert_nothing_resident(manager)
    with manager.phase("log_prob") as phase:
        assert_nothing_resident(manager)
        assert faults.memory().chunk_bytes > 0
        phase.keep("actor")
    with pytest.raises(
        AssertionError,
        match=r"actor is GPU_RESIDENT outside every phase and holds [\d,]+ bytes",
    ):
        assert_nothing_resident(manager)
    assert_nothing_resident(manager, except_for=["actor"])
    with manager.phase("values"):
        pass
    stray = faults.create(SIZE)
    with pytest.raises(
        AssertionError,
        match=r"(?s)chunks take 16,384 bytes, the "
        r"handles "
        r"hold "
        r"0 "
        r"\(actor 0\)\n.*\nunaccounted: .*16,384",
    ):
        assert_nothing_resident(manager)
    faults.release(stray)
    assert_nothing_resident(manager)


def test_assert_nothing_resident_allows_what_is_early_inside_a_phase_alone(faults: Faults) -> None:
    manager, _model = managed(faults, Early({"idle": {"actor": SIZE}, "values": {"actor": SIZE}}))
    with manager.phase("values"):
        assert manager.handles["actor"].prefetched_bytes
        assert_nothing_resident(manager)
    with pytest.raises(AssertionError, match=r"actor is CPU_OFFLOADED and holds [\d,]+ bytes"):
        assert_nothing_resident(manager)
    manager.close()
