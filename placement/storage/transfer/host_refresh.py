"""The host copy of an object that stays on the device, brought up to date for a reader."""

from __future__ import annotations

import torch

from placement.storage.fingerprints import differing
from placement.storage.managed import ManagedStorage
from placement.storage.range import Range


def refresh_host_copy(storage: ManagedStorage) -> None:
    """Copy the chunks that changed on the device to the host copy, as an offload would.

    Nothing moves and no memory is given up, for a reader of the host copy (an asynchronous
    checkpoint). The next offload need not copy the same chunks again. Gradients are left out, and
    storages that are new since the last offload, because they have no place in the host copy yet.
    A range that changed is shared with other ranks no longer. The manager's lock is held.

    Raises:
        HostMemoryError: there is no memory for a host copy of this rank's own. Nothing has changed
            in that range.
    """
    # the host copy of a readonly object is always right
    if not storage.on_device or storage.readonly:
        return
    storage.wait_for_host_readers()
    storage.device.sync()
    prints: list[tuple[Range, torch.Tensor]] = []
    for r in storage.ranges:
        if r.transient or r.moving_in is not None:
            continue
        host_prints = None if r.pages.prints is None else r.pages.prints.cpu()
        device_prints = r.fingerprint(0, len(r.chunk_sizes)).cpu()
        changed = differing(host_prints, device_prints)
        if changed:
            storage.make_host_copy_own(r, changed)
            r.pages.save(changed)
        prints.append((r, device_prints))
    storage.device.wait(storage.device.mark("to_host"))
    for r, device_prints in prints:
        r.pages.note_changed(range(len(r.chunk_sizes)))  # from here on they may change
        r.pages.prints = device_prints
