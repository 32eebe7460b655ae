"""Gradients that were zeroed in place while they were offloaded.

`zero_grad(set_to_none=False)` outside a phase writes its zeros into poison, and a load would revive the old gradients. The
version counter of a gradient tells that somebody wrote, its bytes tell what: only a gradient that reads zero throughout was
zeroed. Its host copy becomes zero, and the poison is whole again, so that whatever else was written there is still found.

Looked at one by one, because gradients share storages: FSDP2 cuts those of a part from one, with padding in between that nobody zeroes.
Without a counter (a foreach over DTensors) it stays a wrong write: all offloaded memory shares its poison, so bytes alone prove nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from placement.adapters.base import Adapter, Owned
from placement.memory.base import POISON_BYTE, Device
from placement.memory.range import Placed, Range


class Place(NamedTuple):
    """Where the bytes of one gradient are."""

    range: Range
    offset: int
    """Bytes from the range's first address."""
    nbytes: int


class Zeroed:
    """Watches the loose tensors of one holding."""

    def __init__(self, device: Device, adapter: Adapter) -> None:
        self._device = device
        self._adapter = adapter
        self._versions: dict[int, int] = {}
        """By tensor, as of the offload. Empty while nothing loose is offloaded, so that a border without gradients costs nothing."""

    def note(self, ranges: Sequence[Range]) -> None:
        """The object is offloaded: remember what its loose tensors look like now."""
        self._versions = {id(owned.tensor): owned.version for owned, _ in self._loose(ranges)}

    def find(self, ranges: Sequence[Range]) -> list[Place]:
        """The places of gradients that were zeroed since. Changes nothing: several share their poison, so all are found first."""
        if not self._versions:
            return []
        written = [place for owned, place in self._loose(ranges) if owned.version != self._versions.get(id(owned.tensor))]
        return [place for place in written if not self._shown(place).any()]

    def take(self, places: Sequence[Place], ranges: Sequence[Range]) -> None:
        """Make the host copies zero and the poison whole."""
        for place in places:
            place.range.prints = None
            place.range.slab.view(place.offset, place.nbytes).zero_()
            self._shown(place).fill_(POISON_BYTE)
        self.note(ranges)

    def _shown(self, place: Place) -> torch.Tensor:
        return self._device.view(place.range.adoption.addresses, place.offset, place.nbytes)

    def _loose(self, ranges: Sequence[Range]) -> Iterator[tuple[Owned, Place]]:
        """The loose tensors that lie in a range, and where."""
        loose = {entry.ref.cdata: (r, entry) for r in ranges if r.loose and r.is_alive for entry in r.placed if not entry.ref.expired()}
        for owned in self._adapter.owned() if loose else ():
            where = loose.get(owned.tensor.untyped_storage()._cdata)
            if where is not None and owned.tensor.numel():
                yield owned, _place(owned.tensor, *where)


def _place(tensor: torch.Tensor, r: Range, entry: Placed) -> Place:
    """From a tensor's first element to its last."""
    elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return Place(r, entry.offset + int(tensor.storage_offset()) * tensor.itemsize, elements * tensor.itemsize)
