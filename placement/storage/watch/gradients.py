"""The gradients of an object, which an offload may drop instead of saving them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from placement.ownership.adapter import Adapter
from placement.storage.layout import Adoptee
from placement.storage.range import Range
from placement.storage.scan import lent_gradients
from placement.tensors.plain import dense_parts, is_sparse


class Gradients:
    """The gradients that the adapter reports, asked anew at each call: which ranges hold nothing
    else, and how they are dropped."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter

    def tensors(self) -> dict[int, torch.Tensor]:
        """The tensors that hold the gradients' bytes, by identity."""
        parameters = self._adapter.with_gradients()
        gradients = [tensor.grad for tensor in parameters if tensor.grad is not None]
        for framework in self._adapter.frameworks:
            gradients += framework.unreduced_gradients()
        tensors = {}
        for gradient in gradients:
            tensors.update({id(part): part for _, part in dense_parts(gradient)})
        return tensors

    def besides(self, adoptees: Iterable[Adoptee]) -> list[Adoptee]:
        """The adoptees, among these transient ones, that hold other tensors than gradients."""
        gradients = self.tensors()
        # A sparse gradient's parts are new objects at each access, so they are known by their
        # storages, which nothing else uses.
        sparse = set[int]()
        for tensor in self._adapter.with_gradients():
            if tensor.grad is not None and is_sparse(tensor.grad):
                parts = dense_parts(tensor.grad)
                sparse.update([part.untyped_storage()._cdata for _, part in parts])
        lent = lent_gradients()
        besides = []
        for adoptee in adoptees:
            storage = adoptee.storage._cdata
            is_gradient = all(id(alias) in gradients for alias in adoptee.aliases)
            if storage in lent or not (is_gradient or storage in sparse):
                besides.append(adoptee)
        return besides

    def ranges(self, among: Iterable[Range]) -> tuple[Range, ...]:
        """The ranges, among these, that hold nothing but gradients. They need not be saved when
        gradients are dropped."""
        of_gradients = self._adapter.lasting_gradients()
        for part in self.tensors().values():
            if part.layout is torch.strided:
                of_gradients.add(part.untyped_storage()._cdata)
        for owned in self._adapter.owned():
            if not owned.transient:  # a gradient may be a view of a lasting tensor
                of_gradients.discard(owned.tensor.untyped_storage()._cdata)
        of_gradients -= lent_gradients()
        ranges = []
        for r in [r for r in among if r.transient]:
            living = {entry.ref.cdata for entry in r.placed if not entry.ref.expired()}
            if living <= of_gradients:
                ranges.append(r)
        return tuple(ranges)

    def drop(self, *, zero_buffers: bool) -> None:
        """Set every gradient to None. Ranges that this empties are dropped at the next move.
        `zero_buffers`: also zero the gradient buffers that a framework keeps, which must be on the
        device."""
        for tensor in self._adapter.with_gradients():
            tensor.grad = None
        for framework in self._adapter.frameworks:
            framework.drop_unreduced()
            if zero_buffers:
                for buffer in framework.gradient_buffers():
                    buffer.detach().zero_()

    def zero_lasting(self, dropped: Iterable[Range]) -> list[Range]:
        """Gradients become None, and `dropped` are their ranges. Where a framework keeps a buffer
        in one, zero its host copy: the buffer will load as zeros. Returns those ranges, which must
        not be dropped."""
        lasting = self._adapter.lasting_gradients()
        staying = []
        for r in dropped:
            storages = {entry.ref.cdata for entry in r.placed if not entry.ref.expired()}
            if not storages.isdisjoint(lasting):
                r.note_written()
                r.view(0, r.nbytes).zero_()
                staying.append(r)
        return staying
