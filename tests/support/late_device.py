"""A device whose copies happen as late as they may: when somebody waits for them. Who reads too
early reads what was there before."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from placement.devices.memory import Addresses, Copy, Direction, HostSlab, Mark
from placement.testing import Faults, InjectedFault, SimulatedDevice


class _Number(Mark):
    def __init__(self, direction: Direction, number: int) -> None:
        self.direction = direction
        self.number = number


class LateDevice(Faults):
    """A simulated device with late copies. Taking memory away from under one of them is an error,
    as it is on a real device.

    Attributes:
        most_waiting_bytes: the most bytes that were on their way to the host at once.
        freed_bytes: bytes on their way to host memory that was given up, although the device had
            failed in no wait. It is an error.
    """

    def __init__(self, capacity_bytes: int, *, chunk_bytes: int) -> None:
        super().__init__(SimulatedDevice(capacity_bytes, chunk_bytes=chunk_bytes))
        self._lock = threading.RLock()
        self._waiting: dict[Direction, list[tuple[int, Copy]]] = {"to_device": [], "to_host": []}
        self._number = self._num_failed = 0
        """The last copy so far, and that at the last wait that failed."""
        self.most_waiting_bytes = self.freed_bytes = 0

    @property
    def outside_bytes(self) -> int:
        """Capacity that something else has taken; set by a test."""
        assert isinstance(self.device, SimulatedDevice)
        return self.device.outside_bytes

    @outside_bytes.setter
    def outside_bytes(self, nbytes: int) -> None:
        assert isinstance(self.device, SimulatedDevice)
        self.device.outside_bytes = nbytes

    def _count(self, operation: str) -> None:
        try:
            super()._count(operation)
        except InjectedFault:
            self._num_failed = self._number if operation == "sync" else self._num_failed
            raise

    def host(self, nbytes: int) -> HostSlab:
        slab = super().host(nbytes)
        weakref.finalize(slab, self._forget, slab.address, nbytes)
        return slab

    def _forget(self, address: int, nbytes: int) -> None:
        """Host memory is freed: a copy that is on its way there must not be made any more."""
        with self._lock:
            gone = [
                each
                for each in self._waiting["to_host"]
                if address <= each[1].host_address < address + nbytes
            ]
            self._waiting["to_host"] = [
                each for each in self._waiting["to_host"] if each not in gone
            ]
            self.freed_bytes += sum(each.nbytes for at, each in gone if at > self._num_failed)

    def copy(self, copies: Sequence[Copy], direction: Direction) -> None:
        self._count("copy")
        with self._lock:
            self._number += 1
            self._waiting[direction] += [(self._number, each) for each in copies]
            self.most_waiting_bytes = max(
                self.most_waiting_bytes, sum(each.nbytes for _, each in self._waiting["to_host"])
            )

    def mark(self, direction: Direction) -> Mark:
        return _Number(direction, self._number)

    def wait(self, mark: Mark) -> None:
        assert isinstance(mark, _Number)
        self._count("sync")
        self._make(mark.direction, mark.number)

    @contextmanager
    def after(self, mark: Mark) -> Iterator[None]:
        assert isinstance(mark, _Number)
        self._make(mark.direction, mark.number)
        yield

    def sync(self) -> None:
        self._count("sync")
        self.order()

    def order(self, direction: Direction | None = None) -> None:
        for each in self._waiting if direction is None else (direction,):
            self._make(each, self._number)

    def wipe_mapped(self, addresses: Addresses, nbytes: int, start: int = 0) -> None:
        super().wipe_mapped(addresses, nbytes, start)
        self._count("sync")  # the wait for it, which may fail when all is wiped

    def unmap(self, addresses: Addresses, nbytes: int, start: int = 0) -> None:
        first, last = addresses.base + start, addresses.base + start + nbytes
        for direction, waiting in self._waiting.items():
            for _, each in waiting:
                under = each.device_address < last and first < each.device_address + each.nbytes
                assert not under, f"memory is taken away from under a copy {direction}"
        super().unmap(addresses, nbytes, start)

    def _make(self, direction: Direction, number: int) -> None:
        with self._lock:
            due = [each for at, each in self._waiting[direction] if at <= number]
            self._waiting[direction] = [
                (at, each) for at, each in self._waiting[direction] if at > number
            ]
            self.device.copy(due, direction)
