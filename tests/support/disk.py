"""Host copies that a test sends to the disk, and the keeper's background work."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable

from placement import Manager
from placement.planning.host_tier import DiskTier
from placement.storage.disk import Keeper, Place, Spill
from placement.storage.pages import ChunkPool
from tests.support.threads import until


def tier_of(manager: Manager) -> DiskTier:
    tier = manager._stack.reconciler.disk_tier
    assert isinstance(tier, DiskTier)
    return tier


def is_idle(keeper: Keeper) -> bool:
    """Whether the keeper's thread has done everything that was arranged."""
    with keeper._disk:
        return not keeper._is_due


def settle(manager: Manager) -> None:
    until(lambda: is_idle(tier_of(manager)._keeper))


def spills_of(manager: Manager, name: str) -> list[Spill]:
    """The spills of a handle, each once."""
    holding = manager.handles[name].holding
    assert holding is not None
    found = {id(r.spill): r.spill for r in holding.ranges if r.spill is not None}
    assert found or not holding.ranges
    return list(found.values())


def _give_up_early(manager: Manager, names: Iterable[str]) -> None:
    """Give up the pages aside of handles, for which their host copies are needed in host memory."""
    chunk_pool = ChunkPool(manager._stack.reconciler._device)
    for handle in [manager.handles[name] for name in names]:
        if handle.prefetched_bytes and handle.holding is not None:
            handle.holding.give_up_early(0, chunk_pool)
            for spill in spills_of(manager, handle.name):
                spill.can_leave = True
    chunk_pool.release()


def send_to_disk(manager: Manager, *names: str) -> list[Spill]:
    """Have the host copies of handles leave now. They stay away until somebody needs them or the
    next phase transition is over."""
    gc.collect()  # state dicts, which keep host copies in host memory
    settle(manager)
    tier_of(manager)._keeper.pause()
    settle(manager)
    _give_up_early(manager, names)
    sent = [spill for name in names for spill in spills_of(manager, name)]
    for spill in sent:
        if spill.is_here:
            spill.is_claimed = False
            assert spill.leave(lambda: True, lambda: None)
        assert spill.place in (Place.DISK, Place.NOWHERE)
    return sent


def damage(spill: Spill, offset: int) -> None:
    assert spill._file is not None
    file = os.open(f"/proc/self/fd/{spill._file._file}", os.O_RDWR)
    os.pwrite(file, bytes([os.pread(file, 1, offset)[0] ^ 1]), offset)
    os.close(file)
