"""The gradients of one object: which ranges hold nothing else, and how they are dropped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from placement.storage.range import Range
from placement.storage.range_layout import Claim
from placement.tensors.owned import Adapter
from placement.tensors.plain import parts_of
from placement.tensors.sparse import is_sparse, sparse_parts


def _parts(gradient: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The dense tensors that hold a gradient's bytes."""
    return sparse_parts(gradient, "") if is_sparse(gradient) else parts_of(gradient, "")


class Gradients:
    """What the adapter says of gradients, looked up anew at each call: they come and go between phases."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter

    def tensors(self) -> dict[int, torch.Tensor]:
        """The tensors that hold their bytes, by identity."""
        gradients = [owner.grad for owner in self._adapter.with_gradients() if owner.grad is not None]
        gradients += self._adapter.unreduced_gradients()
        return {id(part): part for gradient in gradients for _, part in _parts(gradient)}

    def besides(self, claims: Iterable[Claim]) -> list[Claim]:
        """Those of loose claims that hold anything but gradients."""
        dead = self.tensors()
        # Indices and values of a sparse gradient are other objects each time, and nothing else is in their storages.
        owners = self._adapter.with_gradients()
        sparse = [part for owner in owners if owner.grad is not None and is_sparse(owner.grad) for _, part in _parts(owner.grad)]
        theirs = {part.untyped_storage()._cdata for part in sparse}
        return [c for c in claims if c.storage._cdata not in theirs and not all(id(alias) in dead for alias in c.aliases)]

    def lasting(self) -> set[int]:
        """The storages that the framework goes on using when the gradients are dropped."""
        return {buffer.untyped_storage()._cdata for buffer in self._adapter.gradient_buffers()}

    def ranges(self, among: Iterable[Range]) -> tuple[Range, ...]:
        """Ranges with nothing but gradients in them: what need not be saved when gradients are dropped."""
        dead = {part.untyped_storage()._cdata for part in self.tensors().values() if part.layout is torch.strided} | self.lasting()
        dead -= {each.tensor.untyped_storage()._cdata for each in self._adapter.owned() if not each.transient}
        return tuple(r for r in among if r.transient and all(p.ref.expired() or p.ref.cdata in dead for p in r.placed))

    def drop(self, *, zero_buffers: bool) -> None:
        """Set every gradient to None. Ranges that this leaves empty go at the next move.

        Args:
            zero_buffers: also those that last; only while they are on the device.
        """
        for owner in self._adapter.with_gradients():
            owner.grad = None
        self._adapter.drop_unreduced()
        for buffer in self._adapter.gradient_buffers() if zero_buffers else ():
            buffer.detach().zero_()

    def zero_lasting(self, dropped: Iterable[Range]) -> list[Range]:
        """Make the host copies of ranges that last zero, which is what they will be when they are loaded. Returns these."""
        lasting = self.lasting()
        staying = [r for r in dropped if any(entry.ref.cdata in lasting and not entry.ref.expired() for entry in r.placed)]
        for r in staying:
            r.prints = None
            r.slab.view(0, r.nbytes).zero_()
        return staying
