"""The interface to the accelerator. Its docstrings are the contract for implementations.

A `Device` hands out three things, and moves bytes between two of them:

* `Addresses`: device addresses that stay for life. Either memory or poison is behind them.
* `Chunk`: physical device memory. It is put behind addresses and taken away again. The driver's "free" counts chunks.
* `HostSlab`: host memory that holds the copy of offloaded values.

No code above this interface calls a driver, and no code below it knows handles.
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
"""The bytes of poison, repeated: the byte at `offset` of a range is `POISON_WORD[offset % 8]`.

Read as numbers, poison is NaN in every float type of two bytes and more. In float8 seven elements of eight are NaN (none in the fnuz
types, whose only NaN is 0x80). Every signed integer is negative. The float64 NaN is a signalling one: an NVIDIA GPU keeps the bits of
a quiet float64 NaN through arithmetic, so a write would not show, but it changes a signalling one (H100). It changes narrower NaNs.
"""

Direction = Literal["to_device", "to_host"]


@dataclass(frozen=True, slots=True)
class Copy:
    """One contiguous run of bytes to copy. Both addresses are absolute."""

    device_address: int
    host_address: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Measurements of the driver and of torch's allocator, in bytes. `used + free == total`."""

    total_bytes: int
    free_bytes: int
    torch_reserved_bytes: int
    """Bytes that torch's caching allocator holds in this process, used or cached (0 where it has none). Ranges do not count."""
    chunk_bytes: int
    """Bytes that this device's chunks hold in this process, without poison."""
    poison_bytes: int

    @property
    def used_bytes(self) -> int:
        return self.total_bytes - self.free_bytes

    @property
    def unaccounted_bytes(self) -> int:
        """Used bytes that are neither torch's nor this device's: the driver's context, communicators, other processes."""
        return self.used_bytes - self.torch_reserved_bytes - self.chunk_bytes - self.poison_bytes


@dataclass(frozen=True, slots=True)
class Communicator:
    """A communicator of this process, whose device memory is neither in torch's allocator nor in a chunk."""

    name: str
    """The name of its process group, unique in this process."""
    ranks: tuple[int, ...]
    """The ranks of the group, as the default group numbers them."""
    nbytes: int | None
    """Device bytes that it holds now; None where the library does not say."""
    suspendable_bytes: int
    """The part of `nbytes` that its own `suspend()` would free."""
    unknown_because: str | None = None
    """Why `nbytes` is None; None where it is known."""


class Addresses(abc.ABC):
    """Reserved device addresses. They are given back when this object dies, never before.

    `Device.view` makes tensors that keep this object alive, so a range outlives the manager for as long as a tensor lies in it.
    """

    base: int
    """The first address, a multiple of the device's granularity."""
    nbytes: int
    """The length, a multiple of the granularity."""


@dataclass(frozen=True, slots=True)
class WrittenPoison:
    """A run of poison that something wrote into, in whole pages."""

    addresses: Addresses
    start: int
    """The run's offset from `addresses.base`, in bytes."""
    nbytes: int


class Chunk(abc.ABC):
    """Physical device memory. `Device.release` returns it to the driver, and so does the death of this object."""

    nbytes: int
    """A multiple of the granularity; `Device.chunk_bytes` for a full chunk, less for the tail of a range."""


class HostSlab(abc.ABC):
    """Host memory of exact size. It is unmapped when this object and the last tensor of `view` are dead.

    Forked children do not have it (`MADV_DONTFORK`): a child that touches it crashes instead of reading old bytes.
    """

    address: int
    nbytes: int
    ready: threading.Event
    """Set once every byte that the device wants pinned is pinned or refused. Until then the memory can be used, and device copies wait."""

    @property
    @abc.abstractmethod
    def pinned_bytes(self) -> int:
        """Bytes that the driver can copy at full link speed. 0 on a device that needs no pinning."""

    @property
    @abc.abstractmethod
    def pageable_bytes(self) -> int:
        """Bytes whose pinning was refused. Bytes that are still to be pinned are not included."""

    @property
    @abc.abstractmethod
    def pageable_reason(self) -> str | None:
        """Why some bytes are not pinned although the device wanted them pinned; None if there are none."""

    @property
    def held_bytes(self) -> int:
        """Bytes of the machine's memory that count for this process: all, or its share where processes share the slab."""
        return self.nbytes

    @property
    def pinned(self) -> bool:
        """Whether all of it is pinned."""
        return 0 < self.pinned_bytes == self.nbytes

    @abc.abstractmethod
    def view(self, offset: int, nbytes: int) -> torch.Tensor:
        """A uint8 CPU tensor over `[offset, offset + nbytes)`, with a storage of exactly that size, that keeps the slab alive."""


class SharedSlab(HostSlab):
    """A host copy that several processes of one machine have mapped. Its memory is freed when the last of them has unmapped it."""

    extra: torch.Tensor
    """The bytes behind the copy in the file, for messages between the processes. This tensor does not keep the slab alive."""

    @abc.abstractmethod
    def pin(self) -> None:
        """Pin all of it in the background, in this process; see `HostSlab.ready`. Call it once, when every process has taken its share."""


class Mark:
    """A point in the copies of one direction, made by `Device.mark`. `Device.wait` waits for it, any number of times."""


class Device(abc.ABC):
    """One accelerator of this process, or its simulation.

    Every method is called with the manager's lock held, on the thread of the phase transition, outside inference mode. The exceptions are
    `copy`, `mark` and `wait`, which the thread of a prefetch calls between two phase transitions, beside calls of other threads.
    `host`, `reserve`, `create`, `map`, `copy`, `sync` and `wait` may fail, and then leave everything as before the call (`map` leaves
    poison where it should have put chunks). `unmap` and `release` fail only when the device itself is unusable (a sticky error).

    Memory behind addresses changes in slots of `chunk_bytes`, counted from the start of the range. A slot holds one full chunk, or poison,
    or a shorter chunk followed by poison. The cost of a call depends on its own slots, not on the length of the range. A call that an
    interrupt cut short may leave its slots with nothing behind them: call `unmap` for them, or for the whole range.
    """

    name: str
    """The name as users write it: "cuda:0", "simulated"."""
    torch_device: torch.device
    """The device of tensors over a range (`cpu` on the simulated device)."""
    granularity: int
    """Sizes of ranges and chunks are multiples of this, in bytes."""
    chunk_bytes: int
    """The size of a full chunk, a multiple of the granularity."""
    pinned_limit_bytes: int | None = None
    """The most host bytes to pin at a time; slabs beyond it stay pageable. None: as much as the driver pins."""

    @property
    def adopter(self) -> Adopter:
        """How storages get a place in this device's ranges."""
        return Adopter(self.torch_device)

    @property
    def uuid(self) -> str:
        """The accelerator's UUID as in `nvidia-smi -L`; empty without one. `cuda:0` of two processes may be two GPUs."""
        return ""

    @property
    def pci_address(self) -> str:
        """The accelerator's PCI address as the kernel names it ("0000:3b:00.0"); empty without one. It tells the NUMA node."""
        return ""

    @abc.abstractmethod
    def host(self, nbytes: int) -> HostSlab:
        """Reserve zero-filled host memory for the copy of a range. It is prefaulted and pinned in the background: `HostSlab.ready`.

        Raises:
            HostMemoryError: there is not enough host memory.
        """

    @abc.abstractmethod
    def shared_host(self, file: int, nbytes: int, own: Sequence[tuple[int, int]], extra_bytes: int) -> SharedSlab:
        """Map a memory file, which other processes map too, as the host copy of a range.

        Args:
            file: the file's descriptor; may be closed afterwards. The file has at least `round_up(nbytes, page) + extra_bytes` bytes.
            nbytes: the size of the copy, at the beginning of the file.
            own: (offset, bytes) of the runs that count for this process and are allocated now, in whole pages.
            extra_bytes: the size of `SharedSlab.extra`, which begins after the copy's last page.

        Raises:
            HostMemoryError: there is not enough host memory.
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
            DeviceMemoryError: the driver (or the simulated capacity) does not have enough.
        """

    @abc.abstractmethod
    def map(self, addresses: Addresses, chunks: Sequence[Chunk], start: int = 0) -> None:
        """Put `chunks`, in order, behind `[start, start + their bytes)` of `addresses`, replacing the poison there.

        The chunks keep their content, and the rest of the range is unchanged. Pending kernels are not waited for.

        Args:
            chunks: full chunks, only the last may be shorter. None of them may be behind an address now.
            start: bytes from `addresses.base`, a multiple of `chunk_bytes`.

        Raises:
            ValueError: `start` or a size is wrong, the range is too short, the end would split a chunk that is mapped there, or
                this device does not hold a chunk. Nothing has changed.
            DeviceMemoryError: the driver refused. Poison is behind the addresses.
        """

    @abc.abstractmethod
    def unmap(self, addresses: Addresses, nbytes: int, start: int = 0) -> None:
        """Put poison behind `[start, start + nbytes)` of `addresses` (rounded up to the granularity), whatever is there now.

        The chunks that were there keep their content and can be mapped elsewhere. The caller has made sure that no kernel or copy still
        uses them. Idempotent, and cheap where there is poison already.

        Args:
            start: bytes from `addresses.base`, a multiple of `chunk_bytes`.

        Raises:
            ValueError: `start` is wrong, the range is too short, or the end would split a chunk. Nothing has changed.
        """

    @abc.abstractmethod
    def release(self, *chunks: Chunk) -> None:
        """Return chunks that are behind no address to the driver. Idempotent."""

    @abc.abstractmethod
    def copy(self, copies: Sequence[Copy], direction: Direction) -> None:
        """Enqueue copies between device memory and slabs of this device. Copies of one call in one direction run in order.

        Copies to the host begin after all work that is now on the calling thread's current stream. Copies to the device wait for nothing.
        The call may return before any byte has moved.
        """

    @abc.abstractmethod
    def order(self, direction: Direction | None = None) -> None:
        """Make the calling thread's current stream wait for every copy enqueued so far. The host does not wait. See also `after`.

        Args:
            direction: wait for the copies of this direction only, and let the others go on beside the stream's work.
        """

    @abc.abstractmethod
    def after(self, mark: Mark) -> AbstractContextManager[None]:
        """Context in which torch enqueues work on this device behind the copies noted by `mark`, but beside later ones.

        The work also comes after everything that was on the calling thread's current stream at the last `order`, because collectives of two
        communicators must not run at once in different orders. The next `order` waits for the work. On a device without streams the
        caller waits for the copies instead.
        """

    @abc.abstractmethod
    def mark(self, direction: Direction) -> Mark:
        """Note every copy enqueued so far in that direction. Costs microseconds and waits for nothing."""

    @abc.abstractmethod
    def wait(self, mark: Mark) -> None:
        """Wait on the host until the copies noted by `mark` have arrived. Other Python threads run meanwhile.

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
        """Start bringing a small int64 tensor of this device to the host, beside copies in progress.

        Returns:
            A function that waits for the values and returns them.
        """
        return values.cpu

    @abc.abstractmethod
    def memory(self) -> DeviceMemory:
        """Measure the memory. Cheap enough for every phase transition; waits for nothing."""

    def torch_allocated_bytes(self) -> int:
        """The part of `DeviceMemory.torch_reserved_bytes` that tensors use now. Too slow for phase transitions: walks adopted storages."""
        return 0

    def compare_poison(self) -> None:
        """Begin the comparison that the next waiting `heal_poison` reports, so that the device compares while bytes are being moved.

        A device that knows the answer without comparing does nothing here.
        """

    @abc.abstractmethod
    def heal_poison(self, wait: bool = True) -> bool:
        """Restore all damaged poison. Returns True if something has written into poison, even where a chunk is mapped by now.

        The answer covers all work on the calling thread's current stream now, or at `compare_poison`. Each damage is reported once.

        Ranges may share one piece of poison (CUDA). Then a write shows in all of them, its target is unknown, and it is found by comparing
        bytes. A write that leaves every byte unchanged is not found: a copy of poison, or a NaN passed on unchanged. On an NVIDIA GPU
        clamp_ does that; its arithmetic changes the bytes in every float type. Or each range has poison pages of its own (the simulated
        device, whose kernel records written pages). Then a write shows in its own range only, and is found whatever it wrote.

        Args:
            wait: whether to wait for the answer. If not, the call reports the earlier comparison if that is done, and begins the next one.
                A damage then shows in a later call, at the latest in one that waits. A device that knows the answer at once ignores this.

        Raises:
            RuntimeError: the device reports an error of earlier work.
        """

    def written_poison(self) -> Sequence[WrittenPoison]:
        """The places of the damage that the last `heal_poison` reported; empty where ranges share their poison."""
        return ()

    def mend_poison(self, addresses: Addresses, offset: int, nbytes: int) -> None:
        """Restore the poison in `[offset, offset + nbytes)` after a legitimate write, which is not reported as damage.

        A write beside it is still reported. The work is enqueued on the calling thread's current stream. Until it is done, the memory
        behind the addresses must not change.
        """
        fill_with_poison(self.view(addresses, offset, nbytes), offset)

    @property
    def ipc_collected_bytes(self) -> int:
        """Bytes of tensors shared with other processes that this device has taken back so far, once those processes had dropped them.

        `memory` looks for them before it measures, because torch keeps such a tensor's memory until somebody looks.
        """
        return 0

    def communicators(self) -> Sequence[Communicator]:
        """The communicators that hold memory of this device in this process, as far as they can be found.

        Called at phase transitions that move something. Never fails, and communicates with nobody.
        """
        return ()

    def when_out_of_memory(self, give_back: Callable[[], object]) -> None:
        """Have a function called when torch's allocator finds no memory on this device, just before it raises. For the device's life.

        The function may return memory to the driver, which the next allocation finds. It is called on the allocating thread, and must
        not raise. A device whose allocator does not tell never calls it.
        """

    def trim(self) -> None:
        """Make torch's allocator return its cached memory to the driver. Waits for the whole device; never used in the hot path."""

    def is_capturing(self) -> bool:
        """Whether the calling thread's current stream is capturing a graph."""
        return False

    def close(self) -> None:
        """Release the device's own resources (streams, poison) once its last range is dead. Idempotent."""


def poison_bytes(offset: int, nbytes: int) -> bytes:
    """The poison in `[offset, offset + nbytes)` of a range."""
    first = offset % len(POISON_WORD)
    return (POISON_WORD * (nbytes // len(POISON_WORD) + 2))[first : first + nbytes]


def fill_with_poison(view: torch.Tensor, offset: int) -> None:
    """Fill a uint8 tensor with the poison that begins at `offset` of a range. The host waits for nothing."""
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
        raise ValueError(f"chunks of {sizes} bytes: each but the last must have chunk_bytes {chunk_bytes:,}, and the last at most that")
