"""The facts about a device and its machine that decide whether models can be moved on and off it
fast: `inspect`.

`placing` has host memory allocated on the NUMA node of a GPU.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from placement.core import __version__
from placement.core.journal import logger
from placement.core.snapshot import Frozen, LinkRates, TransitionSeconds, readable
from placement.devices.base import Device
from placement.devices.host.slab import Place, available_bytes, libc
from placement.devices.memory import Copy, Direction

# the size of the buffers whose copies are timed, where the device and the host have room for two of
# them
MEASURED_BYTES = 1 << 30
_TIMES = 5
_MOST_TIMES = 30
_MOST_SECONDS = 2.0
_BOTH: Sequence[Direction] = ("to_device", "to_host")
_SECONDS_TO_PIN = 60.0
_MBIND = {"x86_64": 237, "aarch64": 235}.get(platform.machine())
"""The number of the system call, from the kernel's tables of system calls; the C library has no
function for it."""
# take other nodes' memory where this node has none left. `MPOL_BIND` would kill the process
# instead.
_MPOL_PREFERRED = 1
_BITS = 1024  # the length of the mask of nodes, the largest for which the kernel is built
_SYSTEM = Path("/sys")


class Inspection(Frozen):
    """One device, the host beside it, and conditions that would slow moves down or stop them."""

    device: str
    uuid: str  # as in `nvidia-smi -L`; empty without a GPU
    total_bytes: int
    free_bytes: int
    chunk_bytes: int  # the size in which device memory moves between handles
    link: LinkRates
    # host memory that this process can still take: the machine's, or that which its control groups
    # leave
    host_available_bytes: int
    # free bytes in `Settings.disk_directory`; None where none is set
    disk_free_bytes: int | None = None
    # why host memory could not be page-locked, so that copies are slower; None if it could
    pageable_reason: str | None
    numa_nodes: int
    numa_node: int | None  # the device's node. None: the machine has one node, or does not say.
    # the seconds that phase transitions take beside copies; None: not measured
    transitions: TransitionSeconds | None = None
    versions: dict[str, str]
    findings: tuple[str, ...]  # sentences about problems; empty if all is well


def inspect(device: Device, nbytes: int = MEASURED_BYTES) -> Inspection:
    """Measure a device, and time copies. Takes two buffers of `nbytes` on both sides, or less where
    there is no room for them.

    Raises:
        DeviceMemoryError: the device does not even have two free chunks.
        HostMemoryError: there is not enough host memory for the buffers.
    """
    memory = device.memory()
    available = available_bytes()
    room = min(nbytes, memory.free_bytes // 4, available // 4)
    buffers = _Buffers(device, max(1, room // device.chunk_bytes) * device.chunk_bytes)
    try:
        pageable = buffers.pin()
        link = LinkRates(
            to_device_bytes_per_second=buffers.rate(["to_device"]),
            to_host_bytes_per_second=buffers.rate(["to_host"]),
            both_bytes_per_second=buffers.rate(_BOTH),
        )
    finally:
        buffers.release()
    nodes = num_nodes()
    node = node_of(device.pci_address)
    findings = []
    if pageable is not None:
        findings.append(f"host memory is not page-locked, so copies are slow: {pageable}")
    if nodes > 1 and node is None and device.pci_address:
        findings.append(
            f"the kernel does not say on which of {nodes} NUMA nodes the device is: copies from "
            "the other ones are slower"
        )
    if available < memory.total_bytes:
        findings.append(
            f"the host has {readable(available)} left, and the device has "
            f"{readable(memory.total_bytes)}: models that fill the device do not fit into host "
            "memory together"
        )
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
        versions=_versions(),
        findings=tuple(findings),
    )


def _versions() -> dict[str, str]:
    versions = {
        "placement": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if torch.cuda.is_available():
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return versions


def settled(
    measure: Callable[[], Sequence[float]],
    spread: float = 0.02,
) -> list[float]:
    """Measure until five totals in a row lie within `spread` of one another. Returns each figure's
    median over these five, in seconds. A device, its driver and the threads that lock pages are
    slower at first, and a machine has slow moments: five figures taken at once were up to 40 % too
    slow on an H100. After 30 times or two seconds the last five are taken as they are."""
    measured = [measure()]  # the first one warms up
    began = time.monotonic()
    while True:
        measured.append(measure())
        last = measured[1:][-_TIMES:]
        if len(last) < _TIMES:
            continue
        totals = [sum(figures) for figures in last]
        is_settled = max(totals) - min(totals) <= spread * min(totals)
        is_over = len(measured) > _MOST_TIMES or time.monotonic() - began > _MOST_SECONDS
        if is_settled or is_over:
            return [statistics.median(column) for column in zip(*last, strict=True)]


class _Buffers:
    """Device memory and host memory of the same size, one half for each direction. After an error
    the chunks are freed with their objects."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self._device = device
        self._nbytes = nbytes
        self._slab = device.host(2 * nbytes)
        self._addresses = device.reserve(2 * nbytes)
        self._chunks = [
            device.create(device.chunk_bytes) for _ in range(2 * nbytes // device.chunk_bytes)
        ]
        device.map(self._addresses, self._chunks)

    def pin(self) -> str | None:
        """Wait until the host memory is page-locked. Returns the reason why it is not, or None."""
        if not self._slab.ready.wait(_SECONDS_TO_PIN):
            return f"it took more than {_SECONDS_TO_PIN:g} s"
        return self._slab.pageable_reason

    def rate(self, directions: Sequence[Direction]) -> float:
        """The rate of copies in these directions at once, in bytes a second, all directions added
        up."""

        def copy() -> list[float]:
            self._device.sync()
            began = time.perf_counter()
            for direction in directions:
                start = self._nbytes * _BOTH.index(direction)
                self._device.copy(
                    [Copy(self._addresses.base + start, self._slab.address + start, self._nbytes)],
                    direction,
                )
            self._device.sync()
            return [time.perf_counter() - began]

        (seconds,) = settled(copy)
        return len(directions) * self._nbytes / seconds

    def release(self) -> None:
        self._device.sync()
        self._device.unmap(self._addresses, self._addresses.nbytes)
        self._device.release(*self._chunks)


# --- NUMA nodes: copies between a GPU and memory of another node cross the link between the
# processors


def placing(name: str, pci_address: str, system: Path = _SYSTEM) -> Place | None:
    """A function that places host memory on the node of a GPU (`name`), see `prefer`. None: the
    machine has one, or does not say.
    `pci_address`: domain, bus, device and function, such as "0000:3b:00.0"."""
    count, node = num_nodes(system), node_of(pci_address, system)
    if count >= 2 and node is not None:
        logger.info(
            "%s: host memory is taken from NUMA node %d of %d, which is the GPU's",
            name,
            node,
            count,
        )
        return functools.partial(prefer, node=node)
    reason = f"the kernel does not say on which of {count} NUMA nodes it is"
    if count < 2:
        reason = "the machine has one NUMA node"
    logger.info("%s: %s, so host memory has no preference", name, reason)
    return None


def num_nodes(system: Path = _SYSTEM) -> int:
    """The number of the machine's NUMA nodes; 0 where the kernel does not tell."""
    return len([*(system / "devices/system/node").glob("node[0-9]*")])


def node_of(pci_address: str, system: Path = _SYSTEM) -> int | None:
    """The NUMA node of a PCI device. None: the kernel does not say, as in many virtual machines, or
    there is no such device."""
    try:
        node = int((system / "bus/pci/devices" / pci_address.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def prefer(address: int, nbytes: int, node: int) -> str | None:
    """Have the memory of a mapping allocated on a node as far as it has room. Memory that is
    allocated already stays where it is. Returns the reason why the kernel refused, or None; the
    memory can be used all the same."""
    if _MBIND is None:
        return f"the number of the system call mbind is not known for {platform.machine()}"
    mask = (ctypes.c_ulong * (_BITS // 64))()
    mask[node // 64] = 1 << node % 64
    arguments = (
        ctypes.c_long(_MBIND),
        ctypes.c_void_p(address),
        ctypes.c_ulong(nbytes),
        ctypes.c_int(_MPOL_PREFERRED),
        mask,
        ctypes.c_ulong(_BITS + 1),  # the kernel takes one bit less than it is told
        ctypes.c_uint(0),
    )
    if libc.syscall(*arguments) == 0:
        return None
    return os.strerror(ctypes.get_errno())
