"""The limit on host memory in a forecast: the manager's own host tier, on a disk that counts bytes and takes no time.

What a keeper's thread does while phases compute is done here at once, when it is arranged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from placement.core.errors import HostMemoryError
from placement.devices.host.disk_file import DiskFile, GoesOn, always
from placement.devices.host.slab import PAGE, Slab, round_up
from placement.forecasting.device import SizedSlab
from placement.manager import Manager
from placement.planning.host_tier import DiskTier, HostShare
from placement.registration.handle import Handle
from placement.storage.disk import Keeper, Place, Spill
from placement.storage.managed import ManagedStorage


class _File(DiskFile):
    """A file without bytes. It knows which of a slab's blocks were copied to since it took them."""

    def __init__(self, slab: SizedSlab) -> None:
        self.nbytes, self.num_blocks = round_up(slab.nbytes, PAGE), len(slab.writes)
        self._slab = slab
        self.forget()

    def forget(self) -> None:
        self._has: Sequence[int | None] = [None] * self.num_blocks

    def write(self, address: int, goes_on: GoesOn = always) -> tuple[int, bool]:
        before, self._has = self._has, [*self._slab.writes]
        return sum(self.block(index)[1] for index, now in enumerate(self._has) if now != before[index]), True

    def read(self, address: int, goes_on: GoesOn = always) -> list[int]:
        return []


class _Spill(Spill):
    """A host copy without bytes."""

    def _release(self, slab: Slab) -> None:
        slab.is_released = True

    def _renew(self, slab: Slab, fill: Callable[[], bool] | None) -> bool:
        slab.is_released = False
        return fill is None or fill()

    def _new_file(self, slab: Slab) -> DiskFile:
        assert isinstance(slab, SizedSlab)
        return _File(slab)


class _Keeper(Keeper):
    """A keeper whose work is done when `arrange` returns."""

    waited_bytes: int  # see `CountedTier.waited_bytes`
    look: Callable[[], object]  # called whenever something has left or come

    def _work(self) -> None:
        """Nothing is left for a thread."""

    def _warn(self, what: str, text: str) -> None:
        """Nothing: the forecast has a note of it."""

    def arrange(self, order: Sequence[Spill], fixed_bytes: int, wait: Callable[[], object]) -> None:
        super().arrange(order, fixed_bytes, lambda: None)
        with self._in_front(order):
            while self._step():
                self.look()

    def bring(self, *spills: Spill) -> None:
        self.waited_bytes += sum(spill.nbytes for spill in spills if spill.place is Place.DISK)
        super().bring(*spills)
        self.look()


class CountedTier(DiskTier):
    """The host tier of a manager on a `SizesDevice`, in the place of the manager's own. It refuses no registration. `part_of`: returns this
    rank's part of a host copy's bytes, by the handle's name; None where no other rank shares the host copy."""

    keeper_type, spill_type = _Keeper, _Spill
    _keeper: _Keeper

    def __init__(self, manager: Manager, limit_bytes: int, part_of: Callable[[str, int], int | None]) -> None:
        stack = manager._stack
        super().__init__(manager.device, stack.registry.handles, stack.reconciler.prefetcher.discard, limit_bytes, "", gives_back=False)
        stack.reconciler.disk_tier, stack.registry.admit = self, self.admit
        self._part_of = part_of
        self._keeper.look = self.most_bytes
        self.refused: dict[str, str] = {}  # why a manager refuses registrations, by the handles' names
        self.begin()

    def begin(self) -> None:
        self._most_bytes = self._keeper.waited_bytes = 0

    @property
    def waited_bytes(self) -> int:
        """Bytes that somebody has waited for since `begin`, because they were on the disk."""
        return self._keeper.waited_bytes

    def most_bytes(self) -> int:
        """The most bytes of host copies that were in host memory since `begin`."""
        self._most_bytes = max(self._most_bytes, sum(self.share_of(handle).held_bytes for handle in self._handles.values()))
        return self._most_bytes

    def admit(self, handle: Handle, needed: Callable[[], int]) -> None:
        """Make room as a manager does. Where that refuses the registration, note it and go on."""
        nbytes = needed()
        part = self._part_of(handle.name, nbytes)
        try:
            super().admit(handle, lambda: nbytes if part is None else part)
        except HostMemoryError as error:
            self.refused.setdefault(handle.name, str(error).partition("\n")[0])

    def share_of(self, handle: Handle) -> HostShare:
        found = super().share_of(handle)
        part = self._part_of(handle.name, found.total_bytes)
        return found if part is None else HostShare(part, part, part)

    def _spills_of(self, handle: Handle, holding: ManagedStorage) -> tuple[list[Spill], int]:
        part = self._part_of(handle.name, holding.host_bytes)
        return super()._spills_of(handle, holding) if part is None else ([], part)
