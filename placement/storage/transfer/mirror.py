"""Bringing the host copy up to date while the bytes stay on the device, for whoever reads it there (an asynchronous checkpoint)."""

from __future__ import annotations

import torch

from placement.storage.managed import ManagedStorage
from placement.storage.range import Range


def mirror(holding: ManagedStorage) -> None:
    """Copy what changed on the device into the host copy, as an offload would; nothing moves and nothing is given up.

    It takes no memory, and what it copied the next offload need not copy again. Gradients are left out, and so is what was born since
    the last offload: that has no place in the host copy yet.
    """
    if not holding.on_device or holding.readonly:  # the host copy of a readonly object is always right
        return
    holding.host_read_locks.wait()
    holding.device.sync()
    prints: list[tuple[Range, torch.Tensor]] = []
    for r in holding.ranges:
        if r.transient or r.claims is not None:
            continue
        known = None if r.prints is None else r.prints.cpu()
        now = holding.storages.fingerprint(r, 0, len(r.chunk_sizes)).cpu()
        changed = [index for index in range(len(now)) if known is None or int(now[index]) != int(known[index])]
        if changed:
            r.prints = None  # from here on the slab is neither the old content nor the new
            holding.device.copy(r.copies(changed), "to_host")
        prints.append((r, now))
    holding.device.wait(holding.device.mark("to_host"))
    for r, now in prints:
        r.prints = now
