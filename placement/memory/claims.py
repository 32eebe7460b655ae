"""Who owns an address: the one table of all ranges in this process.

A storage belongs to one handle of one manager. Two managers, or a module and a second name for its weights, would move the
same bytes against each other, so every adoption asks here first.
"""

from __future__ import annotations

import bisect
import threading
import weakref
from typing import Protocol


class Owner(Protocol):
    name: str


class _Table:
    """Ranges sorted by their first address. Entries of dead owners are skipped and dropped when met."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bases: list[int] = []
        self._entries: dict[int, tuple[int, weakref.ref[Owner]]] = {}

    def add(self, owner: Owner, base: int, nbytes: int) -> None:
        with self._lock:
            if base not in self._entries:
                bisect.insort(self._bases, base)
            self._entries[base] = (base + nbytes, weakref.ref(owner))

    def remove(self, base: int) -> None:
        with self._lock:
            if self._entries.pop(base, None) is not None:
                self._bases.pop(bisect.bisect_left(self._bases, base))

    def owner_of(self, address: int) -> Owner | None:
        with self._lock:
            index = bisect.bisect_right(self._bases, address) - 1
            if index < 0:
                return None
            end, owner = self._entries[self._bases[index]]
            return owner() if address < end else None


RANGES = _Table()
