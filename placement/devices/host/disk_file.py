"""Files on a local disk that take the bytes of slabs: aligned blocks, several requests at a time,
past the page cache where possible."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import logging
import mmap
import os
import tempfile
import threading
import weakref
import zlib
from collections.abc import Callable

import torch

from placement.core.interrupts import BackgroundThread
from placement.devices.base import round_up
from placement.devices.host.slab import PAGE, libc

BLOCK_BYTES = 4 << 20  # the bytes of one request, and of one checksum
# the number of requests in flight. Each has a thread, which is outside of Python while the disk
# works.
DEPTH = 8
# the threads beside these that compute checksums, so that the disk has its requests meanwhile
_CHECKING = 2

GoesOn = Callable[[], bool]  # whether to go on; asked on the calling thread between blocks

logger = logging.getLogger("placement")
_NOT_OFFERED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_warning = threading.Lock()  # taken by the first warning of the cache, for good


def always() -> bool:
    """Go on."""
    return True


def check_directory(path: str | os.PathLike[str]) -> None:
    """Raise ValueError, which says what to do, unless a `DiskFile` can be made in a folder."""
    advice = "set disk_directory to a folder on a local disk that this process may write"
    if not os.path.isdir(path):
        raise ValueError(f"disk_directory {os.fspath(path)!r} is no folder; {advice}")
    try:
        DiskFile(path, "trial", PAGE)
    except OSError as error:
        raise ValueError(
            f"disk_directory {os.fspath(path)!r}: {error.strerror}; {advice}"
        ) from error


class DiskFile:
    """A file of `nbytes`, rounded up to whole pages, with a checksum of each block.

    It has no name in the file system (`name` is for messages), so that its space is given back when
    this object dies, and when the process is killed. A checksum is a CRC-32, which finds every run
    of up to 32 changed bits and other damage all but once in 2**32, and the sum of the words. It
    needs both, because a block whose checksum is unchanged is not written: with a CRC alone, a long
    run would lose a block some day. Raises OSError: the file system refused (ENOSPC: the disk has
    no room for so many bytes)."""

    def __init__(self, directory: str | os.PathLike[str], name: str, nbytes: int) -> None:
        self.path = f"{os.fspath(directory)}/{name}"
        self.nbytes = round_up(nbytes, PAGE)
        self.num_blocks = -(-self.nbytes // BLOCK_BYTES)
        own = tempfile.TemporaryFile(buffering=0, dir=directory)  # noqa: SIM115 (closed when this object dies)
        weakref.finalize(self, own.close).atexit = False
        self._file = own.fileno()
        # The whole length now, so that a full disk shows before a byte is written.
        if self.nbytes and libc.fallocate(self._file, 0, 0, self.nbytes):
            number = ctypes.get_errno()
            if number not in _NOT_OFFERED:
                raise OSError(number, os.strerror(number), self.path)
        flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags | os.O_DIRECT)
            # some file systems refuse only the request
            os.pwrite(self._file, mmap.mmap(-1, PAGE), 0)
        except OSError:
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags)
            if _warning.acquire(blocking=False):
                logger.warning(
                    "%s: no direct IO here, so spilled bytes go through the page cache, which is "
                    "slower",
                    self.path,
                )
        # the checksum of each block's content; None where the content means nothing
        self._checksums: list[tuple[int, int] | None] = []
        self.forget()

    def forget(self) -> None:
        """Take the content for meaningless: the next `write` writes all of it."""
        self._checksums = [None] * self.num_blocks

    def block(self, index: int) -> tuple[int, int]:
        """The offset and the bytes of a block."""
        offset = index * BLOCK_BYTES
        return offset, min(BLOCK_BYTES, self.nbytes - offset)

    def write(self, address: int, goes_on: GoesOn = always) -> tuple[int, bool]:
        """Write the blocks at `address` that differ from the file's. Returns how many bytes that
        were, and whether it was not stopped.
        Raises OSError: a write failed. Use the file no more."""
        requests = threading.Semaphore(DEPTH)
        written: list[int] = []

        def write(index: int) -> None:
            offset, nbytes = self.block(index)
            checksum = _checksum(address + offset, nbytes)
            if checksum != self._checksums[index]:
                self._checksums[index] = None
                with requests:
                    self._whole(os.pwritev, address, offset, nbytes)
                self._checksums[index] = checksum
                written.append(nbytes)

        is_whole = _in_parallel(self.num_blocks, write, goes_on)
        os.fdatasync(self._file)  # reports what buffered writes could not report
        return sum(written), is_whole

    def read(self, address: int, goes_on: GoesOn = always) -> list[int] | None:
        """Read the file into the memory at `address`. Returns the blocks that are not as they were
        written; None if it was stopped.
        Raises OSError: a read failed, or the file is too short."""
        requests = threading.Semaphore(DEPTH)
        damaged: list[int] = []

        def read(index: int) -> None:
            offset, nbytes = self.block(index)
            with requests:
                self._whole(os.preadv, address, offset, nbytes)
            if _checksum(address + offset, nbytes) != self._checksums[index]:
                damaged.append(index)

        return sorted(damaged) if _in_parallel(self.num_blocks, read, goes_on) else None

    def _whole(self, call: Callable[..., int], address: int, offset: int, nbytes: int) -> None:
        """Read or write one block, in as many calls as the kernel wants."""
        while nbytes:
            done = call(self._file, [_memory(address + offset, nbytes)], offset)
            if done <= 0:
                raise OSError(errno.EIO, f"the file ends at {offset:,} of {self.nbytes:,} bytes")
            offset, nbytes = offset + done, nbytes - done


def _memory(address: int, nbytes: int) -> ctypes.Array[ctypes.c_char]:
    return (ctypes.c_char * nbytes).from_address(address)


def _checksum(address: int, nbytes: int) -> tuple[int, int]:
    memory = _memory(address, nbytes)
    return zlib.crc32(memory), int(torch.frombuffer(memory, dtype=torch.int64).sum())


def _in_parallel(num_blocks: int, work: Callable[[int], None], goes_on: GoesOn) -> bool:
    """Do `work` for every block on several threads, this one among them. Returns False if it was
    stopped.
    Raises OSError, Exception: the first error. No thread works any more then."""
    blocks = iter(range(num_blocks))  # shared: each step of it is one, whichever thread takes it
    # why no further block is begun: errors, and None where it was stopped
    ends: list[Exception | None] = []

    def take(goes_on: GoesOn) -> None:
        for index in blocks:
            if ends:
                return
            try:
                work(index)
            except Exception as error:  # raised by the calling thread
                ends.append(error)
            if not goes_on():
                ends.append(None)

    others = range(min(DEPTH + _CHECKING, num_blocks) - 1)
    threads = [
        BackgroundThread("placement-disk-io", functools.partial(take, always)) for _ in others
    ]
    try:
        # the machine gives no more threads: those that run do all blocks
        with contextlib.suppress(RuntimeError):
            for thread in threads:
                thread.start()
        take(goes_on)
    finally:
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    for error in ends:
        if error is not None:
            raise error
    return not ends
