"""One look at an object: which of its storages lie at their places, which are new, and how many of
its tensors use each.

Several tensors may lie in one storage, each in its own form: FSDP2's flat view of a padded storage
and the local tensor cut from it, parameters cut from one buffer, tied weights of different shapes.
A tensor that was put in place of one of them is known by its name alone. Storages are known by
`_cdata`, their address in C++.
"""

from __future__ import annotations

import operator
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from placement.core.errors import RegistrationError
from placement.core.weak import WeakIdSet
from placement.ownership.adapter import Adapter, Seen
from placement.storage.layout import Adoptee
from placement.storage.owners import RANGES, Owner
from placement.storage.places import ObjectRanges
from placement.storage.range import Range
from placement.storage.versions import Versions
from placement.storage.watch.state_dicts import StateDictTensors
from placement.tensors.alive import PlacedStorage, Unadopted, storage_use_count
from placement.tensors.plain import Owned, align_all, is_sparse, own_storages

_CDATA = operator.attrgetter("_cdata")
_STORAGE = torch.Tensor.untyped_storage


class Relocated(NamedTuple):
    """An adopted storage that is not at its place, because something changed its pointer:
    `share_memory_()`, `resize_()`."""

    range: Range
    entry: PlacedStorage
    adoptee: Adoptee


class _Steady(NamedTuple):
    """A look that found every tensor at its place: the ranges, and each tensor's storage
    (`_cdata`), address and version counter."""

    ranges: tuple[Range, ...]
    storages: Sequence[int]
    addresses: list[int]
    versions: list[int]


class Scan(NamedTuple):
    """One look at an object: the storages that it owns outside their places, one adoptee a storage,
    in the adapter's order."""

    lasting: Sequence[Adoptee] = ()
    transient: Sequence[Adoptee] = ()
    relocated: Sequence[Relocated] = ()
    # the tensors that are at their places; None where a quick look has shown that nothing changed
    in_place: Sequence[Owned] | None = None

    @property
    def new(self) -> list[Adoptee]:
        """The storages that have no place."""
        return [*self.lasting, *self.transient]

    @property
    def outside(self) -> list[Adoptee]:
        return [*(relocated.adoptee for relocated in self.relocated), *self.new]

    def new_beside(self, device: torch.device) -> Scan:
        """The new storages that are not on this device."""
        return Scan(
            [adoptee for adoptee in self.lasting if adoptee.storage.device != device],
            [adoptee for adoptee in self.transient if adoptee.storage.device != device],
        )

    def with_relocated(self) -> Scan:
        """The same with the relocated storages among the new ones, as far as they have bytes."""
        lasting = [*self.lasting]
        transient = [*self.transient]
        for _, _, adoptee in self.relocated:
            if adoptee.nbytes:
                (transient if adoptee.owned[0].transient else lasting).append(adoptee)
        return self._replace(lasting=lasting, transient=transient, relocated=[])


_SCANNERS: WeakIdSet[StorageScanner] = WeakIdSet()
BORROWED: WeakIdSet[torch.Tensor] = WeakIdSet()
"""Tensors that lay in storages of another object when their own object was last looked at (an
optimizer's shard in the model's buffer). They may have left placement since."""


def alias_tables() -> list[dict[int, int]]:
    """`StorageScanner.aliases` of each registered object. No table is ever changed. A look with
    other numbers makes another table."""
    return [scanner.aliases for scanner in _SCANNERS]


def lent_gradients() -> set[int]:
    """The storages (`_cdata`) of gradients that are also state of a registered optimizer now: see
    `Adapter.lent_gradients`."""
    return set().union(*(scanner.lent_gradients() for scanner in _SCANNERS))


def registered_tensors() -> Iterator[torch.Tensor]:
    """The tensors of all registered objects, and the parameters that optimizers step, whose modules
    may be gone."""
    for scanner in _SCANNERS:
        yield from scanner.adapter.stepped()
        yield from scanner.tensors_now()


def _refusal(owned: Owned, name: str, kind: str, owner: str) -> str:
    if owner == name:  # within one manager a name is given once
        return (
            f"{owned.name!r} of {name!r} is registered in another manager of this process, as "
            f"{owner!r} too; a storage has one owner. Use that manager, or unregister it there "
            "first (close() does that for all handles of a manager)."
        )
    advice = (
        "Register modules that share storages once, as one module: torch.nn.ModuleList([actor, "
        "critic]) for two with one trunk. Else give it a copy (clone())."
    )
    if kind == "optimizer":
        advice = (
            "State may lie in the modules that its optimizer steps; give it a copy of anything "
            "else (clone()). Register optimizers that share their state once, as one object that "
            "has them in .sub_optimizers."
        )
    elif owned.transient:
        advice = "Give it a gradient of its own (clone()), and drop this one with zero_grad()."
    return (
        f"{owned.name!r} of {name!r} lies in a storage that belongs to {owner!r} already; a "
        f"storage has one owner. {advice}"
    )


def _adoptee(tensors: list[Owned], shown: Iterable[torch.Tensor]) -> Adoptee:
    """The storage of these tensors of the object, and of those that state dicts show. A tensor with
    elements names it, if there is any."""
    if len(tensors) > 1:
        tensors.sort(key=lambda owned: not owned.tensor.numel())
    first = tensors[0]
    aliases = (*[owned.tensor for owned in tensors], *shown)
    return Adoptee(first.name, first.tensor.untyped_storage(), aliases, tuple(tensors))


def _places(ranges: Sequence[Range]) -> dict[int, int]:
    """The address of the place of each adopted storage (`_cdata`) that is alive."""
    places = {}
    for r in ranges:
        base = r.layout.addresses.base
        for entry in r.placed:
            if storage_use_count(entry.ref.cdata):
                places[entry.ref.cdata] = base + entry.offset
    return places


class _Walk:
    """One walk over the tensors that an object owns. Each dictionary is by storage (`_cdata`)."""

    def __init__(self, tensors: Iterable[Owned], ranges: Sequence[Range]) -> None:
        places = _places(ranges)
        # There may be tens of thousands of tensors, so the loop has local names.
        self.storages = storages = list[int]()  # the storage of each tensor, in the adapter's order
        # the tensors whose storages are adopted and at their places
        self.in_place = in_place = list[Owned]()
        # adopted storages that are not at their places
        self.elsewhere = elsewhere = dict[int, list[Owned]]()
        self.new = new = dict[int, list[Owned]]()  # storages that are not adopted and not empty
        # weak references to `storages`, and more
        self.references = references = [entry.ref for r in ranges for entry in r.placed]
        adopted, versions = list[int](), list[int]()
        self.versions = Versions(adopted, versions)
        for owned in tensors:
            storage = owned.tensor.untyped_storage()
            key = storage._cdata
            storages.append(key)
            address = places.get(key)
            if address is None:
                references.append(StorageWeakRef(storage))
                if storage.nbytes():
                    new.setdefault(key, []).append(owned)
                continue
            adopted.append(key)
            versions.append(owned.version)
            if storage.data_ptr() == address:
                in_place.append(owned)
            else:
                elsewhere.setdefault(key, []).append(owned)


class StorageScanner:
    """Knows the storages of one object: which lie in its ranges, and which outside.
    `owner`: the owner of the ranges in the process's table (`RANGES`)."""

    def __init__(
        self,
        adapter: Adapter,
        owner: Owner,
        ranges: ObjectRanges,
        state_dict_tensors: StateDictTensors,
    ) -> None:
        self.adapter = adapter
        self.name = owner.name
        self._owner = weakref.ref(owner)
        self.ranges = ranges
        self.state_dict_tensors = state_dict_tensors
        # the counters of the adopted storages, as of the last look. A write raises them.
        self.versions = Versions()
        self.aliases: dict[int, int] = {}
        """The number of the object's tensors in each storage (`_cdata`), those of other objects
        included, as of the last look."""
        # the keys of `aliases`: no new storage gets a dead one's `_cdata`, and its count
        self._alive: list[StorageWeakRef] = []
        # the object's new storages (`_cdata`) as of the last look: its own from then on
        self.discovered: frozenset[int] = frozenset()
        self._last: _Steady | None = None  # the last look, if every tensor was at its place
        # the `Adapter.steady` of tensors adopted since the last look: they have moved in by the
        # next
        self._adopted: object | None = None
        # the ranges at the last `unadopted`, and the record
        self._measured_at: tuple[tuple[Range, ...], object] | None = None
        _SCANNERS.add(self)

    def lent_gradients(self) -> set[int]:
        """See `Adapter.lent_gradients`. Looks at the state if a quick look cannot tell that nothing
        changed."""
        if self.adapter.kind == "optimizer" and self.adapter.unchanged() is None:
            deque(self.adapter.owned(), maxlen=0)
        return self.adapter.lent_gradients()

    def tensors_now(self) -> list[torch.Tensor]:
        """The object's tensors that can be moved, also where it has got some that cannot."""
        # state may lie in the modules' storages by now, which a quick look does not see
        is_module = self.adapter.kind != "optimizer"
        unchanged = self.adapter.unchanged() if is_module else None
        if unchanged is not None:
            return unchanged.tensors
        hands_back = self.adapter.hands_back
        self.adapter.hands_back = True
        try:
            return [owned.tensor for owned in self.adapter.owned()]
        finally:
            self.adapter.hands_back = hands_back

    def rescan(self, *, movable: bool = False, anew: bool = False) -> Scan:
        """Look at the object anew: update `versions`, `aliases` and `BORROWED`, and return the
        storages outside their places.
        `movable`: give sparse gradients storages without other users, so that all new storages can
        be moved.
        `anew`: look at every tensor, even if nothing has changed since the last look.

        Raises RegistrationError: a storage belongs to another handle.
        """
        if not anew and self._is_steady():
            return Scan()
        self._last = self._adopted = None
        walk = self._walk(movable=movable)
        self._note(walk)
        shown: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        for tensor in self.state_dict_tensors:
            shown[tensor.untyped_storage()._cdata].append(tensor)
        places = dict[int, tuple[Range, PlacedStorage]]()
        if walk.elsewhere:
            for r in self.ranges.all:
                places.update({entry.ref.cdata: (r, entry) for entry in r.placed})
        relocated = list[Relocated]()
        for key, tensors in walk.elsewhere.items():
            adoptee = _adoptee(tensors, shown.get(key, ()))
            relocated.append(Relocated(*places[key], adoptee))
        lasting = list[Adoptee]()
        transient = list[Adoptee]()
        for key, tensors in walk.new.items():
            adoptee = _adoptee(tensors, shown.get(key, ()))
            first = adoptee.owned[0]
            if first.tensor.numel():
                (transient if first.transient else lasting).append(adoptee)
        return Scan(lasting, transient, relocated, walk.in_place)

    def _is_steady(self) -> bool:
        """Whether a quick look shows that nothing has changed since the last one, except that
        adopted storages have moved in. Updates the facts of the last look."""
        last = self._last
        adopted = self._adopted
        self._adopted = None
        if last is not None and last.ranges is not self.ranges.all:
            last = None
        if last is None and (adopted is None or adopted is not self.adapter.steady):
            return False
        unchanged = self.adapter.unchanged()
        if unchanged is None:
            return False
        if last is None:
            return self._has_moved_in(unchanged)
        return self._is_as_before(unchanged, last)

    def _walk(self, *, movable: bool) -> _Walk:
        """Walk over the object's tensors. Those that lie in storages of other handles become
        `BORROWED`. Raises RegistrationError: one may not lie there."""
        walk = _Walk(self.adapter.owned(), self.ranges.all)
        sparse = list(self.adapter.sparse()) if movable else []
        if sparse:
            del walk  # its tensors use the sparse gradients' storages, too
            for tensor in sparse:
                own_storages(tensor)
            walk = _Walk(self.adapter.owned(), self.ranges.all)
        lent, refusal = self._belong_elsewhere(walk.new)
        if refusal is not None:
            del walk  # an error that a caller keeps must not keep tensors
            raise RegistrationError(refusal)
        for key in lent:
            BORROWED.update(owned.tensor for owned in walk.new.pop(key))
        return walk

    def _note(self, walk: _Walk) -> None:
        """Take the facts of a walk as those of the last look."""
        self.discovered = frozenset(walk.new)
        self.versions = walk.versions
        self._note_aliases(walk.storages, walk.references)
        if walk.storages and len(walk.in_place) == len(walk.storages):
            unchanged = self.adapter.unchanged()
            if unchanged is not None:
                self._last = _Steady(
                    self.ranges.all, walk.storages, unchanged.addresses, unchanged.versions
                )

    def versions_now(self) -> Versions:
        """The counters of the adopted storages, as of a new look."""
        self.rescan()
        return self.versions

    def _note_aliases(self, storages: list[int], references: list[StorageWeakRef]) -> None:
        hosts = self._note_borrowed()
        self._alive = references + hosts
        self.aliases = dict(Counter([*storages, *(host.cdata for host in hosts)]))

    def _note_borrowed(self) -> list[StorageWeakRef]:
        """Note the tensors that the last walk found in storages of the modules. Returns the storage
        of each, and of each one's base, which autograd keeps with the view. A parameter that is
        stepped is left out: the `aliases` of its module have it."""
        tensors = {id(tensor): tensor for tensor in self.adapter.borrowed()}
        BORROWED.update(tensors.values())
        bases = [tensor._base for tensor in tensors.values() if tensor._base is not None]
        tensors |= {id(base): base for base in bases}
        if bases:
            for parameter in self.adapter.stepped():
                tensors.pop(id(parameter), None)
        return [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors.values()]

    def note_adopted(self) -> None:
        """Note that storages of the last look were adopted, so that the next one begins with their
        places."""
        self._adopted = self.adapter.steady

    def note_places(self, born: Scan) -> None:
        if born.in_place is not None:
            self.ranges.note_places(born.in_place, self.adapter.other_names())

    def align_wrappers(self) -> None:
        if self.adapter.steady is None:  # else the last walk found none
            align_all(self.adapter.owned())

    def _is_as_before(self, unchanged: Seen, last: _Steady) -> bool:
        """Whether tensors that the adapter calls unchanged are those of the last look, all at their
        places. Updates the counters."""
        if unchanged.addresses != last.addresses:
            return False
        # Unchanged since the ADAPTER's last walk, which need not be the one of this look: a state
        # dict that was loaded back in between lies at the same addresses, in storages that are not
        # adopted.
        if self.state_dict_tensors.shares_addresses:
            storages = list(map(_CDATA, map(_STORAGE, unchanged.tensors)))
            if storages != last.storages:
                return False
        if unchanged.versions != last.versions:
            self.versions = Versions(last.storages, unchanged.versions)
            self._last = last._replace(versions=unchanged.versions)
        return True

    def _has_moved_in(self, unchanged: Seen) -> bool:
        """Whether the tensors of the last look, which the adapter calls unchanged, have all moved
        in since. Updates the facts of the last look."""
        ranges = self.ranges.all
        storages = list(map(_STORAGE, unchanged.tensors))
        keys = list(map(_CDATA, storages))
        places = list(map(_places(ranges).get, keys))
        if not keys or places != list(map(torch.UntypedStorage.data_ptr, storages)):
            return False
        self.discovered = frozenset()
        self.versions = Versions(keys, unchanged.versions)
        self._note_aliases(keys, [entry.ref for r in ranges for entry in r.placed])
        self._last = _Steady(ranges, keys, unchanged.addresses, unchanged.versions)
        return True

    def _belong_elsewhere(
        self,
        new: Mapping[int, list[Owned]],
    ) -> tuple[list[int], str | None]:
        """The storages among `new` that another handle owns and this object leaves there; and why
        one of them is refused, or None.

        An optimizer leaves the storages of its modules there. So does a sparse gradient, which gets
        a storage of its own before it is moved, and an object that is handed back. No other storage
        may be claimed a second time: its owner is the handle in which it was first seen.
        """
        if not new:
            return [], None
        other_owners = self._owners_by_address(new)
        modules = set[Owner | None]()
        if not self.adapter.hands_back:
            modules = self._modules()
            for key, owner in self._owners_by_last_look(new, modules).items():
                other_owners.setdefault(key, owner)
        for key, owner in other_owners.items():
            # first one that is not only held, if there is any
            owned = min(new[key], key=lambda owned: owned.held)
            is_left = (
                self.adapter.hands_back
                or owner in modules
                or (owned.wrapper is not None and is_sparse(owned.wrapper))
                or owned.held
            )
            if not is_left:
                return [], _refusal(owned, self.name, self.adapter.kind, owner.name)
        return [*other_owners], None

    def _owners_by_address(self, new: Mapping[int, list[Owned]]) -> dict[int, Owner]:
        """The other handles in whose ranges storages among `new` lie."""
        storages = [tensors[0].tensor.untyped_storage() for tensors in new.values()]
        owners = RANGES.owners_of(storage.data_ptr() for storage in storages)
        own = self._owner()
        return {
            key: owner
            for key, owner in zip(new, owners, strict=True)
            if owner is not None and owner is not own
        }

    def _owners_by_last_look(
        self, new: Mapping[int, list[Owned]], modules: Collection[Owner | None]
    ) -> dict[int, Owner]:
        """The other handles that have got storages among `new` since their last look: these are
        theirs all the same. Of `modules` also those that they have now."""
        other_owners = dict[int, Owner]()
        for other in _SCANNERS:
            owner = other._owner()
            if owner is None or other is self:
                continue
            if owner not in modules and other.discovered.isdisjoint(new):
                continue
            keys = {*map(_CDATA, map(_STORAGE, other.tensors_now()))}
            for key in new:
                if key in keys and (owner in modules or key in other.discovered):
                    other_owners.setdefault(key, owner)
        return other_owners

    def _modules(self) -> set[Owner | None]:
        """For an optimizer: the owners of the parameters that it steps."""
        if self.adapter.kind != "optimizer":
            return set()
        stepped = (tensor.untyped_storage().data_ptr() for tensor in self.adapter.stepped())
        return {*RANGES.owners_of(stepped)} - {self._owner()}

    def unadopted(self) -> Unadopted | None:
        """The object's storages in torch's own memory. None where no state of a training has come
        since the last call, see `Adapter.record_if_current`: a policy that never offloads asks
        often."""
        record = self.adapter.record_if_current()
        if record is not None and self._measured_at == (self.ranges.all, record):
            return None
        scan = self.rescan()
        self._measured_at = self.ranges.all, self.adapter.record_if_current()
        return Unadopted([adoptee.storage for adoptee in scan.new])
