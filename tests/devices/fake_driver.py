"""A CUDA driver for machines without one: the rules of its virtual memory, and nothing behind
them."""

from __future__ import annotations

import enum
import threading
from collections import Counter
from types import ModuleType, SimpleNamespace
from typing import Any

from placement.devices.memory import Addresses

STEP = 2 << 20
POISON = "poison"


class Result(enum.Enum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2


class FakeDriver(ModuleType):
    """The functions that placement calls. A mapping takes a whole chunk and free addresses;
    unmapping takes whole mappings."""

    def __init__(self) -> None:
        super().__init__("cuda.bindings.driver")
        self.CUresult = Result
        self.CUstream = int
        self.memory: dict[int, int] = {}
        """Bytes by handle, for as long as the handle or a mapping holds them."""
        self.content: dict[int, str] = {}
        self.released: set[int] = set()
        self.reserved: dict[int, int] = {}
        self.mapped: dict[int, tuple[int, int]] = {}
        """(bytes, handle) by address."""
        self.accessible: dict[int, int] = {}
        """To how many devices, by address of a mapping."""
        self.calls: Counter[str] = Counter()
        self.num_contexts = 0  # pushed and not popped
        self.errors = 0
        self.refused = ""
        self.has_virtual_memory = True
        self.pinned: dict[int, int] = {}
        """Bytes of host memory by address."""
        self.capture_mode = threading.local()
        self.in_use = {0}
        """Devices with a context."""
        self._next = 1 << 40
        names = ("CUmemAllocationProp", "CUmemAccessDesc")
        for name in names:
            setattr(self, name, lambda: SimpleNamespace(location=SimpleNamespace()))
        anything = SimpleNamespace(
            CU_MEM_ALLOCATION_TYPE_PINNED=1,
            CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3,
            CU_MEM_LOCATION_TYPE_DEVICE=1,
            CU_MEM_ALLOC_GRANULARITY_RECOMMENDED=1,
            CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED=102,
            CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM=91,
            CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID=50,
            CU_DEVICE_ATTRIBUTE_PCI_BUS_ID=33,
            CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID=34,
        )
        for name in ("Type", "Granularity_flags"):
            setattr(self, f"CUmemAllocation{name}", anything)
        self.CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED="relaxed")
        self.CUmemAccess_flags = self.CUmemLocationType = self.CUdevice_attribute = anything

    def _answer(self, name: str, is_right: bool, value: Any = None) -> tuple[Any, ...]:
        self.calls[name] += 1
        if self.refused == name:
            return (Result.CUDA_ERROR_OUT_OF_MEMORY,)
        self.errors += not is_right
        return (
            Result.CUDA_SUCCESS if is_right else Result.CUDA_ERROR_INVALID_VALUE,
            *([] if value is None else [value]),
        )

    def cuGetErrorName(self, error: Result) -> tuple[Result, bytes]:
        return Result.CUDA_SUCCESS, error.name.encode()

    def cuGetErrorString(self, error: Result) -> tuple[Result, bytes]:
        return self.cuGetErrorName(error)

    def cuDeviceGetAttribute(self, attribute: int, device: int) -> tuple[Any, ...]:
        return self._answer("cuDeviceGetAttribute", True, int(self.has_virtual_memory))

    def cuDevicePrimaryCtxGetState(self, device: int) -> tuple[Any, ...]:
        return *self._answer("cuDevicePrimaryCtxGetState", True, 0), int(device in self.in_use)

    def cuMemGetAllocationGranularity(self, properties: object, option: object) -> tuple[Any, ...]:
        return self._answer("cuMemGetAllocationGranularity", True, STEP)

    def __getattr__(self, name: str) -> Any:
        if name in ("cuDeviceGet", "cuDevicePrimaryCtxRetain"):
            return lambda index: self._answer(name, True, index)
        if name == "cuCtxSynchronize":
            return lambda: self._answer(name, True)
        raise AttributeError(name)

    def cuCtxPushCurrent(self, context: int) -> tuple[Any, ...]:
        self.num_contexts += 1
        return self._answer("cuCtxPushCurrent", True)

    def cuCtxPopCurrent(self) -> tuple[Any, ...]:
        self.num_contexts -= 1
        return self._answer("cuCtxPopCurrent", True)

    def cuMemsetD8Async(
        self, address: int, value: int, nbytes: int, stream: object
    ) -> tuple[Any, ...]:
        is_right = self.num_contexts > 0 and bool(self._whole(address, nbytes))
        return self._answer("cuMemsetD8Async", is_right)

    def cuMemAddressReserve(self, nbytes: int, *_: int) -> tuple[Any, ...]:
        self._next += nbytes + STEP
        self.reserved[self._next - nbytes] = nbytes
        return self._answer("cuMemAddressReserve", nbytes % STEP == 0, self._next - nbytes)

    def cuMemAddressFree(self, base: int, nbytes: int) -> tuple[Any, ...]:
        is_right = self.reserved.get(base) == nbytes and not any(
            base <= at < base + nbytes for at in self.mapped
        )
        self.reserved.pop(base, None)
        return self._answer("cuMemAddressFree", is_right)

    def cuMemCreate(self, nbytes: int, *_: object) -> tuple[Any, ...]:
        self._next += 1
        if self.refused != "cuMemCreate":
            self.memory[self._next] = nbytes
        return self._answer("cuMemCreate", nbytes % STEP == 0, self._next)

    def cuMemRelease(self, handle: int) -> tuple[Any, ...]:
        is_right = handle in self.memory and handle not in self.released
        self.released.add(handle)
        self._free_unused(handle)
        return self._answer("cuMemRelease", is_right)

    def _free_unused(self, handle: int) -> None:
        if handle in self.released and handle not in [used for _, used in self.mapped.values()]:
            self.memory.pop(handle, None)

    def cuMemMap(
        self, address: int, nbytes: int, offset: int, handle: int, flags: int
    ) -> tuple[Any, ...]:
        is_reserved = any(
            base <= address and address + nbytes <= base + size
            for base, size in self.reserved.items()
        )
        is_free = not any(
            at < address + nbytes and address < at + size for at, (size, _) in self.mapped.items()
        )
        is_right = (
            is_reserved
            and is_free
            and self.memory.get(handle) == nbytes
            and handle not in self.released
        )
        if is_right and self.refused != "cuMemMap":
            self.mapped[address] = nbytes, handle
        return self._answer("cuMemMap", is_right)

    def _whole(self, address: int, nbytes: int) -> list[int]:
        """The mappings that fill the span without a gap; none if they do not, or one is cut."""
        found, at = [], address
        while at in self.mapped and at < address + nbytes:
            found.append(at)
            at += self.mapped[at][0]
        return found if at == address + nbytes else []

    def cuMemUnmap(self, address: int, nbytes: int) -> tuple[Any, ...]:
        found = self._whole(address, nbytes)
        for at in found:
            _, handle = self.mapped.pop(at)
            self.accessible.pop(at, None)
            self._free_unused(handle)
        return self._answer("cuMemUnmap", bool(found))

    def cuMemSetAccess(
        self, address: int, nbytes: int, access: list[Any], count: int
    ) -> tuple[Any, ...]:
        found = self._whole(address, nbytes)
        self.accessible.update(
            dict.fromkeys(
                found, len({each.location.id for each in access}) if len(access) == count else 0
            )
        )
        return self._answer("cuMemSetAccess", bool(found))

    def cuThreadExchangeStreamCaptureMode(self, mode: str) -> tuple[Any, ...]:
        before, self.capture_mode.value = getattr(self.capture_mode, "value", "global"), mode
        return self._answer("cuThreadExchangeStreamCaptureMode", True, before)

    def cuMemHostRegister(self, address: int, nbytes: int, flags: int) -> tuple[Any, ...]:
        self.pinned[address] = nbytes
        return self._answer("cuMemHostRegister", self.capture_mode.value == "relaxed")

    def cuMemHostUnregister(self, address: int) -> tuple[Any, ...]:
        return self._answer(
            "cuMemHostUnregister",
            self.pinned.pop(address, 0) > 0 and self.capture_mode.value == "relaxed",
        )

    def fill_with_poison(self, addresses: Addresses) -> None:
        """A kernel of torch has filled what is behind a range."""
        found = self._whole(addresses.base, addresses.nbytes)
        self.content.update({self.mapped[at][1]: POISON for at in found})

    def behind(self, addresses: Addresses, devices: int = 1) -> list[tuple[int, int | str]]:
        """(bytes, handle or poison) of what is behind a range, from its start; all of it must be
        accessible."""
        at, found = addresses.base, list[tuple[int, int | str]]()
        while at in self.mapped and at < addresses.base + addresses.nbytes:
            assert self.accessible.get(at) == devices, "mapped without access"
            nbytes, handle = self.mapped[at]
            found.append((nbytes, self.content.get(handle, handle)))
            at += nbytes
        return found
