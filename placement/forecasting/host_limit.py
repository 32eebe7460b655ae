"""A limit on host memory in a forecast: which host copies wait on the disk, and the bytes that the disk writes and reads.

The disk is taken to be quick enough to do its work while phases compute. Each handle's host copy counts as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from placement.core.errors import HostMemoryError
from placement.core.states import State
from placement.planning.host_need import HostShare, UseHistory, check_fits_host
from placement.planning.simulated_handles import Moved, SimulatedHandle
from placement.planning.simulation import Step
from placement.storage.disk import HostCopy, next_step


class DiskUse(NamedTuple):
    """The host memory and the disk in one phase, and in the phase transition at its beginning."""

    host_bytes: int
    """Host bytes of this rank's host copies, at their most."""
    disk_bytes: int
    """Bytes of the files of this rank."""
    written_bytes: int = 0
    read_bytes: int = 0
    waited_bytes: int = 0
    """The part of `read_bytes` that the phase transition has to wait for."""


@dataclass(slots=True)
class _Copy:
    """The host copy of one handle."""

    handle: SimulatedHandle
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
        return self.handle.host_bytes

    @property
    def is_fixed(self) -> bool:
        """Whether it never leaves host memory."""
        return self.handle.is_shared or self.handle.is_reserved

    @property
    def can_leave(self) -> bool:
        return not self.is_fixed and not self.handle.early_bytes


class HostLimit:
    """The host copies of one rank under `host_limit_bytes`. It decides as `planning.host_tier` does."""

    def __init__(self, limit_bytes: int) -> None:
        self._copies: dict[str, _Copy] = {}
        self._limit_bytes = limit_bytes
        self._uses = UseHistory()
        self._order: list[str] = []
        """The handles, soonest needed first, as of the last phase transition."""
        self._written_bytes = self._read_bytes = self._most_bytes = 0

    def admit(self, handle: SimulatedHandle) -> str:
        """Make room for a handle that is registered now. Returns why a manager refuses the registration; "" where it does not."""
        shares = {
            name: HostShare(copy.nbytes, copy.nbytes if copy.is_fixed else 0, copy.nbytes if copy.place == "memory" else 0)
            for name, copy in self._copies.items()
        }
        try:
            check_fits_host(handle.name, handle.host_bytes, handle.facts.owners, shares, self._limit_bytes)
            refused = ""
        except HostMemoryError as error:
            refused = str(error).partition("\n")[0]
        self._make_room(handle.host_bytes, ())
        self._copies[handle.name] = _Copy(handle)
        return refused

    def follow(self, step: Step) -> tuple[Step, DiskUse]:
        """Follow a phase transition that the simulation has just made.

        Returns it with the bytes that are copied only because a host copy was given up, and what it takes on host and disk.
        """
        self._written_bytes = self._read_bytes = self._most_bytes = 0
        if step.plan is None or step.is_refused:
            return step, self._use(0)
        having = [copy for copy in self._copies.values() if copy.nbytes]
        streamed = [copy for copy in having if copy.handle.name in step.plan.streamed]
        used = [copy for copy in having if copy.handle.on_device is not copy.was_on_device or copy in streamed]
        self._bring(used)
        waited_bytes = self._read_bytes
        moved = dict(step.moved)
        for copy in used:
            self._note_moves(copy, moved)
        self._arrange(step.phase.name)
        stepped = [copy for copy in streamed if copy.handle.state is State.TRAINING]
        self._bring(stepped)  # each step reads and writes it
        for copy in stepped:
            copy.is_used, copy.is_in_file = True, False
        return replace(step, moved=moved), self._use(waited_bytes)

    def _note_moves(self, copy: _Copy, moved: dict[str, Moved]) -> None:
        name, copy.was_on_device, copy.is_used = copy.handle.name, copy.handle.on_device, True
        each = moved.get(name, Moved())
        if copy.place == "nowhere" and not copy.was_on_device:
            moved[name] = replace(each, offloaded_bytes=each.offloaded_bytes + each.skipped_bytes, skipped_bytes=0)
        if copy.place == "nowhere" or each.offloaded_bytes:
            copy.is_in_file = False
        copy.place = "memory"

    def _bring(self, wanted: Sequence[_Copy]) -> None:
        """Have these in host memory, in the place of others that are needed later."""
        absent = [copy for copy in wanted if copy.place != "memory"]
        self._make_room(sum(copy.nbytes for copy in absent), wanted)
        gone = sum(copy.nbytes for copy in absent if copy.place == "nowhere")
        for copy in absent:
            self._come(copy)
        self._most_bytes = max(self._most_bytes, self._held_bytes() + gone)

    def _make_room(self, nbytes: int, wanted: Sequence[_Copy]) -> None:
        """Have others leave, those needed last first, until so many bytes fit."""
        for copy in [self._copies[name] for name in reversed(self._order)]:
            if self._held_bytes() + nbytes > self._limit_bytes and copy.place == "memory" and copy not in wanted and copy.can_leave:
                self._leave(copy)

    def _arrange(self, phase: str) -> None:
        """Decide anew what stays, and let the disk do its work."""
        known = {name: copy for name, copy in self._copies.items() if copy.nbytes and not copy.is_fixed}
        fixed_bytes = sum(copy.nbytes for copy in self._copies.values() if copy.is_fixed)
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
        if copy.handle.on_device and not copy.handle.facts.readonly:
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

    def _use(self, waited_bytes: int) -> DiskUse:
        disk_bytes = sum(copy.file_bytes for copy in self._copies.values())
        host_bytes = max(self._most_bytes, self._held_bytes())
        return DiskUse(host_bytes, disk_bytes, self._written_bytes, self._read_bytes, waited_bytes)
