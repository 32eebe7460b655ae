"""Measure what an object owns in torch's own memory, quickly where nothing has changed.

State that the first steps of an optimizer have created lies there until an offload. A policy that never offloads would walk all of it
after each training.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from placement.ownership.adapter import Adapter
from placement.storage.range import Range
from placement.storage.scanning.places import NewStorages

_CDATA = operator.attrgetter("_cdata")


class _Look(NamedTuple):
    keys: list[int]
    """The storage of each tensor (`_cdata`)."""
    addresses: list[int]
    unadopted: list[int]
    """Which tensors lie in torch's own memory, by number."""


class Unadopted:
    """The bytes of one object's storages in torch's own memory."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        self._last: _Look | None = None
        """The last walk, if a quick look can tell that its result still holds."""
        self._known: tuple[tuple[Range, ...], object, int] | None = None
        """The last measurement: the object's ranges, what stands for the adapter's walk, and the bytes."""

    def measure(self, ranges: tuple[Range, ...], walk: Callable[[], NewStorages]) -> int:
        """The bytes now.

        Args:
            ranges: the object's ranges.
            walk: finds the storages that are not at their places, by a walk of all tensors.
        """
        known = self._known
        if known is not None and known[0] is ranges and known[1] is not None and self._adapter.standing() == known[1]:
            return known[2]
        nbytes = self._measure(walk)
        self._known = ranges, self._adapter.standing(), nbytes
        return nbytes

    def _measure(self, walk: Callable[[], NewStorages]) -> int:
        if self._last is not None and (found := self._again(self._last)) is not None:
            return found
        self._last = None
        new = walk()
        storages = [claim.storage for claim in (*new.stay, *new.transient)]
        if storages:
            self._last = self._look({*map(_CDATA, storages)})
        return _sum_of_bytes(storages)

    def _look(self, unadopted: set[int]) -> _Look | None:
        if (found := self._adapter.unchanged()) is None:
            return None
        keys = _keys(_storages(found.tensors))
        return _Look(keys, found.addresses, [number for number, key in enumerate(keys) if key in unadopted])

    def _again(self, last: _Look) -> int | None:
        """The bytes, if the object owns the same tensors as at that look, in the same storages; else None."""
        # An offload would have given what lies in torch's own memory other addresses.
        if (found := self._adapter.unchanged()) is None or found.addresses != last.addresses:
            return None
        storages = _storages(found.tensors)
        # A storage at a freed one's address may be larger, or another one.
        return _sum_of_bytes(storages[number] for number in last.unadopted) if _keys(storages) == last.keys else None


def _storages(tensors: Sequence[torch.Tensor]) -> list[torch.UntypedStorage]:
    return list(map(torch.Tensor.untyped_storage, tensors))


def _keys(storages: Sequence[torch.UntypedStorage]) -> list[int]:
    return list(map(_CDATA, storages))


def _sum_of_bytes(storages: Iterable[torch.UntypedStorage]) -> int:
    """The bytes of different storages, each counted once."""
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())
