"""Places: where each tensor of an object lies and in what form, by the name under which the object owns it.

Several tensors may lie in one storage, each in its own form: FSDP2's flat view of a padded storage and the local tensor cut from it,
parameters cut from one buffer, tied weights of different shapes. A tensor that was put in place of one of them is known by its name
alone.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from placement.storage.range import PlacedStorage, Range
from placement.storage.range_layout import Claim
from placement.tensors.plain import Outline, Owned, is_wrapper

Form = tuple[torch.dtype, int, torch.Size, tuple[int, ...]]
"""Dtype, storage offset, size and strides of a tensor."""


class Place(NamedTuple):
    """The range, the adopted storage and the form that belong to one name."""

    range: Range
    entry: PlacedStorage
    form: Form

    @property
    def address(self) -> int:
        """The address of the storage's first byte."""
        return self.range.layout.addresses.base + self.entry.offset


class Relocated(NamedTuple):
    """An adopted storage that is not at its place, because something changed its pointer: `share_memory_()`, `resize_()`."""

    range: Range
    entry: PlacedStorage
    claim: Claim
    transient: bool

    @property
    def is_resized(self) -> bool:
        return self.claim.nbytes != self.entry.nbytes


class NewStorages(NamedTuple):
    """The storages that an object owns outside their places, one claim a storage, in the adapter's order."""

    stay: list[Claim]
    transient: list[Claim]
    relocated: list[Relocated]
    in_place: Sequence[Owned] | None = None
    """The tensors that are at their places; None where a quick look has shown that nothing changed."""
    other_names: Mapping[str, str] = {}
    """See `Adapter.other_names`."""

    def __bool__(self) -> bool:
        return bool(self.stay or self.transient or self.relocated)


class Places:
    """The places and forms of one object's tensors, as of its last offload. Holds no tensor."""

    def __init__(self) -> None:
        self._forms: dict[str, tuple[int, Form]] = {}
        """The address of the storage, and the form, by the tensor's name."""
        self._outlines: dict[str, Outline] = {}
        """The outlines of wrappers, by the names of their parts."""
        self._other_names: Mapping[str, str] = {}

    def note(self, born: NewStorages) -> None:
        """Replace everything known by the tensors that are at their places now.

        There may be tens of thousands, so functions implemented in C do the work.
        """
        if born.in_place is None:
            return
        self._forms, self._outlines, self._other_names = {}, {}, born.other_names
        self._add(born.in_place, list(map(_ADDRESS, map(_STORAGE, map(_TENSOR, born.in_place)))))

    def add(self, fresh: Range) -> None:
        """Add the tensors that are about to move into a new range."""
        for claim, offset in zip(fresh.claims or (), fresh.layout.offsets, strict=True):
            self._add(claim.owned, [fresh.layout.addresses.base + offset] * len(claim.owned))

    def _add(self, found: Sequence[Owned], addresses: Sequence[int]) -> None:
        tensors = list(map(_TENSOR, found))
        forms = zip(map(_DTYPE, tensors), map(_OFFSET, tensors), map(_SIZE, tensors), map(_STRIDE, tensors), strict=True)
        self._forms.update(zip(map(_NAME, found), zip(addresses, forms, strict=True), strict=True))
        outlines: dict[int, Outline] = {}
        for owned in found:
            if owned.wrapper is not None and is_wrapper(owned.wrapper):  # a sparse tensor is no wrapper: it is restored by its parts
                if id(owned.wrapper) not in outlines:
                    outlines[id(owned.wrapper)] = Outline.of(owned.wrapper)
                self._outlines[owned.name] = outlines[id(owned.wrapper)]

    def within(self, ranges: Iterable[Range]) -> dict[str, Place]:
        """The places in these ranges, by the tensor's name."""
        entries = {r.layout.addresses.base + entry.offset: (r, entry) for r in ranges for entry in r.placed}
        found = {name: Place(*entries[address], form) for name, (address, form) in self._forms.items() if address in entries}
        return {other: found[name] for other, name in self._others(found) if other not in found} | found

    def _others(self, names: Iterable[str]) -> Iterator[tuple[str, str]]:
        """Pairs of another name and the known one, for tensors, their parts and their gradients that have several names."""
        others: dict[str, list[str]] = {}
        for other, first in self._other_names.items():
            others.setdefault(first, []).append(other)
        for name in names if others else ():
            for end in (len(name), *(index for index, letter in enumerate(name) if letter == ".")):
                yield from ((other + name[end:], name) for other in others.get(name[:end], ()))

    def outlines(self) -> dict[str, Outline]:
        """The outlines of wrappers, by the names of their parts."""
        return {other: self._outlines[name] for other, name in self._others(self._outlines)} | self._outlines


def form_of(tensor: torch.Tensor) -> Form:
    return tensor.dtype, int(tensor.storage_offset()), tensor.size(), tensor.stride()


_NAME = operator.attrgetter("name")
_TENSOR = operator.attrgetter("tensor")
_STORAGE = torch.Tensor.untyped_storage
_ADDRESS = torch.UntypedStorage.data_ptr
_DTYPE = operator.attrgetter("dtype")
_OFFSET: Callable[[torch.Tensor], int] = torch.Tensor.storage_offset  # type: ignore[assignment]
_SIZE: Callable[[torch.Tensor], torch.Size] = torch.Tensor.size
_STRIDE: Callable[[torch.Tensor], tuple[int, ...]] = torch.Tensor.stride
