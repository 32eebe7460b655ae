"""The facts about a device and its machine that decide whether models can be moved on and off it fast: `inspect`.

`Outside` follows, from one phase transition to the next, the device memory that neither torch's allocator nor a chunk holds.
"""

from __future__ import annotations

import functools
import platform
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Sequence

import torch
from pydantic import BaseModel, ConfigDict

from placement.core import __version__
from placement.core.snapshot import LinkRates, TransitionSeconds
from placement.devices.base import Device
from placement.devices.host import numa
from placement.devices.host.mapping import available_bytes
from placement.devices.memory import Communicator, Copy, DeviceMemory, Direction, HostSlab
from placement.observe.nvml import OtherProcesses

MEASURED_BYTES = 1 << 30  # the size of the buffers whose copies are timed, where the device and the host have room for two of them
_TIMES = 5
_MOST_TIMES = 30
_MOST_SECONDS = 2.0
_BOTH: Sequence[Direction] = ("to_device", "to_host")
_SECONDS_TO_PIN = 60.0


class Inspection(BaseModel):
    """One device, the host beside it, and what would slow moves down or stop them."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    device: str
    uuid: str  # as in `nvidia-smi -L`; empty without a GPU
    total_bytes: int
    free_bytes: int
    chunk_bytes: int  # the size in which device memory moves between handles
    link: LinkRates
    host_available_bytes: int  # host memory that this process can still take: the machine's, or what its control groups leave
    disk_free_bytes: int | None = None  # of the disk that host copies leave for (`Settings.disk_directory`); None where none is set
    pageable_reason: str | None  # why host memory could not be page-locked, so that copies are slower; None if it could
    numa_nodes: int
    numa_node: int | None  # the device's node. None: the machine has one node, or does not say.
    transitions: TransitionSeconds | None = None  # the seconds that phase transitions take beside copies; None: not measured
    versions: dict[str, str]
    findings: tuple[str, ...]  # sentences about what is not as it should be; empty if all is well


def inspect(device: Device, nbytes: int = MEASURED_BYTES) -> Inspection:
    """Look at a device and time copies. Takes two buffers of `nbytes` on both sides, or less where there is no room for them.
    Raises DeviceMemoryError: the device does not even have two free chunks.
    Raises HostMemoryError: there is not enough host memory for the buffers."""
    memory, available = device.memory(), available_bytes()
    room = min(nbytes, memory.free_bytes // 4, available // 4)
    buffers = _Buffers(device, max(device.chunk_bytes, room // device.chunk_bytes * device.chunk_bytes))
    try:
        pageable = buffers.pin()
        ways: dict[str, Sequence[Direction]] = {"to_device": ["to_device"], "to_host": ["to_host"], "both": _BOTH}
        link = LinkRates(**{f"{name}_bytes_per_second": buffers.rate(directions) for name, directions in ways.items()})
    finally:
        buffers.release()
    nodes, node = numa.nodes(), numa.node_of(device.pci_address)
    found = [] if pageable is None else [f"host memory is not page-locked, so copies are slow: {pageable}"]
    if nodes > 1 and node is None and device.pci_address:
        found.append(f"the kernel does not say on which of {nodes} NUMA nodes the device is: copies from the other ones are slower")
    if available < memory.total_bytes:
        sizes = f"the host has {_gib(available)} left, and the device has {_gib(memory.total_bytes)}"
        found.append(f"{sizes}: models that fill the device do not fit into host memory together")
    versions = {"placement": __version__, "python": platform.python_version(), "torch": torch.__version__}
    if torch.cuda.is_available():
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return Inspection(
        device=device.name,
        uuid=device.uuid,
        total_bytes=memory.total_bytes,
        free_bytes=memory.free_bytes,
        chunk_bytes=device.chunk_bytes,
        link=link,
        host_available_bytes=available,
        pageable_reason=pageable,
        numa_nodes=nodes,
        numa_node=node,
        versions=versions,
        findings=tuple(found),
    )


def settled(measure: Callable[[], Sequence[float]], spread: float = 0.02) -> list[float]:
    """Measure until five totals in a row lie within `spread` of one another. Returns each figure's median over these five, in seconds. A
    device, its driver and the threads that lock pages are slower at first, and a machine has slow moments: five figures taken at once were
    up to 40 % too slow on an H100. After 30 times or two seconds the last five are taken as they are."""
    measured = [measure()]  # the first one warms up
    began = time.monotonic()
    while True:
        measured.append(measure())
        last = measured[1:][-_TIMES:]
        totals = [sum(each) for each in last]
        is_over = len(measured) > _MOST_TIMES or time.monotonic() - began > _MOST_SECONDS
        if len(last) == _TIMES and (is_over or max(totals) - min(totals) <= spread * min(totals)):
            return [statistics.median(column) for column in zip(*last, strict=True)]


class _Buffers:
    """For each direction device memory and host memory of the same size."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self._device = device
        self._nbytes = nbytes
        self._slabs: dict[Direction, HostSlab] = {direction: device.host(nbytes) for direction in _BOTH}
        self._addresses = {direction: device.reserve(nbytes) for direction in _BOTH}
        self._chunks = {}
        try:
            for direction in _BOTH:
                self._chunks[direction] = [device.create(device.chunk_bytes) for _ in range(nbytes // device.chunk_bytes)]
                device.map(self._addresses[direction], self._chunks[direction])
        except Exception:
            self.release()
            raise

    def pin(self) -> str | None:
        """Wait until the host memory is page-locked. Returns the reason why it is not, or None."""
        for slab in self._slabs.values():
            if not slab.ready.wait(_SECONDS_TO_PIN):
                return f"it took more than {_SECONDS_TO_PIN:g} s"
        return next((reason for slab in self._slabs.values() if (reason := slab.pageable_reason) is not None), None)

    def rate(self, directions: Sequence[Direction]) -> float:
        """The rate of copies in these directions at once, in bytes a second, all directions added up."""

        def copy() -> list[float]:
            self._device.sync()
            began = time.perf_counter()
            for direction in directions:
                self._device.copy([Copy(self._addresses[direction].base, self._slabs[direction].address, self._nbytes)], direction)
            self._device.sync()
            return [time.perf_counter() - began]

        (seconds,) = settled(copy)
        return len(directions) * self._nbytes / seconds

    def release(self) -> None:
        self._device.sync()
        for addresses in self._addresses.values():
            self._device.unmap(addresses, addresses.nbytes)
        for chunks in self._chunks.values():
            self._device.release(*chunks)


def _gib(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.1f} GiB"


_OWNERS = "the driver's context and its kernels, libraries that allocate by themselves, communicators"


class Outside:
    """The memory outside torch and placement, as of the last measurement, and who is known to hold it. Not every library says how much its
    communicators hold, so the growth of this memory is noted whenever some have appeared. That is an upper bound: kernels that were loaded
    meanwhile are in it, and other processes' growth."""

    def __init__(self, device: Device, memory: DeviceMemory) -> None:
        self._device = device
        self.nbytes = memory.unaccounted_bytes
        self.communicators: tuple[Communicator, ...] = tuple(device.communicators())
        self.grown_bytes = 0  # the growth of `nbytes` between measurements in which communicators appeared
        self._others: OtherProcesses | None = None
        self._own_bytes: int | None = None
        self._told = threading.Event()

    @property
    def is_watched(self) -> bool:
        """Whether somebody measures other processes."""
        return self._others is not None

    def watch(self, others: OtherProcesses) -> None:
        """From now on `others` tells what other processes hold."""
        self._others = others
        self._ask()

    def measure(self, memory: DeviceMemory) -> None:
        """Look again, on the thread of a phase transition. Others are measured on their own thread, milliseconds later."""
        known = {each.name for each in self.communicators}
        self.communicators = tuple(self._device.communicators())
        before, self.nbytes = self.nbytes, memory.unaccounted_bytes
        if any(each.name not in known for each in self.communicators):
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
        """Device bytes of other processes; None while unknown, or not subtracted from `own_bytes` yet."""
        return None if self._others is None or self._own_bytes is None else self._others.nbytes

    @property
    def own_bytes(self) -> int | None:
        """`nbytes` without other processes; None while these are unknown.

        Only measurements that belong together are subtracted, because an engine in another process may have gone to sleep since: this is
        of the last measurement after which others were measured too.
        """
        return None if self.others_bytes is None else self._own_bytes

    @property
    def communicator_bytes(self) -> int | None:
        """Device bytes of all communicators; None if one of them does not say how many it holds."""
        known = [each.nbytes for each in self.communicators if each.nbytes is not None]
        return sum(known) if len(known) == len(self.communicators) else None

    def report(self) -> Iterable[str]:
        """Lines for people; none where there is nothing to say."""
        if self.nbytes <= 0 and not self.communicators:
            return
        others = "and other processes" if self.others_bytes is None else f"and other processes ({self.others_bytes:,} bytes)"
        yield f"outside: {self.nbytes:,} bytes are neither torch's nor placement's: {_OWNERS}, {others}"
        for each in self.communicators:
            yield f"outside: communicator {each.name!r} of {_ranks(each.ranks)}: {_size(each)}"
        if self.communicator_bytes is None and self.grown_bytes:
            yield f"outside: grew by {self.grown_bytes:,} bytes while communicators appeared, which hold at most that"


def _ranks(ranks: tuple[int, ...]) -> str:
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"


def _size(communicator: Communicator) -> str:
    if communicator.nbytes is None:
        return f"size unknown ({communicator.unknown_because})"
    suspendable = f", {communicator.suspendable_bytes:,} of them could be suspended" if communicator.suspendable_bytes else ""
    return f"{communicator.nbytes:,} bytes{suspendable}"
