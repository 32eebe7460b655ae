"""Pin host memory, so that the driver copies it at full link speed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from placement.devices.cuda.driver import Driver


class Pinning:
    """The host memory that is registered with one device's driver."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._pinned: dict[int, int] = {}  # length by address
        self._uncounted: dict[int, int] = {}  # registered memory that does not count against the limit
        self._turn = threading.Lock()

    @property
    def pinned_bytes(self) -> int:
        return sum(list(self._pinned.values()))

    def pin_uncounted(self, address: int, nbytes: int) -> str | None:
        """Pin a few bytes that are not for copies of handles, outside the limit."""
        self._uncounted[address] = nbytes
        return self.pin(address, nbytes)

    def pin(self, address: int, nbytes: int, limit_bytes: int | None = None) -> str | None:
        """Register host memory, and return the reason if that fails. The runtime's errors would stick and show in torch's next launch."""
        # One at a time, because of the limit, and because waiting inside the driver blocks all other threads that need it.
        with self._turn:
            pinned = self.pinned_bytes - sum(self._uncounted.values())
            if limit_bytes is not None and pinned + nbytes > limit_bytes:
                return f"pinned_limit_bytes is {limit_bytes:,}: {pinned:,} bytes are pinned, and {nbytes:,} more are wanted"
            self._pinned[address] = nbytes  # first, so that `unpin` also undoes a registration that was cut short
            with self._beside_captures():
                reason = self._driver.failed("cuMemHostRegister", address, nbytes, 0)
            if reason is not None:
                del self._pinned[address]
            return reason

    def unpin(self, address: int) -> None:
        """Undo `pin`, even one that was cut short. Does nothing at interpreter exit and in a forked child. Takes no lock, because it runs
        when objects die, on any thread and under any lock."""
        self._uncounted.pop(address, None)
        if self._driver.usable and self._pinned.pop(address, 0):
            with self._beside_captures():
                self._driver.failed("cuMemHostUnregister", address)

    @contextlib.contextmanager
    def _beside_captures(self) -> Iterator[None]:
        """Allow driver calls while another thread captures a graph. Otherwise the driver fails them and breaks the capture."""
        exchange = "cuThreadExchangeStreamCaptureMode"
        with self._driver:
            before = self._driver.call(exchange, self._driver.api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
            try:
                yield
            finally:
                self._driver.call(exchange, before)
