"""Who owns an address: the one table of all ranges in this process.

A storage belongs to one handle of one manager. Two managers, or a module and a second name for its weights, would move the
same bytes against each other, so every adoption asks here first.
"""

from __future__ import annotations

import bisect
import threading
import weakref
from operator import itemgetter
from typing import Protocol


class Owner(Protocol):
    name: str


_base, _end = itemgetter(0), itemgetter(1)


class _Table:
    """Ranges that do not overlap, sorted: first address, end, owner. Each change is a single store, so that no interrupt cuts it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a collection inside may drop a manager, which takes its ranges out
        self._ranges: list[tuple[int, int, weakref.ref[Owner]]] = []

    def add(self, owner: Owner, base: int, nbytes: int) -> None:
        """Enter a range. What overlaps it is of managers that were dropped: their addresses have been given out again."""
        end = base + nbytes
        with self._lock:
            first = bisect.bisect_right(self._ranges, base, key=_end)
            last = bisect.bisect_left(self._ranges, end, key=_base)
            self._ranges[first:last] = [(base, end, weakref.ref(owner))]

    def remove(self, base: int) -> None:
        with self._lock:
            index = bisect.bisect_left(self._ranges, base, key=_base)
            if index < len(self._ranges) and self._ranges[index][0] == base:
                del self._ranges[index]

    def owner_of(self, address: int) -> Owner | None:
        """The owner of the range that holds an address; None where there is none, or none any more."""
        with self._lock:
            index = bisect.bisect_right(self._ranges, address, key=_base) - 1
            if index < 0:
                return None
            _, end, owner = self._ranges[index]
            return owner() if address < end else None


RANGES = _Table()
