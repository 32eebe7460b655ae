"""Gradients that were zeroed in place while they were offloaded.

`zero_grad(set_to_none=False)` outside a phase writes its zeros into poison, and a load would revive the old gradients. The
version counter of a gradient tells that somebody wrote, its bytes tell what: only a gradient that reads zero throughout was
zeroed. Its host copy becomes zero, and the poison is whole again, so that whatever else was written there is still found.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from placement.adapters.base import Adapter
from placement.memory.base import POISON_BYTE, Device
from placement.memory.range import Placed, Range

Place = tuple[Range, Placed]


class Zeroed:
    """Watches the loose storages of one holding."""

    def __init__(self, device: Device, adapter: Adapter) -> None:
        self._device = device
        self._adapter = adapter
        self._versions: dict[int, int] = {}
        """By storage, as of the offload. Empty while nothing loose is offloaded, so that a border without gradients costs nothing."""

    def note(self, ranges: Sequence[Range]) -> None:
        """The object is offloaded: remember what its loose tensors look like now."""
        self._versions = self._count(ranges)

    def find(self, ranges: Sequence[Range]) -> list[Place]:
        """The places of storages that were zeroed since. Changes nothing: several share their poison, so all are found first."""
        if not self._versions:
            return []
        now = self._count(ranges)
        moved = {storage for storage, version in now.items() if version != self._versions.get(storage)}
        return [(r, entry) for r in ranges for entry in r.placed if entry.ref.cdata in moved and not self._shown(r, entry).any()]

    def take(self, places: Sequence[Place], ranges: Sequence[Range]) -> None:
        """Make the host copies zero and the poison whole."""
        for r, entry in places:
            r.prints = None
            r.slab.view(entry.offset, entry.nbytes).zero_()
            self._shown(r, entry).fill_(POISON_BYTE)
        self.note(ranges)

    def _shown(self, r: Range, entry: Placed) -> torch.Tensor:
        return self._device.view(r.adoption.addresses, entry.offset, entry.nbytes)

    def _count(self, ranges: Sequence[Range]) -> dict[int, int]:
        loose = {entry.ref.cdata for r in ranges if r.loose and r.is_alive for entry in r.placed if not entry.ref.expired()}
        versions: dict[int, int] = {}
        if loose:
            for owned in self._adapter.owned():
                storage = owned.tensor.untyped_storage()._cdata
                if storage in loose:
                    versions[storage] = versions.get(storage, 0) + owned.tensor._version
        return versions
