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
from collections.abc import Iterable, Iterator, Mapping, Sequence
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

    def split(self, device: torch.device) -> tuple[list[Adoptee], Scan]:
        """The new storages on this device, and those elsewhere."""

        def away(adoptees: Sequence[Adoptee]) -> list[Adoptee]:
            return [adoptee for adoptee in adoptees if adoptee.storage.device != device]

        here = [adoptee for adoptee in self.new if adoptee.storage.device == device]
        return here, Scan(away(self.lasting), away(self.transient))

    def with_relocated(self) -> Scan:
        """The same with the relocated storages among the new ones, as far as they have bytes."""
        lasting, transient = [*self.lasting], [*self.transient]
        for relocated in self.relocated:
            adoptee = relocated.adoptee
            if adoptee.nbytes:
                (transient if adoptee.owned[0].transient else lasting).append(adoptee)
        return self._replace(lasting=lasting, transient=transient, relocated=[])


_SCANNERS: WeakIdSet[StorageScanner] = WeakIdSet()
BORROWED: WeakIdSet[torch.Tensor] = WeakIdSet()
"""Tensors that lay in storages of another object when their own object was last looked at (an
optimizer's shard in the model's buffer). They may have left placement since."""


def alias_tables() -> list[dict[int, int]]:
    """`StorageScanner.aliases` of each registered object. No table is ever changed: a look that
    finds other numbers makes another one."""
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


def _adoptee(found: list[Owned], shown: Iterable[torch.Tensor]) -> Adoptee:
    """The storage of these tensors of the object, and of those that state dicts show. One with
    elements names it, if there is any."""
    if len(found) > 1:
        found.sort(key=lambda each: not each.tensor.numel())
    return Adoptee(
        found[0].name,
        found[0].tensor.untyped_storage(),
        (*[each.tensor for each in found], *shown),
        tuple(found),
    )


def _places(ranges: Sequence[Range]) -> dict[int, int]:
    """The address of the place of each adopted storage that is alive."""
    return {
        entry.ref.cdata: r.layout.addresses.base + entry.offset
        for r in ranges
        for entry in r.placed
        if storage_use_count(entry.ref.cdata)
    }


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
        self.versions = Versions(placed_at := list[int](), versions := list[int]())
        for owned in tensors:
            storage = owned.tensor.untyped_storage()
            key = storage._cdata
            storages.append(key)
            if (address := places.get(key)) is None:
                references.append(StorageWeakRef(storage))
                if storage.nbytes():
                    new.setdefault(key, []).append(owned)
                continue
            placed_at.append(key)
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
        self._last: tuple[tuple[Range, ...], Sequence[int], list[int], list[int]] | None = None
        """The last look, if it found every tensor at its place: the ranges, and each tensor's
        storage, address and version."""
        # the `Adapter.steady` of what was adopted since the last look: it has moved in by the next
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
        if is_module and (seen := self.adapter.unchanged()) is not None:
            return seen.tensors
        before, self.adapter.hands_back = self.adapter.hands_back, True
        try:
            return [owned.tensor for owned in self.adapter.owned()]
        finally:
            self.adapter.hands_back = before

    def rescan(self, *, movable: bool = False, anew: bool = False) -> Scan:
        """Look at the object anew: update `versions`, `aliases` and what is borrowed, and return
        the storages outside their places.
        `movable`: give sparse gradients storages that nothing else uses, so that everything new can
        be moved.
        `anew`: look at every tensor, even if nothing has changed since the last look.

        Raises RegistrationError: a storage belongs to another handle.
        """
        if not anew and self._is_known():
            return Scan()
        self._last = self._adopted = None
        walk = self._walk(movable=movable)
        self._note(walk)
        shown: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        for tensor in self.state_dict_tensors:
            shown[tensor.untyped_storage()._cdata].append(tensor)
        places = {}
        if walk.elsewhere:
            places = {entry.ref.cdata: (r, entry) for r in self.ranges.all for entry in r.placed}
        relocated = [
            Relocated(*places[key], _adoptee(tensors, shown.get(key, ())))
            for key, tensors in walk.elsewhere.items()
        ]
        lasting, transient = list[Adoptee](), list[Adoptee]()
        for key, tensors in walk.new.items():
            adoptee = _adoptee(tensors, shown.get(key, ()))
            first = adoptee.owned[0]
            if first.tensor.numel():
                (transient if first.transient else lasting).append(adoptee)
        return Scan(lasting, transient, relocated, walk.in_place)

    def _is_known(self) -> bool:
        """Whether a quick look shows that nothing has changed since the last one, except that what
        was adopted has moved in. Updates what is known."""
        last, adopted, self._adopted = self._last, self._adopted, None
        if last is not None and last[0] is not self.ranges.all:
            last = None
        if last is None and (adopted is None or adopted is not self.adapter.steady):
            return False
        if (seen := self.adapter.unchanged()) is None:
            return False
        return self._is_in_place(seen) if last is None else self._is_as_before(seen, *last[1:])

    def _walk(self, *, movable: bool) -> _Walk:
        walk = _Walk(self.adapter.owned(), self.ranges.all)
        if movable and (sparse := list(self.adapter.sparse())):
            del walk  # its tensors use the sparse gradients' storages, too
            for tensor in sparse:
                own_storages(tensor)
            walk = _Walk(self.adapter.owned(), self.ranges.all)
        lent, refusal = self._belong_elsewhere(walk.new)
        if refusal is not None:
            del walk  # an error that somebody keeps must not keep tensors
            raise RegistrationError(refusal)
        BORROWED.update(owned.tensor for key in lent for owned in walk.new.pop(key))
        return walk

    def _note(self, walk: _Walk) -> None:
        """Take what a walk has found as known from now on."""
        self.discovered, self.versions = frozenset(walk.new), walk.versions
        self._note_aliases(walk.storages, walk.references)
        if (
            walk.storages
            and len(walk.in_place) == len(walk.storages)
            and (seen := self.adapter.unchanged()) is not None
        ):
            self._last = self.ranges.all, walk.storages, seen.addresses, seen.versions

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
        stepped is left out: its module counts it."""
        borrowed = {id(tensor): tensor for tensor in self.adapter.borrowed()}
        BORROWED.update(borrowed.values())
        bases = {
            id(base): base for tensor in borrowed.values() if (base := tensor._base) is not None
        }
        stepped = {id(parameter) for parameter in self.adapter.stepped()} if bases else ()
        return [
            StorageWeakRef(tensor.untyped_storage())
            for key, tensor in (borrowed | bases).items()
            if key not in stepped
        ]

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

    def _is_as_before(
        self, found: Seen, storages: Sequence[int], addresses: list[int], last_versions: list[int]
    ) -> bool:
        """Whether tensors that the adapter has found unchanged are those of the last look, all at
        their places. Updates the counters."""
        if found.addresses != addresses:
            return False
        # The adapter says what is as at ITS last walk, which need not be the one of this look: a
        # state dict that was loaded back in between lies at the same addresses, in storages that
        # are not adopted.
        if (
            self.state_dict_tensors.shares_addresses
            and list(map(_CDATA, map(_STORAGE, found.tensors))) != storages
        ):
            return False
        if found.versions != last_versions:
            self.versions = Versions(storages, found.versions)
            self._last = self.ranges.all, storages, addresses, found.versions
        return True

    def _is_in_place(self, found: Seen) -> bool:
        """Whether the tensors of the last look, which the adapter has found unchanged, have all
        moved in since. Updates what is known."""
        ranges, storages = self.ranges.all, list(map(_STORAGE, found.tensors))
        keys = list(map(_CDATA, storages))
        places = _places(ranges)
        if not keys or list(map(places.get, keys)) != list(
            map(torch.UntypedStorage.data_ptr, storages)
        ):
            return False
        self.discovered, self.versions = frozenset(), Versions(keys, found.versions)
        self._note_aliases(keys, [entry.ref for r in ranges for entry in r.placed])
        self._last = ranges, keys, found.addresses, found.versions
        return True

    def _belong_elsewhere(self, found: Mapping[int, list[Owned]]) -> tuple[list[int], str | None]:
        """The storages among `found` that another handle owns and this object leaves there; and why
        one of them is refused, or None. An optimizer leaves its modules what is theirs. So does a
        sparse gradient, which gets a storage of its own before it is moved, and whatever is handed
        back. Nothing else may be claimed a second time: whose it is was decided when it was first
        seen."""
        if not found:
            return [], None
        owners = RANGES.owners_of(
            tensors[0].tensor.untyped_storage().data_ptr() for tensors in found.values()
        )
        theirs = {
            key: owner
            for key, owner in zip(found, owners, strict=True)
            if owner is not None and owner is not self._owner()
        }
        modules = set[Owner | None]()
        if not self.adapter.hands_back:
            modules = self._modules()
            for other in _SCANNERS:
                owner = other._owner()
                if owner is None or other is self:
                    continue
                # what another object has got since its last look is its own all the same
                if owner not in modules and other.discovered.isdisjoint(found):
                    continue
                now = {*map(_CDATA, map(_STORAGE, other.tensors_now()))}
                for key in found:
                    if key in now and (owner in modules or key in other.discovered):
                        theirs.setdefault(key, owner)
        for key, owner in theirs.items():
            first = next((owned for owned in found[key] if not owned.held), found[key][0])
            is_left = (
                self.adapter.hands_back
                or owner in modules
                or (first.wrapper is not None and is_sparse(first.wrapper))
            )
            if not is_left and not all(owned.held for owned in found[key]):
                return [], _refusal(first, self.name, self.adapter.kind, owner.name)
        return [*theirs], None

    def _modules(self) -> set[Owner | None]:
        """For an optimizer: the owners of the parameters that it steps."""
        if self.adapter.kind != "optimizer":
            return set()
        stepped = (tensor.untyped_storage().data_ptr() for tensor in self.adapter.stepped())
        return {*RANGES.owners_of(stepped)} - {self._owner()}

    def unadopted(self) -> Unadopted | None:
        """The object's storages in torch's own memory. None where nothing that comes with a
        training has come since the last call, see `Adapter.record_if_current`: a policy that never
        offloads asks often."""
        if (record := self.adapter.record_if_current()) is not None and self._measured_at == (
            self.ranges.all,
            record,
        ):
            return None
        new = self.rescan()
        self._measured_at = self.ranges.all, self.adapter.record_if_current()
        return Unadopted.of([adoptee.storage for adoptee in new.new])
