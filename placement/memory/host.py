"""Host memory: slabs of exact size that live as long as the last tensor in them, and what is left of the machine's memory.

Mappings are made through the C library, because closing Python's own `mmap` under a live tensor is allowed and the next read crashes.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import itertools
import mmap
import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from placement.errors import HostMemoryError
from placement.memory.base import HostSlab

PAGE = mmap.PAGESIZE
READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
MAP_FAILED = ctypes.c_void_p(-1).value
MADV_POPULATE_WRITE = 23
_MADV_DONTFORK = 10
_PREFAULT_STEP = 256 << 20
"""Prefaulting stops for signals after this many bytes."""

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
libc.mmap.restype = ctypes.c_void_p
libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def round_up(nbytes: int, multiple: int) -> int:
    """The smallest multiple that is not below `nbytes`."""
    return -(-nbytes // multiple) * multiple


def map_for_life(owner: object, nbytes: int, protection: int, flags: int, pinned: list[Callable[[], None]] | None = None) -> int:
    """Map `nbytes` of new addresses, and unmap them when `owner` dies: in this process only, and not at interpreter exit.

    Args:
        pinned: what to call before unmapping; read when the owner dies.

    Raises:
        OSError: the kernel refused.
    """
    held: list[int] = []
    # First the duty to unmap, then the mapping. `extend` runs mmap and keeps its result within one call of C code: an interrupt
    # cannot fall between the two and lose the mapping.
    weakref.finalize(owner, _unmap, held, nbytes, [] if pinned is None else pinned, os.getpid()).atexit = False
    held.extend(itertools.starmap(libc.mmap, [(None, nbytes, protection, flags, -1, 0)]))
    if held[0] == MAP_FAILED:
        held.clear()
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    keep_from_children(held[0], nbytes)
    return held[0]


def _unmap(held: list[int], nbytes: int, pinned: list[Callable[[], None]], pid: int) -> None:
    # A forked child never had the mapping; its own memory may lie at these addresses.
    if not held or os.getpid() != pid:
        return
    try:
        for unpin in pinned:
            unpin()
    finally:
        libc.munmap(held[0], nbytes)


def keep_from_children(address: int, nbytes: int) -> None:
    """Leave the mapping out of forked children: one that touches it dies instead of reading old bytes."""
    libc.madvise(address, nbytes, _MADV_DONTFORK)


@functools.lru_cache(maxsize=1024)
def _array_type(nbytes: int) -> Any:
    # A subclass, because instances of the plain array type take no attributes.
    return type("Bytes", (ctypes.c_char * nbytes,), {})


def tensor_at(address: int, nbytes: int, owner: object) -> torch.Tensor:
    """A uint8 CPU tensor over `[address, address + nbytes)`, with a storage of exactly that size, that keeps `owner` alive."""
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    array = _array_type(nbytes).from_address(address)
    array.owner = owner
    return torch.frombuffer(array, dtype=torch.uint8)


def check_span(offset: int, nbytes: int, size: int) -> None:
    """Raise ValueError unless `[offset, offset + nbytes)` lies within `size` bytes."""
    if offset < 0 or nbytes < 0 or offset + nbytes > size:
        raise ValueError(f"[{offset}, {offset + nbytes}) is not within {size} bytes")


class Slab(HostSlab):
    """Anonymous memory, zero-filled, prefaulted, without a byte in forked children. See `HostSlab`.

    Args:
        nbytes: exact size; 0 maps nothing.
        register: pins `(address, nbytes)` for a device; returns None, or the reason why it could not.
        unregister: undoes it. Called before the memory goes, also for an address whose `register` was interrupted.

    Raises:
        HostMemoryError: the machine or the control group has not that much.
    """

    def __init__(
        self,
        nbytes: int,
        register: Callable[[int, int], str | None] | None = None,
        unregister: Callable[[int], None] | None = None,
    ) -> None:
        if nbytes < 0:
            raise ValueError(f"a slab of {nbytes} bytes")
        self.nbytes = nbytes
        self.address = 0
        self.pinned = False
        self.pageable_reason = None
        if nbytes == 0:
            return
        size = round_up(nbytes, PAGE)
        available = available_bytes()
        if size > available:
            # Prefaulting more than there is would get the process killed instead of refused.
            raise HostMemoryError(f"host memory: asked for {size:,} bytes, {available:,} available")
        pinned: list[Callable[[], None]] = []
        try:
            self.address = map_for_life(self, size, READ_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, pinned)
            _prefault(self.address, size)
        except OSError as exc:
            raise HostMemoryError(f"host memory: asked for {size:,} bytes, {available:,} available: {exc.strerror}") from exc
        if register is not None:
            if unregister is not None:
                pinned.append(functools.partial(unregister, self.address))
            self.pageable_reason = register(self.address, size)
            self.pinned = self.pageable_reason is None
            if not self.pinned:
                pinned.clear()

    def view(self, offset: int, nbytes: int) -> torch.Tensor:
        check_span(offset, nbytes, self.nbytes)
        return tensor_at(self.address + offset, nbytes, self)


def _prefault(address: int, nbytes: int) -> None:
    for start in range(address, address + nbytes, _PREFAULT_STEP):
        step = min(_PREFAULT_STEP, address + nbytes - start)
        if libc.madvise(start, step, MADV_POPULATE_WRITE) == 0:
            continue
        number = ctypes.get_errno()
        if number != errno.EINVAL:
            raise OSError(number, os.strerror(number))
        ctypes.memset(start, 0, step)  # a kernel before 5.14 has no call for it


def available_bytes() -> int:
    """Bytes that new allocations of this process can get: the machine's, or what its control groups leave if that is less."""
    meminfo = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return max(0, min([int(meminfo["MemAvailable"].split()[0]) << 10, *_left_in_cgroups()]))


def _left_in_cgroups(membership: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> Iterator[int]:
    """What each control group around this process leaves, both versions. One without a limit says nothing."""
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
            if value.isdigit():
                yield int(value) - int(_read(folder / usage) or 0) + _reclaimable(folder)
            if folder == base:
                break


def _reclaimable(group: Path) -> int:
    """Bytes of cached files: counted as used, dropped when memory is wanted."""
    stat = dict(line.split() for line in _read(group / "memory.stat").splitlines())
    names = ("active_file", "inactive_file")
    return sum(int(stat.get(f"total_{name}", stat.get(name, 0))) for name in names)  # version 1: `total_` includes the groups below


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # not in this version of control groups, or not visible from inside a container
        return ""
