"""The owner of each address.

A storage belongs to one handle of one manager. Otherwise two managers, or two names for the same
weights, would move the same bytes against each other. So every adoption looks into the table of all
ranges first (`RANGES`).
"""

from __future__ import annotations

import bisect
import itertools
import operator
import weakref
from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar

from placement.core.weak import WeakIdSet
from placement.storage.range import Range

T = TypeVar("T")


class AddressMap(Generic[T]):
    """Finds the value of an address, among spans that do not overlap: (first address, end,
    value)."""

    def __init__(self, spans: Iterable[tuple[int, int, T]] = ()) -> None:
        self._spans = sorted(spans, key=operator.itemgetter(0))
        self._bases = [base for base, _, _ in self._spans]

    def at(self, address: int) -> tuple[T, int] | None:
        """The value of the span that an address lies in, and the offset of the address there; None
        where it lies in none."""
        index = bisect.bisect_right(self._bases, address) - 1
        if index < 0 or address >= self._spans[index][1]:
            return None
        return self._spans[index][2], address - self._bases[index]

    def all_at(self, addresses: Iterable[int]) -> list[T | None]:
        """The value of the span that each address lies in; None where it lies in none."""
        values = list[T | None]()
        for address in addresses:  # without a call of `at`: there may be tens of thousands
            index = bisect.bisect_right(self._bases, address) - 1
            is_inside = index >= 0 and address < self._spans[index][1]
            values.append(self._spans[index][2] if is_inside else None)
        return values


class Owner(Protocol):
    """The `ManagedStorage` that a range belongs to. (The owners of an optimizer's handle are the
    handles of modules.)"""

    name: str

    @property
    def ranges(self) -> tuple[Range, ...]: ...


class _RangeOwners:
    """The owner of each range, by its device addresses. There is no lock: a garbage collection in
    the middle of a call may drop a manager, whose ranges then go in the same thread. `_map` is made
    anew at the first question after a change."""

    def __init__(self) -> None:
        self._owners: WeakIdSet[Owner] = WeakIdSet()
        self._changes = itertools.count(1)
        self._change = 0
        # the number of the last change in it, and the map
        self._map = (0, AddressMap[weakref.ref[Owner]]())

    def note(self, owner: Owner) -> None:
        """Note that an owner has got or dropped ranges."""
        self._owners.add(owner)
        self._change = next(self._changes)

    def owner_of(self, address: int) -> Owner | None:
        return self.owners_of((address,))[0]

    def owners_of(self, addresses: Iterable[int]) -> list[Owner | None]:
        """The owner of the range that each address lies in; None where there is no range, or its
        owner is gone."""
        change, address_map = self._map
        if change != self._change:
            change = self._change
            spans = []
            for owner in self._owners:
                reference = weakref.ref(owner)
                for r in owner.ranges:
                    base = r.layout.addresses.base
                    spans.append((base, base + r.nbytes, reference))
            address_map = AddressMap(spans)
            self._map = change, address_map
        owners = address_map.all_at(addresses)
        return [None if owner is None else owner() for owner in owners]


RANGES = _RangeOwners()
