"""A streamed step, seen from the storage: what is half done in the middle of it, and how every byte gets home.

While the steps of an optimizer stream its state, the host copy is authoritative, except for the chunks in `Range.newer`: from before
their parameters are stepped until their bytes are on the host again, the device has the newer bytes. State that a step has created is
in torch's own memory until it is taken in. `settle` brings both home. So a step that an exception or an interrupt cut short leaves
parameters that are stepped, with their new state, and others that are not, with their old state: as an ordinary step does. The same holds
for the elements of a parameter that is stepped in slices; its counter counts the step once all are.
"""

from __future__ import annotations

import logging
from collections.abc import Set
from typing import TYPE_CHECKING

from placement.core.errors import HostMemoryError
from placement.core.torch_modes import without_modes
from placement.storage.range import Range
from placement.storage.transfer.chunk_pool import ChunkPool

if TYPE_CHECKING:
    from placement.storage.held import HeldStorage

_logger = logging.getLogger("placement")


def settle(holding: HeldStorage, chunk_pool: ChunkPool) -> None:
    """End a streamed step, if one has begun, wherever it stopped: all state is on the host, and poison behind every address. Idempotent.

    Raises:
        RuntimeError: the device failed. What the host does not have yet is still on the device, and the call can be repeated.
    """
    if not holding.is_stepping:
        return
    device, storages = holding.device, holding.storages
    for r in holding.ranges:
        if r.early is not None:
            r.early.forget(r.chunks.values())
            r.early.discard_all(chunk_pool)
    if any(r.chunks for r in holding.ranges):
        device.sync()  # kernels of the step on other streams, and copies to the device
        stepped = [r for r in holding.ranges if r.newer]
        for r in stepped:
            r.note_written()
            device.copy(r.copies(sorted(r.newer)), "to_host")
        device.sync()
        for r in stepped:
            r.newer = frozenset()
        for r in holding.ranges:
            storages.vacate(r, chunk_pool)
    for r in holding.ranges:
        r.move_in()
    with without_modes():
        fresh = adopt_created(holding)
        if fresh is not None:
            device.sync()
            storages.keep((*holding.ranges, fresh))
            fresh.move_in()
        storages.rescan()
        storages.writes.note()  # the step has written the state
    holding.is_stepping = False


def adopt_created(holding: HeldStorage, besides: Set[int] = frozenset()) -> Range | None:
    """Start copying state that a step has created in torch's memory to the host. Returns the range into which it has still to move.

    None where there is none, or where host memory lacks: then the state stays in torch's memory, and the next step tries again.

    Args:
        besides: storages (`_cdata`) to leave out: those of which copies are under way, and those that the step has still to use.
    """
    try:
        return holding.storages.adopt_lasting(besides, in_parts=True)
    except HostMemoryError as error:
        _logger.warning("%s: new optimizer state stays on the device until host memory is free: %s", holding.name, str(error))
        return None
