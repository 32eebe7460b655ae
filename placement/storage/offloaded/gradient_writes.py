"""Gradients that were written in place while they were offloaded: zeroed, or lost.

`zero_grad(set_to_none=False)` outside a phase writes its zeros into poison, and a load would revive the old gradients. The
version counter of a gradient tells that somebody wrote, its bytes tell what: only a gradient that reads zero throughout was
zeroed. Its host copy becomes zero, and the poison is whole again, so that whatever else was written there is still found. Any other
write (clipping, unscaling) is lost, and reported. What makes zeros of NaN (`nan_to_num_`) cannot be told from zeroing.

Looked at one by one, because gradients share storages: FSDP2 cuts those of a part from one, with padding in between that nobody zeroes.
These share a counter, so beside one that was zeroed nothing is known of the others but their poison.
Without a counter (a foreach over DTensors) it stays a wrong write: all offloaded memory may share its poison, so bytes alone prove nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from placement.devices.base import Device
from placement.storage.range import PlacedStorage, Range
from placement.tensors.owned import Adapter, Owned


class Place(NamedTuple):
    """Where the bytes of one gradient are."""

    range: Range
    offset: int
    """Bytes from the range's first address."""
    nbytes: int


class Found(NamedTuple):
    """What was written into the gradients of one object while they were offloaded."""

    zeroed: list[Place]
    written: list[str]
    """Names of those that were written otherwise."""


NOTHING = Found([], [])


class GradientWrites:
    """Watches the loose tensors of one holding."""

    def __init__(self, device: Device, adapter: Adapter) -> None:
        self._device = device
        self._adapter = adapter
        self._versions: dict[int, int] | None = None
        """By tensor, as of the offload; None while on the device. Empty without gradients, so that a phase transition costs nothing
        then."""

    def note(self, ranges: Sequence[Range]) -> None:
        """The object is offloaded: remember what its loose tensors look like now, if it is not remembered yet."""
        if self._versions is None:
            self._versions = {id(owned.tensor): owned.version for owned, _ in self._transient(ranges)}

    def forget(self) -> None:
        """The object is on the device."""
        self._versions = None

    def find(self, ranges: Sequence[Range]) -> Found:
        """What was written since. Changes nothing: several share their poison, so all are found first."""
        if not (noted := self._versions):
            return NOTHING
        changed = [(owned, place) for owned, place in self._transient(ranges) if owned.version != noted.get(id(owned.tensor))]
        zeroed = [(owned, place) for owned, place in changed if not self._shown(place).any()]
        counted = {owned.tensor.untyped_storage()._cdata for owned, _ in zeroed}
        written = [
            owned.name
            for owned, _ in changed
            if owned.version > noted.get(id(owned.tensor), owned.version) and owned.tensor.untyped_storage()._cdata not in counted
        ]
        return Found([place for _, place in zeroed], written)

    def take(self, found: Found, ranges: Sequence[Range]) -> None:
        """Make the host copies of what was zeroed zero and the poison whole; what was written otherwise is found no more."""
        for place in found.zeroed:
            place.range.prints = None
            place.range.slab.view(place.offset, place.nbytes).zero_()
            self._device.mend_poison(place.range.layout.addresses, place.offset, place.nbytes)
        self.forget()
        self.note(ranges)

    def _shown(self, place: Place) -> torch.Tensor:
        return self._device.view(place.range.layout.addresses, place.offset, place.nbytes)

    def _transient(self, ranges: Sequence[Range]) -> Iterator[tuple[Owned, Place]]:
        """The loose tensors that lie in a range, and where."""
        transient = {
            entry.ref.cdata: (r, entry) for r in ranges if r.transient and r.is_alive for entry in r.placed if not entry.ref.expired()
        }
        for owned in self._adapter.owned() if transient else ():
            where = transient.get(owned.tensor.untyped_storage()._cdata)
            if where is not None and owned.tensor.numel():
                yield owned, _place(owned.tensor, *where)


def _place(tensor: torch.Tensor, r: Range, entry: PlacedStorage) -> Place:
    """From a tensor's first element to its last."""
    elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return Place(r, entry.offset + int(tensor.storage_offset()) * tensor.itemsize, elements * tensor.itemsize)
