"""A platform of verl that computes on the CPU, since verl brings none: registered as its own
platforms are."""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed.fsdp
from verl.plugin.platform import PlatformBase, set_platform


class CpuIndex(str):
    """The number of the only device: "cpu" where torch wants a device, "0" in a text such as
    `f"{device_name}:{index}"`."""

    __slots__ = ()

    def __format__(self, spec: str) -> str:
        return "0"


class DeviceName(str):
    """The name of the device, which is not equal to "cpu", so that verl can tell the device from
    the host; torch reads its letters."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DeviceName)

    def __ne__(self, other: object) -> bool:
        return not isinstance(other, DeviceName)


def _device_module() -> types.ModuleType:
    module = types.ModuleType("torch.cpu_for_verl")
    for name in (
        "empty_cache",
        "synchronize",
        "ipc_collect",
        "set_device",
        "reset_peak_memory_stats",
    ):
        setattr(module, name, lambda *_, **__: None)
    for name in (
        "memory_allocated",
        "memory_reserved",
        "max_memory_allocated",
        "max_memory_reserved",
    ):
        setattr(module, name, lambda *_, **__: 0)
    module.is_available = lambda: True  # type: ignore[attr-defined]
    module.mem_get_info = lambda *_: (1 << 30, 1 << 30)  # type: ignore[attr-defined]
    module.get_device_name = lambda *_: "CPU"  # type: ignore[attr-defined]
    module.current_device = lambda: CpuIndex("cpu")  # type: ignore[attr-defined]
    module.get_rng_state, module.set_rng_state = torch.get_rng_state, torch.set_rng_state  # type: ignore[attr-defined]
    return module


class _Idle(PlatformBase):  # type: ignore[misc, unused-ignore]
    """Does nothing where a device would have something to do."""


for _name in PlatformBase.__abstractmethods__:
    setattr(_Idle, _name, lambda *_, **__: None)
_Idle.__abstractmethods__ = frozenset()


class CpuPlatform(_Idle):
    device_name = DeviceName("cpu")
    vendor_name = "cpu"
    device_module = _device_module()

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return CpuIndex("cpu")

    def device_count(self) -> int:
        return 1

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def ray_resource_name(self) -> str:
        return "GPU"  # verl's driver looks for no other; a cluster may claim to have some

    def ray_noset_envvars(self) -> list[str]:
        return []


def use_cpu() -> None:
    """Let verl compute on the CPU in this process. Before verl's engines are imported."""
    set_platform(CpuPlatform())
    # verl asks FSDP1 to broadcast the first rank's values, which torch refuses for values on the
    # CPU, although gloo could.
    init_utils = torch.distributed.fsdp._init_utils
    init_utils._check_module_states_for_sync_module_states = lambda states: None
