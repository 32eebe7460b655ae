"""The seam to the accelerator.

A `Device` hands out three things and moves bytes between two of them:

* `Addresses`: device addresses that stay for life. Memory is behind them, or poison.
* `Chunk`: physical device memory. It goes behind addresses and comes back, and is what "free" counts.
* `HostSlab`: host memory that holds the copy of what is not on the device.

Nothing above this seam calls a driver, and nothing below it knows what a handle is.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

POISON_BYTE = 0xFF
"""Every byte of poison: NaN in every float type but float8 fnuz, -1 in signed integers."""

Direction = Literal["to_device", "to_host"]


@dataclass(frozen=True, slots=True)
class Copy:
    """One contiguous run of bytes to move. Both addresses are absolute."""

    device_address: int
    host_address: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """What the driver and torch's allocator measure, in bytes. `used + free == total`."""

    total_bytes: int
    free_bytes: int
    torch_reserved_bytes: int
    """Held by torch's caching allocator in this process, used or cached (0 where it has none). Ranges do not count."""
    torch_allocated_bytes: int
    """Of those, in use by tensors."""
    chunk_bytes: int
    """Held by this device's chunks in this process, poison not counted."""
    poison_bytes: int

    @property
    def used_bytes(self) -> int:
        return self.total_bytes - self.free_bytes


class Addresses(abc.ABC):
    """Reserved device addresses. They are given back when this object dies, never before.

    `Device.view` makes tensors that keep this object alive, so a range outlives the manager for as long as a tensor lies in it.
    """

    base: int
    """First address, a multiple of the device's granularity."""
    nbytes: int
    """Length, a multiple of the granularity."""


class Chunk(abc.ABC):
    """Physical device memory. `Device.release` returns it to the driver; so does the death of this object."""

    nbytes: int
    """A multiple of the granularity; `Device.chunk_bytes` for a full chunk, less for the tail of a range."""


class HostSlab(abc.ABC):
    """Host memory of exact size. It is unmapped when this object and the last tensor of `view` are dead.

    Forked children do not have it (`MADV_DONTFORK`): a child that touches it dies loudly instead of reading old bytes.
    """

    address: int
    nbytes: int
    pinned: bool
    """Whether the driver can copy from it at the speed of the link. False on a device that needs no pinning."""
    pageable_reason: str | None
    """Why it is not pinned although the device wanted it; None otherwise."""

    @abc.abstractmethod
    def view(self, offset: int, nbytes: int) -> torch.Tensor:
        """A uint8 CPU tensor over `[offset, offset + nbytes)`, with a storage of exactly that size, that keeps the slab alive."""


class Device(abc.ABC):
    """One accelerator of this process, or its simulation.

    All methods are called with the manager's lock held, on the thread that changes the phase, outside inference mode.
    `host`, `reserve`, `create`, `map`, `copy` and `sync` may fail, and leave everything as it was before the call.
    `unmap` and `release` fail only when the device itself is beyond use (a sticky error).
    """

    name: str
    """As users write it: "cuda:0", "simulated"."""
    torch_device: torch.device
    """Where tensors over a range say they are (`cpu` on the simulated device)."""
    granularity: int
    """Ranges and chunks are multiples of this, in bytes."""
    chunk_bytes: int
    """The size of a full chunk, a multiple of the granularity."""

    @abc.abstractmethod
    def host(self, nbytes: int) -> HostSlab:
        """Reserve host memory for the copy of a range, zero-filled and prefaulted.

        Raises:
            HostMemoryError: there is not enough.
        """

    @abc.abstractmethod
    def reserve(self, nbytes: int) -> Addresses:
        """Reserve at least `nbytes` of addresses, rounded up to the granularity. Nothing is behind them until `unmap` or `map`.

        Raises:
            DeviceMemoryError: the driver refused.
        """

    @abc.abstractmethod
    def create(self, nbytes: int) -> Chunk:
        """Take physical memory from the driver. Its content is undefined.

        Raises:
            DeviceMemoryError: the driver (or the simulated capacity) has not enough.
        """

    @abc.abstractmethod
    def map(self, addresses: Addresses, chunks: Sequence[Chunk]) -> None:
        """Put `chunks`, in order, behind the start of `addresses` in place of poison. They must cover what `unmap` covered.

        The chunks keep what was in them. Pending kernels are not waited for.
        """

    @abc.abstractmethod
    def unmap(self, addresses: Addresses, nbytes: int) -> None:
        """Put poison behind the first `nbytes` (rounded up to the granularity) of `addresses`, whatever was there.

        The chunks that were behind them keep their content and can be mapped again elsewhere. The caller made sure that no
        kernel or copy still uses them. Idempotent.
        """

    @abc.abstractmethod
    def release(self, chunk: Chunk) -> None:
        """Return a chunk that is behind no address to the driver. Idempotent."""

    @abc.abstractmethod
    def copy(self, copies: Sequence[Copy], direction: Direction) -> None:
        """Enqueue copies between device memory and slabs of this device; runs of one call and one direction stay in order.

        To the host, they begin after all work that the calling thread's current stream holds now. To the device, they wait
        for nothing. The call may return before a byte has moved.
        """

    @abc.abstractmethod
    def order(self) -> None:
        """Let the calling thread's current stream wait for every copy enqueued so far. The host does not wait."""

    @abc.abstractmethod
    def sync(self) -> None:
        """Wait on the host until the device is idle: every stream, every copy.

        Raises:
            RuntimeError: the device reports an error of earlier work.
        """

    @abc.abstractmethod
    def view(self, addresses: Addresses, offset: int, nbytes: int) -> torch.Tensor:
        """A uint8 tensor over `[offset, offset + nbytes)` of the range, with a storage of exactly that size.

        It keeps `addresses` alive. Making it touches no memory.
        """

    @abc.abstractmethod
    def memory(self) -> DeviceMemory:
        """Measure. Cheap enough for every phase border; waits for nothing."""

    @abc.abstractmethod
    def heal_poison(self) -> bool:
        """Compare the poison with what it must be and refill it. True when something had written into it.

        Orders itself after the calling thread's current stream and waits for the answer.
        """

    def trim(self) -> None:
        """Make torch's allocator return what it caches to the driver. Waits for the whole device; never in the hot path."""

    def is_capturing(self) -> bool:
        """Whether the calling thread's current stream is capturing a graph."""
        return False

    def close(self) -> None:
        """Give back what the device itself holds (streams, poison) once its last range is dead. Idempotent."""
