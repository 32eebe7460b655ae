"""Mappings of memory that belong to an owner and to this process alone, and how much of the machine's memory is left for this process.

They are made through the C library: Python's own `mmap` can be closed under a live tensor, and the next read would crash.

A forked child gets none of the memory, because a child that touches it should crash instead of reading old bytes. It does keep the
addresses taken: what it inherits names values by their addresses, so memory of its own there would be mistaken for the parent's.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

from placement.core.interrupts import deferred

PAGE = mmap.PAGESIZE
NO_ACCESS = 0
READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
MAP_FAILED = ctypes.c_void_p(-1).value
MADV_POPULATE_WRITE = 23
_MADV_DONTFORK = 10
MAP_NORESERVE = 0x4000
_MAP_FIXED_NOREPLACE = 0x100000  # only at these addresses, and only if nothing is there. A kernel before 4.17 takes the address as a hint.

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
libc.mmap.restype = ctypes.c_void_p
libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

_mapped: dict[int, int] = {}  # bytes by first address: what this process has mapped and its children will not have


def round_up(nbytes: int, multiple: int) -> int:
    """The smallest multiple that is at least `nbytes`."""
    return -(-nbytes // multiple) * multiple


def map_for_life(
    owner: object, nbytes: int, protection: int, flags: int, pinned: list[Callable[[], None]] | None = None, *, file: int = -1
) -> int:
    """Map `nbytes` at new addresses, and unmap them when `owner` dies: only in this process, and not at interpreter exit.
    `pinned`: functions to call before unmapping; the list is read when the owner dies.
    `file`: the descriptor of a file to map from its beginning, may be closed afterwards; -1: anonymous memory.
    Raises OSError: the kernel refused."""
    address: int = libc.mmap(None, nbytes, protection, flags, file, 0)
    if address == MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    weakref.finalize(owner, _unmap, address, nbytes, [] if pinned is None else pinned, os.getpid()).atexit = False
    _mapped[address] = nbytes
    keep_from_children(address, nbytes)
    return address


def _unmap(address: int, nbytes: int, pinned: list[Callable[[], None]], pid: int) -> None:
    if os.getpid() != pid:  # a forked child never had the mapping
        return
    with deferred():
        try:
            for unpin in pinned:
                unpin()
        finally:
            _mapped.pop(address, None)  # first: another thread may map memory there as soon as it is free
            libc.munmap(address, nbytes)


def keep_from_children(address: int, nbytes: int) -> None:
    """Leave the mapping out of forked children: a child that touches it crashes instead of reading old bytes."""
    libc.madvise(address, nbytes, _MADV_DONTFORK)


def _take_addresses() -> None:
    """In a forked child: let nothing else get the addresses of the parent's mappings."""
    for address, nbytes in _mapped.items():
        found = libc.mmap(address, nbytes, NO_ACCESS, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE | _MAP_FIXED_NOREPLACE, -1, 0)
        if found not in (address, MAP_FAILED):
            libc.munmap(found, nbytes)
    _mapped.clear()  # a child of this child inherits what was mapped here


os.register_at_fork(after_in_child=_take_addresses)


_HUGE_ORDER = 9  # free blocks of this order and above are whole huge pages: 2**9 pages, which are 2 MiB with pages of 4 KiB


def available_bytes() -> int:
    """Bytes that this process can still allocate: the machine's available memory, or what its control groups leave if that is less."""
    meminfo = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    total, available = (int(meminfo[name].split()[0]) << 10 for name in ("MemTotal", "MemAvailable"))
    return max(0, min([available, *left_in_cgroups(below=total)]))


def left_in_cgroups(
    membership: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup"), below: int = sys.maxsize
) -> Iterator[int]:
    """The bytes left by each control group of this process (versions 1 and 2). Limits of at least `below` bytes are no limits."""
    if not membership.exists():
        return
    for line in membership.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit, usage = root, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base, limit, usage = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        group = base / path.lstrip("/")
        for folder in (group, *group.parents):
            value = _read(folder / limit)
            if value.isdigit() and int(value) < below:  # without a limit the value is "max", or a large number in version 1
                yield int(value) - int(_read(folder / usage) or 0) + _reclaimable(folder)
            if folder == base:
                break


def free_huge_bytes(buddyinfo: Path = Path("/proc/buddyinfo")) -> int:
    """Bytes that the kernel has free in blocks of whole huge pages; 0 where it does not report them."""
    total = 0
    for line in _read(buddyinfo).splitlines():  # Node 0, zone   Normal   4   1   0 ...: free blocks of each order
        counts = line.partition("zone")[2].split()[1:]
        total += sum(int(count) << order for order, count in enumerate(counts) if order >= _HUGE_ORDER)
    return total * mmap.PAGESIZE


def _reclaimable(group: Path) -> int:
    """Bytes of cached files. They count as used, but are dropped when memory is needed."""
    stat = dict(line.split() for line in _read(group / "memory.stat").splitlines())
    names = ("active_file", "inactive_file")
    return sum(int(stat.get(f"total_{name}", stat.get(name, 0))) for name in names)  # version 1: `total_` includes child groups


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # absent in this version of control groups, or hidden inside a container
        return ""
