"""A file that takes the bytes of a host slab: aligned blocks, several requests in flight, past the page cache where that is possible."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence

from placement.devices.background import BackgroundThread
from placement.devices.host.mapping import PAGE, libc, round_up
from placement.devices.host.spill_directory import SpillDirectory

BLOCK_BYTES = 4 << 20
"""The bytes of one request."""
DEPTH = 8
"""The number of requests in flight. Each has a thread, which is outside of Python while the disk works."""
_LOOKING = 2
"""The threads beside these that look at blocks, so that the disk has its requests meanwhile."""

Look = Callable[[int, int], object]
"""(offset, bytes) of a block that is in memory -> ignored. Called on several threads."""
GoesOn = Callable[[], bool]
"""Whether to go on; asked on the calling thread between blocks."""

logger = logging.getLogger("placement")
_fallocate = libc.fallocate
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)
_NOT_OFFERED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_warning = threading.Lock()
"""Taken by the first warning of the cache, for good."""


def always() -> bool:
    """Go on."""
    return True


class SpillFile:
    """A file of `nbytes`, rounded up to whole pages. Its space on the disk is given back when this object dies.

    Args:
        name: the file's name in messages.

    Raises:
        OSError: the file system refused (ENOSPC: the disk has no room for so many bytes).
    """

    def __init__(self, directory: SpillDirectory, name: str, nbytes: int) -> None:
        self.path = str(directory.path / name)
        """The file's name in messages. The file has no name in the file system."""
        self.nbytes = round_up(nbytes, PAGE)
        self._file = file = directory.open(name)
        weakref.finalize(self, os.close, file).atexit = False
        self._is_direct = bool(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT)
        if not self._is_direct:
            self._warn_of_cache()
        # The whole length now, so that a full disk shows before a byte is written.
        if self.nbytes and _fallocate(file, 0, 0, self.nbytes):
            number = ctypes.get_errno()
            if number not in _NOT_OFFERED:
                raise OSError(number, os.strerror(number), self.path)

    def write(self, address: int, goes_on: GoesOn = always, look: Look | None = None) -> bool:
        """Write the bytes from `address` on. Returns False if it was stopped; the file's content means nothing then.

        Args:
            look: called for each block before it is written.

        Raises:
            OSError: a write failed, or the file is shorter than what was written. Its content means nothing then.
        """

        requests = threading.Semaphore(DEPTH)

        def write(offset: int, nbytes: int) -> None:
            if look is not None:
                look(offset, nbytes)
            with requests:
                self._whole(os.pwritev, address, offset, nbytes)

        if not _in_parallel(self._blocks(), write, goes_on, DEPTH if look is None else DEPTH + _LOOKING):
            return False
        os.fdatasync(self._file)  # reports what buffered writes could not report
        if (found := os.fstat(self._file).st_size) < self.nbytes:
            raise OSError(errno.EIO, f"{self.nbytes:,} bytes were written, but the file has {found:,}", self.path)
        self._leave_cache()
        return True

    def read(self, address: int, goes_on: GoesOn = always, look: Look | None = None) -> bool:
        """Read the file into the memory from `address` on. Returns False if it was stopped.

        Args:
            look: called for each block after it has been read.

        Raises:
            OSError: a read failed, or the file is too short.
        """

        requests = threading.Semaphore(DEPTH)

        def read(offset: int, nbytes: int) -> None:
            with requests:
                self._whole(os.preadv, address, offset, nbytes)
            if look is not None:
                look(offset, nbytes)

        done = _in_parallel(self._blocks(), read, goes_on, DEPTH if look is None else DEPTH + _LOOKING)
        self._leave_cache()
        return done

    def _leave_cache(self) -> None:
        with contextlib.suppress(OSError):  # an advice
            os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)

    def _blocks(self) -> list[tuple[int, int]]:
        return [(offset, min(BLOCK_BYTES, self.nbytes - offset)) for offset in range(0, self.nbytes, BLOCK_BYTES)]

    def _whole(self, call: Callable[..., int], address: int, offset: int, nbytes: int) -> None:
        """Read or write one block, in as many calls as the kernel wants."""
        while nbytes:
            block = (ctypes.c_char * nbytes).from_address(address + offset)
            # Several threads may be refused at once: each of them began with direct IO, whichever turns it off, and may try again.
            was_direct = self._is_direct
            try:
                done = call(self._file, [block], offset)
            except OSError as error:
                if error.errno == errno.EINVAL and was_direct:
                    self._leave_direct()
                    continue
                raise OSError(error.errno, error.strerror, self.path) from error
            if done <= 0:
                raise OSError(errno.EIO, f"the file ends at {offset:,} of {self.nbytes:,} bytes", self.path)
            offset, nbytes = offset + done, nbytes - done

    def _leave_direct(self) -> None:
        """Go on with buffered IO, on every thread."""
        fcntl.fcntl(self._file, fcntl.F_SETFL, fcntl.fcntl(self._file, fcntl.F_GETFL) & ~os.O_DIRECT)
        self._is_direct = False
        self._warn_of_cache()

    def _warn_of_cache(self) -> None:
        if _warning.acquire(blocking=False):
            logger.warning("%s: the file system refuses direct IO, so spilled bytes go through the page cache, which is slower", self.path)


def _in_parallel(blocks: Sequence[tuple[int, int]], work: Callable[[int, int], None], goes_on: GoesOn, num_threads: int) -> bool:
    """Do `work` for every block on so many threads, this one among them. Returns False if it was stopped.

    Raises:
        OSError, Exception: the first error. No thread works any more then.
    """
    left = deque(blocks)
    errors: list[BaseException] = []

    def take() -> bool:
        """Do one block. False when there is none."""
        try:
            block = left.popleft()
        except IndexError:
            return False
        try:
            work(*block)
        except BaseException as error:  # raised by the calling thread
            errors.append(error)
            left.clear()
        return True

    def take_all() -> None:
        while take():
            pass

    threads = [BackgroundThread("placement-disk-io", take_all) for _ in range(min(num_threads, len(blocks)) - 1)]
    was_stopped = False
    try:
        with contextlib.suppress(RuntimeError):  # the machine gives no more threads: those that run do all blocks
            for thread in threads:
                thread.start()
        while take():
            if left and not goes_on():
                left.clear()
                was_stopped = True
    finally:
        left.clear()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    if errors:
        raise errors[0]
    return not was_stopped
