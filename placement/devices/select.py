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


def name_or_device(given: object) -> str | Device:
    """The name or the `Device` that `Manager(device=...)` was given. A `torch.device` stands for
    its name, a number N for "cuda:N".
    Raises TypeError: it is none of these."""
    if isinstance(given, str | Device):
        return given
    if isinstance(given, torch.device):
        return str(given)
    if isinstance(given, int) and not isinstance(given, bool):
        return f"cuda:{given}"
    raise TypeError(
        f'device={given!r} is no device; write "auto", "cuda:0" or "simulated:1GiB", or pass a '
        "placement Device"
    )


def select_device(name: str, *, is_tight: bool = False) -> Device:
    """Make the device called "auto", "cuda", "cuda:N" or "simulated:64MiB", or by an entry point of
    the group `placement.devices`. "auto" is the device that the environment names, else this
    process's accelerator. `is_tight`: whether this process has only a share of the device's
    memory, so that a swap needs smaller chunks. Raises ValueError: the name is unknown.
    Raises PlacementError: there is no accelerator, an unsupported one, or an entry point that
    fails."""
    if name == "auto" and (variable := device_of_environment()) != "auto":
        try:
            return select_device(variable, is_tight=is_tight)
        except (PlacementError, ValueError) as error:
            error.add_note(f"placement: set in the environment: {PREFIX}DEVICE={variable!r}")
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
    if kind not in ("auto", "cuda") or (
        index is not None and (kind == "auto" or not index.isdecimal())
    ):
        return _from_entry_point(name, kind)
    refuse_rocm(name)
    if not torch.cuda.is_available():
        raise PlacementError(
            f"device {name!r}: torch sees no CUDA device in this process. {_WITHOUT_ONE}"
        )
    from placement.devices.cuda.device import CHUNK_BYTES, TIGHT_CHUNK_BYTES, CudaDevice

    chunk_bytes = TIGHT_CHUNK_BYTES if is_tight else CHUNK_BYTES
    return CudaDevice(
        torch.cuda.current_device() if index is None else int(index), chunk_bytes=chunk_bytes
    )


def _from_entry_point(name: str, kind: str) -> Device:
    points = entry_points(group=GROUP)
    point = next((each for each in points if each.name == kind), None)
    if point is None and kind == "cpu":
        raise ValueError(
            f"device {name!r} is host memory, where placement keeps what is off the device. "
            f"{_WITHOUT_ONE}"
        )
    if point is None:
        known = ", ".join(
            f'"{each}"'
            for each in sorted(
                {"auto", "cuda:0", "simulated:64MiB", *(each.name for each in points)}
            )
        )
        raise ValueError(
            f"device {name!r} is not known; write one of {known}, or pass a Device: "
            "placement.testing.SimulatedDevice"
        )
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
