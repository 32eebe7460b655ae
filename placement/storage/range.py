"""The ranges of a handle: addresses that last for its life, host slabs of the same layout, and the
storages and tensors in them.

A storage belongs to one handle of one manager. Otherwise two managers, or two names for the same
weights, would move the same bytes against each other. So every adoption looks into the table of all
ranges first (`RANGES`), which says who owns an address.
"""

from __future__ import annotations

import bisect
import itertools
import operator
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from placement.core.interrupts import WeakIdSet
from placement.devices.base import Device
from placement.devices.memory import HostSlab
from placement.storage.fingerprints import differing, fingerprints, used_bytes
from placement.storage.layout import Adoptee, Form, RangeLayout, chunk_sizes, form_of
from placement.storage.pages import Pages
from placement.tensors.alive import PlacedStorage, UnusedPages
from placement.tensors.plain import Outline, Owned, is_wrapper


class Range:
    """Addresses of one handle with their page table, and the storages that have a place there. The
    host copy has the same layout."""

    is_shared = False  # whether other processes read the slab, too. If so, it is not written.

    def __init__(
        self,
        device: Device,
        layout: RangeLayout,
        slab: HostSlab,
        moving_in: tuple[Adoptee, ...],
        transient: bool,
    ) -> None:
        self._device = device
        self.layout = layout
        # used length. The rest of the last chunk is neither copied nor fingerprinted.
        self.nbytes = used_bytes(layout.nbytes)
        # see `layout.chunk_sizes`
        self.chunk_sizes: tuple[int, ...] = chunk_sizes(device, layout.nbytes)
        self.pages = Pages(device, layout.addresses, self.chunk_sizes, self.nbytes, slab)
        self.used_sizes, self.starts = self.pages.used_sizes, self.pages.starts
        self.transient = transient
        # the storages that have still to move in; None once all have
        self.moving_in: tuple[Adoptee, ...] | None = moving_in
        self.placed: tuple[PlacedStorage, ...] = ()
        self._by_storage: dict[int, PlacedStorage] | None = None
        # the storages (`_cdata`) of `placed` and their `use_count`, once counted
        self.counted: tuple[list[int], list[int]] | None = None
        self.without_stray_references: (
            tuple[tuple[list[int], list[int]], list[dict[int, int]], list[int]] | None
        ) = None
        """The last search for stray references, if it found none: `counted`, the tables of aliases,
        and the reference counts of then."""
        self._unused: UnusedPages | None = None  # None where it is not transient
        # called, in any thread, when a page of it has become unused
        self.when_unused: Callable[[], object] = lambda: None
        # whether a state dict has shown the slab. Its holder may have written there, so `prints`
        # may be out of date.
        self.is_shown = False

    @property
    def host(self) -> HostSlab:
        """The slab, some bytes of which may still be on their way. Who reads or writes it asks for
        a `view`."""
        return self.pages.host

    def move_in(self) -> None:
        """Give every storage its place. The slab has their bytes already. Idempotent."""
        if self.moving_in is None:
            return
        placed = []
        for index, (each, offset) in enumerate(
            zip(self.moving_in, self.layout.offsets, strict=True)
        ):
            self.layout.move_in(index)
            # not each.storage: rebinding has given the aliases another one
            ref = StorageWeakRef(each.aliases[0].untyped_storage())
            placed.append(PlacedStorage(each.name, ref, offset, each.nbytes))
        self.placed, self.moving_in, self._by_storage = tuple(placed), None, None
        self.layout.forget_adoptees()
        self._watch()

    def forget(self, entry: PlacedStorage) -> None:
        """Remove a storage that has left for good. Its place stays empty."""
        self.counted = self._by_storage = None
        self.placed = tuple(each for each in self.placed if each is not entry)
        self._watch()

    def replace(self, entry: PlacedStorage, home: torch.UntypedStorage) -> None:
        # first: they have the address of the old storage, which may be freed now
        self.counted = self._by_storage = None
        entry.ref, entry.use_count = StorageWeakRef(home), 0
        self._watch()

    def _watch(self) -> None:
        self.pages.need_all()
        if self.transient:
            self._unused = UnusedPages(
                self.placed, self._device.chunk_bytes, len(self.chunk_sizes), self.when_unused
            )

    def unused_pages(self) -> set[int]:
        """The pages that have become unused since memory was last given up."""
        return set() if self._unused is None else self._unused.found - self.pages.unused

    def place_of(self, storage: torch.UntypedStorage) -> PlacedStorage | None:
        """The place to which a storage belongs, wherever it lies now; None where it has no place in
        this range."""
        if self._by_storage is None:
            coming = zip(self.moving_in or (), self.layout.offsets, strict=False)
            places = [
                PlacedStorage(each.name, StorageWeakRef(each.storage), offset, each.nbytes)
                for each, offset in coming
            ]
            self._by_storage = {entry.ref.cdata: entry for entry in (*self.placed, *places)}
        return self._by_storage.get(storage._cdata)

    def has_any(self, addresses: Sequence[int]) -> bool:
        """Whether one of these addresses (ascending) lies in the range or in its slab."""
        bases = (self.layout.addresses.base, self.host.address)
        return any(
            bisect.bisect_left(addresses, base) < bisect.bisect_left(addresses, base + self.nbytes)
            for base in bases
        )

    @property
    def is_alive(self) -> bool:
        """Whether any tensor still lies in the range, or is about to move in."""
        return self.moving_in is not None or any(not placed.ref.expired() for placed in self.placed)

    def view(self, offset: int, nbytes: int) -> torch.Tensor:
        """A tensor over a part of the complete host copy, which stays as long as the tensor lives.
        Waits for bytes on their way there."""
        self.pages.wait_until_saved()
        return self.host.view(offset, nbytes)

    def fingerprint(self, first: int, last: int) -> torch.Tensor:
        """Fingerprints of chunks `first` up to `last` (not included), computed from the device;
        int64, enqueued on the current stream."""
        sizes = self.used_sizes[first:last]
        if not sizes:
            return torch.empty(0, dtype=torch.int64, device="cpu")
        known = self._device.known_fingerprints(self.layout.addresses, self.starts[first], sizes)
        return (
            fingerprints(self.on_device(self.starts[first], sum(sizes)), sizes)
            if known is None
            else known
        )

    def on_device(self, offset: int, nbytes: int) -> torch.Tensor:
        """A tensor over a part of the range, with what is behind its addresses: the bytes on the
        device, or poison."""
        return self._device.view(self.layout.addresses, offset, nbytes)

    def note_written(self) -> None:
        """The slab has changed, or is about to: forget its fingerprints, and do not use what was
        prefetched."""
        self.pages.prints = None
        self.pages.is_stale = True

    def note_shown(self) -> None:
        """The slab is shown to a caller who may write there as long as the range is offloaded: do
        not use what was prefetched."""
        self.is_shown = True
        self.pages.is_stale = True

    def outside(self) -> list[PlacedStorage]:
        """The relocated storages: alive, but not at their place, because somebody changed their
        pointer."""
        base, alive = (
            self.layout.addresses.base,
            [(entry, entry.storage()) for entry in self.placed],
        )
        return [
            entry
            for entry, storage in alive
            if storage is not None and storage.data_ptr() != base + entry.offset
        ]

    def differing(
        self, known: torch.Tensor | None, found: torch.Tensor, first: int = 0
    ) -> list[int]:
        """The pages, without unused ones, whose bytes differ: see `differing`."""
        return [i for i in differing(known, found, first) if i not in self.pages.unused]


RangeChunk = tuple[Range, int]  # a chunk of a range, by its index


# --- who owns an address


T = TypeVar("T")


class AddressMap(Generic[T]):
    """Finds what an address belongs to, among spans that do not overlap: (first address, end, what
    lies there)."""

    def __init__(self, spans: Iterable[tuple[int, int, T]] = ()) -> None:
        self._spans = sorted(spans, key=operator.itemgetter(0))
        self._bases = [base for base, _, _ in self._spans]

    def at(self, address: int) -> tuple[T, int] | None:
        """The value of the span that an address lies in, and the offset of the address there; None
        where it lies in none."""
        index = bisect.bisect_right(self._bases, address) - 1
        if index < 0 or address >= self._spans[index][1]:
            return None
        return self._spans[index][2], address - self._bases[index]

    def all_at(self, addresses: Iterable[int]) -> Iterator[T | None]:
        """The value of the span that each address lies in; None where it lies in none."""
        spans, asked = [(0, 0, None), *self._spans], list(addresses)
        indices = map(bisect.bisect_right, itertools.repeat(self._bases), asked)
        return (
            spans[index][2] if address < spans[index][1] else None
            for address, index in zip(asked, indices, strict=True)
        )


class Owner(Protocol):
    """The `ManagedStorage` that a range belongs to. (The owners of an optimizer's handle are the
    handles of modules.)"""

    name: str

    @property
    def ranges(self) -> tuple[Range, ...]: ...


class _RangeOwners:
    """The owner of each range, by its device addresses. There is no lock: a garbage collection in
    the middle of a call may drop a manager, whose ranges then go in the same thread. `_map` is made
    anew at the first question after a change."""

    def __init__(self) -> None:
        self._owners: WeakIdSet[Owner] = WeakIdSet()
        self._changes = itertools.count(1)
        self._change = 0
        # the number of the last change in it, and the map
        self._map: tuple[int, AddressMap[weakref.ref[Owner]]] = (0, AddressMap())

    def note(self, owner: Owner) -> None:
        """Note that an owner has got or dropped ranges."""
        self._owners.add(owner)
        self._change = next(self._changes)

    def owner_of(self, address: int) -> Owner | None:
        return self.owners_of((address,))[0]

    def owners_of(self, addresses: Iterable[int]) -> list[Owner | None]:
        """The owner of the range that each address lies in; None where there is no range, or its
        owner is gone."""
        change, known = self._map
        if change != self._change:
            change, living = (
                self._change,
                [
                    (r.layout.addresses.base, r.nbytes, owner)
                    for owner in self._owners
                    for r in owner.ranges
                ],
            )
            known = AddressMap(
                (base, base + nbytes, weakref.ref(owner)) for base, nbytes, owner in living
            )
            self._map = change, known
        return [None if found is None else found() for found in known.all_at(addresses)]


RANGES = _RangeOwners()


# --- the ranges of one object


class Place(NamedTuple):
    """The range, the adopted storage and the form that belong to one name."""

    range: Range
    entry: PlacedStorage
    form: Form

    def home(self) -> torch.UntypedStorage:
        """A new storage over the place on the device."""
        return self.range.on_device(self.entry.offset, self.entry.nbytes).untyped_storage()


class Versions(NamedTuple):
    """The version counters of an object's tensors at one look. Views share a counter, but a tensor
    bound by `.data =` has its own."""

    storages: Sequence[int] = ()  # the storage (`_cdata`) of each tensor
    versions: Sequence[int] = ()

    def but(self, other: Versions, *, among: Collection[int]) -> Versions:
        """These counters, but those of another look for the storages `among` that it has."""
        theirs = {key for key in other.storages if key in among}
        kept = [pair for pair in zip(*self, strict=True) if pair[0] not in theirs]
        kept += [pair for pair in zip(*other, strict=True) if pair[0] in theirs]
        return Versions([key for key, _ in kept], [version for _, version in kept])

    def written_since(self, before: Versions) -> set[int]:
        """The storages that were written since an earlier look: no write lowers a counter. A
        storage that has got or lost a tensor since is not compared."""
        if self == before:  # the common case, and fast for tens of thousands of tensors
            return set()
        now, written = self._by_storage(), set()
        for key, versions in before._by_storage().items():
            current = now.get(key, [])
            if len(current) == len(versions) and sum(current) > sum(versions):
                written.add(key)
        return written

    def _by_storage(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for key, version in zip(*self, strict=True):
            found.setdefault(key, []).append(version)
        return found


class ObjectRanges:
    """The ranges of one object, and the places, forms and version counters of its tensors, as of
    its last offload. Holds no tensor."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._addresses: dict[str, int] = {}  # the address of the storage, by the tensor's name
        # equal forms are one object: each object more is one more for the garbage collector
        self._forms: dict[str, Form] = {}
        # the outlines of wrappers, by the names of their parts
        self._outlines: dict[str, Outline] = {}
        self._other_names: Mapping[str, str] = {}
        self.versions = Versions()
        # whether values may be, though not gradients: tensors of a state dict share the counters
        self.may_be_written = False
        self.set(())

    def set(self, ranges: tuple[Range, ...]) -> None:
        self.all = ranges
        self._map = AddressMap(
            (base, base + r.nbytes, r)
            for r in ranges
            for base in (r.layout.addresses.base, r.host.address)
        )

    def at(self, address: int) -> tuple[Range, int] | None:
        """The range that an address lies in, behind its own addresses or in its slab, and the
        offset there; None for no range."""
        return self._map.at(address)

    def find(self, tensor: torch.Tensor) -> tuple[Range, int] | None:
        """The range that a tensor's storage begins in, as for `at`, and the offset there; None for
        no range."""
        return self._map.at(tensor.untyped_storage().data_ptr())

    def named_places(self) -> dict[str, Place]:
        """The places of what lasts, by name. What a forward has left under a name is no earlier
        value of a parameter of that name."""
        return self.places([r for r in self.all if not r.transient])

    def note_versions(self, versions: Versions) -> None:
        """Take these version counters as those of the offload: later writes count as written while
        offloaded."""
        self.versions, self.may_be_written = versions, False

    def note_more_versions(self, versions: Versions) -> None:
        """Add the counters of storages that were found for the first time now. Counters noted
        earlier stay."""
        self.versions = versions.but(self.versions, among={*self.versions.storages})

    def note_places(self, in_place: Sequence[Owned], other_names: Mapping[str, str]) -> None:
        """Forget all places, and note those where these tensors are now."""
        self._addresses, self._forms, self._outlines, self._other_names = {}, {}, {}, other_names
        self._add((owned, owned.tensor.untyped_storage().data_ptr()) for owned in in_place)

    def note_unless_moved(
        self, in_place: Sequence[Owned], other_names: Mapping[str, str]
    ) -> list[str]:
        """Note the places of now, unless a name has another place than noted. Returns such
        names."""
        noted = self._addresses, self._forms, self._outlines, self._other_names
        self.note_places(in_place, other_names)
        moved = []
        for name, address in noted[0].items():
            now = self._addresses.get(name)
            if now is None and name in other_names:
                now = self._addresses.get(other_names[name])
            if now is not None and now != address:
                moved.append(name)
        if moved:
            self._addresses, self._forms, self._outlines, self._other_names = noted
        return moved

    def add_places(self, fresh: Range) -> None:
        """Add the places of the tensors that are about to move into a new range."""
        places = zip(fresh.moving_in or (), fresh.layout.offsets, strict=True)
        self._add(
            (owned, fresh.layout.addresses.base + offset)
            for adoptee, offset in places
            for owned in adoptee.owned
        )

    def _add(self, found: Iterable[tuple[Owned, int]]) -> None:
        outlines: dict[int, Outline] = {}
        forms = {form: form for form in self._forms.values()}
        for owned, address in found:
            form = form_of(owned.tensor)
            self._addresses[owned.name], self._forms[owned.name] = (
                address,
                forms.setdefault(form, form),
            )
            # a sparse tensor is no wrapper: it is restored by its parts
            if owned.wrapper is not None and is_wrapper(owned.wrapper):
                if id(owned.wrapper) not in outlines:
                    outlines[id(owned.wrapper)] = Outline.of(owned.wrapper)
                self._outlines[owned.name] = outlines[id(owned.wrapper)]

    def places(self, ranges: Iterable[Range]) -> dict[str, Place]:
        entries = {
            r.layout.addresses.base + entry.offset: (r, entry) for r in ranges for entry in r.placed
        }
        found = {
            name: Place(*entries[address], self._forms[name])
            for name, address in self._addresses.items()
            if address in entries
        }
        return {
            other: found[name] for other, name in self._others(found) if other not in found
        } | found

    def _others(self, names: Iterable[str]) -> Iterator[tuple[str, str]]:
        """Pairs of another name and the known one, for tensors, their parts and their gradients
        that have several names."""
        others: dict[str, list[str]] = {}
        for other, first in self._other_names.items():
            others.setdefault(first, []).append(other)
        for name in names if others else ():
            for end in (len(name), *(index for index, letter in enumerate(name) if letter == ".")):
                yield from ((other + name[end:], name) for other in others.get(name[:end], ()))

    def outlines(self) -> dict[str, Outline]:
        return {
            other: self._outlines[name] for other, name in self._others(self._outlines)
        } | self._outlines
