"""Put torch storages at chosen addresses where torch cannot swap a storage's pointer (before 2.13):
a `MemPool` over a range.

A storage that is resized to nothing and back takes its memory from the active pool. The pool asks a
custom allocator for segments, and this module answers with addresses of the range. Two facts shape
the module:

* The allocator calls back with its own lock held. A callback in Python needs the interpreter lock.
  Another thread may hold that while it waits for the allocator: a deadlock. So no callback runs
  Python code. The one for memory is `deque.popleft` itself. It is only reached through
  `UntypedStorage.resize_`, which keeps the interpreter lock, and no bytecode runs inside, so the
  lock cannot change hands. The one for freeing is a C library function without effect: segments are
  never freed alone, the range goes as a whole.
* The place of a block must be known before anything moves. So placeholders occupy every place
  first, and plugs occupy the remainders of segments. When a placeholder goes, it leaves the only
  gap, and the next request gets it.
"""

from __future__ import annotations

import atexit
import bisect
import collections
import ctypes
import functools
import os
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from placement.core.errors import RegistrationError
from placement.devices import base
from placement.devices.base import Adopter, Way
from placement.devices.memory import Addresses

# The way torch's allocator splits its segments (c10/cuda/CUDACachingAllocator). `PoolRange` checks
# every address.
_ROUND = 512
# requests up to this size share segments of `_SMALL_SEGMENT`. A remainder longer than this is split
# off a larger block.
_SMALL = 1 << 20
_SMALL_SEGMENT = 2 << 20
_ARENA_STEP = 2 << 20
# from this size on a request gets a segment of its own, rounded to `_ARENA_STEP`
_ARENA_LEAST = 10 << 20


_next_address: collections.deque[int] = collections.deque()
# Declared without the argument that it does not read: on every ABI with CUDA the caller cleans up
# its registers.
_take = ctypes.CFUNCTYPE(ctypes.c_void_p)(_next_address.popleft)
_ignore = ctypes.CDLL(None).labs
_allocating = threading.RLock()
_ranges: list[PoolRange] = []


def _function_address(function: Any) -> int:
    return int(ctypes.cast(function, ctypes.c_void_p).value or 0)


@dataclass(frozen=True, slots=True)
class Place:
    """One block, with its offset from the start of the range."""

    offset: int
    nbytes: int  # the size of the request to torch
    index: int | None  # the index of the block's storage; None for a plug
    # the length of the segment that torch requests for this block; 0 if the block lies in the
    # segment before
    opens: int = 0


def plan(sizes: Sequence[int]) -> tuple[list[Place], int]:
    """Predict the places of storages of these sizes. Returns the places in the order of allocation,
    and the used bytes."""
    rounded = [-(-size // _ROUND) * _ROUND for size in sizes]
    large = [i for i, size in enumerate(rounded) if size > _SMALL]
    small = [i for i, size in enumerate(rounded) if 0 < size <= _SMALL]
    small.sort(key=lambda i: -rounded[i])
    places: list[Place] = []
    cursor = 0
    if large:
        used = sum(rounded[i] for i in large)
        arena = max(_ARENA_LEAST, -(-used // _ARENA_STEP) * _ARENA_STEP)
        for i in large:
            places.append(Place(cursor, sizes[i], i, opens=0 if places else arena))
            cursor += rounded[i]
        if arena - cursor > _SMALL:
            places.append(Place(cursor, arena - cursor, None))
        cursor = arena
    end = cursor
    for i in small:
        opens = 0
        if cursor + rounded[i] > end:
            places += _plugs(cursor, end)
            cursor, end, opens = end, end + _SMALL_SEGMENT, _SMALL_SEGMENT
        places.append(Place(cursor, sizes[i], i, opens))
        cursor += rounded[i]
    places += _plugs(cursor, end)
    return places, end


def _plugs(start: int, end: int) -> list[Place]:
    plugs = []
    for offset in range(start, end, _SMALL):
        plugs.append(Place(offset, min(_SMALL, end - offset), None))
    return plugs


class PoolRange:
    """A range, at least as long as `plan(sizes)` says, from which torch allocates storages of these
    sizes. They may come as long as `owner` lives. Raises RegistrationError: the settings of torch's
    allocator do not work with a pool over a range."""

    def __init__(
        self, device: torch.device, addresses: Addresses, sizes: Sequence[int], owner: object
    ) -> None:
        hook = "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"
        value = os.environ.get(hook, "0").lower()
        if value not in ("", "0", "false", "no", "n"):
            raise RegistrationError(
                f"{hook} is set: NCCL would register memory that placement replaces. Unset the "
                "variable."
            )
        self._device = device
        self._owner = weakref.ref(owner)
        # weak references and lengths, by the address of torch's own object
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self._held: dict[int, torch.UntypedStorage] = {}
        self._plugs: list[torch.UntypedStorage] = []
        self.addresses = addresses
        self.places, self.nbytes = plan(sizes)
        self.offsets = {
            place.index: place.offset for place in self.places if place.index is not None
        }
        # a short remainder belongs to the block before it
        ends = [place.offset for place in self.places[1:]] + [self.nbytes]
        self._blocks = {
            p.index: end - p.offset
            for p, end in zip(self.places, ends, strict=True)
            if p.index is not None
        }
        self._sizes = tuple(sizes)
        _ranges.append(self)  # before torch knows the addresses, so that they outlive torch's use
        with _on_one_stream(device):
            self._pool = torch.cuda.MemPool(_the_allocator())
            self._fill()

    def _fill(self) -> None:
        for place in self.places:
            # the one segment of all large blocks: request it whole, free it, and split it
            if place.opens > _SMALL_SEGMENT:
                whole = torch.UntypedStorage(0, device=self._device)
                self._allocate(whole, place.opens, self.addresses.base + place.offset)
                whole.resize_(0)
            storage = torch.UntypedStorage(0, device=self._device)
            opens = place.opens == _SMALL_SEGMENT
            self._allocate(
                storage, place.nbytes, self.addresses.base + place.offset if opens else None
            )
            if storage.data_ptr() != self.addresses.base + place.offset:
                raise RegistrationError(
                    f"torch's allocator put a block of {place.nbytes:,} bytes at another place "
                    "than planned; PYTORCH_ALLOC_CONF (max_split_size_mb, "
                    "roundup_power2_divisions) changes how it cuts memory: leave these unset"
                )
            if place.index is None:
                self._plugs.append(storage)
            else:
                self._held[place.index] = storage

    def _allocate(
        self, storage: torch.UntypedStorage, nbytes: int, address: int | None = None
    ) -> None:
        """Give a storage memory from the pool. `address` is the segment that torch may request;
        None if it must not need one."""
        index, pool = self._device.index, self._pool.id
        with _allocating:
            _next_address.clear()
            if address is not None:
                _next_address.append(address)
            torch._C._cuda_beginAllocateCurrentThreadToPool(index, pool)
            try:
                storage.resize_(nbytes)
            except RuntimeError as exc:
                raise RegistrationError(
                    f"torch's allocator could not take {nbytes:,} bytes from the range: {exc}"
                ) from exc
            finally:
                torch._C._cuda_endAllocateToPool(index, pool)
                torch._C._cuda_releasePool(index, pool)

    def take(self, index: int, storage: torch.UntypedStorage) -> None:
        """Put a storage at its place. Its bytes are lost, and its old memory returns to torch.
        Idempotent."""
        if storage._cdata not in self._storages:
            self._storages[storage._cdata] = (StorageWeakRef(storage), self._blocks[index])
        target, nbytes = self.addresses.base + self.offsets[index], self._sizes[index]
        with _on_one_stream(self._device):
            if storage.data_ptr() != target or storage.nbytes() != nbytes:
                storage.resize_(0)
                if index in self._held:
                    self._held[index].resize_(0)
                self._allocate(storage, nbytes)
            if storage.data_ptr() != target:
                self._settle_at(target, storage, nbytes)
        self._held.pop(index, None)

    def _settle_at(self, target: int, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Find the right gap after another storage of the range died and left one of the same size:
        plug gaps until it is the last."""
        plugs: list[torch.UntypedStorage] = []
        while storage.data_ptr() != target:
            plug = self._plug(nbytes)
            while plug.data_ptr() != target:
                plugs.append(plug)
                plug = self._plug(nbytes)
            storage.resize_(0)
            # takes the gap that the storage leaves, or another one
            plugs.append(self._plug(nbytes))
            plug.resize_(0)
            self._allocate(storage, nbytes)

    def _plug(self, nbytes: int) -> torch.UntypedStorage:
        plug = torch.UntypedStorage(0, device=self._device)
        self._allocate(plug, nbytes)
        return plug

    @property
    def is_over(self) -> bool:
        """Whether no storage lies in the range any more, and none will come."""
        return self._owner() is None and all(map(torch.UntypedStorage._expired, self._storages))

    def end(self) -> None:
        """Let torch forget the range: first the plugs, then the pool, then the addresses."""
        self._held.clear()
        self._plugs.clear()
        self.__dict__.pop("_pool", None)

    def allocated_bytes(self) -> int:
        held: int = sum(self._blocks[index] for index in self._held) + sum(
            plug.nbytes() for plug in self._plugs
        )
        return held + sum(
            nbytes
            for cdata, (_, nbytes) in [*self._storages.items()]
            if not torch.UntypedStorage._expired(cdata)
        )


def reap() -> None:
    """Drop the ranges whose storages have all died. The addresses are freed with the last
    reference."""
    for pool_range in [r for r in _ranges if r.is_over]:
        pool_range.end()
        _ranges.remove(pool_range)


def reserved_bytes(device: torch.device) -> int:
    """The part of torch's reserved bytes on a device that belongs to ranges."""
    return sum(r.nbytes for r in _ranges if r._device == device)


def allocated_bytes(device: torch.device) -> int:
    """The part of torch's allocated bytes on a device that belongs to ranges."""
    return sum(r.allocated_bytes() for r in _ranges if r._device == device)


@functools.cache
def _the_allocator() -> Any:
    """The custom allocator. There is one for the process and for ever, because torch keeps bare
    pointers to it."""
    return torch._C._cuda_customAllocator(_function_address(_take), _function_address(_ignore))


@contextmanager
def _on_one_stream(device: torch.device) -> Iterator[None]:
    """Use the default stream, because torch gives a block back only to the stream on which it was
    allocated."""
    default = torch.cuda.default_stream(device)
    if torch.cuda.current_device() == device.index and torch.cuda.current_stream(device) == default:
        yield
    else:
        with torch.cuda.device(device), torch.cuda.stream(default):
            yield


@atexit.register
def _leave_to_the_system() -> None:
    """At interpreter exit keep the pools alive: a dying pool would make the allocator wait for the
    device."""
    for pool_range in _ranges:
        if "_pool" in pool_range.__dict__:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(pool_range._pool))


class CudaAdopter(Adopter):
    """Adoption on a CUDA device: by a pool over the range where torch cannot swap storages."""

    def way(self, storage: torch.UntypedStorage) -> Way:
        if storage.device == self.device and not base.can_swap() and storage.resizable():
            return "pool"
        return super().way(storage)

    def refuse(self, storages: Sequence[tuple[str, torch.UntypedStorage]]) -> None:
        """Refuse storages in a private memory pool, whose old memory a captured graph or a library
        (NCCL, RDMA) would go on using."""
        on_device = [(name, storage) for name, storage in storages if storage.device.type == "cuda"]
        if not on_device:
            return
        segments = []
        for segment in torch.cuda.memory_snapshot():
            if tuple(segment["segment_pool_id"]) != (0, 0):
                first = segment["address"]
                segments.append((first, first + segment["total_size"]))
        segments.sort()
        for name, storage in on_device:
            place = bisect.bisect_right(segments, (storage.data_ptr(), sys.maxsize)) - 1
            if place >= 0 and storage.data_ptr() < segments[place][1]:
                raise RegistrationError(
                    f"{name!r} lies in a private memory pool (a captured CUDA graph's, or a "
                    "MemPool such as one of ncclMemAlloc, whose buffers NCCL registers): register "
                    "before capturing, and build the object outside the pool"
                )

    def pooled_bytes(self, sizes: Sequence[int]) -> int:
        return 0 if base.can_swap() else plan(sizes)[1]

    def pool(self, addresses: Addresses, sizes: Sequence[int], owner: object) -> PoolRange:
        return PoolRange(self.device, addresses, sizes, owner)

    def reallocate(self, storage: torch.UntypedStorage) -> None:
        # Lack of memory shows here, before anything is given up: the next lines get this block.
        nbytes = storage.nbytes()
        reserved = torch.UntypedStorage(nbytes, device=storage.device)
        storage.resize_(0)
        reserved.resize_(0)
        storage.resize_(nbytes)
        for pool_range in _ranges:  # it no longer keeps its range alive
            pool_range._storages.pop(storage._cdata, None)
