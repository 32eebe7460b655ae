"""Host memory that the driver copies from at the speed of the link."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence

from placement.memory.base import Copy
from placement.memory.cuda_driver import Driver

_PIN_BYTES = 1 << 30
"""Longest single registration of host memory. A copy that spans two registrations fails."""


class Pinning:
    """What is registered with one device's driver."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._pinned: dict[int, int] = {}  # length by address

    def pin(self, address: int, nbytes: int) -> str | None:
        """Register host memory with the driver; the reason if it refuses. Through the driver and not the runtime, whose
        errors would stick and be reported by torch's next kernel launch."""
        end = address + nbytes
        self._pinned[address] = nbytes  # first, so that `unpin` undoes a registration that was interrupted
        with self._driver:
            for start in range(address, end, _PIN_BYTES):
                reason = self._driver.failed("cuMemHostRegister", start, min(_PIN_BYTES, end - start), 0)
                if reason is not None:
                    break
        if reason is not None:
            self.unpin(address)
        return reason

    def unpin(self, address: int) -> None:
        """Undo `pin`, whole or interrupted. Does nothing at interpreter exit and in a forked child."""
        nbytes = self._pinned.pop(address, 0)
        if nbytes and self._driver.usable:
            with self._driver:
                for start in range(address, address + nbytes, _PIN_BYTES):
                    self._driver.failed("cuMemHostUnregister", start)

    def cut(self, copies: Sequence[Copy]) -> Iterator[tuple[int, int, int]]:
        """(device address, host address, bytes): the copies, cut where one registration ends and the next begins."""
        slabs = sorted(self._pinned.items())
        starts = [start for start, _ in slabs]
        for copy in copies:
            device, host, left = copy.device_address, copy.host_address, copy.nbytes
            place = bisect.bisect_right(starts, host) - 1
            pinned = place >= 0 and host < starts[place] + slabs[place][1]
            while left:
                step = min(left, _PIN_BYTES - (host - starts[place]) % _PIN_BYTES) if pinned else left
                yield device, host, step
                device, host, left = device + step, host + step, left - step
