"""A device whose copies happen as late as they may: when somebody waits for them. Who reads too early reads what was there before."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from placement.devices.memory import Addresses, Copy, Direction, Mark
from placement.testing import Faults, SimulatedDevice


class _Number(Mark):
    def __init__(self, direction: Direction, number: int) -> None:
        self.direction = direction
        self.number = number


class LateDevice(Faults):
    """A simulated device with late copies. Taking memory away from under one of them is an error, as it is on a real device.

    Attributes:
        most_waiting_bytes: the most bytes that were on their way to the host at once.
    """

    def __init__(self, capacity_bytes: int, *, chunk_bytes: int) -> None:
        super().__init__(SimulatedDevice(capacity_bytes, chunk_bytes=chunk_bytes))
        self._lock = threading.RLock()
        self._waiting: dict[Direction, list[tuple[int, Copy]]] = {"to_device": [], "to_host": []}
        self._number = 0
        self.most_waiting_bytes = 0

    @property
    def outside_bytes(self) -> int:
        """Capacity that something else has taken; set by a test."""
        assert isinstance(self.device, SimulatedDevice)
        return self.device.outside_bytes

    @outside_bytes.setter
    def outside_bytes(self, nbytes: int) -> None:
        assert isinstance(self.device, SimulatedDevice)
        self.device.outside_bytes = nbytes

    def copy(self, copies: Sequence[Copy], direction: Direction) -> None:
        self._count("copy")
        with self._lock:
            self._number += 1
            self._waiting[direction] += [(self._number, each) for each in copies]
            self.most_waiting_bytes = max(self.most_waiting_bytes, sum(each.nbytes for _, each in self._waiting["to_host"]))

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
            self._waiting[direction] = [(at, each) for at, each in self._waiting[direction] if at > number]
            self.device.copy(due, direction)
