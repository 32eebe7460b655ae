"""Host memory on the NUMA node of a GPU: copies between the GPU and memory of another node cross the link between the processors.

The kernel knows the node of a PCI device, and takes a preference for the node of a mapping. Threads are left where the user put them.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import platform
from pathlib import Path

from placement.devices.host.slab import Place, libc

_logger = logging.getLogger("placement")
_MBIND = {"x86_64": 237, "aarch64": 235}.get(platform.machine())
"""The number of the system call, from the kernel's tables of system calls; the C library has no function for it."""
_MPOL_PREFERRED = 1  # take other nodes' memory where this node has none left. `MPOL_BIND` would kill the process instead.
_BITS = 1024  # the length of the mask of nodes, which is what the kernel is built for at most
_SYSTEM = Path("/sys")


def placing(name: str, pci_address: str, system: Path = _SYSTEM) -> Place | None:
    """A function that places host memory on the node of a GPU (`name`), see `prefer`. None: the machine has one, or does not say.
    `pci_address`: domain, bus, device and function, such as "0000:3b:00.0"."""
    count, node = nodes(system), node_of(pci_address, system)
    if count >= 2 and node is not None:
        _logger.info("%s: host memory is taken from NUMA node %d of %d, which is the GPU's", name, node, count)
        return functools.partial(prefer, node=node)
    why = "the machine has one NUMA node" if count < 2 else f"the kernel does not say on which of {count} NUMA nodes it is"
    _logger.info("%s: %s, so host memory has no preference", name, why)
    return None


def nodes(system: Path = _SYSTEM) -> int:
    """The number of the machine's NUMA nodes; 0 where the kernel does not tell."""
    return len([*(system / "devices/system/node").glob("node[0-9]*")])


def node_of(pci_address: str, system: Path = _SYSTEM) -> int | None:
    """The NUMA node of a PCI device. None: the kernel does not say, as in many virtual machines, or there is no such device."""
    try:
        node = int((system / "bus/pci/devices" / pci_address.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def prefer(address: int, nbytes: int, node: int) -> str | None:
    """Have the memory of a mapping allocated on a node as far as it has room. Memory that is allocated already stays where it is. Returns
    the reason why the kernel refused, or None; the memory can be used all the same."""
    if _MBIND is None:
        return f"the number of the system call mbind is not known for {platform.machine()}"
    mask = (ctypes.c_ulong * (_BITS // 64))()
    mask[node // 64] = 1 << node % 64
    arguments = (ctypes.c_long(_MBIND), ctypes.c_void_p(address), ctypes.c_ulong(nbytes), ctypes.c_int(_MPOL_PREFERRED), mask)
    if libc.syscall(*arguments, ctypes.c_ulong(_BITS + 1), ctypes.c_uint(0)) == 0:  # the kernel takes one bit less than it is told
        return None
    return os.strerror(ctypes.get_errno())
