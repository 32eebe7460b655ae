"""Which tensor lies where and in what form, by the name under which its object owns it.

Several tensors may lie in one storage, each in a form of its own: FSDP2's flat view of a padded storage and the local tensor cut from
it, parameters cut from one buffer, tied weights of other shapes. What was put in place of one of them is known by its name alone.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from placement.adapters.base import Owned
from placement.adapters.tensors import Outline
from placement.memory.adopt import Claim
from placement.memory.range import Placed, Range

Form = tuple[torch.dtype, int, torch.Size, tuple[int, ...]]
"""Dtype, storage offset, size and strides of a tensor."""


class Place(NamedTuple):
    """Where a tensor belongs."""

    range: Range
    entry: Placed
    form: Form

    @property
    def address(self) -> int:
        """Of the storage's first byte."""
        return self.range.adoption.addresses.base + self.entry.offset


class Astray(NamedTuple):
    """A storage that has a place and lies elsewhere, because its pointer was changed: `share_memory_()`, `resize_()`."""

    range: Range
    entry: Placed
    claim: Claim
    loose: bool

    @property
    def is_resized(self) -> bool:
        return self.claim.nbytes != self.entry.nbytes


class Born(NamedTuple):
    """What an object owns outside its places, one claim a storage, in the adapter's order."""

    stay: list[Claim]
    loose: list[Claim]
    astray: list[Astray]

    def __bool__(self) -> bool:
        return any(self[:])


class Places:
    """The forms of one object's tensors, each as of the last look that found it at its place. Holds no tensor."""

    def __init__(self) -> None:
        self._forms: dict[str, tuple[int, Form]] = {}
        """By name; the storage by its `_cdata`."""
        self._outlines: dict[str, Outline] = {}
        """Of wrappers, by the names of their parts."""

    def note(self, found: Sequence[Owned], storages: Sequence[int], *, is_all: bool) -> None:
        """These tensors lie in these storages (`_cdata`), each at its place.

        Args:
            is_all: the object has no others, so what is known of others is forgotten.
        """
        if is_all:
            self._forms, self._outlines = {}, {}
        forms = [form_of(owned.tensor) for owned in found]
        self._forms.update(zip(map(_NAME, found), zip(storages, forms, strict=True), strict=True))
        outlines: dict[int, Outline] = {}
        for owned in found:
            if owned.wrapper is not None:
                if id(owned.wrapper) not in outlines:
                    outlines[id(owned.wrapper)] = Outline.of(owned.wrapper)
                self._outlines[owned.name] = outlines[id(owned.wrapper)]

    def within(self, ranges: Iterable[Range]) -> dict[str, Place]:
        """By name, the places in these ranges."""
        entries = {entry.ref.cdata: (r, entry) for r in ranges for entry in r.placed}
        return {name: Place(*entries[storage], form) for name, (storage, form) in self._forms.items() if storage in entries}

    def outline(self, name: str) -> Outline | None:
        """Of the wrapper that the tensor of this name was a part of."""
        return self._outlines.get(name)


def form_of(tensor: torch.Tensor) -> Form:
    return tensor.dtype, int(tensor.storage_offset()), tensor.size(), tensor.stride()


_NAME = operator.attrgetter("name")
