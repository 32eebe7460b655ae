"""Who owns an address: the one table of all ranges in this process.

A storage belongs to one handle of one manager. Two managers, or a module and a second name for its weights, would move the
same bytes against each other, so every adoption asks here first.
"""

from __future__ import annotations

import bisect
import itertools
import weakref
from typing import Protocol


class Owner(Protocol):
    name: str


class _Table:
    """First address, end and owner of each range. No lock: a collection in the middle may drop a manager, which takes its ranges
    out in the same thread, and an interrupt must not leave a lock held. Each change is one dictionary operation."""

    def __init__(self) -> None:
        self._ranges: dict[int, tuple[int, weakref.ref[Owner]]] = {}
        self._changes = itertools.count(1)
        self._change = 0
        self._sorted: tuple[int, list[int]] = (0, [])
        """The first addresses of living owners, ascending, and the change up to which that holds."""

    def add(self, owner: Owner, base: int, nbytes: int) -> None:
        self._ranges[base] = (base + nbytes, weakref.ref(owner))
        self._change = next(self._changes)

    def remove(self, base: int) -> None:
        self._ranges.pop(base, None)
        self._change = next(self._changes)

    def owner_of(self, address: int) -> Owner | None:
        """The owner of the range that holds an address; None where there is none, or none any more."""
        for anew in (False, True):
            bases = self._bases(anew)
            index = bisect.bisect_right(bases, address) - 1
            if index < 0:
                return None
            end, reference = self._ranges.get(bases[index], (0, None))
            owner = reference() if reference is not None else None
            if owner is not None:
                return owner if address < end else None
            # Of a manager that was dropped; its addresses may have been given out again, in other pieces.
        return None

    def _bases(self, anew: bool) -> list[int]:
        change, bases = self._sorted
        if anew or change != self._change:
            change = self._change
            for base, (_, reference) in self._ranges.copy().items():  # a list of its items would make tuples, and so collect
                if reference() is None and self._ranges.get(base, (0, None))[1] is reference:
                    self._ranges.pop(base, None)
            bases = sorted(self._ranges.copy())
            self._sorted = change, bases
        return bases


RANGES = _Table()
