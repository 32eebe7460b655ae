"""Gradients that were written in place while they were offloaded. Zeroing takes effect; any other write is lost.

`zero_grad(set_to_none=False)` outside a phase writes its zeros into poison, and a load would bring the old gradients back. A gradient's
version counter shows that somebody wrote, and its bytes show what. Only a gradient that reads zero throughout was zeroed: its host copy
becomes zero. Then its poison is restored, so that other writes there are still found. Any other write (clipping, unscaling) is lost,
and reported. A write that turns NaN into zeros (`nan_to_num_`) cannot be told from zeroing.

Gradients are looked at one by one, because several may share a storage: FSDP2 cuts the gradients of a part from one storage, with
padding in between that nobody zeroes. These share a counter, too. So if one of them was zeroed, a changed counter proves nothing about
the others.

A write that raises no counter (a foreach over DTensors) is treated as a wrong write. All offloaded memory may share its poison, so
zero bytes alone prove nothing. Only where a gradient has gone since its offload (`zero_grad()`) they are believed: it was zeroed before
that, its counter is gone with it, and its value no longer matters.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence, Set
from typing import NamedTuple

import torch

from placement.devices.base import Device
from placement.storage.range import PlacedStorage, Range
from placement.tensors.owned import Adapter, Owned


class GradientPlace(NamedTuple):
    """The range and the bytes of one gradient."""

    range: Range
    offset: int
    """Bytes from the range's first address."""
    nbytes: int


class Found(NamedTuple):
    """The gradients of one object that were written while they were offloaded."""

    zeroed: list[GradientPlace]
    written: list[str]
    """Names of the gradients that were written otherwise than zeroed."""


NOTHING = Found([], [])


class GradientWrites:
    """Watches the transient tensors of one object."""

    def __init__(self, device: Device, adapter: Adapter) -> None:
        self._device = device
        self._adapter = adapter
        self._versions: dict[int, int] | None = None
        """The version counters as of the offload, by `id` of the tensor; None while on the device. Without gradients it is empty and costs
        nothing."""
        self._places: dict[int, tuple[weakref.ref[Range], int, int]] = {}
        """Where each of these lies. Weak, because a range outlives its gradients only while the object is offloaded."""

    def note(self, ranges: Sequence[Range]) -> None:
        """Called when the object is offloaded: remember the version counters of its transient tensors, if none are remembered yet."""
        if self._versions is None:
            found = [(id(owned.tensor), owned.version, place) for owned, place in self._transient(ranges)]
            self._places = {key: (weakref.ref(place.range), place.offset, place.nbytes) for key, _, place in found}
            self._versions = {key: version for key, version, _ in found}

    def forget(self) -> None:
        """Called when the object is on the device: forget the version counters."""
        self._versions, self._places = None, {}

    def find(self, ranges: Sequence[Range]) -> Found:
        """The gradients that were written since `note`. Changes nothing: objects may share poison, so all are asked before any `take`."""
        if not (noted := self._versions):
            return NOTHING
        present = [*self._transient(ranges)]
        changed = [(owned, place) for owned, place in present if owned.version != noted.get(id(owned.tensor))]
        zeroed = [(owned, place) for owned, place in changed if not self._shown(place).any()]
        counted = {owned.tensor.untyped_storage()._cdata for owned, _ in zeroed}
        written = [
            owned.name
            for owned, _ in changed
            if owned.version > noted.get(id(owned.tensor), owned.version) and owned.tensor.untyped_storage()._cdata not in counted
        ]
        erased = self._erased({id(owned.tensor) for owned, _ in present}, ranges)
        return Found([*(place for _, place in zeroed), *erased], written)

    def _erased(self, present: Set[int], ranges: Sequence[Range]) -> list[GradientPlace]:
        """The places of gradients that have gone, as far as they read zero."""
        found = [(alive(), offset, nbytes) for key, (alive, offset, nbytes) in self._places.items() if key not in present]
        gone = [GradientPlace(r, offset, nbytes) for r, offset, nbytes in found if r is not None and r in ranges]
        if not gone:
            return []
        firsts = torch.cat([self._shown(place)[:1] for place in gone]).tolist()  # no byte of poison is zero, so most need no further look
        return [place for place, first in zip(gone, firsts, strict=True) if first == 0 and not self._shown(place).any()]

    def take(self, found: Found, ranges: Sequence[Range]) -> None:
        """Zero the host copies of the gradients that were zeroed, restore their poison, and do not report the other writes again."""
        for place in found.zeroed:
            place.range.note_written()
            place.range.view(place.offset, place.nbytes).zero_()
            self._device.mend_poison(place.range.layout.addresses, place.offset, place.nbytes)
        self.forget()
        self.note(ranges)

    def _shown(self, place: GradientPlace) -> torch.Tensor:
        return self._device.view(place.range.layout.addresses, place.offset, place.nbytes)

    def _transient(self, ranges: Sequence[Range]) -> Iterator[tuple[Owned, GradientPlace]]:
        """The transient tensors that lie in one of the ranges, and their places."""
        transient = {
            entry.ref.cdata: (r, entry) for r in ranges if r.transient and r.is_alive for entry in r.placed if not entry.ref.expired()
        }
        for owned in self._adapter.owned() if transient else ():
            where = transient.get(owned.tensor.untyped_storage()._cdata)
            if where is not None and owned.tensor.numel():
                yield owned, _place(owned.tensor, *where)


def _place(tensor: torch.Tensor, r: Range, entry: PlacedStorage) -> GradientPlace:
    """The bytes from a tensor's first element to its last."""
    elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return GradientPlace(r, entry.offset + int(tensor.storage_offset()) * tensor.itemsize, elements * tensor.itemsize)
