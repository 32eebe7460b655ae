"""The gradients of an object, which an offload may drop instead of saving them."""

from __future__ import annotations

import itertools
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
        gradients = [
            owner.grad for owner in self._adapter.with_gradients() if owner.grad is not None
        ]
        gradients += itertools.chain.from_iterable(
            each.unreduced_gradients() for each in self._adapter.frameworks
        )
        return {id(part): part for gradient in gradients for _, part in dense_parts(gradient)}

    def besides(self, adoptees: Iterable[Adoptee]) -> list[Adoptee]:
        """The adoptees, among these transient ones, that hold anything but gradients."""
        gradients = self.tensors()
        # A sparse gradient's parts are new objects at each access, so they are known by their
        # storages, which nothing else uses.
        owners = self._adapter.with_gradients()
        sparse = [
            part
            for owner in owners
            if owner.grad is not None and is_sparse(owner.grad)
            for _, part in dense_parts(owner.grad)
        ]
        theirs = {part.untyped_storage()._cdata for part in sparse}
        lent = lent_gradients()
        more = []
        for adoptee in adoptees:
            storage = adoptee.storage._cdata
            is_gradient = all(id(alias) in gradients for alias in adoptee.aliases)
            if storage in lent or not (is_gradient or storage in theirs):
                more.append(adoptee)
        return more

    def ranges(self, among: Iterable[Range]) -> tuple[Range, ...]:
        """The ranges, among these, that hold nothing but gradients. They need not be saved when
        gradients are dropped."""
        dead = self._adapter.lasting_gradients()
        for part in self.tensors().values():
            if part.layout is torch.strided:
                dead.add(part.untyped_storage()._cdata)
        for owned in self._adapter.owned():
            if not owned.transient:  # a gradient may be a view of what lasts
                dead.discard(owned.tensor.untyped_storage()._cdata)
        dead -= lent_gradients()
        return tuple(
            r
            for r in among
            if r.transient
            and all(entry.ref.expired() or entry.ref.cdata in dead for entry in r.placed)
        )

    def drop(self, *, zero_buffers: bool) -> None:
        """Set every gradient to None. Ranges that this empties are dropped at the next move.
        `zero_buffers`: also zero the framework's gradient buffers, which it keeps. Only while they
        are on the device."""
        for owner in self._adapter.with_gradients():
            owner.grad = None
        for framework in self._adapter.frameworks:
            framework.drop_unreduced()
            for buffer in framework.gradient_buffers() if zero_buffers else ():
                buffer.detach().zero_()

    def zero_lasting(self, dropped: Iterable[Range]) -> list[Range]:
        """Zero the host copies of the ranges that hold the framework's lasting buffers: they will
        load as zeros. Returns these ranges."""
        lasting = self._adapter.lasting_gradients()
        staying = [
            r
            for r in dropped
            if any(entry.ref.cdata in lasting and not entry.ref.expired() for entry in r.placed)
        ]
        for r in staying:
            r.note_written()
            r.view(0, r.nbytes).zero_()
        return staying
