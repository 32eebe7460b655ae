"""Devices of other packages, found by the name of an entry point."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import placement
from placement.devices.select import name_or_device
from placement.testing import SimulatedDevice, assert_nothing_resident

SOURCE = """
from placement.testing import SimulatedDevice

def opened(name):
    device = SimulatedDevice(1 << 20, chunk_bytes=4096)
    device.name = name
    return device

def broken(name):
    raise RuntimeError("no driver")

def wrong(name):
    return name
"""


@pytest.fixture
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package as if it were installed, with three kinds of devices."""
    (tmp_path / "lab_devices.py").write_text(SOURCE)
    info = tmp_path / "lab_devices-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lab-devices\nVersion: 1.0\n")
    lines = [f"{kind} = lab_devices:{kind}" for kind in ("opened", "broken", "wrong")]
    (info / "entry_points.txt").write_text("\n".join(["[placement.devices]", *lines]) + "\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "lab_devices", raising=False)


@pytest.mark.parametrize("name", ["opened", "opened:3"])
@pytest.mark.usefixtures("devices")
def test_a_device_of_another_package_is_found_by_name(name: str) -> None:
    manager = placement.Manager(device=name)
    assert manager.device.name == name
    model = nn.Linear(2, 2)
    before = model.weight.tolist()
    manager.register("actor", model, role="actor")
    with manager.phase("log_prob"):
        assert model.weight.tolist() == before
    assert_nothing_resident(manager)


@pytest.mark.usefixtures("devices")
def test_an_error_names_the_entry_point() -> None:
    with pytest.raises(
        placement.PlacementError,
        match=r"device 'broken:0': entry point 'broken'.*lab_devices:broken.*no driver",
    ):
        placement.Manager(device="broken:0")
    with pytest.raises(
        placement.PlacementError, match=r"gave 'wrong', which is no placement Device"
    ):
        placement.Manager(device="wrong")


def test_a_device_of_torch_and_an_index_stand_for_a_name() -> None:
    for given, name in (
        (torch.device("cuda", 1), "cuda:1"),
        (torch.device("cuda"), "cuda"),
        (2, "cuda:2"),
        ("auto", "auto"),
    ):
        assert name_or_device(given) == name
    device = SimulatedDevice(1 << 20)
    assert name_or_device(device) is device


def test_the_capacity_of_a_simulated_device_as_text() -> None:
    assert SimulatedDevice(capacity_bytes="1.5MiB").capacity_bytes == 3 << 19
    for wrong, error in (
        ("much", ValueError),
        (1.5, TypeError),
        (None, TypeError),
        (True, TypeError),
    ):
        with pytest.raises(error, match=r"capacity_bytes.* is not a number of bytes; write"):
            SimulatedDevice(capacity_bytes=wrong)  # type: ignore[arg-type]


def test_auto_is_the_device_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLACEMENT_DEVICE", "simulated:3MiB")
    for manager in (
        placement.Manager(),
        placement.Manager(device="auto"),
        placement.Manager.from_settings({"policy": "resident"}),
        placement.Manager.from_settings(),
    ):
        assert manager.device.capacity_bytes == 3 << 20
    assert placement.Manager(device="simulated:1MiB").device.capacity_bytes == 1 << 20
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("", "auto"):
        monkeypatch.setenv("PLACEMENT_DEVICE", name)
        with pytest.raises(placement.PlacementError, match=NO_GPU):
            placement.Manager()


def test_a_wrong_name_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLACEMENT_DEVICE", "gpu")
    for make in (placement.Manager, placement.Manager.from_settings):
        with pytest.raises(ValueError, match="device 'gpu' is not known") as raised:
            make()
        assert raised.value.__notes__ == [
            "placement: set in the environment: PLACEMENT_DEVICE='gpu'"
        ]


NO_DEVICE = r'is no device; write "auto", "cuda:0" or "simulated:1GiB", or pass a placement Device'
NO_GPU = r'no CUDA device.*device="simulated:1GiB" .*PLACEMENT_DEVICE=.*SimulatedDevice\('


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        *(
            (name, ValueError, "simulated:64MiB")
            for name in ("simulated", "simulated:much", "simulated:-1")
        ),
        *(
            (name, ValueError, (f"device '{name}' is not known"))
            for name in ("cuda:x", "auto:0", "cuda:")
        ),
        *((each, TypeError, NO_DEVICE) for each in (None, True, 1.5, ["cuda:0"], SimulatedDevice)),
        *(
            (each, ValueError, r"device 'cpu.*' is host memory.*PLACEMENT_DEVICE=simulated:1GiB")
            for each in ("cpu", "cpu:0", torch.device("cpu"))
        ),
        *(
            (each, placement.PlacementError, NO_GPU)
            for each in ("auto", "cuda:0", torch.device("cuda", 0), 0)
        ),
    ],
)
def test_what_cannot_be_had_is_told_what_to_write(
    monkeypatch: pytest.MonkeyPatch, given: Any, error: type[Exception], message: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(error, match=message):
        placement.Manager(device=given)
