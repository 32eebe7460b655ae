"""Host memory that the driver copies from at the speed of the link."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

from placement.devices.base import Copy
from placement.devices.cuda.driver import Driver
from placement.devices.host.reserve import SPAN_BYTES, cut_at, wait_until_ready


class Pinning:
    """What is registered with one device's driver."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._pinned: dict[int, int] = {}  # length by address
        self._uncounted: dict[int, int] = {}
        """Of these, what no limit counts."""
        self._turn = threading.Lock()

    @property
    def pinned_bytes(self) -> int:
        return sum(list(self._pinned.values()))

    def pin_uncounted(self, address: int, nbytes: int) -> str | None:
        """`pin` for the few bytes that are not for copies of handles: no limit counts them."""
        self._uncounted[address] = nbytes
        return self.pin(address, nbytes)

    def pin(self, address: int, nbytes: int, limit_bytes: int | None = None) -> str | None:
        """Register host memory with the driver; the reason if it refuses. Through the driver and not the runtime, whose
        errors would stick and be reported by torch's next kernel launch."""
        # One at a time, for the limit, and because others would wait in the driver and keep everybody else waiting there.
        with self._turn:
            pinned = self.pinned_bytes - sum(self._uncounted.values())
            if limit_bytes is not None and pinned + nbytes > limit_bytes:
                return f"pinned_limit_bytes is {limit_bytes:,}: {pinned:,} bytes are pinned, {nbytes:,} more wanted"
            self._pinned[address] = nbytes  # first, so that `unpin` undoes a registration that was cut short
            with self._beside_captures():
                reason = self._driver.failed("cuMemHostRegister", address, nbytes, 0)
            if reason is not None:
                del self._pinned[address]
            return reason

    def unpin(self, address: int) -> None:
        """Undo `pin`, whole or cut short. Does nothing at interpreter exit and in a forked child. Takes no lock: it is called
        when objects die, on any thread, whatever that thread holds."""
        self._uncounted.pop(address, None)
        if self._driver.usable and self._pinned.pop(address, 0):
            with self._beside_captures():
                self._driver.failed("cuMemHostUnregister", address)

    @contextlib.contextmanager
    def _beside_captures(self) -> Iterator[None]:
        """While another thread captures a graph, the driver fails such calls and spoils the capture, unless the caller has
        declared that they have nothing to do with it."""
        exchange = "cuThreadExchangeStreamCaptureMode"
        with self._driver:
            before = self._driver.call(exchange, self._driver.api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
            try:
                yield
            finally:
                self._driver.call(exchange, before)

    def cut(self, copies: Sequence[Copy]) -> Iterator[tuple[int, int, int]]:
        """(device address, host address, bytes): the copies, cut where one registration may end and the next begin, because
        a copy that spans two fails. Waits for what is still to be registered."""
        for copy in copies:
            wait_until_ready(copy.host_address, copy.nbytes)
            for host, nbytes in cut_at(SPAN_BYTES, copy.host_address, copy.nbytes):
                yield copy.device_address + (host - copy.host_address), host, nbytes
