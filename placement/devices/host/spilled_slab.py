"""Give the memory of a slab back to the system, and have it again later at the same addresses.

The addresses stay mapped all the time, so tensors over the slab and addresses that others noted stay valid. They read as zeros in between.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

from placement.core.errors import HostMemoryError
from placement.devices.host.available import available_bytes
from placement.devices.host.mapping import PAGE, libc, round_up
from placement.devices.host.reserve import promised_bytes
from placement.devices.host.slab import Slab

_MADV_DONTNEED = 4


def release(slab: Slab) -> None:
    """Give the memory back to the system; its bytes are gone. Nobody may use the slab. Waits until it is pinned, because that goes on in
    the background.

    Raises:
        OSError: the kernel refused. The bytes are still there.
    """
    slab.unpin()
    if _dropped(slab):
        slab.is_released = True
    else:
        number = ctypes.get_errno()
        slab.pin_again(is_touched=True)
        raise OSError(number, os.strerror(number))


def renew(slab: Slab, fill: Callable[[], bool] | None = None) -> bool:
    """Have the memory back. It is pinned in the background, and device copies wait for that.

    Args:
        fill: writes every byte; returns False if it gave up, and then the memory goes back again. None: the bytes are undefined.

    Raises:
        HostMemoryError: there is not enough memory now. The slab stays as it was.
        Exception: `fill` failed. The slab stays as it was.
    """
    size = round_up(slab.nbytes, PAGE)
    available = max(0, available_bytes() - promised_bytes())
    if size > available:
        raise HostMemoryError(f"host memory: asked for {size:,} bytes of a host copy that had left it, {available:,} available")
    slab.is_released = False
    is_filled = False
    try:
        is_filled = fill is None or fill()
    finally:
        if not is_filled:
            slab.is_released = _dropped(slab)
    if is_filled:
        slab.pin_again(is_touched=fill is not None)
    return is_filled


def _dropped(slab: Slab) -> bool:
    size = round_up(slab.nbytes, PAGE)
    return not size or libc.madvise(slab.address, size, _MADV_DONTNEED) == 0
