"""The ranges that were cut from one slab, as one: they leave host memory together, because pages and registrations are the slab's."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence

import torch

from placement.devices.host.slab import Slab
from placement.storage.range import Range

_CHUNK_BYTES = 64 << 20
"""The bytes of one fingerprint."""


class CutSlab:
    """A slab of which several ranges have parts. It keeps all of them alive.

    Its own fingerprints are never known: those of the ranges leave out the bytes between the parts.
    """

    def __init__(self, slab: Slab, ranges: Sequence[Range]) -> None:
        self.host = slab
        self.nbytes = slab.nbytes
        self._ranges = ranges

    @functools.cached_property
    def starts(self) -> tuple[int, ...]:
        return tuple(range(0, self.nbytes, _CHUNK_BYTES))

    @functools.cached_property
    def used_sizes(self) -> tuple[int, ...]:
        return tuple(min(_CHUNK_BYTES, self.nbytes - start) for start in self.starts)

    @property
    def prints(self) -> torch.Tensor | None:
        """None. Setting it to None makes those of all ranges unknown."""
        return None

    @prints.setter
    def prints(self, prints: torch.Tensor | None) -> None:
        assert prints is None
        for r in self._ranges:
            r.prints = None

    @property
    def is_shown(self) -> bool:
        return any(r.is_shown for r in self._ranges)

    @property
    def has_early(self) -> bool:
        return any(r.has_early for r in self._ranges)


class Parts:
    """Knows the ranges that have a part of a slab, and keeps neither them nor the slab alive."""

    def __init__(self, slab: Slab) -> None:
        self._slab = weakref.ref(slab)
        self._ranges: tuple[weakref.ref[Range], ...] = ()

    def have(self, ranges: Sequence[Range]) -> None:
        """Note all ranges that have a part now."""
        self._ranges = tuple(weakref.ref(r) for r in ranges)

    def find(self) -> CutSlab | None:
        """The slab with its ranges; None when it is gone."""
        slab = self._slab()
        return None if slab is None else CutSlab(slab, [r for ref in self._ranges if (r := ref()) is not None])
