"""Find the device for a device name."""

from __future__ import annotations

import re
from importlib.metadata import entry_points

import torch

from placement.core.errors import PlacementError
from placement.core.settings import PREFIX, device_of_environment, parse_bytes
from placement.devices.base import Device
from placement.devices.cuda.driver import refuse_rocm

GROUP = "placement.devices"
"""Entry points by the kind of a device: each names a callable that takes the device's whole name
("npu:1") and returns a `Device`."""
_NAME = re.compile(r"([A-Za-z_]\w*)(?::([\w.]+))?")
_WITHOUT_ONE = (
    'On a machine without an accelerator write device="simulated:1GiB" (for "auto", the default, '
    "PLACEMENT_DEVICE=simulated:1GiB in the environment does the same), or pass "
    "device=placement.testing.SimulatedDevice(capacity_bytes=...): this device behaves the same in "
    "host memory."
)


def name_or_device(device: object) -> str | Device:
    """The name or the `Device` that `Manager(device=...)` was given. A `torch.device` stands for
    its name, a number N for "cuda:N".

    Raises TypeError: it is none of these.
    """
    if isinstance(device, str | Device):
        return device
    if isinstance(device, torch.device):
        return str(device)
    if isinstance(device, int) and not isinstance(device, bool):
        return f"cuda:{device}"
    raise TypeError(
        f'device={device!r} is no device; write "auto", "cuda:0" or "simulated:1GiB", or pass a '
        "placement Device"
    )


def select_device(name: str, *, is_tight: bool = False) -> Device:
    """Make the device called "auto", "cuda", "cuda:N" or "simulated:64MiB", or by an entry point of
    the group `placement.devices`. "auto" is the device that the environment names, else this
    process's accelerator. `is_tight`: whether this process has only a share of the device's
    memory, so that a swap needs smaller chunks.

    Raises:
        ValueError: the name is unknown.
        PlacementError: there is no accelerator, an unsupported one, or an entry point that fails.
    """
    of_environment = device_of_environment()
    if name == "auto" and of_environment != "auto":
        try:
            return select_device(of_environment, is_tight=is_tight)
        except (PlacementError, ValueError) as error:
            error.add_note(f"placement: set in the environment: {PREFIX}DEVICE={of_environment!r}")
            raise
    match = _NAME.fullmatch(name)
    kind, index = ("", None) if match is None else match.groups()
    if kind == "simulated":
        from placement.devices.simulated.device import SimulatedDevice

        try:
            return SimulatedDevice(parse_bytes(index or ""))
        except ValueError as error:
            raise ValueError(
                f'device {name!r}: write how much memory it has, as in "simulated:64MiB" ({error})'
            ) from error
    is_cuda = kind == "cuda" and (index is None or index.isdecimal())
    is_auto = kind == "auto" and index is None
    if not is_cuda and not is_auto:
        return _from_entry_point(name, kind)
    refuse_rocm(name)
    if not torch.cuda.is_available():
        raise PlacementError(
            f"device {name!r}: torch sees no CUDA device in this process. {_WITHOUT_ONE}"
        )
    from placement.devices.cuda.device import CHUNK_BYTES, TIGHT_CHUNK_BYTES, CudaDevice

    chunk_bytes = TIGHT_CHUNK_BYTES if is_tight else CHUNK_BYTES
    number = torch.cuda.current_device() if index is None else int(index)
    return CudaDevice(number, chunk_bytes=chunk_bytes)


def _from_entry_point(name: str, kind: str) -> Device:
    points = entry_points(group=GROUP)
    matching = [point for point in points if point.name == kind]
    if not matching and kind == "cpu":
        raise ValueError(
            f"device {name!r} is host memory, where placement keeps what is off the device. "
            f"{_WITHOUT_ONE}"
        )
    if not matching:
        names = sorted({"auto", "cuda:0", "simulated:64MiB", *(point.name for point in points)})
        listed = ", ".join(f'"{device}"' for device in names)
        raise ValueError(
            f"device {name!r} is not known; write one of {listed}, or pass a Device: "
            "placement.testing.SimulatedDevice"
        )
    point = matching[0]
    try:
        device = point.load()(name)
    except Exception as error:
        raise PlacementError(
            f"device {name!r}: entry point {point.name!r} of {GROUP!r} ({point.value}) failed: "
            f"{error}"
        ) from error
    if not isinstance(device, Device):
        raise PlacementError(
            f"device {name!r}: entry point {point.name!r} ({point.value}) gave {device!r}, which "
            "is no placement Device"
        )
    return device
