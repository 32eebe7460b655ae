"""The ranges of one object, and where its tensors lie in them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch

from placement.storage.layout import Form, form_of
from placement.storage.owners import AddressMap
from placement.storage.range import Range
from placement.storage.versions import Versions
from placement.tensors.alive import PlacedStorage
from placement.tensors.plain import Outline, Owned, is_wrapper

T = TypeVar("T")


class Place(NamedTuple):
    """The range, the adopted storage and the form that belong to one name."""

    range: Range
    entry: PlacedStorage
    form: Form

    def home(self) -> torch.UntypedStorage:
        """A new storage over the place on the device."""
        return self.range.on_device(self.entry.offset, self.entry.nbytes).untyped_storage()


class ObjectRanges:
    """The ranges of one object, and the places, forms and version counters of its tensors, as of
    its last offload. Holds no tensor."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._addresses: dict[str, int] = {}  # the address of the storage, by the tensor's name
        self._identities: dict[str, int] = {}  # `id` of the tensor, by its name
        # equal forms are one object: each object more is one more for the garbage collector
        self._forms: dict[str, Form] = {}
        # the outlines of wrappers, by the names of their parts
        self._outlines: dict[str, Outline] = {}
        self._other_names: Mapping[str, str] = {}
        self.versions = Versions()
        # Whether a state dict shows values, whose holder may write them: then the counter of a
        # value proves no forbidden write. Gradients are never lent.
        self.are_values_lent = False
        self.set(())

    def set(self, ranges: tuple[Range, ...]) -> None:
        self.all = ranges
        spans = []
        for r in ranges:
            for base in (r.layout.addresses.base, r.host.address):
                spans.append((base, base + r.nbytes, r))
        self._map = AddressMap(spans)

    def at(self, address: int) -> tuple[Range, int] | None:
        """The range that an address lies in, behind its own addresses or in its slab, and the
        offset there; None for no range."""
        return self._map.at(address)

    def find(self, tensor: torch.Tensor) -> tuple[Range, int] | None:
        """The range that a tensor's storage begins in, as for `at`, and the offset there; None for
        no range."""
        return self._map.at(tensor.untyped_storage().data_ptr())

    def named_places(self) -> dict[str, Place]:
        """The places of lasting tensors, by name. A tensor that a forward has left under a name is
        no earlier value of a parameter of that name."""
        return self.places([r for r in self.all if not r.transient])

    def note_versions(self, versions: Versions) -> None:
        """Take these version counters as those of the offload: later writes count as written while
        offloaded."""
        self.versions = versions
        self.are_values_lent = False

    def note_more_versions(self, versions: Versions) -> None:
        """Add the counters of new storages. Counters noted earlier stay."""
        self.versions = self.versions.with_new_of(versions)

    def note_places(self, in_place: Sequence[Owned], other_names: Mapping[str, str]) -> None:
        """Forget all places, and note those where these tensors are now."""
        self._addresses = {}
        self._identities = {}
        self._forms = {}
        self._outlines = {}
        self._other_names = other_names
        self._add((owned, owned.tensor.untyped_storage().data_ptr()) for owned in in_place)

    def note_unless_moved(
        self, in_place: Sequence[Owned], other_names: Mapping[str, str]
    ) -> list[str]:
        """Note the places of these tensors, unless some are at other places than noted. Returns
        their names. A tensor may have another name now: the first layer was taken out."""
        present = {owned.name: owned.tensor for owned in in_place}
        moved = []
        at_home: frozenset[int] | None = None
        for name, noted_address in self._addresses.items():
            tensor = present.get(name)
            if tensor is None and name in other_names:
                tensor = present.get(other_names[name])
            # a name without a tensor has not moved: its tensor is gone
            if tensor is None or tensor.untyped_storage().data_ptr() == noted_address:
                continue
            if at_home is None:
                at_home = self.at_home(in_place)
            if name not in present or id(tensor) not in at_home:  # tied, or replaced
                moved.append(name)
        if not moved:
            self.note_places(in_place, other_names)
        return moved

    def at_home(self, in_place: Iterable[Owned]) -> frozenset[int]:
        """`id` of each of these tensors that is at its noted place, under any name."""
        homes = {self._identities[name]: address for name, address in self._addresses.items()}
        at_home = list[int]()
        for owned in in_place:
            identity = id(owned.tensor)
            if homes.get(identity) == owned.tensor.untyped_storage().data_ptr():
                at_home.append(identity)
        return frozenset(at_home)

    def has_taken_name(self, name: str, at_home: frozenset[int]) -> bool:
        """Whether a new tensor that has this noted name has only taken the name: the tensor that
        had it is `at_home`, under another one. A layer was put in before others."""
        return self._identities.get(name) in at_home

    def add_places(self, fresh: Range) -> None:
        """Add the places of the tensors that are about to move into a new range."""
        places = []
        for adoptee, offset in zip(fresh.moving_in or (), fresh.layout.offsets, strict=True):
            address = fresh.layout.addresses.base + offset
            places += [(owned, address) for owned in adoptee.owned]
        self._add(places)

    def _add(self, places: Iterable[tuple[Owned, int]]) -> None:
        """Add the address of each tensor's storage, the tensor's form, and its wrapper's
        outline."""
        outlines: dict[int, Outline] = {}
        forms = {form: form for form in self._forms.values()}
        for owned, address in places:
            form = form_of(owned.tensor)
            self._addresses[owned.name] = address
            self._identities[owned.name] = id(owned.tensor)
            self._forms[owned.name] = forms.setdefault(form, form)
            # a sparse tensor is no wrapper: it is restored by its parts
            if owned.wrapper is not None and is_wrapper(owned.wrapper):
                if id(owned.wrapper) not in outlines:
                    outlines[id(owned.wrapper)] = Outline.of(owned.wrapper)
                self._outlines[owned.name] = outlines[id(owned.wrapper)]

    def places(self, ranges: Iterable[Range]) -> dict[str, Place]:
        """The places in these ranges, by name, as of the last offload. An address has one entry,
        because empty storages are not adopted."""
        entries = {}
        for r in ranges:
            for entry in r.placed:
                entries[r.layout.addresses.base + entry.offset] = (r, entry)
        places = {}
        for name, address in self._addresses.items():
            if address in entries:
                places[name] = Place(*entries[address], self._forms[name])
        return self._under_all_names(places)

    def outlines(self) -> dict[str, Outline]:
        """The outlines of wrappers, by the names of their parts."""
        return self._under_all_names(self._outlines)

    def _under_all_names(self, values: dict[str, T]) -> dict[str, T]:
        """These values by name, and by the other names of tensors that have several, of their parts
        and of their gradients."""
        if not self._other_names:
            return {**values}
        other_names: dict[str, list[str]] = {}
        for other_name, first_name in self._other_names.items():
            other_names.setdefault(first_name, []).append(other_name)
        more = {}
        for name, value in values.items():
            steps = name.split(".")
            for length in range(1, len(steps) + 1):
                tensor_name = ".".join(steps[:length])
                for other_name in other_names.get(tensor_name, ()):
                    more[other_name + name.removeprefix(tensor_name)] = value
        return more | values
