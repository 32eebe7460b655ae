"""The host copy of a range while it may be away from host memory: in a file, or nowhere while the device has its bytes.

Only the keeper's thread changes `place`. No lock is between it and the others, because an interrupt could leave one held. Whoever uses
the host copy makes a tensor over it or a claim, and reads the place afterwards. The keeper's thread does it the other way round: it says
that the bytes leave, and then looks for claims and for living tensors. So one of the two sees the other.
"""

from __future__ import annotations

import bisect
import ctypes
import enum
import errno
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from placement.core.errors import HostMemoryError, IntegrityError
from placement.core.journal import HandleCounters, logger
from placement.devices.host.slab import Slab, tensor_at
from placement.devices.host.spill_directory import SpillDirectory
from placement.devices.host.spill_file import BLOCK_BYTES, GoesOn, Look, SpillFile
from placement.devices.host.spilled_slab import release, renew
from placement.devices.memory import HostSlab
from placement.storage.disk.checksum import partial_checksum

_NAN = 0xFF
_FOR_NOW = (errno.ENOMEM, errno.EAGAIN)
"""Errors of a read that tell of the kernel's memory, and nothing of the file."""


class Place(enum.Enum):
    """Where the bytes of a host copy are."""

    MEMORY = enum.auto()
    WRITING = enum.auto()
    """In host memory, and being written to the file."""
    LEAVING = enum.auto()
    """In host memory for a moment still, or not any more."""
    DISK = enum.auto()
    NOWHERE = enum.auto()
    """Only on the device, whose next offload writes all of them."""
    COMING = enum.auto()


_HERE = (Place.MEMORY, Place.WRITING)


class SpilledRange(Protocol):
    """The part of a range that this needs."""

    nbytes: int
    prints: torch.Tensor | None

    @property
    def starts(self) -> tuple[int, ...]: ...
    @property
    def used_sizes(self) -> tuple[int, ...]: ...
    @property
    def is_shown(self) -> bool: ...
    @property
    def host(self) -> HostSlab: ...
    @property
    def has_early(self) -> bool: ...


class Spill:
    """The way of a slab to a file and back: of one range's host copy, or of the host copies of all ranges that were cut from the slab.

    Args:
        find: finds the range, which this must not keep alive; None when it is gone.
        name: the handle's name.
        bring: has the keeper bring the bytes back, and waits for that.
        lose: called with the words for it when values are lost.
    """

    def __init__(
        self,
        find: Callable[[], SpilledRange | None],
        name: str,
        directory: SpillDirectory,
        counters: HandleCounters,
        bring: Callable[[Spill], None],
        lose: Callable[[str], None],
    ) -> None:
        self.place = Place.MEMORY
        self.is_claimed = False
        """Whether somebody may use addresses of the host copy until the keeper is told anew what is needed when. If so, it stays."""
        self.is_used = False
        """Whether anybody has used it since then."""
        self.is_stuck = False
        """Whether it could not leave or come. It is not tried again before the keeper is told anew."""
        self.can_leave = False
        """Whether nothing but a claim or a tensor over it speaks against leaving. Set before `is_claimed` is cleared, like `drops`."""
        self.drops = False
        """Whether the device has the bytes, and its next offload copies all of them: nothing need be written."""
        self.lost: str | None = None
        """Which values are lost, and why; None while none is."""
        self._name = name
        self._range = find
        self._directory = directory
        self._counters = counters
        self._bring = bring
        self._lose = lose
        self._claim = object()
        """Another object with each use."""
        self._claim_in_file: object = None
        """The last use before the file got its content: while it is the last one, the content is the same."""
        self._file: SpillFile | None = None
        self._checksums: list[int] | None = None
        """The checksum of each chunk in the file; None while the file has nothing that can be used."""
        self._prints: torch.Tensor | None = None
        """The fingerprints of the same chunks, int64 on the CPU, where known: they tell whether the host copy has changed."""
        r = find()
        if r is not None and isinstance(r.host, Slab):
            r.host.before_use, r.host.on_claim = self._use, self.claim

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that it takes while it is there."""
        r = self._range()
        return 0 if r is None else r.host.nbytes

    @property
    def held_bytes(self) -> int:
        r = self._range()
        return 0 if r is None else r.host.held_bytes

    @property
    def disk_bytes(self) -> int:
        """Bytes of the file. It is kept while the bytes are in host memory: what does not change need not be written again."""
        file = self._file
        return 0 if file is None else file.nbytes

    @property
    def is_here(self) -> bool:
        return self.place in _HERE

    def claim(self) -> None:
        """Have the bytes in host memory, and keep them there until the keeper is told anew. Waits for the disk if it must. Any thread.

        Raises:
            HostMemoryError: there is not enough memory for them now.
        """
        self.is_claimed = True
        self._use()

    def _use(self) -> None:
        """Have the bytes in host memory, where they stay as long as a tensor over them lives, which must be there already."""
        self._claim = object()
        self.is_used = True
        if self.place not in _HERE:
            self._bring(self)

    def claim_if_here(self) -> bool:
        """Like `claim` where it need not wait. False where it would have to."""
        self._claim = object()
        self.is_claimed = self.is_used = True
        return self.place in _HERE

    # --- the keeper's thread

    @property
    def may_leave(self) -> bool:
        return self.can_leave and not self.is_claimed and not self.is_stuck

    def leave(self, goes_on: GoesOn, settle: Callable[[], object]) -> bool:
        """Free the host memory. Returns False if somebody wants the bytes, or it was stopped; they are in host memory then.

        Args:
            settle: waits until no copy of the device uses the host copy.

        Raises:
            OSError: the file cannot be written, or the kernel does not take the memory. The bytes are in host memory.
            Exception: `settle` failed.
        """
        r, claim = self._range(), self._claim
        if r is None or self.place is not Place.MEMORY or not isinstance(r.host, Slab):
            return False
        if self.is_claimed or not self.can_leave or r.host.has_views or r.has_early:
            return False
        drops = self.drops
        settle()
        try:
            if not drops and not self._is_in_file(r, claim):
                self.place = Place.WRITING
                if not self._write(r, claim, goes_on):
                    return False
            self.place = Place.LEAVING
            if self._is_used(r, r.host, claim):
                return False
            if drops:
                r.prints = self._claim_in_file = None
            release(r.host)
            self.place = Place.NOWHERE if drops else Place.DISK
        finally:
            if self.place in (Place.WRITING, Place.LEAVING):
                self.place = Place.MEMORY
        return True

    def come(self, goes_on: GoesOn) -> bool:
        """Bring the bytes back into host memory. Returns False if it was stopped. What cannot be read as it was written is lost.

        Raises:
            HostMemoryError: there is not enough memory now. The bytes are where they were.
        """
        r, before = self._range(), self.place
        if r is None or before not in (Place.DISK, Place.NOWHERE):
            return self.is_here
        assert isinstance(r.host, Slab)
        self.place = Place.COMING
        try:
            if renew(r.host, None if before is Place.NOWHERE else lambda: self._read(r, goes_on)):
                before = Place.MEMORY
        finally:
            self.place = before
        return before is Place.MEMORY

    def _is_used(self, r: SpilledRange, slab: Slab, claim: object) -> bool:
        """Whether anybody uses the host copy now, or has claimed it since this claim. Asked after `place` says that it leaves."""
        return claim is not self._claim or slab.has_views or r.has_early

    def _is_in_file(self, r: SpilledRange, claim: object) -> bool:
        if self._checksums is None:
            return False
        known = None if r.is_shown or r.prints is None else r.prints.cpu()
        if known is not None and self._prints is None and claim is not self._claim_in_file:
            # Written before its fingerprints were known. To read it here costs less than to write it again.
            self._prints = known if self._checksums_now(r) == self._checksums else None
        is_same = known is not None and self._prints is not None and torch.equal(known, self._prints)
        return is_same or claim is self._claim_in_file

    def _write(self, r: SpilledRange, claim: object, goes_on: GoesOn) -> bool:
        known = None if r.is_shown or r.prints is None else r.prints.cpu()
        self._checksums, self._prints, self._claim_in_file = None, None, claim
        if self._file is None:
            self._file = SpillFile(self._directory, f"{self._name}-{id(self):x}.spill", r.nbytes)
        found: list[_Share] = []
        try:
            is_written = self._file.write(r.host.address, goes_on, self._look(r, found))
        except BaseException:
            self._file = None
            raise
        if is_written:
            self._counters.spilled_bytes += r.nbytes
            if claim is self._claim:  # else somebody may have changed the bytes meanwhile
                self._checksums, self._prints = _summed(found, len(r.starts)), known
        return is_written

    def _read(self, r: SpilledRange, goes_on: GoesOn) -> bool:
        assert self._file is not None
        assert self._checksums is not None
        found: list[_Share] = []
        try:
            if not self._file.read(r.host.address, goes_on, self._look(r, found)):
                return False
        except OSError as error:
            if error.errno in _FOR_NOW:
                raise HostMemoryError(f"the host copy of {self._name!r} cannot be read from the disk now: {error.strerror}") from error
            self._lost(r, range(len(r.starts)), f"could not be read from {self._file.path}: {error.strerror}")
            return True
        self._counters.disk_read_bytes += r.nbytes
        now = _summed(found, len(r.starts))
        if bad := [index for index, (is_now, was) in enumerate(zip(now, self._checksums, strict=True)) if is_now != was]:
            self._lost(r, bad, f"came back from {self._file.path} with other bytes than were written there")
        return True

    def _checksums_now(self, r: SpilledRange) -> list[int]:
        """The checksums of the host copy as it is in host memory."""
        found: list[_Share] = []
        look = self._look(r, found)
        for offset in range(0, r.nbytes, BLOCK_BYTES):
            look(offset, BLOCK_BYTES)
        return _summed(found, len(r.starts))

    def _look(self, r: SpilledRange, found: list[_Share]) -> Look:
        """Compute checksums block by block, cut where chunks end. `found` gets what each adds to its chunk's."""

        def look(offset: int, nbytes: int) -> None:
            end = min(offset + nbytes, r.nbytes)
            while offset < end:
                index = bisect.bisect_right(r.starts, offset) - 1
                stop = min(end, r.starts[index] + r.used_sizes[index])
                words = tensor_at(r.host.address + offset, stop - offset, None).view(torch.int64)
                found.append((index, partial_checksum(words, (offset - r.starts[index]) // 8)))
                offset = stop

        return look

    def _lost(self, r: SpilledRange, chunks: Sequence[int], what: str) -> None:
        for index in chunks:  # NaN, as offloaded tensors read it, rather than half of the bytes
            ctypes.memset(r.host.address + r.starts[index], _NAN, r.used_sizes[index])
        numbers = ", ".join(map(str, chunks[:8])) + (", ..." if len(chunks) > 8 else "")
        self.lost = (
            f"chunk{'s' if len(chunks) > 1 else ''} {numbers} of {len(r.starts)} of the host copy of {self._name!r} {what}, and no other "
            "copy of them exists. The handle stays off the device: unregister it, load a checkpoint into the object, and register it again."
        )
        r.prints = self._prints = self._checksums = self._file = None
        self._lose(self.lost)
        logger.error("%s", self.lost)

    def require_values(self) -> None:
        """Raise if values are lost.

        Raises:
            IntegrityError: they are.
        """
        if self.lost is not None:
            raise IntegrityError(self.lost)


_Share = tuple[int, int]
"""A chunk's index, and what a part of the chunk adds to its sum."""


def _summed(shares: Sequence[_Share], count: int) -> list[int]:
    """The sum of each chunk, modulo 2**64."""
    sums = [0] * count
    for index, share in shares:
        sums[index] = (sums[index] + share) % (1 << 64)
    return sums
