"""A limit on host memory in a forecast: which host copies wait on the disk, and the bytes that the disk writes and reads.

A run has no bytes that a disk could take. So the disk is followed in numbers beside it, with the decisions of the real one
(`planning.host_tier.check_fits_host`, `storage.disk.next_step`), and is taken to be quick enough to do its work while phases compute.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from placement.core.errors import HostMemoryError
from placement.planning.host_tier import HostShare, UseHistory, check_fits_host
from placement.storage.disk import HostCopy, next_step


class DiskUse(NamedTuple):
    """The host memory and the disk in one phase, and in the phase transition at its beginning."""

    host_bytes: int
    """Host bytes of this rank's host copies, at their most."""
    disk_bytes: int = 0
    """Bytes of the files of this rank."""
    disk_written_bytes: int = 0
    disk_read_bytes: int = 0
    disk_waited_bytes: int = 0
    """The part of `disk_read_bytes` that the phase transition has to wait for."""


class HostUse(NamedTuple):
    """A handle and its host copy, as a phase begins."""

    nbytes: int
    is_readonly: bool
    is_fixed: bool
    """Whether the host copy never leaves host memory: processes share it, or it is reserved for state that is still to be created."""
    on_device: bool = False
    has_early: bool = False
    is_streamed: bool = False
    """Whether the handle is published or stepped from its host copy."""
    is_stepped: bool = False
    offloaded_bytes: int = 0
    skipped_bytes: int = 0


@dataclass(slots=True)
class _Copy:
    """The host copy of one handle."""

    use: HostUse
    place: Literal["memory", "disk", "nowhere"] = "memory"
    """"nowhere": the device has the bytes, and the next offload copies all of them."""
    file_bytes: int = 0
    is_in_file: bool = False
    """Whether the file has the bytes of the host copy."""
    was_on_device: bool = False
    is_used: bool = True
    """Whether anybody has used it since the last phase transition."""

    @property
    def nbytes(self) -> int:
        return self.use.nbytes

    @property
    def can_leave(self) -> bool:
        return not self.use.is_fixed and not self.use.has_early


class HostLimit:
    """The host copies of one rank under `host_limit_bytes`. It decides as `planning.host_tier` does."""

    def __init__(self, limit_bytes: int) -> None:
        self._copies: dict[str, _Copy] = {}
        self._limit_bytes = limit_bytes
        self._uses = UseHistory()
        self._order: list[str] = []
        """The handles, soonest needed first, as of the last phase transition."""
        self._written_bytes = self._read_bytes = self._most_bytes = 0

    def admit(self, name: str, use: HostUse, owners: Sequence[str]) -> str:
        """Make room for a handle that is registered now. Returns why a manager refuses the registration; "" where it does not."""
        shares = {
            name: HostShare(copy.nbytes, copy.nbytes if copy.use.is_fixed else 0, copy.nbytes if copy.place == "memory" else 0)
            for name, copy in self._copies.items()
        }
        try:
            check_fits_host(name, use.nbytes, owners, shares, self._limit_bytes)
            refused = ""
        except HostMemoryError as error:
            refused = str(error).partition("\n")[0]
        self._make_room(use.nbytes, ())
        self._copies[name] = _Copy(use)
        return refused

    def follow(self, phase: str, uses: Mapping[str, HostUse]) -> tuple[int, DiskUse]:
        """Follow a phase transition.

        Returns the bytes that are copied to the host only because a host copy was given up, and what it takes on host and disk.
        """
        self._written_bytes = self._read_bytes = self._most_bytes = 0
        for name, use in uses.items():
            self._copies[name].use = use
        having = [copy for copy in self._copies.values() if copy.nbytes]
        used = [copy for copy in having if copy.use.on_device is not copy.was_on_device or copy.use.is_streamed]
        self._bring(used)
        waited_bytes, again_bytes = self._read_bytes, 0
        for copy in used:
            copy.was_on_device, copy.is_used = copy.use.on_device, True
            again_bytes += copy.use.skipped_bytes if copy.place == "nowhere" and not copy.was_on_device else 0
            if copy.place == "nowhere" or copy.use.offloaded_bytes:
                copy.is_in_file = False
            copy.place = "memory"
        self._arrange(phase)
        stepped = [copy for copy in used if copy.use.is_stepped]
        self._bring(stepped)  # each step reads and writes it
        for copy in stepped:
            copy.is_used, copy.is_in_file = True, False
        return again_bytes, self.stay(waited_bytes)

    def stay(self, waited_bytes: int = 0) -> DiskUse:
        """The use of host and disk, as of the last phase transition that was followed."""
        disk_bytes = sum(copy.file_bytes for copy in self._copies.values())
        host_bytes = max(self._most_bytes, self._held_bytes())
        return DiskUse(host_bytes, disk_bytes, self._written_bytes, self._read_bytes, waited_bytes)

    def _bring(self, wanted: Collection[_Copy]) -> None:
        """Have these in host memory, in the place of others that are needed later."""
        absent = [copy for copy in wanted if copy.place != "memory"]
        self._make_room(sum(copy.nbytes for copy in absent), wanted)
        gone = sum(copy.nbytes for copy in absent if copy.place == "nowhere")
        for copy in absent:
            self._come(copy)
        self._most_bytes = max(self._most_bytes, self._held_bytes() + gone)

    def _make_room(self, nbytes: int, wanted: Collection[_Copy]) -> None:
        """Have others leave, those needed last first, until so many bytes fit."""
        for copy in [self._copies[name] for name in reversed(self._order)]:
            if self._held_bytes() + nbytes > self._limit_bytes and copy.place == "memory" and copy not in wanted and copy.can_leave:
                self._leave(copy)

    def _arrange(self, phase: str) -> None:
        """Decide anew what stays, and let the disk do its work."""
        known = {name: copy for name, copy in self._copies.items() if copy.nbytes and not copy.use.is_fixed}
        fixed_bytes = sum(copy.nbytes for copy in self._copies.values() if copy.use.is_fixed)
        self._uses.note(phase, frozenset(name for name, copy in known.items() if copy.is_used))
        self._order = self._uses.order(known)
        order = [known[name] for name in self._order]
        for copy in order:
            copy.is_used = False
        while True:
            copies = [HostCopy(copy.nbytes, copy.place == "memory", copy.can_leave) for copy in order]
            position = next_step(copies, fixed_bytes, self._limit_bytes)
            if position is None:
                return
            copy = order[position]
            if copy.place == "memory":
                self._leave(copy)
            else:
                self._come(copy)
                copy.place = "memory"

    def _leave(self, copy: _Copy) -> None:
        if copy.use.on_device and not copy.use.is_readonly:
            copy.place, copy.is_in_file = "nowhere", False
            return
        if not copy.is_in_file:
            self._written_bytes += copy.nbytes
            copy.file_bytes, copy.is_in_file = copy.nbytes, True
        copy.place = "disk"

    def _come(self, copy: _Copy) -> None:
        if copy.place == "disk":
            self._read_bytes += copy.nbytes
            copy.place = "memory"
        self._most_bytes = max(self._most_bytes, self._held_bytes())

    def _held_bytes(self) -> int:
        return sum(copy.nbytes for copy in self._copies.values() if copy.place == "memory")
