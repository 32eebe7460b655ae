"""An NVIDIA GPU by CUDA virtual memory: addresses are reserved once, physical memory goes behind them and comes back."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any, TypeVar

import torch

from placement.memory import cuda_pool
from placement.memory.base import POISON_BYTE, Addresses, Chunk, Copy, Device, DeviceMemory, Direction, HostSlab
from placement.memory.cuda_driver import Driver
from placement.memory.cuda_lifetime import Life, Lives, uninterrupted
from placement.memory.cuda_pinning import Pinning
from placement.memory.host import Slab, check_span

_Mapping = tuple[int, int, int, int, int]
"""Arguments of cuMemMap: address, bytes, 0, handle, 0."""


class _Extent:
    """How much of a range may have something behind it. `settled` is False from before a change until after it:
    whoever finds it False (an interrupt came in between) clears the range piece by piece, and takes none for granted."""

    def __init__(self) -> None:
        self.covered = 0
        self.settled = True
        self.pieces: tuple[tuple[int, int], ...] = ()
        """(address, bytes) of every single mapping."""
        self.chunks: tuple[_Chunk, ...] = ()
        """What may be mapped now: counted as held until nothing can touch it, also when everybody else has dropped it."""


class _Addresses(Addresses):
    def __init__(self, base: int, nbytes: int, extent: _Extent) -> None:
        self.base = base
        self.nbytes = nbytes
        self.extent = extent


class _Chunk(Chunk):
    def __init__(self, handle: int, nbytes: int) -> None:
        self.handle = handle
        self.nbytes = nbytes


class _Exporter:
    """What a tensor over a range keeps alive: torch drops it with the storage, and the addresses with it."""

    def __init__(self, addresses: Addresses, offset: int, nbytes: int) -> None:
        self._addresses = addresses
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (addresses.base + offset, False), "version": 3}


class _Poison:
    """A full chunk and one of the granularity, filled with `POISON_BYTE`, at addresses where they can be compared and refilled."""

    def __init__(self, full: _Chunk, tail: _Chunk, words: torch.Tensor) -> None:
        self.full = full
        self.tail = tail
        self.words = words
        """All bytes of both, as int64."""
        self.nbytes = full.nbytes + tail.nbytes


class CudaDevice(Device):
    """One CUDA device of this process.

    Args:
        index: as torch counts devices.
        chunk_bytes: size of a full chunk, rounded up to the driver's granularity (2 MiB). Larger chunks block the host
            shorter, smaller ones share better.

    Raises:
        PlacementError: no CUDA virtual memory here; the message says what to install.
    """

    def __init__(self, index: int = 0, *, chunk_bytes: int = 64 << 20) -> None:
        self._driver = Driver(index)
        self.name = f"cuda:{index}"
        self.torch_device = torch.device("cuda", index)
        self.granularity = self._driver.granularity
        self.chunk_bytes = self._rounded(max(chunk_bytes, 1))
        self._chunks = Lives()
        self._ranges = Lives()
        self._poison: _Poison | None = None
        self._pinning = Pinning(self._driver)
        self._streams: dict[Direction, Any] = {
            "to_device": torch.cuda.Stream(self.torch_device),
            "to_host": torch.cuda.Stream(self.torch_device),
        }

    def _rounded(self, nbytes: int) -> int:
        return -(-nbytes // self.granularity) * self.granularity

    def host(self, nbytes: int) -> HostSlab:
        return Slab(nbytes, register=self._pinning.pin, unregister=self._pinning.unpin)

    def reserve(self, nbytes: int) -> Addresses:
        self._poison = self._poison or self._make_poison()
        return self._reserve(nbytes)

    def _reserve(self, nbytes: int) -> _Addresses:
        self._collect()
        nbytes = self._rounded(max(nbytes, 1))
        base = int(self._driver.call("cuMemAddressReserve", nbytes, 0, 0, 0))
        addresses = _Addresses(base, nbytes, _Extent())
        self._ranges.add(addresses, nbytes, functools.partial(self._free, base, nbytes, addresses.extent))
        return addresses

    def _free(self, base: int, nbytes: int, extent: _Extent, life: Life) -> bool:
        """The last tensor over a range is gone. A kernel that used it may still run, and would take the context down."""
        if self._driver.usable:
            with self._driver:
                if self._driver.failed("cuCtxSynchronize"):  # not allowed while a stream captures
                    return False
                self._clear(base, extent)
                free = functools.partial(self._driver.api.cuMemAddressFree, base, nbytes)
                uninterrupted(free, functools.partial(self._ranges.owned.pop, life, None))
        return True

    def _collect(self) -> None:
        self._ranges.collect()
        self._chunks.collect()

    def create(self, nbytes: int) -> Chunk:
        self._collect()
        self._poison = self._poison or self._make_poison()  # before the memory is gone
        return self._create(self._rounded(nbytes))

    def _create(self, nbytes: int) -> _Chunk:
        chunk = _Chunk(0, nbytes)
        outcomes: list[tuple[Any, ...]] = []
        try:
            self._driver.collect("cuMemCreate", [(nbytes, self._driver.property, 0)], outcomes)
            chunk.handle = int(self._driver.value("cuMemCreate", outcomes[0]))
            self._chunks.add(chunk, nbytes, functools.partial(self._release, chunk.handle))
        except BaseException:
            if weakref.ref(chunk) in self._chunks.owned:
                self.release(chunk)
            elif outcomes and outcomes[0][0] == self._driver.api.CUresult.CUDA_SUCCESS:
                self._driver.failed("cuMemRelease", outcomes[0][1])  # an interrupt between the driver's answer and its owner
            raise
        return chunk

    def release(self, chunk: Chunk) -> None:
        ours = _ours(chunk, _Chunk)
        self._release(ours.handle, weakref.ref(ours))

    def _release(self, handle: int, life: weakref.ref[_Chunk]) -> bool:
        # In one step: the driver gives the number of a released chunk to the next, so it must never be released twice.
        if life in self._chunks.owned and self._driver.usable:
            release = functools.partial(self._driver.api.cuMemRelease, handle)
            uninterrupted(release, functools.partial(self._chunks.owned.pop, life, None))
        return True

    def map(self, addresses: Addresses, chunks: Sequence[Chunk]) -> None:
        target = _ours(addresses, _Addresses)
        new = tuple(_ours(chunk, _Chunk) for chunk in chunks)
        if not all(weakref.ref(chunk) in self._chunks.owned for chunk in new):
            raise ValueError("a chunk that this device does not hold: released, or of another device")
        sizes = [chunk.nbytes for chunk in new]
        nbytes, covered = sum(sizes), max(sum(sizes), target.extent.covered)
        if nbytes > target.nbytes:
            raise ValueError(f"chunks of {nbytes:,} bytes for {target.nbytes:,} bytes of addresses")
        places = itertools.accumulate(sizes, initial=target.base)
        mappings = list(zip(places, sizes, repeat(0), [chunk.handle for chunk in new], repeat(0), strict=False))
        try:
            self._put(target, new, covered, [*mappings, *self._poisoned(target.base + nbytes, covered - nbytes)])
        except BaseException:
            self.unmap(addresses, covered)
            raise

    def unmap(self, addresses: Addresses, nbytes: int) -> None:
        target = _ours(addresses, _Addresses)
        nbytes = max(self._rounded(nbytes), target.extent.covered)
        if nbytes > target.nbytes:
            raise ValueError(f"{nbytes:,} bytes of a range of {target.nbytes:,}")
        if nbytes:
            self._put(target, (), nbytes, list(self._poisoned(target.base, nbytes)))

    def _poisoned(self, base: int, nbytes: int) -> Iterator[_Mapping]:
        """The mappings that put poison there."""
        self._poison = poison = self._poison or self._make_poison()
        # A mapping shorter than its chunk is refused (error 801), so the rest takes the small chunk many times.
        rest, end = base + nbytes // self.chunk_bytes * self.chunk_bytes, base + nbytes
        for chunk, places in ((poison.full, range(base, rest, self.chunk_bytes)), (poison.tail, range(rest, end, self.granularity))):
            yield from zip(places, repeat(chunk.nbytes), repeat(0), repeat(chunk.handle), repeat(0), strict=False)

    def _put(self, target: _Addresses, chunks: tuple[_Chunk, ...], nbytes: int, mappings: Sequence[_Mapping]) -> None:
        """Replace what is behind the start of a range: one unmap, the mappings, one call for the access rights."""
        extent = target.extent
        with self._driver:
            self._clear(target.base, extent)
            extent.covered, extent.chunks, extent.pieces = nbytes, chunks, tuple(mapping[:2] for mapping in mappings)
            self._driver.batch("cuMemMap", mappings)
            self._driver.call("cuMemSetAccess", target.base, nbytes, [self._driver.access], 1)
            extent.settled = True

    def _clear(self, base: int, extent: _Extent) -> None:
        whole, extent.settled = extent.settled, False
        if whole and extent.covered:
            self._driver.call("cuMemUnmap", base, extent.covered)
        elif extent.covered:
            for place, size in extent.pieces:  # after an interrupt each may be there or not
                self._driver.failed("cuMemUnmap", place, size)
        extent.covered, extent.chunks = 0, ()

    def copy(self, copies: Sequence[Copy], direction: Direction) -> None:
        stream = self._streams[direction]
        handle = self._driver.api.CUstream(stream.cuda_stream)
        if direction == "to_device":
            function = "cuMemcpyHtoDAsync"
            calls = [(device, host, nbytes, handle) for device, host, nbytes in self._pinning.cut(copies)]
        else:
            function = "cuMemcpyDtoHAsync"
            calls = [(host, device, nbytes, handle) for device, host, nbytes in self._pinning.cut(copies)]
            stream.wait_stream(torch.cuda.current_stream(self.torch_device))
        with self._driver:
            self._driver.batch(function, calls)

    def order(self) -> None:
        current = torch.cuda.current_stream(self.torch_device)
        for stream in self._streams.values():
            current.wait_stream(stream)

    def sync(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def view(self, addresses: Addresses, offset: int, nbytes: int) -> torch.Tensor:
        """As the contract says; the addresses must have memory or poison behind them, because torch asks the driver whose they are."""
        check_span(offset, nbytes, addresses.nbytes)
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8, device=self.torch_device)
        return torch.as_tensor(_Exporter(addresses, offset, nbytes), device=self.torch_device)

    def memory(self) -> DeviceMemory:
        cuda_pool.reap()
        self._collect()
        poison = self._poison.nbytes if self._poison else 0
        free, total = torch.cuda.mem_get_info(self.torch_device)
        stats: dict[str, Any] = torch.cuda.memory_stats_as_nested_dict(self.torch_device)
        # Torch counts what lies in our ranges by way of its pools as its own.
        pools = cuda_pool.counted(self.torch_device, stats["allocation"]["all"]["freed"] if stats else 0)
        return DeviceMemory(
            total_bytes=total,
            free_bytes=free,
            torch_reserved_bytes=stats["reserved_bytes"]["all"]["current"] - pools.reserved_bytes if stats else 0,
            torch_allocated_bytes=stats["allocated_bytes"]["all"]["current"] - pools.allocated_bytes if stats else 0,
            chunk_bytes=sum(list(self._chunks.owned.values())) - poison,
            poison_bytes=poison,
        )

    def _make_poison(self) -> _Poison:
        full, tail = self._create(self.chunk_bytes), self._create(self.granularity)
        addresses = self._reserve(full.nbytes + tail.nbytes)
        mappings = [(addresses.base, full.nbytes, 0, full.handle, 0), (addresses.base + full.nbytes, tail.nbytes, 0, tail.handle, 0)]
        self._put(addresses, (full, tail), addresses.nbytes, mappings)
        with self._driver:
            self._driver.call("cuMemsetD8", addresses.base, POISON_BYTE, addresses.nbytes)
            self._driver.call("cuCtxSynchronize")  # the fill is on a stream that torch's do not wait for
        return _Poison(full, tail, self.view(addresses, 0, addresses.nbytes).view(torch.int64))

    def heal_poison(self) -> bool:
        if self._poison is None:
            return False
        words = self._poison.words
        if torch.stack(torch.aminmax(words)).tolist() == [-1, -1]:
            return False
        words.fill_(-1)
        torch.cuda.current_stream(self.torch_device).synchronize()
        return True

    def trim(self) -> None:
        with torch.cuda.device(self.torch_device):
            torch.cuda.empty_cache()

    def is_capturing(self) -> bool:
        with torch.cuda.device(self.torch_device):
            return torch.cuda.is_current_stream_capturing()

    def close(self) -> None:
        cuda_pool.reap()
        self._collect()
        if len(self._ranges.owned) <= 1:  # the poison's own
            self._poison = None
            self._collect()


_Ours = TypeVar("_Ours")


def _ours(given: object, kind: type[_Ours]) -> _Ours:
    if not isinstance(given, kind):
        raise TypeError(f"not of this device: {given!r}")
    return given
