"""Host copies beyond a limit on host memory: mappings of files on a local disk.

The kernel keeps such a copy: it writes changed pages to the file when it wants, and may give their
memory to others. Pages that are not in memory are read again when they are used. `read_ahead` has
the disk begin with all pages of a copy.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import tempfile
import threading
from collections.abc import Callable

import torch

from placement.core.errors import HostMemoryError
from placement.core.settings import Settings
from placement.core.weak import WeakIdSet
from placement.devices.base import Device, check_span, round_up, tensor_at
from placement.devices.host.slab import PAGE, READ_WRITE, libc, map_for_life
from placement.devices.memory import HostSlab

_MADV_WILLNEED = 3
# The bytes of one hint. Of a larger one the kernel reads the beginning alone: at least 128 KiB.
_HINT_BYTES = 128 << 10


class FileSlab(HostSlab):
    """A shared mapping of a file in a folder. See `HostSlab`. It is never pinned.

    The file has no name, so its space is free again when the mapping is gone, also after a kill.
    All of the space is taken now: a write into the mapping could not tell of a full disk, and would
    kill the process.

    Raises:
        HostMemoryError: the file system refused, for example because it is full.
    """

    pinned = False
    pageable_reason = "it is the mapping of a file"
    held_bytes = 0  # its pages in memory are the kernel's cache of the file

    def __init__(self, directory: str, nbytes: int) -> None:
        self.nbytes = nbytes
        self.address = 0
        self.ready = threading.Event()
        self.ready.set()
        _alive.add(self)
        if not nbytes:
            return
        size = round_up(nbytes, PAGE)
        try:
            with tempfile.TemporaryFile(buffering=0, dir=directory) as file:
                os.posix_fallocate(file.fileno(), 0, size)
                self.address = map_for_life(
                    self, size, READ_WRITE, mmap.MAP_SHARED, file=file.fileno()
                )
        except OSError as error:
            raise HostMemoryError(
                f"disk_directory {directory!r} cannot take a host copy of {size:,} bytes: "
                f"{error.strerror}; {_free(directory)}. Free space there, set disk_directory to a "
                "folder on a larger disk, or raise host_limit_bytes"
            ) from error

    @property
    def file_bytes(self) -> int:
        return self.nbytes

    def view(self, offset: int, nbytes: int) -> torch.Tensor:
        check_span(offset, nbytes, self.nbytes)
        return tensor_at(self.address + offset, nbytes, self)


_alive: WeakIdSet[FileSlab] = WeakIdSet()


def read_ahead(address: int, nbytes: int) -> None:
    """Begin to read `[address, address + nbytes)`, where that is in a file and not in memory. The
    page faults of a copy would read less at a time, which is slower: 0.5 instead of 1.8 GB/s where
    the kernel reads 128 KiB ahead, its default (ext4)."""
    if not any(slab.address <= address < slab.address + slab.nbytes for slab in _alive):
        return
    first = address // PAGE * PAGE
    end = address + nbytes
    if not _is_in_memory(first, end - first):
        for start in range(first, end, _HINT_BYTES):
            libc.madvise(start, min(_HINT_BYTES, end - start), _MADV_WILLNEED)


def _is_in_memory(address: int, nbytes: int) -> bool:
    pages = (ctypes.c_ubyte * -(-nbytes // PAGE))()
    libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), pages)
    return b"\0" not in bytes(pages)


def _free(directory: str) -> str:
    try:
        return f"{shutil.disk_usage(directory).free:,} bytes are free"
    except OSError as error:
        return f"its free space is unknown ({error.strerror})"


def new_slab_for(settings: Settings, device: Device) -> Callable[[int], HostSlab]:
    """The function that makes the slabs of one manager's host copies.

    Raises:
        ValueError: `disk_directory` cannot be used.
    """
    if settings.host_limit_bytes is None or settings.disk_directory is None:
        return device.host
    check_directory(settings.disk_directory)
    return LimitedHost(device, settings.host_limit_bytes, settings.disk_directory).slab


class LimitedHost:
    """Makes slabs in host memory as long as they hold at most `limit_bytes` together, else in
    files."""

    def __init__(self, device: Device, limit_bytes: int, directory: str) -> None:
        self._device = device
        self._limit_bytes = limit_bytes
        self._directory = directory
        self._in_memory: WeakIdSet[HostSlab] = WeakIdSet()

    def slab(self, nbytes: int) -> HostSlab:
        """A new slab. Raises HostMemoryError: neither the machine nor the disk has the room."""
        held_bytes = sum(slab.held_bytes for slab in self._in_memory)
        if held_bytes + nbytes > self._limit_bytes:
            return FileSlab(self._directory, nbytes)
        slab = self._device.host(nbytes)
        self._in_memory.add(slab)
        return slab


def check_directory(path: str) -> None:
    """Raise ValueError, which says what to do, unless a `FileSlab` can be made in a folder."""
    advice = "set disk_directory to a folder on a local disk that this process may write"
    if not os.path.isdir(path):
        raise ValueError(f"disk_directory {path!r} is no folder; {advice}")
    try:
        FileSlab(path, PAGE)
    except HostMemoryError as error:
        raise ValueError(f"{error}; {advice}") from error
