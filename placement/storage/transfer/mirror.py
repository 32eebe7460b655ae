"""Bring the host copy up to date while the bytes stay on the device, for a reader of the host copy (an asynchronous checkpoint)."""

from __future__ import annotations

import torch

from placement.storage.managed import ManagedStorage
from placement.storage.range import Range
from placement.storage.transfer.fingerprint import changed_chunks


def mirror(holding: ManagedStorage) -> None:
    """Copy the chunks that changed on the device into the host copy, as an offload would. Nothing moves and no memory is given up.

    It takes no memory, and the next offload need not copy the same chunks again. Gradients are left out. So are storages that are new since
    the last offload, because they have no place in the host copy yet.
    """
    if not holding.on_device or holding.readonly:  # the host copy of a readonly object is always right
        return
    holding.host_read_locks.wait()
    holding.device.sync()
    prints: list[tuple[Range, torch.Tensor]] = []
    for r in holding.ranges:
        if r.transient or r.claims is not None:
            continue
        _ = r.slab  # before the fingerprints are read: they are unknown where the slab has come back without its bytes
        host_prints = None if r.prints is None else r.prints.cpu()
        device_prints = holding.storages.fingerprint(r, 0, len(r.chunk_sizes)).cpu()
        changed = [index for index, is_changed in enumerate(changed_chunks(host_prints, device_prints)) if is_changed]
        if changed:
            holding.own_host_copy(r)
            r.pages.save(changed)
        prints.append((r, device_prints))
    holding.device.wait(holding.device.mark("to_host"))
    for r, device_prints in prints:
        r.pages.note_changed(range(len(r.chunk_sizes)))  # from here on, as far as anybody knows
        r.prints = device_prints
