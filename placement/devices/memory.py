"""The pieces that a `Device` hands out or moves, and what it says of its memory: the contract for
implementations, beside `base`.

* `Addresses`: device addresses that stay for life. Either memory or poison is behind them.
* `Chunk`: physical device memory. It is put behind addresses and taken away again. The driver's
  "free" counts chunks.
* `HostSlab`: host memory that holds the copy of offloaded values.

`Outside` follows, from one phase transition to the next, the device memory that neither torch's
allocator nor a chunk holds.
"""

from __future__ import annotations

import abc
import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from placement.core import snapshot
from placement.observe.nvml import OtherProcesses

Direction = Literal["to_device", "to_host"]
Communicator = snapshot.Communicator


class Copy(NamedTuple):
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
    """Bytes that torch's caching allocator holds in this process, used or cached (0 where it has
    none). Ranges do not count."""
    chunk_bytes: int  # bytes that this device's chunks hold in this process, without poison
    poison_bytes: int

    @property
    def used_bytes(self) -> int:
        return self.total_bytes - self.free_bytes

    @property
    def unaccounted_bytes(self) -> int:
        """Used bytes that are neither torch's nor this device's: the driver's context,
        communicators, other processes."""
        return self.used_bytes - self.torch_reserved_bytes - self.chunk_bytes - self.poison_bytes


class Addresses(abc.ABC):
    """Reserved device addresses. They are given back when this object dies, never before.

    `Device.view` makes tensors that keep this object alive, so a range outlives the manager for as
    long as a tensor lies in it.
    """

    base: int  # the first address, a multiple of the device's granularity
    nbytes: int  # the length, a multiple of the granularity


@dataclass(frozen=True, slots=True)
class WrittenPoison:
    """A run of poison that something wrote into, in whole pages."""

    addresses: Addresses
    start: int  # the run's offset from `addresses.base`, in bytes
    nbytes: int


class Chunk(abc.ABC):
    """Physical device memory. `Device.release` returns it to the driver, and so does the death of
    this object."""

    # a multiple of the granularity; `Device.chunk_bytes` for a full chunk, less for the tail of a
    # range
    nbytes: int
    is_wiped = False  # whether it is behind no address, and filled as by `Device.wipe`


class HostSlab(abc.ABC):
    """Host memory of exact size. It is unmapped when this object and the last tensor of `view` are
    dead. Forked children do not have it (`MADV_DONTFORK`): a child that touches it crashes instead
    of reading old bytes."""

    address: int
    nbytes: int
    ready: threading.Event
    """Set once it is pinned or refused, or need not be pinned. Until then the memory can be used,
    and device copies wait."""

    @property
    @abc.abstractmethod
    def pinned(self) -> bool:
        """Whether it is pinned, so that the driver copies it at full link speed. False on a device
        that needs no pinning."""

    @property
    @abc.abstractmethod
    def pageable_reason(self) -> str | None:
        """Why it is not pinned although the device wanted it pinned; None while that is not
        decided."""

    @property
    def pageable_bytes(self) -> int:
        """Bytes whose pinning was refused."""
        return 0 if self.pageable_reason is None else self.held_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of the machine's memory that count for this process: all, its share where processes
        share the slab, none where it is the mapping of a file."""
        return self.nbytes

    @property
    def file_bytes(self) -> int:
        """Bytes that are in a file on a disk, see `file_slab`: all or none."""
        return 0

    @property
    def has_views(self) -> bool:
        """Whether a tensor of `view` may be alive. If so, the memory is not used for other
        bytes."""
        return True

    @abc.abstractmethod
    def view(self, offset: int, nbytes: int) -> torch.Tensor:
        """A uint8 CPU tensor over `[offset, offset + nbytes)`, with a storage of exactly that size,
        that keeps the slab alive."""


class SharedHostSlab(HostSlab):
    """A host copy that several processes have mapped, see `Device.shared_host`. Its memory is freed
    when the last has unmapped it."""

    # the bytes behind the copy in the file, for messages between the processes. It does not keep
    # the slab alive.
    extra: torch.Tensor

    @abc.abstractmethod
    def pin(self) -> None:
        """Pin all of it in the background, if the device wants that. Called once every process has
        taken its own share."""


class Mark:
    """A point in the copies of one direction, made by `Device.mark`. `Device.wait` waits for it,
    any number of times."""


_OWNERS = (
    "the driver's context and its kernels, libraries that allocate by themselves, communicators"
)


class Outside:
    """The memory outside torch and placement, as of the last measurement, and who is known to hold
    it. Not every library says how much its communicators hold, so the growth of this memory is
    noted whenever some have appeared. That is an upper bound: kernels that were loaded meanwhile
    are in it, and other processes' growth. `communicators`: see `Device.communicators`."""

    def __init__(
        self, communicators: Callable[[], Sequence[Communicator]], memory: DeviceMemory
    ) -> None:
        self._find_communicators = communicators
        self.nbytes = memory.unaccounted_bytes
        self.communicators: tuple[Communicator, ...] = tuple(communicators())
        # the growth of `nbytes` between measurements in which communicators appeared
        self.grown_bytes = 0
        self._others: OtherProcesses | None = None
        self._own_bytes: int | None = None
        self._told = threading.Event()

    def watch(self, uuid: str) -> None:
        """Measure from now on the bytes of other processes on the GPU of this UUID. Idempotent."""
        self._others = OtherProcesses(uuid) if self._others is None else self._others
        self._ask()

    def measure(self, memory: DeviceMemory) -> None:
        """Measure again, on the thread of a phase transition. Other processes are measured on a
        thread of their own, milliseconds later."""
        names = {communicator.name for communicator in self.communicators}
        self.communicators = tuple(self._find_communicators())
        before = self.nbytes
        self.nbytes = memory.unaccounted_bytes
        if any(communicator.name not in names for communicator in self.communicators):
            self.grown_bytes += max(0, self.nbytes - before)
        self._ask()

    def wait_for_others(self, seconds: float) -> None:
        """Wait until others were measured after the last measurement, if they are known at all."""
        if self.others_bytes is not None:
            self._told.wait(seconds)

    def _ask(self) -> None:
        if self._others is not None:
            self._told.clear()
            self._others.ask(functools.partial(self._tell, self.nbytes))

    def _tell(self, nbytes: int, others_bytes: int | None) -> None:
        self._own_bytes = None if others_bytes is None else nbytes - others_bytes
        self._told.set()

    @property
    def others_bytes(self) -> int | None:
        """Device bytes of other processes; None while unknown, or not subtracted from `own_bytes`
        yet."""
        if self._others is None or self._own_bytes is None:
            return None
        return self._others.nbytes

    def unaccounted_bytes(self, memory: DeviceMemory) -> int:
        """Those of this process, of the last measurement after which other processes were measured
        too: an engine there may have gone to sleep since. While these are unknown: of all."""
        if self.others_bytes is None or self._own_bytes is None:
            return memory.unaccounted_bytes
        return self._own_bytes

    @property
    def communicator_bytes(self) -> int | None:
        """Device bytes of all communicators; None if one of them does not say how many it holds."""
        total = 0
        for communicator in self.communicators:
            if communicator.nbytes is None:
                return None
            total += communicator.nbytes
        return total

    def report(self) -> Iterable[str]:
        """Lines for people; none where there is nothing to say."""
        if self.nbytes <= 0 and not self.communicators:
            return
        size = "" if self.others_bytes is None else f" ({self.others_bytes:,} bytes)"
        yield (
            f"outside: {self.nbytes:,} bytes are neither torch's nor placement's: {_OWNERS}, "
            f"and other processes{size}"
        )
        for communicator in self.communicators:
            ranks = _ranks(communicator.ranks)
            yield f"outside: communicator {communicator.name!r} of {ranks}: {_size(communicator)}"
        if self.communicator_bytes is None and self.grown_bytes:
            yield (
                f"outside: grew by {self.grown_bytes:,} bytes while communicators appeared, which "
                "hold at most that"
            )


def _ranks(ranks: tuple[int, ...]) -> str:
    first, last = ranks[0], ranks[-1]
    if len(ranks) > 2 and last - first == len(ranks) - 1:
        return f"ranks {first} to {last}"
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"


def _size(communicator: Communicator) -> str:
    if communicator.nbytes is None:
        return f"size unknown ({communicator.unknown_because})"
    text = f"{communicator.nbytes:,} bytes"
    if communicator.suspendable_bytes:
        text += f", {communicator.suspendable_bytes:,} of them could be suspended"
    return text
