"""A part of a slab: host memory that was reserved as a whole and is given to several ranges."""

from __future__ import annotations

import torch

from placement.devices.host.slab import check_span
from placement.devices.memory import HostSlab

_ALIGNMENT = 64


class SlabPart(HostSlab):
    """`[offset, offset + nbytes)` of another slab, which it keeps alive. The whole's memory is freed when its last part is gone."""

    def __init__(self, whole: HostSlab, offset: int, nbytes: int) -> None:
        check_span(offset, nbytes, whole.nbytes)
        self.whole, self._offset = whole, offset
        self.address = whole.address + offset
        self.nbytes = nbytes
        self.ready = whole.ready

    @property
    def pinned_bytes(self) -> int:
        """All of it if all of the whole is pinned; else its share of the whole's pinned bytes, wherever those are."""
        return self.nbytes if self.whole.pinned else self._share(self.whole.pinned_bytes)

    @property
    def pageable_bytes(self) -> int:
        return self._share(self.whole.pageable_bytes)

    @property
    def pageable_reason(self) -> str | None:
        return self.whole.pageable_reason

    @property
    def held_bytes(self) -> int:
        return self._share(self.whole.held_bytes)

    def claim(self) -> None:
        self.whole.claim()

    def view(self, offset: int, nbytes: int) -> torch.Tensor:
        check_span(offset, nbytes, self.nbytes)
        return self.whole.view(self._offset + offset, nbytes)

    def _share(self, nbytes: int) -> int:
        return nbytes * self.nbytes // self.whole.nbytes if self.whole.nbytes else 0


def cut(whole: HostSlab, nbytes: int) -> tuple[SlabPart, SlabPart | None]:
    """A part of `nbytes` from the beginning of a slab, and what follows it from the next cache line on; None where nothing does.

    Raises:
        ValueError: the slab is shorter.
    """
    start = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    rest = SlabPart(whole, start, whole.nbytes - start) if start < whole.nbytes else None
    return SlabPart(whole, 0, nbytes), rest
