"""Prefetch: how much of what a plan wants early there is room for, and which pages aside must give up their place.

`divide` cuts the room into shares: what each handle gets at once, and what it gets when earlier offloads are saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from placement.core.journal import logger
from placement.core.states import Plan
from placement.devices.base import Device
from placement.planning.planner import Planner
from placement.registration.handle import Handle
from placement.storage.managed import ManagedStorage
from placement.storage.transfer.chunk_pool import ChunkPool
from placement.storage.transfer.prefetch import Prefetch


def _nothing(_: ChunkPool) -> None:
    """Begin nothing."""


@dataclass(frozen=True, slots=True)
class Ahead:
    """The work that a phase transition does for later ones."""

    staying: Mapping[ManagedStorage, int] = field(default_factory=dict)
    """Device bytes of storages that leave which stay aside."""
    begin: Callable[[ChunkPool], None] = _nothing
    """Called when everything is where it belongs, with the chunks that are free. Those that it leaves go back to the driver."""


NOTHING_AHEAD = Ahead()


class Prefetcher:
    """Carries out `Plan.prefetch` for one manager. Called with the manager's lock held.

    A phase transition calls `hold`, then `look_ahead` before it moves anything, and does what that returns.

    Args:
        handles: the manager's handles; read at each call.
        planner: knows the budget, and what others needed in earlier runs of a phase.
    """

    def __init__(self, device: Device, handles: Mapping[str, Handle], planner: Planner) -> None:
        self._device = device
        self._handles = handles
        self._planner = planner
        self._prefetch = Prefetch(device)
        self._has_any = False
        """Whether anything may have arrived early and be unused."""
        self._most_bytes: dict[str, int] = {}
        """The most bytes that may be early in a phase in which torch's allocator has found no memory before."""

    @property
    def discarded_bytes(self) -> int:
        """Device bytes that arrived early and were given up unused, so far."""
        return self._prefetch.discarded_bytes

    def hold(self) -> None:
        """Start no further copy until the next `begin`."""
        self._prefetch.hold()

    def look_ahead(self, name: str, plan: Plan, chunk_pool: ChunkPool) -> tuple[Ahead, int]:
        """Say what the coming phase transition does for later ones. First give up pages aside for which the plan has no use or no room.

        Args:
            name: the phase of the plan.
            chunk_pool: takes the chunks that are given up.

        Returns:
            What is done ahead, and the device bytes given up.
        """
        if not plan.prefetch and not self._has_any:
            return NOTHING_AHEAD, 0
        shares, given = self._shares(plan, self._room_bytes(name, plan)), 0
        for handle in self._handles.values():
            if handle.holding is not None and not plan.on_device(handle.name):
                keep_bytes = shares[handle.holding].first_bytes if handle.holding in shares else 0
                given += handle.holding.give_up_early(keep_bytes, chunk_pool)
        self._has_any = bool(shares) or any(handle.storage.prefetched_bytes for handle in self._handles.values())
        staying = {storage: share.first_bytes for storage, share in shares.items() if storage.on_device and share.first_bytes}
        for storage in staying:
            self._prefetch.prepare(storage)
        return Ahead(staying, partial(self._begin, name, plan)), given

    def discard(self) -> int:
        """Return the memory of all pages aside to the driver. Returns how many bytes."""
        self.hold()
        chunk_pool, given = ChunkPool(self._device), 0
        for handle in self._handles.values():
            if handle.holding is not None:
                given += handle.holding.give_up_early(0, chunk_pool)
        chunk_pool.release()
        return given

    def give_up(self, name: str) -> None:
        """Return the memory of all pages aside to the driver. The phase gets half as much from now on."""
        if given := self.discard():
            self._most_bytes[name] = given // 2
            logger.warning("out of memory in phase %s: gave up %s early bytes; it gets half as many from now on", name, f"{given:,}")

    def go_on(self, name: str, plan: Plan) -> None:
        """Start copying again after `hold`, while the phase goes on."""
        chunk_pool = ChunkPool(self._device)
        try:
            self._begin(name, plan, chunk_pool)
        finally:
            chunk_pool.release()

    def _begin(self, name: str, plan: Plan, chunk_pool: ChunkPool) -> None:
        """Bring what the plan wants early, as far as there is room beside the phase, whose plan has been carried out.

        A device that fails does not fail what has been carried out. It says so at the next phase transition or step.

        Args:
            chunk_pool: chunks that the phase transition freed, and that would go back to the driver now.
        """
        try:
            self._bring(name, plan, chunk_pool)
        except Exception as error:
            self.hold()
            logger.warning("nothing more comes early in phase %s: %s", name, str(error))  # whoever keeps the record keeps no frames

    def _bring(self, name: str, plan: Plan, chunk_pool: ChunkPool) -> None:
        if not plan.prefetch:
            return
        memory = self._device.memory()
        early_bytes = sum(handle.storage.prefetched_bytes for handle in self._handles.values())
        spare_bytes = memory.free_bytes + chunk_pool.held_bytes - self._planner.growth_bytes(name, memory)
        room_bytes = min(self._room_bytes(name, plan), early_bytes + spare_bytes)
        chunk_pool.room_bytes = max(0, room_bytes - early_bytes - chunk_pool.held_bytes)
        self._has_any = True  # state that was born in the phase before has a place only now
        self._prefetch.begin(self._shares(plan, room_bytes), chunk_pool)

    def _room_bytes(self, name: str, plan: Plan) -> int:
        room_bytes = self._planner.room_bytes(name, plan)
        return min(room_bytes, self._most_bytes.get(name, room_bytes))

    def _shares(self, plan: Plan, room_bytes: int) -> dict[ManagedStorage, Share]:
        """The storages of which bytes may be on the device early, in the plan's order, each with its share of the room."""
        wanted = dict(self._wanted(plan))
        return dict(zip(wanted, divide(room_bytes, [*wanted.values()]), strict=True))

    def _wanted(self, plan: Plan) -> Iterator[tuple[ManagedStorage, Wish]]:
        for name, most_bytes in plan.prefetch.items():
            storage = self._handles[name].holding if name in self._handles else None
            if storage is not None and storage.can_prefetch and not plan.on_device(name):
                nbytes = storage.device_bytes
                yield storage, Wish(min(most_bytes, nbytes), nbytes if storage.on_device else storage.left_bytes)


class Wish(NamedTuple):
    """The bytes of one handle that a plan wants to have early."""

    wanted_bytes: int
    held_bytes: int = 0
    """Device bytes that the handle has now and that may have to be saved before others can have their memory: those of a handle that
    leaves the device, and what an earlier offload has left."""


class Share(NamedTuple):
    """The room that one handle gets."""

    first_bytes: int
    last_bytes: int


def divide(room_bytes: int, wishes: Sequence[Wish]) -> list[Share]:
    """Divide the room. The wishes are in the order of the plan, soonest needed first; the shares are in the same order.

    In the end, the first have all that they want. At first, everybody keeps what is wanted of what it holds, and the first have what is
    left beside that.
    """
    room_bytes = max(0, room_bytes)
    kept, room = list[int](), room_bytes
    for wish in wishes:
        kept.append(min(wish.held_bytes, wish.wanted_bytes, room))
        room -= kept[-1]
    shares, last_room = list[Share](), room_bytes
    for wish, mine in zip(wishes, kept, strict=True):
        last = min(wish.wanted_bytes, last_room)
        more = min(max(0, last - mine), room)
        shares.append(Share(mine + more, last))
        room, last_room = room - more, last_room - last
    return shares
