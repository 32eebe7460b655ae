"""The interface to the accelerator. Its docstrings are the contract for implementations.

A `Device` hands out addresses, chunks and host slabs (see `memory`), and moves bytes between them.
Its `Adopter` says how torch's storages get a place behind the addresses.

No code above this interface calls a driver, and no code below it knows handles.
"""

from __future__ import annotations

import abc
import ctypes
import functools
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch

from placement.devices.memory import (
    Addresses,
    Chunk,
    Communicator,
    Copy,
    DeviceMemory,
    Direction,
    HostSlab,
    Mark,
    SharedHostSlab,
    WrittenPoison,
)

POISON_WORD = bytes.fromhex("ff ff ff ff ff ff f7 ff")
"""The bytes of poison, repeated: the byte at `offset` of a range is `POISON_WORD[offset % 8]`.

Read as numbers, poison is NaN in every float type of two bytes and more. In float8 seven elements
of eight are NaN (none in the fnuz types, whose only NaN is 0x80). Every signed integer is negative.
The float64 NaN is a signalling one: an NVIDIA GPU keeps the bits of a quiet float64 NaN through
arithmetic, so a write would not show, but it changes a signalling one (H100). It changes narrower
NaNs.
"""


Way = Literal["swap", "pool", "rebind"]
"""How one storage gets to its place:

* swap: the storage exchanges its pointer with one that lies in the range (torch 2.13 on). Everybody
  who uses it follows.
* pool: the storage is resized to nothing and back inside a memory pool over the range. Everybody
  who uses it follows.
* rebind: every tensor that is known to use the storage is given a new one by `.data =`. A tensor
  that is not known stays behind.
"""


def can_swap() -> bool:
    """Whether this torch can exchange the memory of two storages."""
    return hasattr(torch.UntypedStorage, "_swap_data_ptr_")


class Adopter:
    """Adoption as any torch device allows it: by swapping, else by rebinding."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def way(self, storage: torch.UntypedStorage) -> Way:
        """How a storage gets into a range of this device."""
        return "swap" if storage.device == self.device and can_swap() else "rebind"

    def refuse(self, storages: Sequence[tuple[str, torch.UntypedStorage]]) -> None:
        """Raise RegistrationError for a storage, given with its name, whose memory another owner
        relies on that would not follow."""

    def pooled_bytes(self, sizes: Sequence[int]) -> int:
        """The length of a range for storages of these sizes that come by a pool; 0 where none
        do."""
        return 0

    def pool(self, addresses: Addresses, sizes: Sequence[int], owner: object) -> Any:
        """A pool over a range of `pooled_bytes(sizes)`: see `PoolRange`."""
        raise NotImplementedError(f"storages of {self.device} are adopted without a pool")

    def reallocate(self, storage: torch.UntypedStorage) -> None:
        """Give a storage that came by a pool ordinary memory of the same size; its bytes are
        undefined.
        torch.OutOfMemoryError: everything is as before."""
        raise NotImplementedError(f"storages of {self.device} are adopted without a pool")


class Device(abc.ABC):
    """One accelerator of this process, or its simulation.

    Every method is called with the manager's lock held, on the thread of the phase transition,
    outside inference mode. The exceptions are `copy`, `mark`, `wait`, `map` and `unmap`, which the
    thread of a prefetch calls between two phase transitions, beside calls of other threads; and
    `wait` and `sync`, which any thread calls that reads a host copy. No two threads use the same
    addresses or chunks at once. `host`, `reserve`, `create`, `map`, `copy`, `sync` and `wait` may
    fail, and then leave everything as before the call. A failed `map` leaves poison where it should
    have put chunks. `unmap` and `release` fail only when the device itself is unusable (a sticky
    error). `sync`, `wait` and `wait_for_work` call `interrupts.check` when they have waited. Like
    `heal_poison`, they raise RuntimeError where the device reports an error of earlier work.

    Memory behind addresses changes in slots of `chunk_bytes`, counted from the start of the range.
    A slot holds one full chunk, or poison, or a shorter chunk followed by poison. The cost of a
    call depends on its own slots, not on the length of the range.
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
    """The most host bytes to pin at a time; slabs beyond it stay pageable. None: as much as the
    driver pins."""
    ipc_collected_bytes: int = 0
    """Bytes of tensors shared with other processes that this device has taken back so far, once
    those processes had dropped them. `memory` looks for them before it measures, because torch
    keeps such a tensor's memory until it is asked."""

    @property
    def uuid(self) -> str:
        """The accelerator's UUID as in `nvidia-smi -L`; empty without one. `cuda:0` of two
        processes may be two GPUs."""
        return ""

    @property
    def pci_address(self) -> str:
        """The accelerator's PCI address as the kernel names it ("0000:3b:00.0"); empty without one.
        It tells the NUMA node."""
        return ""

    @property
    def adopter(self) -> Adopter:
        """How storages get a place in this device's ranges."""
        return Adopter(self.torch_device)

    @abc.abstractmethod
    def host(self, nbytes: int) -> HostSlab:
        """Reserve zero-filled host memory for the copy of a range. It is prefaulted and pinned in
        the background: `HostSlab.ready`.

        Raises:
            HostMemoryError: there is not enough host memory.
        """

    @abc.abstractmethod
    def shared_host(
        self, file: int, nbytes: int, own: Sequence[tuple[int, int]], extra_bytes: int
    ) -> SharedHostSlab:
        """Map a memory file, which other processes map too, as the host copy of a range.

        Args:
            file: the file's descriptor; may be closed afterwards. The file has at least
                `round_up(nbytes, page) + extra_bytes` bytes.
            nbytes: the size of the copy, at the beginning of the file.
            own: (offset, bytes) of the runs that count for this process and are allocated now, in
                whole pages.
            extra_bytes: the size of `SharedHostSlab.extra`, which begins after the copy's last
                page.

        Raises:
            HostMemoryError: there is not enough host memory.
        """

    @abc.abstractmethod
    def reserve(self, nbytes: int) -> Addresses:
        """Reserve at least `nbytes` of addresses, rounded up to the granularity. Nothing is behind
        them until `unmap` or `map`.

        Raises:
            DeviceMemoryError: the driver refused.
        """

    @abc.abstractmethod
    def create(self, nbytes: int) -> Chunk:
        """Take physical memory from the driver. Its content is undefined.

        Raises:
            DeviceMemoryError: the driver (or the simulated capacity) does not have enough.
        """

    def wipe(self, chunks: Sequence[Chunk]) -> None:
        """Fill chunks that are behind no address with poison, or with other bytes that are NaN.
        Waits until they are.

        Raises:
            DeviceMemoryError: the driver refused. The content of the chunks is undefined.
        """
        for chunk in chunks:
            addresses = self.reserve(chunk.nbytes)
            self.map(addresses, (chunk,))
            self.wipe_mapped(addresses, chunk.nbytes)
            self.unmap(addresses, chunk.nbytes)

    def wipe_mapped(self, addresses: Addresses, nbytes: int, start: int = 0) -> None:
        """Fill `nbytes` bytes of memory behind addresses as `wipe` does, and wait until they are.
        Copies of other memory go on.

        Raises:
            DeviceMemoryError: the driver refused. The content of the memory is undefined.
        """
        self.view(addresses, start, nbytes).fill_(0xFF)
        self.wait_for_work()

    @abc.abstractmethod
    def map(self, addresses: Addresses, chunks: Sequence[Chunk], start: int = 0) -> None:
        """Put `chunks`, in order, behind `[start, start + their bytes)` of `addresses`, replacing
        the poison there.

        The chunks keep their content, and the rest of the range is unchanged. Pending kernels are
        not waited for.

        Args:
            chunks: full chunks, only the last may be shorter. None of them may be behind an address
                now.
            start: bytes from `addresses.base`, a multiple of `chunk_bytes`.

        Raises:
            ValueError: `start` or a size is wrong, the range is too short, another chunk is mapped
                there, or this device does not hold a chunk. Nothing has changed.
            DeviceMemoryError: the driver refused. Poison is behind the addresses.
        """

    @abc.abstractmethod
    def unmap(self, addresses: Addresses, nbytes: int, start: int = 0) -> None:
        """Put poison behind `[start, start + nbytes)` of `addresses` (rounded up to the
        granularity), over chunks and poison alike.

        The chunks that were there keep their content and can be mapped elsewhere. The caller has
        made sure that no kernel or copy still uses them. Idempotent, and cheap where there is
        poison already.

        Args:
            start: bytes from `addresses.base`, a multiple of `chunk_bytes`.

        Raises:
            ValueError: `start` is wrong, the range is too short, or the end would split a chunk.
                Nothing has changed.
        """

    @abc.abstractmethod
    def release(self, *chunks: Chunk) -> None:
        """Return chunks that are behind no address to the driver. Idempotent."""

    @abc.abstractmethod
    def copy(self, copies: Sequence[Copy], direction: Direction) -> None:
        """Enqueue copies between device memory and slabs of this device. Copies of one call in one
        direction run in order.

        Copies to the host begin after all work that is now on the calling thread's current stream.
        Copies to the device wait for nothing. The call may return before any byte has moved.
        """

    @abc.abstractmethod
    def order(self, direction: Direction | None = None) -> None:
        """Make the calling thread's current stream wait for every copy enqueued so far. The host
        does not wait. See also `after`.

        Args:
            direction: wait for the copies of this direction only, and let the others go on beside
                the stream's work.
        """

    waits: Collection[object] = ()
    """The waits in `order("to_device")` that `waited_seconds` has still to count. By default none,
    as on a device whose `order` has the caller wait."""

    def waited_seconds(self) -> float:
        """The seconds that streams waited in `order("to_device")`, of those waits that have ended
        since the last call. Their own work does not count."""
        return 0.0

    def after(self, mark: Mark) -> AbstractContextManager[None]:
        """Context in which torch enqueues work on this device behind the copies noted by `mark`,
        but beside later ones.

        The work also comes after everything that was on the calling thread's current stream at the
        last `order`: collectives of two communicators must not run at once in different orders. The
        next `order` waits for the work. On a device without streams, as by default, the caller
        waits for the copies instead.
        """
        self.wait(mark)
        return nullcontext()

    @abc.abstractmethod
    def mark(self, direction: Direction) -> Mark:
        """Note every copy enqueued so far in that direction. Costs microseconds and waits for
        nothing."""

    @abc.abstractmethod
    def wait(self, mark: Mark) -> None:
        """Wait on the host until the copies noted by `mark` have arrived. Other Python threads run
        meanwhile."""

    def wait_for_work(self) -> None:
        """Wait on the host until the work on the calling thread's current stream is done. Copies go
        on. By default, work never waits."""

    @abc.abstractmethod
    def sync(self) -> None:
        """Wait on the host until the device is idle: every stream, every copy."""

    @abc.abstractmethod
    def view(self, addresses: Addresses, offset: int, nbytes: int) -> torch.Tensor:
        """A uint8 tensor over `[offset, offset + nbytes)` of the range, with a storage of exactly
        that size.

        It keeps `addresses` alive. Making it touches no memory.
        """

    def known_fingerprints(
        self, addresses: Addresses, start: int, sizes: Sequence[int]
    ) -> torch.Tensor | None:
        """Numbers that change with the bytes, for a device that knows them without reading; None:
        they are computed from the bytes.

        Args:
            sizes: bytes of consecutive pieces, from `addresses.base + start` on.

        Returns:
            int64 of shape `(len(sizes),)` on the CPU.
        """
        return None

    def ask(self, values: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start bringing a small int64 tensor of this device to the host, beside copies in
        progress. Returns a function that waits for the values and returns them, to be called
        once."""
        return values.cpu

    @abc.abstractmethod
    def memory(self) -> DeviceMemory:
        """Measure the memory. Cheap enough for every phase transition; waits for nothing."""

    def torch_allocated_bytes(self) -> int:
        """The part of `DeviceMemory.torch_reserved_bytes` that tensors use now. Too slow for phase
        transitions: walks adopted storages."""
        return 0

    def compare_poison(self) -> None:
        """Begin the comparison that the next waiting `heal_poison` reports, so that the device
        compares while bytes are being moved. A device that knows the answer without comparing does
        nothing here."""

    @abc.abstractmethod
    def heal_poison(self, wait: bool = True) -> bool:
        """Restore all damaged poison. Returns True if something has written into poison, even where
        a chunk is mapped by now.

        The answer covers all work on the calling thread's current stream now, or at
        `compare_poison`. Each damage is reported once.

        Ranges may share one piece of poison (CUDA). Then a write shows in all of them, its target
        is unknown, and it is found by comparing bytes. A write that leaves every byte unchanged is
        not found: a copy of poison, or a NaN passed on unchanged, as by clamp_ on an NVIDIA GPU. Or
        each range has poison pages of its own (the simulated device, whose kernel records written
        pages). Then a write shows in its own range only, and any write is found.

        Args:
            wait: whether to wait for the answer. If not, the call reports the earlier comparison if
                that is done, and begins the next one. A damage then shows in a later call, at the
                latest in one that waits. A device that knows the answer at once ignores this.
        """

    def written_poison(self) -> Sequence[WrittenPoison]:
        """The places of the damage that the last `heal_poison` reported; empty where ranges share
        their poison."""
        return ()

    def communicators(self) -> Sequence[Communicator]:
        """The communicators that hold memory of this device in this process, as far as they can be
        found, for phase transitions that move something. Never fails, and does not communicate."""
        return ()

    def when_out_of_memory(self, give_back: Callable[[], object]) -> None:
        """Have a function called when torch's allocator finds no memory on this device, just before
        it raises. For the device's life.

        The function may return memory to the driver, which the next allocation finds. It is called
        on the allocating thread, and must not raise. A device whose allocator does not tell never
        calls it.
        """

    def trim(self) -> None:
        """Return torch's cached memory to the driver. Waits for the device. For where publishing
        ends, state was taken in, memory lacks."""

    def is_capturing(self) -> bool:
        """Whether the calling thread's current stream is capturing a graph."""
        return False

    def close(self) -> None:
        """Release the device's own resources (streams, poison) once its last range is dead.
        Idempotent."""


def poison_bytes(offset: int, nbytes: int) -> bytes:
    """The poison in `[offset, offset + nbytes)` of a range."""
    first = offset % len(POISON_WORD)
    return (POISON_WORD * (nbytes // len(POISON_WORD) + 2))[first : first + nbytes]


def check_slots(chunks: Sequence[Chunk], start: int, chunk_bytes: int) -> None:
    """Raise ValueError unless `start` is the start of a slot, and each chunk fills one (the last
    may be shorter)."""
    if start < 0 or start % chunk_bytes:
        raise ValueError(f"start {start:,} is not a multiple of chunk_bytes {chunk_bytes:,}")
    sizes = [chunk.nbytes for chunk in chunks]
    if any(size != chunk_bytes for size in sizes[:-1]) or any(
        size > chunk_bytes for size in sizes[-1:]
    ):
        raise ValueError(
            f"chunks of {sizes} bytes: each but the last must have chunk_bytes {chunk_bytes:,}, "
            "and the last at most that"
        )


def round_up(nbytes: int, multiple: int) -> int:
    """The smallest multiple that is at least `nbytes`."""
    return -(-nbytes // multiple) * multiple


def check_span(offset: int, nbytes: int, size: int) -> None:
    """Raise ValueError unless `[offset, offset + nbytes)` lies within `size` bytes."""
    if offset < 0 or nbytes < 0 or offset + nbytes > size:
        raise ValueError(f"[{offset}, {offset + nbytes}) is not within {size} bytes")


@functools.lru_cache(maxsize=1024)
def _array_type(nbytes: int) -> Any:
    # A subclass, because instances of the plain array type cannot hold attributes.
    return type("Bytes", (ctypes.c_char * nbytes,), {"__slots__": ("owner",)})


def tensor_at(address: int, nbytes: int, owner: object) -> torch.Tensor:
    """A uint8 CPU tensor over `[address, address + nbytes)`, with a storage of exactly that size.
    It keeps `owner` alive."""
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    array = _array_type(nbytes).from_address(address)
    array.owner = owner
    return torch.frombuffer(array, dtype=torch.uint8)
