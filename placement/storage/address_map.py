"""The table of all ranges in this process. It says which handle owns an address.

A storage belongs to one handle of one manager. Otherwise two managers, or two names for the same weights, would move the same bytes
against each other. So every adoption looks here first.
"""

from __future__ import annotations

import bisect
import itertools
import weakref
from typing import Protocol


class Owner(Protocol):
    name: str


class _Table:
    """First address, end and owner of each range.

    There is no lock. A garbage collection in the middle of a call may drop a manager, which then removes its ranges in the same thread,
    and an interrupt must not leave a lock held. Each change is one dictionary operation.
    """

    def __init__(self) -> None:
        self._ranges: dict[int, tuple[int, weakref.ref[Owner]]] = {}
        self._changes = itertools.count(1)
        self._change = 0
        self._sorted: tuple[int, list[int]] = (0, [])
        """The number of the last change that the list knows, and the first addresses of living owners, ascending."""

    def add(self, owner: Owner, base: int, nbytes: int) -> None:
        self._ranges[base] = (base + nbytes, weakref.ref(owner))
        self._change = next(self._changes)

    def remove(self, base: int) -> None:
        self._ranges.pop(base, None)
        self._change = next(self._changes)

    def owner_of(self, address: int) -> Owner | None:
        """The owner of the range that an address lies in; None where there is no range, or its owner is gone."""
        for anew in (False, True):
            bases = self._bases(anew)
            index = bisect.bisect_right(bases, address) - 1
            if index < 0:
                return None
            end, reference = self._ranges.get(bases[index], (0, None))
            owner = reference() if reference is not None else None
            if owner is not None:
                return owner if address < end else None
            # The owner was dropped with its manager. Its addresses may have been given out again, in other pieces: look once more.
        return None

    def _bases(self, anew: bool) -> list[int]:
        change, bases = self._sorted
        if anew or change != self._change:
            change = self._change
            for base, (_, reference) in self._ranges.copy().items():  # a list of the items would make tuples, which may start a collection
                if reference() is None and self._ranges.get(base, (0, None))[1] is reference:
                    self._ranges.pop(base, None)
            bases = sorted(self._ranges.copy())
            self._sorted = change, bases
        return bases


RANGES = _Table()
