"""The gradients of one object: which ranges hold nothing but gradients, and how gradients are dropped."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Set

import torch

from placement.ownership.adapter import Adapter
from placement.storage.layout import Adoptee
from placement.storage.range import Range
from placement.storage.scan import lent_gradients
from placement.tensors.plain import is_sparse, parts_of, sparse_parts


def dense_parts(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The paths and dense tensors that hold a tensor's bytes."""
    return sparse_parts(tensor, "") if is_sparse(tensor) else parts_of(tensor, "")


class Gradients:
    """The gradients that the adapter reports. Each call asks the adapter anew, because gradients come and go between phases."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter

    def tensors(self) -> dict[int, torch.Tensor]:
        """The tensors that hold the gradients' bytes, by identity."""
        gradients = [owner.grad for owner in self._adapter.with_gradients() if owner.grad is not None]
        gradients += itertools.chain.from_iterable(each.unreduced_gradients() for each in self._adapter.frameworks)
        return {id(part): part for gradient in gradients for _, part in dense_parts(gradient)}

    def besides(self, adoptees: Iterable[Adoptee]) -> list[Adoptee]:
        """The adoptees, among these transient ones, that hold anything but gradients."""
        dead = self.tensors()
        # A sparse gradient's parts are new objects at each access, so they are known by their storages, which nothing else uses.
        owners = self._adapter.with_gradients()
        sparse = [part for owner in owners if owner.grad is not None and is_sparse(owner.grad) for _, part in dense_parts(owner.grad)]
        theirs = {part.untyped_storage()._cdata for part in sparse}
        lent = lent_gradients()
        return [
            c
            for c in adoptees
            if c.storage._cdata in lent or (c.storage._cdata not in theirs and not all(id(alias) in dead for alias in c.aliases))
        ]

    def lasting(self) -> set[int]:
        """The storages (`_cdata`) that the framework goes on using when the gradients are dropped."""
        return {buffer.untyped_storage()._cdata for framework in self._adapter.frameworks for buffer in framework.gradient_buffers()}

    def ranges(self, among: Iterable[Range]) -> tuple[Range, ...]:
        """The ranges, among these, that hold nothing but gradients. They need not be saved when gradients are dropped."""
        dead = {part.untyped_storage()._cdata for part in self.tensors().values() if part.layout is torch.strided} | self.lasting()
        dead -= {each.tensor.untyped_storage()._cdata for each in self._adapter.owned() if not each.transient} | lent_gradients()
        return tuple(r for r in among if r.transient and all(p.ref.expired() or p.ref.cdata in dead for p in r.placed))

    def drop(self, *, zero_buffers: bool) -> None:
        """Set every gradient to None. Ranges that this empties are dropped at the next move.

        Args:
            zero_buffers: also zero the framework's gradient buffers, which it keeps. Only while they are on the device.
        """
        for owner in self._adapter.with_gradients():
            owner.grad = None
        for framework in self._adapter.frameworks:
            framework.drop_unreduced()
            for buffer in framework.gradient_buffers() if zero_buffers else ():
                buffer.detach().zero_()

    def drop_in(self, storages: Set[int]) -> None:
        """Set the gradients that lie in these storages (`_cdata`) to None."""
        for owner in self._adapter.with_gradients():
            if owner.grad is not None and any(part.untyped_storage()._cdata in storages for _, part in dense_parts(owner.grad)):
                owner.grad = None

    def zero_lasting(self, dropped: Iterable[Range]) -> list[Range]:
        """Zero the host copies of the ranges that hold the framework's lasting buffers: they will load as zeros. Returns these ranges."""
        lasting = self.lasting()
        staying = [r for r in dropped if any(entry.ref.cdata in lasting and not entry.ref.expired() for entry in r.placed)]
        for r in staying:
            r.note_written()
            r.view(0, r.nbytes).zero_()
        return staying
