"""Which tensor lies where and in what form, by the name under which its object owns it.

Several tensors may lie in one storage, each in a form of its own: FSDP2's flat view of a padded storage and the local tensor cut from
it, parameters cut from one buffer, tied weights of other shapes. What was put in place of one of them is known by its name alone.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from placement.storage.range import PlacedStorage, Range
from placement.storage.range_layout import Claim
from placement.tensors.owned import Owned
from placement.tensors.plain import Outline, is_wrapper

Form = tuple[torch.dtype, int, torch.Size, tuple[int, ...]]
"""Dtype, storage offset, size and strides of a tensor."""


class Place(NamedTuple):
    """Where a tensor belongs."""

    range: Range
    entry: PlacedStorage
    form: Form

    @property
    def address(self) -> int:
        """Of the storage's first byte."""
        return self.range.layout.addresses.base + self.entry.offset


class Relocated(NamedTuple):
    """A storage that has a place and lies elsewhere, because its pointer was changed: `share_memory_()`, `resize_()`."""

    range: Range
    entry: PlacedStorage
    claim: Claim
    transient: bool

    @property
    def is_resized(self) -> bool:
        return self.claim.nbytes != self.entry.nbytes


class NewStorages(NamedTuple):
    """What an object owns outside its places, one claim a storage, in the adapter's order."""

    stay: list[Claim]
    transient: list[Claim]
    relocated: list[Relocated]
    in_place: Sequence[Owned] | None = None
    """And what it has at its places; None where it was quickly seen that all is as it was."""
    other_names: Mapping[str, str] = {}
    """See `Adapter.other_names`."""

    def __bool__(self) -> bool:
        return bool(self.stay or self.transient or self.relocated)


class Places:
    """The forms of one object's tensors, as of its last offload. Holds no tensor."""

    def __init__(self) -> None:
        self._forms: dict[str, tuple[int, Form]] = {}
        """By name: the address of the storage, and the form."""
        self._outlines: dict[str, Outline] = {}
        """Of wrappers, by the names of their parts."""
        self._other_names: Mapping[str, str] = {}

    def note(self, born: NewStorages) -> None:
        """What lies at its place now is all that belongs there. Of tens of thousands of tensors, so functions of C ask them."""
        if born.in_place is None:
            return
        self._forms, self._outlines, self._other_names = {}, {}, born.other_names
        self._add(born.in_place, list(map(_ADDRESS, map(_STORAGE, map(_TENSOR, born.in_place)))))

    def add(self, fresh: Range) -> None:
        """What is about to move into a range belongs there."""
        for claim, offset in zip(fresh.claims or (), fresh.layout.offsets, strict=True):
            self._add(claim.owned, [fresh.layout.addresses.base + offset] * len(claim.owned))

    def _add(self, found: Sequence[Owned], addresses: Sequence[int]) -> None:
        tensors = list(map(_TENSOR, found))
        forms = zip(map(_DTYPE, tensors), map(_OFFSET, tensors), map(_SIZE, tensors), map(_STRIDE, tensors), strict=True)
        self._forms.update(zip(map(_NAME, found), zip(addresses, forms, strict=True), strict=True))
        outlines: dict[int, Outline] = {}
        for owned in found:
            if owned.wrapper is not None and is_wrapper(owned.wrapper):  # a sparse tensor is none: what it has is found by its parts
                if id(owned.wrapper) not in outlines:
                    outlines[id(owned.wrapper)] = Outline.of(owned.wrapper)
                self._outlines[owned.name] = outlines[id(owned.wrapper)]

    def within(self, ranges: Iterable[Range]) -> dict[str, Place]:
        """By name, the places in these ranges."""
        entries = {r.layout.addresses.base + entry.offset: (r, entry) for r in ranges for entry in r.placed}
        found = {name: Place(*entries[address], form) for name, (address, form) in self._forms.items() if address in entries}
        return {other: found[name] for other, name in self._others(found) if other not in found} | found

    def _others(self, names: Iterable[str]) -> Iterator[tuple[str, str]]:
        """Further names of tensors, of their parts and gradients, each with the name that is known."""
        others: dict[str, list[str]] = {}
        for other, first in self._other_names.items():
            others.setdefault(first, []).append(other)
        for name in names if others else ():
            for end in (len(name), *(index for index, letter in enumerate(name) if letter == ".")):
                yield from ((other + name[end:], name) for other in others.get(name[:end], ()))

    def outlines(self) -> dict[str, Outline]:
        """Of wrappers, by the names of their parts."""
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
