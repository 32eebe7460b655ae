"""The seam to the accelerator.

A `Device` hands out three things and moves bytes between two of them:

* `Addresses`: device addresses that stay for life. Memory is behind them, or poison.
* `Chunk`: physical device memory. It goes behind addresses and comes back, and is what "free" counts.
* `HostSlab`: host memory that holds the copy of what is not on the device.

Nothing above this seam calls a driver, and nothing below it knows what a handle is.
"""

from __future__ import annotations

import abc
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal

import torch

from placement.devices.adoption import Adopter

POISON_WORD = bytes.fromhex("ff ff ff ff ff ff f7 ff")
"""What poison consists of, over and over: the byte at `offset` of a range is `POISON_WORD[offset % 8]`.

NaN in every float type of two bytes and more; in float8 seven elements of eight are (none in the fnuz types, which have one NaN, 0x80).
Every signed integer is negative. In float64 the NaN is a signalling one: an NVIDIA GPU keeps the bits of a quiet float64 NaN through
arithmetic, so that a write would not show, and makes another of a signalling one (H100). In the narrower types it makes another of any.
"""

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


@dataclass(frozen=True, slots=True)
class WrittenPoison:
    """A run of poison that something wrote into, in whole pages."""

    addresses: Addresses
    start: int
    """Bytes from `addresses.base`."""
    nbytes: int


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
    ready: threading.Event
    """Set once all that the device wants pinned is pinned or refused. Until then the memory can be read and written, and copies wait."""

    @property
    @abc.abstractmethod
    def pinned_bytes(self) -> int:
        """Bytes that the driver can copy at the speed of the link. 0 on a device that needs no pinning."""

    @property
    @abc.abstractmethod
    def pageable_bytes(self) -> int:
        """Bytes whose pinning was refused. What is still to be pinned is in neither number."""

    @property
    @abc.abstractmethod
    def pageable_reason(self) -> str | None:
        """Why some of it is not pinned although the device wanted it; None otherwise."""

    @property
    def held_bytes(self) -> int:
        """Bytes of the machine's memory that this process answers for: all of them, but for its share where processes share it."""
        return self.nbytes

    @property
    def pinned(self) -> bool:
        """Whether all of it is pinned."""
        return 0 < self.pinned_bytes == self.nbytes

    @abc.abstractmethod
    def view(self, offset: int, nbytes: int) -> torch.Tensor:
        """A uint8 CPU tensor over `[offset, offset + nbytes)`, with a storage of exactly that size, that keeps the slab alive."""


class SharedSlab(HostSlab):
    """A host copy that several processes of one machine have mapped. It goes when the last of them has unmapped it."""

    extra: torch.Tensor
    """What lies behind the copy in the file, as bytes: for what the processes tell each other. Does not keep the slab alive."""

    @abc.abstractmethod
    def pin(self) -> None:
        """Pin all of it in the background, in this process: `HostSlab.ready`. Once, when every process has taken its share."""


class Mark:
    """A point in the copies of one direction. `Device.mark` makes it; `Device.wait` waits for it, as often as wanted."""


class Device(abc.ABC):
    """One accelerator of this process, or its simulation.

    All methods are called with the manager's lock held, on the thread that changes the phase, outside inference mode.
    `host`, `reserve`, `create`, `map`, `copy`, `sync` and `wait` may fail, and leave everything as it was before the call (`map`:
    with poison where it should have put chunks). `unmap` and `release` fail only when the device itself is beyond use (a sticky error).

    What is behind addresses changes in slots of `chunk_bytes`, counted from the start of the range: a slot holds one full chunk,
    or poison, or a shorter chunk with poison after it. A call costs what its own slots cost, however long the range is. Cut by an
    interrupt, it may leave slots of its own with nothing behind them: call `unmap` over them, or over the whole range.
    """

    name: str
    """As users write it: "cuda:0", "simulated"."""
    torch_device: torch.device
    """Where tensors over a range say they are (`cpu` on the simulated device)."""
    granularity: int
    """Ranges and chunks are multiples of this, in bytes."""
    chunk_bytes: int
    """The size of a full chunk, a multiple of the granularity."""
    pinned_limit_bytes: int | None = None
    """Most host bytes to pin at a time; slabs beyond it stay pageable. None: as much as the driver pins."""

    @property
    def adopter(self) -> Adopter:
        """How storages get a place in this device's ranges."""
        return Adopter(self.torch_device)

    @property
    def uuid(self) -> str:
        """The accelerator's own name, as `nvidia-smi -L` says it; empty without one. `cuda:0` of two processes may be two GPUs."""
        return ""

    @abc.abstractmethod
    def host(self, nbytes: int) -> HostSlab:
        """Reserve host memory for the copy of a range, zero-filled. It is prefaulted and pinned in the background: `HostSlab.ready`.

        Raises:
            HostMemoryError: there is not enough.
        """

    @abc.abstractmethod
    def shared_host(self, file: int, nbytes: int, own: Sequence[tuple[int, int]], extra_bytes: int) -> SharedSlab:
        """Map a memory file that other processes map too, as the host copy of a range.

        Args:
            file: its descriptor, which may be closed afterwards; of at least `round_up(nbytes, page) + extra_bytes`.
            nbytes: what holds the copy, from its beginning.
            own: (offset, bytes) of what this process takes from the machine now and answers for, in whole pages.
            extra_bytes: what lies behind the last page of the copy: `SharedSlab.extra`.

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
    def map(self, addresses: Addresses, chunks: Sequence[Chunk], start: int = 0) -> None:
        """Put `chunks`, in order, behind `[start, start + their bytes)` of `addresses`, in place of the poison there.

        The chunks keep what was in them, and what is behind the rest of the range stays. Pending kernels are not waited for.

        Args:
            chunks: full ones, only the last may be shorter; each behind no address now.
            start: bytes from `addresses.base`, a multiple of `chunk_bytes`.

        Raises:
            ValueError: `start` or a size is not as said, the range is too short, the end would cut a chunk that is there in
                two, or a chunk is not held by this device; nothing changed.
            DeviceMemoryError: the driver refused; poison is there.
        """

    @abc.abstractmethod
    def unmap(self, addresses: Addresses, nbytes: int, start: int = 0) -> None:
        """Put poison behind `[start, start + nbytes)` of `addresses` (rounded up to the granularity), whatever was there.

        The chunks that were behind them keep their content and can be mapped again elsewhere. The caller made sure that no
        kernel or copy still uses them. Idempotent, and cheap where poison is already.

        Args:
            start: bytes from `addresses.base`, a multiple of `chunk_bytes`.

        Raises:
            ValueError: `start` is not as said, the range is too short, or the end would cut a chunk in two; nothing changed.
        """

    @abc.abstractmethod
    def release(self, *chunks: Chunk) -> None:
        """Return chunks that are behind no address to the driver. Idempotent."""

    @abc.abstractmethod
    def copy(self, copies: Sequence[Copy], direction: Direction) -> None:
        """Enqueue copies between device memory and slabs of this device; runs of one call and one direction stay in order.

        To the host, they begin after all work that the calling thread's current stream holds now. To the device, they wait
        for nothing. The call may return before a byte has moved.
        """

    @abc.abstractmethod
    def order(self) -> None:
        """Let the calling thread's current stream wait for every copy enqueued so far. The host does not wait. See `after`, too."""

    @abc.abstractmethod
    def after(self, mark: Mark) -> AbstractContextManager[None]:
        """What torch enqueues on this device inside comes after the copies that `mark` notes, beside later ones.

        It also comes after all work that the calling thread's current stream held at the last `order`: collectives of two communicators
        must not run at once in different orders. The next `order` waits for it. Where there are no streams the caller waits for the
        copies instead.
        """

    @abc.abstractmethod
    def mark(self, direction: Direction) -> Mark:
        """Note every copy enqueued so far in that direction. Costs microseconds and waits for nothing."""

    @abc.abstractmethod
    def wait(self, mark: Mark) -> None:
        """Wait on the host until the copies that `mark` notes have arrived. Other Python threads run in the meantime.

        Raises:
            RuntimeError: the device reports an error of earlier work.
        """

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

    def ask(self, values: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Have a small int64 tensor of this device brought to the host, beside whatever is being copied.

        Returns:
            What waits for it.
        """
        return values.cpu

    @abc.abstractmethod
    def memory(self) -> DeviceMemory:
        """Measure. Cheap enough for every phase transition; waits for nothing."""

    def torch_allocated_bytes(self) -> int:
        """Of `DeviceMemory.torch_reserved_bytes`, what tensors use now. Looks at every adopted storage: not at every phase transition."""
        return 0

    def compare_poison(self) -> None:
        """Begin the comparison whose answer the next `heal_poison` that waits gives. For the middle of a move: the device compares while
        bytes are on their way. A device that has the answer at once has nothing to begin."""

    @abc.abstractmethod
    def heal_poison(self, wait: bool = True) -> bool:
        """Make all poison whole again. True when something had written into it, also where a chunk has taken its place since.

        The answer comes after all work that the calling thread's current stream holds now, or held at `compare_poison`. Each damage
        is reported once.

        Ranges may share one piece of poison (CUDA). A write then shows in all of them, nobody can say whose memory was meant, and it is
        found by its bytes. One that leaves every byte as it was is not found: a copy of poison, and NaN that is handed on as it is. On an
        NVIDIA GPU clamp_ does that; its arithmetic changes the bytes in every float type. Or each page is a range's own (the simulated
        device, where the kernel says which pages were written): then a write shows there alone, and is found whatever it wrote.

        Args:
            wait: wait for the answer. Otherwise the host waits for nothing: what an earlier call began is reported if it is
                done, and the next comparison begins. A damage then shows in a later call, at the latest in one that waits.
                A device that has the answer at once gives it in both cases.

        Raises:
            RuntimeError: the device reports an error of earlier work.
        """

    def written_poison(self) -> Sequence[WrittenPoison]:
        """Where the damage lay that the last `heal_poison` reported; empty where ranges share their poison."""
        return ()

    def mend_poison(self, addresses: Addresses, offset: int, nbytes: int) -> None:
        """Make the poison in `[offset, offset + nbytes)` whole: what was written there was written by right, and is no damage.

        A write beside it is still reported. Enqueued on the calling thread's current stream: what is behind the addresses must not change
        before that is through.
        """
        fill_with_poison(self.view(addresses, offset, nbytes), offset)

    def trim(self) -> None:
        """Make torch's allocator return what it caches to the driver. Waits for the whole device; never in the hot path."""

    def is_capturing(self) -> bool:
        """Whether the calling thread's current stream is capturing a graph."""
        return False

    def close(self) -> None:
        """Give back what the device itself holds (streams, poison) once its last range is dead. Idempotent."""


def poison_bytes(offset: int, nbytes: int) -> bytes:
    """The poison in `[offset, offset + nbytes)` of a range."""
    first = offset % len(POISON_WORD)
    return (POISON_WORD * (nbytes // len(POISON_WORD) + 2))[first : first + nbytes]


def fill_with_poison(view: torch.Tensor, offset: int) -> None:
    """Fill a uint8 tensor with the poison from `offset` of a range on. The host waits for nothing."""
    view.fill_(POISON_WORD[0])
    for place, byte in enumerate(POISON_WORD):
        if byte != POISON_WORD[0]:
            view[(place - offset) % len(POISON_WORD) :: len(POISON_WORD)].fill_(byte)


def check_slots(chunks: Sequence[Chunk], start: int, chunk_bytes: int) -> None:
    """Raise ValueError unless `start` is the start of a slot, and each chunk fills one (the last may be shorter)."""
    if start < 0 or start % chunk_bytes:
        raise ValueError(f"start {start:,} is not a multiple of chunk_bytes {chunk_bytes:,}")
    sizes = [chunk.nbytes for chunk in chunks]
    if any(size != chunk_bytes for size in sizes[:-1]) or any(size > chunk_bytes for size in sizes[-1:]):
        raise ValueError(f"chunks of {sizes} bytes: each but the last must have chunk_bytes {chunk_bytes:,}, and none more")
