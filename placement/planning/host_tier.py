"""The limit on host memory of one manager: what is needed when, told to the keeper after each phase
transition.

`UseHistory` knows which host copies are needed next.
`check_fits_host` says whether the host copies that are needed at once fit the limit.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from placement.core.errors import HostMemoryError
from placement.core.settings import Settings
from placement.core.snapshot import mib
from placement.core.states import Plan
from placement.devices.base import Device
from placement.devices.host.disk_file import check_directory
from placement.devices.host.slab import Slab, SlabPart
from placement.devices.memory import HostSlab
from placement.planning.planner import MOST_PHASES, PhaseHistory, bytes_table
from placement.registration.handle import Handle
from placement.storage.disk import Keeper, Spill
from placement.storage.managed import ManagedStorage
from placement.storage.range import Range

_NO_LIMIT = 1 << 62


class DiskTier:
    """Host copies hold at most `limit_bytes` of host memory; those needed last are in files of a
    directory (None: there are none). Called with the manager's lock held.

    With `gives_back`, those of handles that are on the device take none as long as no coming phase
    transition is expected to use them. `give_up_early` gives up all chunks that arrived early. The
    host copies that have some stay in host memory.
    """

    keeper_type: type[Keeper] = Keeper
    spill_type: type[Spill] = Spill

    def __init__(
        self,
        device: Device,
        handles: Mapping[str, Handle],
        give_up_early: Callable[[], object],
        limit_bytes: int,
        directory: str | None,
        *,
        gives_back: bool,
    ) -> None:
        self._device = device
        self._handles = handles
        self._give_up_early = give_up_early
        self._limit_bytes = limit_bytes
        self._directory = directory
        self._gives_back = gives_back
        self._keeper = self.keeper_type(limit_bytes)
        self._uses = UseHistory()
        self._spills: weakref.WeakKeyDictionary[Slab, Spill] = weakref.WeakKeyDictionary()

    @property
    def waited_seconds(self) -> float:
        return self._keeper.waited_seconds

    def admit(self, handle: Handle, needed: Callable[[], int]) -> None:
        """Make room for host memory that a registration is about to take. `needed` returns the
        bytes; it may look at every tensor.

        Raises HostMemoryError: it cannot fit within the limit; the message has a table of who holds
        what.
        """
        nbytes = needed()
        shares = {each.name: self.share_of(each) for each in (*self._handles.values(), handle)}
        check_fits_host(
            handle.name, nbytes, [owner.name for owner in handle.owners], shares, self._limit_bytes
        )
        held = sum(share.held_bytes for share in shares.values())
        if held + nbytes <= self._limit_bytes:
            return
        # with what this registration has taken already
        lacking = nbytes + held - self._keeper.held_bytes
        for gives_up_early in (False, True):
            if gives_up_early:
                self._give_up_early()
                self._arrange()
            self._keeper.pause()  # else it would read ahead into the room that it makes
            if self._keeper.make_room(lacking):
                return
        raise HostMemoryError(
            f"{handle.name!r} needs {mib(nbytes)} more of host memory, host_limit_bytes is "
            f"{mib(self._limit_bytes)}, and not enough of the other host copies could leave for "
            f"{self._directory}.\n"
            f"{host_table(handle.name, nbytes, shares)}"
        )

    def share_of(self, handle: Handle) -> HostShare:
        """The host memory of a handle, wherever its host copy is now."""
        storage = handle.storage
        if not isinstance(storage, ManagedStorage):
            return HostShare(storage.mirror_bytes, storage.mirror_bytes, storage.mirror_bytes)
        ranges, aside = storage.ranges, storage.scanner.reserved
        # also while it is given back
        reserved = max(storage.scanner.reserved_bytes, 0 if aside is None else aside.nbytes)
        shared = sum(r.host.held_bytes for r in ranges if r.is_shared)
        own = sum(r.host.nbytes for r in ranges if not r.is_shared)
        return HostShare(own + shared + reserved, shared + reserved, storage.host_bytes)

    def prepare(self, plan: Plan) -> None:
        """Have in host memory what a phase transition to this plan uses there. It stays until
        `arrange`."""
        self._keeper.pause()
        absent = []
        for name, holding in _holdings(self._handles.values()).items():
            is_moved = (
                not holding.is_consistent
                or name in plan.streamed
                or holding.on_device is not plan.on_device(name)
            )
            if holding.lost is None and is_moved:
                absent += [
                    spill
                    for r in holding.ranges
                    if (spill := r.spill) is not None and not spill.claim_if_here()
                ]
        if absent:
            self._keeper.bring(*absent)

    def arrange(self, phase: str) -> None:
        """Decide anew what stays in host memory, after a phase transition to `phase`. What moves
        then moves in the background."""
        holdings = _holdings(self._handles.values())
        used = {
            name
            for name, holding in holdings.items()
            if any(r.spill is None or r.spill.is_used for r in holding.ranges)
        }
        self._uses.note(phase, frozenset(used))
        self._arrange()

    def _arrange(self) -> None:
        order: list[Spill] = []
        # the engines take it again and again
        fixed_bytes = sum(handle.storage.mirror_bytes for handle in self._handles.values())
        holdings = _holdings(self._handles.values())
        for name in self._uses.order(holdings):
            spills, other_bytes = self._spills_of(self._handles[name], holdings[name])
            for spill in spills:
                spill.is_idle = spill.drops and self._gives_back and self._uses.is_idle(name)
            order += spills
            fixed_bytes += other_bytes
        device, marks = self._device, [self._device.mark("to_device"), self._device.mark("to_host")]
        # without `self`, which must die
        self._keeper.arrange(order, fixed_bytes, lambda: [device.wait(mark) for mark in marks])

    def _spills_of(self, handle: Handle, holding: ManagedStorage) -> tuple[list[Spill], int]:
        """The spills of a handle's slabs, with what is true of them now, and the host memory of
        what never leaves."""
        ranges: dict[HostSlab, list[Range]] = {}
        for r in holding.ranges:
            ranges.setdefault(_whole(r.host), []).append(r)
        aside, fixed_bytes, spills = holding.scanner.reserved, 0, []
        aside = None if aside is None else _whole(aside)
        if aside is not None and aside not in ranges:
            if self._gives_back and isinstance(aside, Slab):
                ranges[aside] = []  # nothing is in it yet
            else:
                fixed_bytes += aside.held_bytes
        for slab, having in ranges.items():
            if not isinstance(slab, Slab):
                fixed_bytes += slab.held_bytes
                continue
            spill = self._spills.get(slab)
            if spill is None:
                spill = self._spills[slab] = self.spill_type(
                    slab, holding, handle.name, self._directory, handle.counters, self._keeper
                )
            for r in having:
                r.spill = spill
            is_sound = (
                holding.is_consistent
                and holding.lost is None
                and all(r.moving_in is None for r in having)
            )
            spill.drops = holding.on_device and (
                not holding.readonly or all(r.transient for r in having)
            )
            spill.can_leave = (
                is_sound
                and not slab.has_views
                and not any(r.has_early for r in having)
                and (bool(having) or spill.drops)
            )
            spills.append(spill)
        return spills, fixed_bytes

    def close(self) -> None:
        """Stop the background work. Every handle has been forgotten. Idempotent."""
        self._keeper.stop()


def disk_tier_for(
    settings: Settings,
    device: Device,
    handles: Mapping[str, Handle],
    give_up_early: Callable[[], object],
) -> DiskTier | None:
    """The limit that the settings ask for; None: all host copies stay in host memory.
    `give_up_early`: see `DiskTier`.
    Raises ValueError: the folder for files cannot be used."""
    gives_back = settings.host_copies == "while_needed"
    if settings.host_limit_bytes is None and not gives_back:
        return None
    if settings.disk_directory is not None:
        check_directory(settings.disk_directory)
    limit_bytes = _NO_LIMIT if settings.host_limit_bytes is None else settings.host_limit_bytes
    return DiskTier(
        device, handles, give_up_early, limit_bytes, settings.disk_directory, gives_back=gives_back
    )


def _holdings(handles: Iterable[Handle]) -> dict[str, ManagedStorage]:
    return {handle.name: handle.holding for handle in handles if handle.holding is not None}


def _whole(slab: HostSlab) -> HostSlab:
    """The slab that leaves host memory where this one is to leave."""
    while isinstance(slab, SlabPart):
        slab = slab.whole
    return slab


class UseHistory:
    """The handles whose host copies each recent phase transition has used (read or written), to
    tell which is used when."""

    def __init__(self) -> None:
        self._phases = PhaseHistory()
        self._uses: deque[frozenset[str]] = deque(maxlen=MOST_PHASES)
        """For each phase in the history, what was used since the one before it."""
        self._upcoming: tuple[frozenset[str], ...] = ()
        """The handles that coming phase transitions are expected to use, nearest first, up to the
        next one into the open phase."""

    def note(self, phase: str, used: frozenset[str]) -> None:
        """Note a phase transition. `phase`: the phase that is open after it. `idle` is one, too:
        what leaves then needs its host copy.
        `used`: the handles whose host copies were used since the last one was noted."""
        followed = len(self._phases.upcoming(phase))
        self._upcoming = (*list(self._uses)[len(self._uses) - followed :], used)
        self._phases.began(phase)
        self._uses.append(used)

    def is_idle(self, name: str) -> bool:
        """Whether a whole cycle of phase transitions is expected to leave a handle's host copy
        alone. False until a cycle has been seen."""
        return len(self._upcoming) > 1 and not any(name in used for used in self._upcoming)

    def order(self, names: Iterable[str]) -> list[str]:
        """The handles, soonest needed first.

        A handle on the device needs its host copy when it is offloaded, and an offloaded one when
        it is loaded: each is one of the uses. Handles that no coming phase transition is known to
        use come last, the least recently used at the very end.
        """
        first = {
            name: distance
            for distance, used in reversed([*enumerate(self._upcoming)])
            for name in used
        }
        last = {name: number for number, used in enumerate(self._uses) for name in used}
        return sorted(
            names, key=lambda name: (first.get(name, len(self._upcoming)), -last.get(name, -1))
        )


class HostShare(NamedTuple):
    """The host memory of one handle."""

    # bytes of its host copy, wherever it is now, and what is reserved for state that is not created
    # yet
    total_bytes: int
    # the part that cannot leave host memory: reserved, shared with other processes, an engine's
    # mirror
    fixed_bytes: int
    held_bytes: int  # the part that is in host memory now


def check_fits_host(
    name: str, nbytes: int, owners: Sequence[str], shares: Mapping[str, HostShare], limit_bytes: int
) -> None:
    """Refuse a registration of which is certain that it cannot be offloaded within the limit.

    What is needed at once is at least the handle itself and the modules that it steps (`owners`),
    beside what cannot leave. `nbytes` is the host memory that it takes now, beside what it has in
    `shares`. Raises HostMemoryError, with a table of who holds what.
    """
    at_once = {name, *owners}
    needed = nbytes + sum(
        share.total_bytes if each in at_once else share.fixed_bytes
        for each, share in shares.items()
    )
    if needed > limit_bytes:
        together = f" together with {', '.join(owners)}, which it steps," if owners else ""
        raise HostMemoryError(
            f"{name!r}{together} needs {mib(needed)} of host memory at once, beside what cannot "
            f"leave it; host_limit_bytes is {mib(limit_bytes)}.\n"
            f"{host_table(name, nbytes, shares)}\n"
            "Raise host_limit_bytes, or shard the object over more ranks."
        )


def host_table(name: str, nbytes: int, shares: Mapping[str, HostShare]) -> str:
    known = shares.get(name, HostShare(0, 0, 0))
    rows = {
        **shares,
        name: HostShare(known.total_bytes + nbytes, known.fixed_bytes, known.held_bytes),
    }
    return bytes_table(
        ("in host memory", "host copy"),
        ((each, share.held_bytes, share.total_bytes) for each, share in rows.items()),
    )
