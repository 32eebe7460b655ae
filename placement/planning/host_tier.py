"""The limit on host memory of one manager: what is needed when, told to the keeper after each phase transition."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping

from placement.core.errors import HostMemoryError
from placement.core.settings import Settings
from placement.core.states import Plan
from placement.devices.base import Device
from placement.devices.host.disk_file import check_directory
from placement.devices.host.part import SlabPart
from placement.devices.host.slab import Slab
from placement.devices.memory import HostSlab
from placement.planning.budget import mib
from placement.planning.host_need import HostShare, UseHistory, check_fits_host, host_table
from placement.registration.handle import Handle
from placement.storage.disk import Keeper, Spill
from placement.storage.managed import ManagedStorage
from placement.storage.range import Range


class HostTier:
    """All host copies stay in host memory: there is no limit. Called with the manager's lock held."""

    @property
    def waited_seconds(self) -> float:
        """Total time that was spent waiting for the disk."""
        return 0.0

    def admit(self, handle: Handle, nbytes: int) -> None:
        """Make room for host memory that a registration is about to take.

        Raises:
            HostMemoryError: it cannot fit within the limit; the message has a table of who holds what.
        """

    def prepare(self, plan: Plan) -> None:
        """Have in host memory what a phase transition to this plan uses there. It stays until `arrange`."""

    def arrange(self, phase: str) -> None:
        """Decide anew what stays in host memory, now that a phase transition is over. What moves then moves in the background.

        Args:
            phase: the phase that is open now.
        """

    def close(self) -> None:
        """Stop the background work. Every handle has been forgotten. Idempotent."""


class DiskTier(HostTier):
    """Host copies hold at most `limit_bytes` of host memory; those needed last are in a folder.

    Args:
        handles: the manager's handles; read at each call.
        give_up_early: gives up all chunks that arrived early. The host copies that have some stay in host memory.
        directory: where the files are.

    Raises:
        ValueError: the folder cannot be used.
    """

    def __init__(
        self, device: Device, handles: Mapping[str, Handle], give_up_early: Callable[[], None], limit_bytes: int, directory: str
    ) -> None:
        self._device = device
        self._handles = handles
        self._give_up_early = give_up_early
        self._limit_bytes = limit_bytes
        check_directory(directory)
        self._directory = directory
        self._keeper = Keeper(limit_bytes)
        self._uses = UseHistory()
        self._spills: weakref.WeakKeyDictionary[Slab, Spill] = weakref.WeakKeyDictionary()

    @property
    def waited_seconds(self) -> float:
        return self._keeper.waited_seconds

    def admit(self, handle: Handle, nbytes: int) -> None:
        shares = {name: _share(holding) for name, holding in _holdings([*self._handles.values(), handle]).items()}
        check_fits_host(handle.name, nbytes, [owner.name for owner in handle.owners], shares, self._limit_bytes)
        held = sum(share.held_bytes for share in shares.values())
        if held + nbytes <= self._limit_bytes:
            return
        lacking = nbytes + held - self._keeper.held_bytes  # with what this registration has taken already
        self._keeper.hold()  # else it would read ahead into the room that it makes
        if self._keeper.make_room(lacking):
            return
        if any(r.has_early for holding in _holdings(self._handles.values()).values() for r in holding.ranges):
            self._give_up_early()
            self._arrange()
            self._keeper.hold()
            if self._keeper.make_room(lacking):
                return
        raise HostMemoryError(
            f"{handle.name!r} needs {mib(nbytes)} more of host memory, host_limit_bytes is {mib(self._limit_bytes)}, and not enough of "
            f"the other host copies could leave for {self._directory}.\n{host_table(handle.name, nbytes, shares)}"
        )

    def prepare(self, plan: Plan) -> None:
        self._keeper.hold()
        absent = []
        for name, holding in _holdings(self._handles.values()).items():
            is_moved = not holding.is_consistent or name in plan.streamed or holding.on_device is not plan.on_device(name)
            if holding.lost is None and is_moved:
                absent += [spill for r in holding.ranges if (spill := r.spill) is not None and not spill.claim_if_here()]
        if absent:
            self._keeper.bring(*absent)

    def arrange(self, phase: str) -> None:
        holdings = _holdings(self._handles.values())
        used = {name for name, holding in holdings.items() if any(r.spill is None or r.spill.is_used for r in holding.ranges)}
        self._uses.note(phase, frozenset(used))
        self._arrange()

    def _arrange(self) -> None:
        order: list[Spill] = []
        fixed_bytes = 0
        holdings = _holdings(self._handles.values())
        for name in self._uses.order(holdings):
            spills, other_bytes = self._spills_of(self._handles[name], holdings[name])
            order += spills
            fixed_bytes += other_bytes
        device, marks = self._device, [self._device.mark("to_device"), self._device.mark("to_host")]
        self._keeper.arrange(order, fixed_bytes, lambda: [device.wait(mark) for mark in marks])  # without `self`, which must die

    def _spills_of(self, handle: Handle, holding: ManagedStorage) -> tuple[list[Spill], int]:
        """The spills of a handle's slabs, with what is true of them now, and the host memory of what never leaves."""
        ranges: dict[HostSlab, list[Range]] = {}
        for r in holding.ranges:
            ranges.setdefault(_whole(r.host), []).append(r)
        aside, fixed_bytes, spills = holding.storages.reserved, 0, []
        if aside is not None and _whole(aside) not in ranges:
            fixed_bytes += aside.held_bytes
        for slab, having in ranges.items():
            if not isinstance(slab, Slab) or any(r.is_shared for r in having):
                fixed_bytes += slab.held_bytes
                continue
            spill = self._spills.get(slab)
            if spill is None:
                spill = self._spills[slab] = Spill(slab, holding, handle.name, self._directory, handle.counters, self._keeper)
            for r in having:
                r.spill = spill
            is_sound = holding.is_consistent and holding.lost is None and all(r.claims is None for r in having)
            spill.drops = holding.on_device and (not holding.readonly or all(r.transient for r in having))
            spill.can_leave = is_sound and not slab.has_views and not any(r.has_early for r in having)
            spills.append(spill)
        return spills, fixed_bytes

    def close(self) -> None:
        self._keeper.stop()


def host_tier_for(settings: Settings, device: Device, handles: Mapping[str, Handle], give_up_early: Callable[[], None]) -> HostTier:
    """The limit that the settings ask for. `give_up_early`: see `DiskTier`."""
    if settings.host_limit_bytes is None or settings.disk_directory is None:
        return HostTier()
    return DiskTier(device, handles, give_up_early, settings.host_limit_bytes, settings.disk_directory)


def _holdings(handles: Iterable[Handle]) -> dict[str, ManagedStorage]:
    return {handle.name: handle.holding for handle in handles if handle.holding is not None}


def _whole(slab: HostSlab) -> HostSlab:
    """The slab that leaves host memory where this one is to leave."""
    while isinstance(slab, SlabPart):
        slab = slab.whole
    return slab


def _share(holding: ManagedStorage) -> HostShare:
    ranges, reserved = holding.ranges, holding.storages.reserved_bytes
    shared = sum(r.host.held_bytes for r in ranges if r.is_shared)
    own = sum(r.host.nbytes for r in ranges if not r.is_shared)
    return HostShare(own + shared + reserved, shared + reserved, holding.host_bytes)
