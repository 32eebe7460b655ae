"""An NVIDIA GPU with CUDA virtual memory: addresses are reserved once, and physical memory is
mapped behind them and taken away."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast, get_args

import torch
from torch.multiprocessing import reductions

from placement.core import interrupts
from placement.core.errors import DeviceMemoryError, HostMemoryError
from placement.devices.base import Adopter, Device, check_span, round_up
from placement.devices.cuda import communicators, pool
from placement.devices.cuda.answers import NUM_BYTES, Answers, Exported, HostWords
from placement.devices.cuda.driver import Driver, Life, Lives, Pinning
from placement.devices.cuda.fingerprint_kernel import kernel_of
from placement.devices.cuda.mapping import DriverChunk, Extent
from placement.devices.cuda.poison import Poison
from placement.devices.cuda.streams import own_stream
from placement.devices.host.file_slab import read_ahead
from placement.devices.host.shared_slab import MappedSlab
from placement.devices.host.slab import Pin, Slab, wait_until_ready
from placement.devices.inspection import placing
from placement.devices.memory import (
    Addresses,
    Chunk,
    Communicator,
    Copy,
    DeviceMemory,
    Direction,
    HostSlab,
    Mark,
)

CHUNK_BYTES = 256 << 20
"""The default chunk size. A chunk costs the host about 0.09 ms to load and 0.14 ms to vacate
(H200), so large chunks are better."""
# The large piece of poison. It stays on the device as long as anything is registered, and is mapped
# several times behind each chunk's addresses. Each mapping costs more while the link is busy: two
# models swap at 65 GB/s with 32 MiB, 73 with 64 and 83 with 256 (H200, without `wipe_mapped`).
_POISON_BYTES = 64 << 20
_WIPED_TOGETHER = 16  # the most chunks to wipe with one call of each function of the driver
# the chunk size where device memory is short: a swap needs room for two chunks
TIGHT_CHUNK_BYTES = 128 << 20


class _Addresses(Addresses):
    def __init__(self, base: int, nbytes: int, extent: Extent) -> None:
        self.base = base
        self.nbytes = nbytes
        self.extent = extent


class _Event(Mark):
    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event


class CudaDevice(Device):
    """One CUDA device of this process.

    Args:
        index: the device's index in torch.
        chunk_bytes: the size of a full chunk, rounded up to the driver's granularity (2 MiB). See
            `CHUNK_BYTES`.

    Raises:
        PlacementError: CUDA virtual memory is not available, and the message says what to install.
    """

    def __init__(self, index: int = 0, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.driver = Driver(index)
        self.name = f"cuda:{index}"
        self.torch_device = torch.device("cuda", index)
        self.granularity = self.driver.granularity
        self.chunk_bytes = self._rounded(max(chunk_bytes, 1))
        self._chunks = Lives()
        self._ranges = Lives()
        self._poison: Poison | None = None
        self._answers: Answers | None = None
        self._pinning = Pinning(self.driver)
        # about: another thread that frees a tensor at the same moment is counted, too
        self.ipc_collected_bytes = 0
        self._place = placing(self.name, self.pci_address)
        self._streams: dict[Direction, torch.cuda.Stream] = {
            direction: own_stream(index, direction) for direction in get_args(Direction)
        }
        # before and after each wait of `order("to_device")`
        self.waits: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        # for work that follows copies, chunk by chunk, beside later copies
        self._following = own_stream(index, "following")
        self._wiping: _Addresses | None = None  # the addresses of `wipe`

    def _rounded(self, nbytes: int) -> int:
        return round_up(nbytes, self.granularity)

    @property
    def adopter(self) -> Adopter:
        return pool.CudaAdopter(self.torch_device)

    @property
    def uuid(self) -> str:
        return f"GPU-{torch.cuda.get_device_properties(self.torch_device).uuid}"

    @property
    def pci_address(self) -> str:
        return self.driver.pci_address

    def host(self, nbytes: int) -> HostSlab:
        return Slab(nbytes, self._pin, self._pinning.unpin, self._place)

    def shared_host(
        self, file: int, nbytes: int, own: Sequence[tuple[int, int]], extra_bytes: int
    ) -> MappedSlab:
        return MappedSlab(
            file, nbytes, own, extra_bytes, self._pin, self._pinning.unpin, self._place
        )

    def _words(self, nbytes: int) -> HostWords:
        """A few words of host memory for answers of kernels."""
        slab = Slab(
            nbytes,
            pin=functools.partial(self._pinning.pin, counts=False),
            unpin=self._pinning.unpin,
        )
        return HostWords(slab, self.torch_device, has_one_address=self.driver.has_one_address)

    @property
    def _pin(self) -> Pin:
        return functools.partial(self._pinning.pin, limit_bytes=self.pinned_limit_bytes)

    def reserve(self, nbytes: int) -> Addresses:
        self._poisoned()
        return self._reserve(nbytes, self.chunk_bytes)

    def _reserve(self, nbytes: int, slot_bytes: int) -> _Addresses:
        self._collect()
        nbytes = self._rounded(max(nbytes, 1))
        reserved = round_up(nbytes, slot_bytes)  # whole slots: see `mapping`
        base = int(self.driver.call("cuMemAddressReserve", reserved, 0, 0, 0))
        addresses = _Addresses(base, nbytes, Extent(self.driver, base, nbytes, slot_bytes))
        self._ranges.add(
            addresses, nbytes, functools.partial(self._free, base, reserved, addresses.extent)
        )
        return addresses

    def _free(self, base: int, nbytes: int, extent: Extent, life: Life) -> bool:
        """Free a range when its last tensor is gone. Waits for kernels that may still use it, whose
        fault would kill the context."""
        if self.driver.usable:
            try:
                if self.is_capturing():  # waiting now would break the capture
                    return False
            except RuntimeError:  # the device is unusable
                return False
            with self.driver:
                if self.driver.failed("cuCtxSynchronize"):  # another thread captures a graph
                    return False
                try:
                    extent.end()
                finally:
                    self.driver.api.cuMemAddressFree(base, nbytes)
                    self._ranges.owned.pop(life, None)
        return True

    def _collect(self) -> None:
        self._ranges.collect()
        self._chunks.collect()

    def create(self, nbytes: int) -> Chunk:
        self._collect()
        self._poisoned()  # before the device memory is used up
        return self._create(self._rounded(nbytes))

    def _create(self, nbytes: int) -> DriverChunk:
        handle = int(self.driver.call("cuMemCreate", nbytes, self.driver.property, 0))
        chunk = DriverChunk(handle, nbytes)
        self._chunks.add(chunk, nbytes, lambda life: self._release({life: handle}))
        return chunk

    def release(self, *chunks: Chunk) -> None:
        own = [cast(DriverChunk, chunk) for chunk in chunks]
        self._release({weakref.ref(chunk): chunk.handle for chunk in own})

    def _release(self, handles: Mapping[Life, int]) -> bool:
        if self.driver.usable:
            # Out of the ledger first, because other threads may look while the driver works, and no
            # number may be released twice.
            held = [
                handle
                for life, handle in handles.items()
                if self._chunks.owned.pop(life, None) is not None
            ]
            for handle in held:
                self.driver.api.cuMemRelease(handle)
        return True

    def wipe(self, chunks: Sequence[Chunk]) -> None:
        """See `Device.wipe`. A chunk has addresses while it is filled: alone that costs 0.4 ms,
        among others 0.2 ms (256 MiB, H100)."""
        new = [cast(DriverChunk, chunk) for chunk in chunks]
        full = [chunk for chunk in new if chunk.nbytes == self.chunk_bytes]
        runs = []
        for start in range(0, len(full), _WIPED_TOGETHER):
            runs.append(full[start : start + _WIPED_TOGETHER])
        runs += [[chunk] for chunk in new if chunk.nbytes != self.chunk_bytes]
        if self._wiping is None:
            self._wiping = self._reserve(_WIPED_TOGETHER * self.chunk_bytes, self.chunk_bytes)
        addresses, extent = self._wiping, self._wiping.extent
        with self.driver:
            for run in runs:
                nbytes = sum(chunk.nbytes for chunk in run)
                try:
                    extent.apply(extent.plan(0, nbytes, run, None))
                    self.wipe_mapped(addresses, nbytes)
                finally:
                    extent.end()

    def wipe_mapped(self, addresses: Addresses, nbytes: int, start: int = 0) -> None:
        wiping = own_stream(self.torch_device.index, "wiping")
        handle = self.driver.api.CUstream(wiping.cuda_stream)
        with self.driver:
            self.driver.call("cuMemsetD8Async", addresses.base + start, 0xFF, nbytes, handle)
        wiping.synchronize()

    def map(self, addresses: Addresses, chunks: Sequence[Chunk], start: int = 0) -> None:
        extent = cast(_Addresses, addresses).extent
        new = [cast(DriverChunk, chunk) for chunk in chunks]
        if not all(weakref.ref(chunk) in self._chunks.owned for chunk in new):
            raise ValueError(
                "this device does not hold the chunk: it was released, or belongs to another device"
            )
        nbytes = sum(chunk.nbytes for chunk in new)
        planned = extent.plan(start, nbytes, new, self._poisoned().chunks)
        try:
            extent.apply(planned)
        except Exception:
            self.unmap(addresses, nbytes, start)
            raise

    def unmap(self, addresses: Addresses, nbytes: int, start: int = 0) -> None:
        extent = cast(_Addresses, addresses).extent
        poison = self._poisoned().chunks
        extent.apply(extent.plan(start, self._rounded(nbytes), (), poison))

    def copy(self, copies: Sequence[Copy], direction: Direction) -> None:
        stream = self._streams[direction]
        handle = self.driver.api.CUstream(stream.cuda_stream)
        for copy in copies:
            wait_until_ready(copy.host_address, copy.nbytes)
        if direction == "to_device":
            for copy in copies:
                read_ahead(copy.host_address, copy.nbytes)
            function, calls = (
                "cuMemcpyHtoDAsync",
                [(copy.device_address, copy.host_address, copy.nbytes, handle) for copy in copies],
            )
        else:
            function, calls = (
                "cuMemcpyDtoHAsync",
                [(copy.host_address, copy.device_address, copy.nbytes, handle) for copy in copies],
            )
            stream.wait_stream(torch.cuda.current_stream(self.torch_device))
        with self.driver:
            self.driver.check(function, self.driver.outcomes(function, calls))

    def order(self, direction: Direction | None = None) -> None:
        current = torch.cuda.current_stream(self.torch_device)
        # before `current` waits for every copy: work after one copy must not wait for others
        self._following.wait_stream(current)
        is_load = direction == "to_device"
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if is_load:
            current.record_event(begin)
        for stream in (
            *(self._streams.values() if direction is None else (self._streams[direction],)),
            self._following,
        ):
            current.wait_stream(stream)
        if is_load:
            current.record_event(end)
            self.waits.append((begin, end))

    def waited_seconds(self) -> float:
        seconds = 0.0
        if not self.waits or self.is_capturing():  # a query would break the capture
            return seconds
        while self.waits and self.waits[0][1].query():
            begin, end = self.waits.popleft()
            seconds += begin.elapsed_time(end) / 1e3
        return seconds

    @contextlib.contextmanager
    def after(self, mark: Mark) -> Iterator[None]:
        self._following.wait_event(cast(_Event, mark).event)
        with torch.cuda.stream(self._following):
            yield

    def mark(self, direction: Direction) -> Mark:
        return _Event(self._streams[direction].record_event())

    def wait(self, mark: Mark) -> None:
        cast(_Event, mark).event.synchronize()
        interrupts.check()

    def wait_for_work(self) -> None:
        torch.cuda.current_stream(self.torch_device).synchronize()
        interrupts.check()

    def sync(self) -> None:
        torch.cuda.synchronize(self.torch_device)
        interrupts.check()

    def view(self, addresses: Addresses, offset: int, nbytes: int) -> torch.Tensor:
        """See `Device.view`. Memory or poison must be behind the addresses, because torch asks the
        driver which device they belong to."""
        check_span(offset, nbytes, addresses.nbytes)
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8, device=self.torch_device)
        return torch.as_tensor(
            Exported(addresses, addresses.base + offset, nbytes), device=self.torch_device
        )

    def ask(self, values: torch.Tensor) -> Callable[[], torch.Tensor]:
        return values.cpu if self._answers is None else self._answers.ask(values)

    def memory(self) -> DeviceMemory:
        self._collect_shared()
        pool.reap()
        self._collect()
        poison = self._poison.nbytes if self._poison else 0
        free, total = torch.cuda.cudart().cudaMemGetInfo(self.torch_device.index)
        return DeviceMemory(
            total_bytes=total,
            free_bytes=free,
            torch_reserved_bytes=self._torch_bytes("reserved_bytes")
            - pool.reserved_bytes(self.torch_device),
            chunk_bytes=sum(list(self._chunks.owned.values())) - poison,
            poison_bytes=poison,
        )

    def torch_allocated_bytes(self) -> int:
        pool.reap()
        return self._torch_bytes("allocated_bytes") - pool.allocated_bytes(self.torch_device)

    def _torch_bytes(self, statistic: str) -> int:
        """One of torch's statistics, with the ranges that its pools allocate from. Its own
        functions for a single value sort all first."""
        stats: dict[str, Any] = torch._C._cuda_memoryStats(self.torch_device.index)
        return int(stats[statistic]["all"]["current"])

    def _poisoned(self) -> Poison:
        if self._poison is None:
            large = self._create(min(self.chunk_bytes, _POISON_BYTES))
            small = self._create(self.granularity)
            addresses = self._reserve(large.nbytes + small.nbytes, large.nbytes)
            planned = addresses.extent.plan(0, addresses.nbytes, (large, small), None)
            addresses.extent.apply(planned)
            try:
                self._poison = Poison(
                    self.driver,
                    large,
                    small,
                    self.view(addresses, 0, addresses.nbytes),
                    self._words(16),
                )
            except torch.OutOfMemoryError as exc:
                raise DeviceMemoryError(
                    f"{self.name}: not enough device memory for the check of the poison: {exc}"
                ) from exc
            with contextlib.suppress(HostMemoryError):  # without them, answers wait for copies
                self._answers = Answers(self._words(NUM_BYTES))
            kernel_of(self.torch_device)  # compiled here, or the first load would wait for it
        return self._poison

    def compare_poison(self) -> None:
        if self._poison is not None:
            self._poison.begin()

    def heal_poison(self, wait: bool = True) -> bool:
        return self._poison is not None and self._poison.heal(wait)

    def _collect_shared(self) -> None:
        """Take back memory of tensors that other processes have opened by CUDA IPC and dropped.
        When such a tensor dies here while another process still has it, torch puts its memory
        aside. It looks there only when another shared tensor dies, or when its allocator finds no
        free block. Until then it counts as allocated: after a weight sync in buckets, the last
        buckets would stay for the whole next phase. Never fails, waits for nothing, and does
        nothing while a graph is being captured. Costs a look at an empty list in a process that
        never shared a tensor. Bytes are only counted where one was shared through pickling:
        measuring costs more than the rest."""
        was_shared = bool(reductions.shared_cache)
        # the device reports an error of earlier work, which is not this method's to raise
        with contextlib.suppress(RuntimeError):
            if self.is_capturing():
                return
            before = self._torch_bytes("allocated_bytes") if was_shared else 0
            torch._C._cuda_ipc_collect()
            if was_shared:
                self.ipc_collected_bytes += max(0, before - self._torch_bytes("allocated_bytes"))

    def communicators(self) -> Sequence[Communicator]:
        return communicators.of_device(self.torch_device)

    def when_out_of_memory(self, give_back: Callable[[], object]) -> None:
        index = self.torch_device.index

        def observe(device: int, *_: int) -> None:
            if device == index:
                give_back()

        attach: Any = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
        # no public name, and a torch without it only leaves what arrived early where it is
        if attach is not None:
            attach(observe)

    def trim(self) -> None:
        self._collect_shared()
        with torch.cuda.device(self.torch_device):
            torch.cuda.empty_cache()

    def is_capturing(self) -> bool:
        # the context manager costs three times as much
        if torch.cuda.current_device() == self.torch_device.index:
            return torch.cuda.is_current_stream_capturing()
        with torch.cuda.device(self.torch_device):
            return torch.cuda.is_current_stream_capturing()

    def close(self) -> None:
        pool.reap()
        self._collect()
        # only the poison's own range, and that of `wipe`
        if len(self._ranges.owned) <= 1 + (self._wiping is not None):
            self._poison = self._answers = self._wiping = None
            self._collect()
