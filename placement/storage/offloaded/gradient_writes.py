"""Gradients that were written in place while they were offloaded: clipped, unscaled, accumulated into. Such a write is lost, and reported.

A gradient's version counter tells it. `zero_grad()` writes nothing here: while offloaded, its call zeroes the host copies (see `ZeroCall`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from placement.ownership.adapter import Adapter
from placement.storage.range import Range
from placement.tensors.plain import Owned


class GradientWrites:
    """Watches the transient tensors of one object."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        self._versions: dict[int, int] | None = None
        """The version counters as of the offload, by `id` of the tensor; None while on the device. Without gradients it is empty and costs
        nothing."""

    def note(self, ranges: Sequence[Range]) -> None:
        """Called when the object is offloaded: remember the version counters of its transient tensors, if none are remembered yet."""
        if self._versions is None:
            self._versions = {id(owned.tensor): owned.version for owned in self._transient(ranges)}

    def forget(self) -> None:
        """Called when the object is on the device: forget the version counters."""
        self._versions = None

    def take(self, ranges: Sequence[Range]) -> list[str]:
        """Names of the gradients that were written since `note`. They are not reported again."""
        if not (noted := self._versions):
            return []
        written = [owned.name for owned in self._transient(ranges) if owned.version > noted.get(id(owned.tensor), owned.version)]
        self.forget()
        self.note(ranges)
        return written

    def _transient(self, ranges: Sequence[Range]) -> Iterator[Owned]:
        """The transient tensors that lie in one of the ranges."""
        transient = {entry.ref.cdata for r in ranges if r.transient and r.is_alive for entry in r.placed if not entry.ref.expired()}
        for owned in self._adapter.owned() if transient else ():
            if owned.tensor.untyped_storage()._cdata in transient and owned.tensor.numel():
                yield owned
