"""Calls of the CUDA driver: when they may be made, how errors become exceptions, when resources are
released, how host memory is pinned."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from placement.core.errors import DeviceMemoryError, PlacementError
from placement.core.interrupts import deferred

_TAKES_MEMORY = frozenset({"cuMemAddressReserve", "cuMemCreate", "cuMemMap", "cuMemSetAccess"})
_exiting = threading.Event()
atexit.register(_exiting.set)


def refuse_rocm(name: str) -> None:
    """Raise where torch was built for AMD GPUs, which it also calls CUDA devices, so that no advice
    for CUDA is given there.
    Raises PlacementError: torch was built for ROCm."""
    if torch.version.hip is not None:
        raise PlacementError(
            f"device {name!r}: torch {torch.__version__} is built for ROCm {torch.version.hip}, "
            "and placement does not support AMD GPUs yet. Supported are NVIDIA GPUs, and "
            "everywhere device=placement.testing.SimulatedDevice(capacity_bytes=...), which "
            "behaves the same in host memory."
        )


class Driver:
    """The driver for one device, with torch's (the primary) context, which `with driver:` makes
    current on the calling thread. Reentrant. What is raised: see `CudaDevice`."""

    def __init__(self, index: int) -> None:
        refuse_rocm(f"cuda:{index}")
        if not 0 <= index < torch.cuda.device_count():
            raise PlacementError(
                f"no device cuda:{index}: torch {torch.__version__} sees "
                f"{torch.cuda.device_count()} CUDA device(s)"
            )
        major = (torch.version.cuda or "13").split(".")[0]
        try:
            self.api: Any = importlib.import_module("cuda.bindings.driver")
        except ImportError as exc:
            raise PlacementError(
                f"cuda:{index}: CUDA virtual memory needs cuda-bindings, which cannot be imported "
                f"({exc}). For this torch (CUDA {torch.version.cuda}): pip install "
                f"'cuda-bindings=={major}.*'"
            ) from exc
        torch.cuda.init()
        # makes the runtime create the primary context now instead of later
        torch.cuda.synchronize(index)
        self._process = os.getpid()
        self._ordinal = self.call("cuDeviceGet", index)
        attribute = (
            self.api.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        )
        is_supported = False
        reason = "the driver reports that the device does not support it"
        try:
            is_supported = bool(self.call("cuDeviceGetAttribute", attribute, self._ordinal))
        except RuntimeError as exc:  # the driver does not know this attribute
            reason = str(exc)
        if not is_supported:
            raise PlacementError(
                f"cuda:{index}: no virtual memory management ({reason}). Install an NVIDIA driver "
                f"as new as torch's CUDA {torch.version.cuda}; a virtual GPU must support unified "
                "memory (a whole GPU or MIG slice does)"
            )
        self._context = self.call("cuDevicePrimaryCtxRetain", self._ordinal)
        same = (
            self.api.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
        )
        # of registered host memory, for kernels too
        self.has_one_address = bool(self.call("cuDeviceGetAttribute", same, self._ordinal))

        self.property = self.api.CUmemAllocationProp()
        self.property.type = self.api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._locate(self.property.location, index)
        # This device may read and write its memory, and so may those GPUs that this process uses
        # already. A process with one of many GPUs uses no other. Rights for a GPU that this process
        # does not use cost that GPU memory and time.
        peers = []
        for peer in range(torch.cuda.device_count()):
            is_in_use = peer != index and self._is_in_use(peer)
            if is_in_use and torch.cuda.can_device_access_peer(peer, index):
                peers.append(peer)
        self.access = [self._access(gpu) for gpu in (index, *peers)]
        option = self.api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        self.granularity = int(self.call("cuMemGetAllocationGranularity", self.property, option))

    @property
    def pci_address(self) -> str:
        """Domain, bus, device and function, as the kernel names the GPU: "0000:3b:00.0"."""
        names = ("DOMAIN", "BUS", "DEVICE")
        attributes = [
            getattr(self.api.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_PCI_{name}_ID")
            for name in names
        ]
        domain, bus, device = (
            int(self.call("cuDeviceGetAttribute", attribute, self._ordinal))
            for attribute in attributes
        )
        return f"{domain:04x}:{bus:02x}:{device:02x}.0"

    def _locate(self, location: Any, index: int) -> None:
        location.type = self.api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = index

    def _access(self, index: int) -> Any:
        access = self.api.CUmemAccessDesc()
        access.flags = self.api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._locate(access.location, index)
        return access

    def _is_in_use(self, index: int) -> bool:
        """Whether this process has a context on a device. Does not create one."""
        outcome = self.api.cuDevicePrimaryCtxGetState(self.call("cuDeviceGet", index))
        self.value("cuDevicePrimaryCtxGetState", outcome)
        return bool(outcome[2])

    @property
    def usable(self) -> bool:
        """False at interpreter exit (the driver may be gone) and in a forked child (the context
        belongs to the parent)."""
        return not _exiting.is_set() and os.getpid() == self._process

    def __enter__(self) -> None:
        self.call("cuCtxPushCurrent", self._context)

    def __exit__(self, *exc: object) -> None:
        self.call("cuCtxPopCurrent")

    def call(self, function: str, *arguments: Any) -> Any:
        """Call a driver function once. Returns its value, or None if it has none.
        Raises DeviceMemoryError: out of memory in a function that takes device memory or addresses.
        Raises RuntimeError: any other error; the message names it."""
        return self.value(function, getattr(self.api, function)(*arguments))

    def check(self, function: str, outcomes: Iterable[tuple[Any, ...]]) -> None:
        """Raise the exception for the first error among the outcomes, as in `call`."""
        success = self.api.CUresult.CUDA_SUCCESS
        for outcome in outcomes:
            if outcome[0] != success:
                self.value(function, outcome)

    def outcomes(
        self,
        function: str,
        calls: Iterable[tuple[Any, ...]],
    ) -> list[tuple[Any, ...]]:
        """Call a driver function once for each tuple of arguments. All calls are made, and nothing
        is raised: `check` does."""
        return [*itertools.starmap(getattr(self.api, function), calls)]

    def value(self, function: str, outcome: tuple[Any, ...]) -> Any:
        """The value of a driver function's outcome. Raises the exception for an error."""
        error, *values = outcome
        if error == self.api.CUresult.CUDA_SUCCESS:
            return values[0] if values else None
        _, name = self.api.cuGetErrorName(error)
        _, text = self.api.cuGetErrorString(error)
        message = f"{function}: {(name or b'unknown error').decode()}: {(text or b'').decode()}"
        if error == self.api.CUresult.CUDA_ERROR_OUT_OF_MEMORY and function in _TAKES_MEMORY:
            raise DeviceMemoryError(message)
        raise RuntimeError(message)

    def failed(self, function: str, *arguments: Any) -> str | None:
        """Call a driver function once. Returns the error as text instead of raising it; None for
        success."""
        try:
            self.call(function, *arguments)
        except (DeviceMemoryError, RuntimeError) as exc:
            return str(exc)
        return None


Life = weakref.ref[Any]  # a weak reference to an object that owns a driver resource
End = Callable[[Life], bool]


class Lives:
    """The ledger of every object that owns a driver resource. It lives as long as they do. An
    object may die at any time: on another thread while the driver works, or here in the middle of
    another release, by a garbage collection. A number that the driver has released may soon belong
    to another resource. So each life is ended by exactly one call."""

    def __init__(self) -> None:
        # bytes by object. Who removes an entry releases the bytes.
        self.owned: dict[Life, int] = {}
        self._later: list[tuple[Life, End]] = []

    def add(self, thing: object, nbytes: int, end: End) -> None:
        """Own `nbytes` for as long as `thing` lives. `end` releases them, or returns False to be
        called again later."""
        life = weakref.ref(thing)
        self.owned[life] = nbytes
        weakref.finalize(thing, self._end, life, end).atexit = False

    def _end(self, life: Life, end: End) -> None:
        with deferred():
            if life in self.owned and not end(life):
                self._later.append((life, end))

    def collect(self) -> None:
        """Release the resources of dead objects that could not be released when they died."""
        for _ in range(len(self._later)):
            try:
                dead = self._later.pop(0)
            except IndexError:  # another thread took it
                return
            self._end(*dead)


class Pinning:
    """The host memory that is registered with one device's driver, so that it copies that at full
    link speed."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._pinned: dict[int, int] = {}  # the bytes that count against the limit, by address
        self._turn = threading.Lock()

    @property
    def pinned_bytes(self) -> int:
        return sum(list(self._pinned.values()))

    def pin(
        self, address: int, nbytes: int, limit_bytes: int | None = None, *, counts: bool = True
    ) -> str | None:
        """Register host memory, and return the reason if that fails. The runtime's errors would
        stick and show in torch's next launch.
        `counts`: whether it counts against the limit; a few bytes that are not for copies of
        handles do not."""
        # One at a time, because of the limit, and because waiting inside the driver blocks all
        # other threads that need it.
        with self._turn:
            pinned = self.pinned_bytes
            if limit_bytes is not None and pinned + nbytes > limit_bytes:
                return (
                    f"pinned_limit_bytes is {limit_bytes:,}: {pinned:,} bytes are pinned, and "
                    f"{nbytes:,} more are wanted"
                )
            # first, so that `unpin` also undoes a registration that was cut short
            self._pinned[address] = nbytes if counts else 0
            with self._beside_captures():
                reason = self._driver.failed("cuMemHostRegister", address, nbytes, 0)
            if reason is not None:
                del self._pinned[address]
            return reason

    def unpin(self, address: int) -> None:
        """Undo `pin`, even one that was cut short. Does nothing at interpreter exit and in a forked
        child. Takes no lock, because it runs when objects die, on any thread and under any lock."""
        if self._driver.usable and self._pinned.pop(address, None) is not None:
            with self._beside_captures():
                self._driver.failed("cuMemHostUnregister", address)

    @contextlib.contextmanager
    def _beside_captures(self) -> Iterator[None]:
        """Allow driver calls while another thread captures a graph. Otherwise the driver fails them
        and breaks the capture."""
        exchange = "cuThreadExchangeStreamCaptureMode"
        with self._driver:
            before = self._driver.call(
                exchange, self._driver.api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
            )
            try:
                yield
            finally:
                self._driver.call(exchange, before)
