"""Look at what an object owns now: which storages lie at their places, which are new, who else uses
them, where each new one goes, and how all of them get ordinary memory again at the end.

Several tensors may lie in one storage, each in its own form: FSDP2's flat view of a padded storage
and the local tensor cut from it, parameters cut from one buffer, tied weights of different shapes.
A tensor that was put in place of one of them is known by its name alone. Storages are known by
`_cdata`, their address in C++.
"""

from __future__ import annotations

import gc
import itertools
import operator
import time
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from placement.core.errors import RegistrationError
from placement.core.interrupts import WeakIdSet
from placement.devices.base import Device
from placement.devices.host.slab import cut
from placement.devices.memory import Addresses, Copy, HostSlab
from placement.ownership.adapter import HANDED_BACK, Adapter, Seen
from placement.storage.fingerprints import used_bytes
from placement.storage.layout import (
    ALIGNMENT,
    Adoptee,
    RangeLayout,
    byte_view,
    expected_bytes,
    move_out,
)
from placement.storage.owners import RANGES, Owner
from placement.storage.places import ObjectRanges
from placement.storage.range import Range
from placement.storage.versions import Versions
from placement.storage.watch.state_dicts import StateDictTensors
from placement.tensors.alive import PlacedStorage, Unadopted, storage_use_count
from placement.tensors.plain import (
    Owned,
    align_all,
    dense_parts,
    follow,
    has_storage,
    is_leaf,
    is_plain_type,
    is_sparse,
    own_storages,
)

_CDATA = operator.attrgetter("_cdata")
_STORAGE = torch.Tensor.untyped_storage
# for stray references to go away before they are reported, with a process group
_WAITS_SECONDS = (0.0, 0.001, 0.003, 0.01, 0.03)


class Relocated(NamedTuple):
    """An adopted storage that is not at its place, because something changed its pointer:
    `share_memory_()`, `resize_()`."""

    range: Range
    entry: PlacedStorage
    adoptee: Adoptee


class Scan(NamedTuple):
    """One look at an object: the storages that it owns outside their places, one adoptee a storage,
    in the adapter's order."""

    lasting: list[Adoptee]
    transient: list[Adoptee]
    relocated: list[Relocated]
    # the tensors that are at their places; None where a quick look has shown that nothing changed
    in_place: Sequence[Owned] | None = None

    def __bool__(self) -> bool:
        return bool(self.lasting or self.transient or self.relocated)


_SCANNERS: WeakIdSet[StorageScanner] = WeakIdSet()
BORROWED: WeakIdSet[torch.Tensor] = WeakIdSet()
"""Tensors that lay in storages of another object when their own object was last looked at (an
optimizer's shard in the model's buffer). They may have left placement since."""


def known_aliases(storages: Sequence[int]) -> list[int]:
    """How many tensors of all registered objects use each of these storages (`_cdata`), as of the
    last look at each object."""
    total = [0] * len(storages)
    for table in [scanner.aliases for scanner in _SCANNERS]:
        total = list(map(operator.add, total, map(table.get, storages, itertools.repeat(0))))
    return total


def lent_gradients() -> set[int]:
    """The storages (`_cdata`) of gradients that are also state of a registered optimizer now: see
    `Adapter.lent_gradients`."""
    return set().union(*(scanner.lent_gradients() for scanner in _SCANNERS))


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


class _Walk:
    """One walk over the tensors that an object owns. Each dictionary is by storage (`_cdata`)."""

    def __init__(self, tensors: Iterable[Owned], ranges: Sequence[Range]) -> None:
        placed = [entry.ref.cdata for r in ranges for entry in r.placed]
        addresses = [
            base + entry.offset
            for r in ranges
            for base in (r.layout.addresses.base,)
            for entry in r.placed
        ]
        places = dict(
            itertools.compress(zip(placed, addresses, strict=True), map(storage_use_count, placed))
        )
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
    """Knows the storages of one object: its ranges, what lies in them, and what lies outside. Makes
    ranges for new storages.
    `owner`: the owner of the ranges in the process's table (`RANGES`)."""

    def __init__(self, device: Device, adapter: Adapter, name: str, owner: Owner) -> None:
        self._device = device
        self.adapter = adapter
        self.name = name
        self._owner = weakref.ref(owner)
        self.ranges = ObjectRanges(name)
        self.state_dict_tensors = StateDictTensors(device, adapter, self.ranges)
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
        # the `Adapter.steady` of what `adopt` was given, until the next look: it has moved in by
        # then
        self._adopted: object | None = None
        # the ranges at the last `unadopted`, and the record
        self._measured_at: tuple[tuple[Range, ...], object] | None = None
        # host memory reserved for storages that are not created yet
        self.reserved: HostSlab | None = None
        self._reserved_addresses: Addresses | None = None
        # memory of gradients that have died, for those of the present offload: pinning takes long
        self.spare: HostSlab | None = None
        self.new_slab: Callable[[int], HostSlab] = device.host
        self.when_unused: Callable[[], object] = lambda: None  # see `Range`
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
        `anew`: look at every tensor, even if nothing has changed since the last look."""
        if anew:
            self._last = None
        ranges, adopted, self._adopted = self.ranges.all, self._adopted, None
        last = self._last if self._last is not None and self._last[0] is ranges else None
        is_known = last is not None or (adopted is not None and adopted is self.adapter.steady)
        seen = self.adapter.unchanged() if is_known else None
        if seen is not None and (
            self._is_in_place(seen) if last is None else self._is_as_before(seen, *last[1:])
        ):
            return Scan([], [], [])
        walk = _Walk(self.adapter.owned(), ranges)
        if movable and (sparse := list(self.adapter.sparse())):
            del walk  # its tensors use the sparse gradients' storages, too
            for tensor in sparse:
                own_storages(tensor)
            walk = _Walk(self.adapter.owned(), ranges)
        lent, refusal = self._belong_elsewhere(walk.new)
        if refusal is not None:
            del walk  # an error that somebody keeps must not keep tensors
            raise RegistrationError(refusal)
        BORROWED.update(owned.tensor for key in lent for owned in walk.new.pop(key))
        self.discovered, hosts = frozenset(walk.new), self._note_borrowed()
        self.versions, self._alive = walk.versions, walk.references + hosts
        self.aliases = dict(Counter([*walk.storages, *(host.cdata for host in hosts)]))
        self._last = None
        if (
            walk.storages
            and len(walk.in_place) == len(walk.storages)
            and (seen := self.adapter.unchanged()) is not None
        ):
            self._last = ranges, walk.storages, seen.addresses, seen.versions
        shown: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        for tensor in self.state_dict_tensors:
            shown[tensor.untyped_storage()._cdata].append(tensor)
        entries = (
            {entry.ref.cdata: (r, entry) for r in ranges for entry in r.placed}
            if walk.elsewhere
            else {}
        )
        relocated = [
            Relocated(*entries[key], _adoptee(each, shown.get(key, ())))
            for key, each in walk.elsewhere.items()
        ]
        adoptees = [_adoptee(each, shown.get(key, ())) for key, each in walk.new.items()]
        moving = [
            (each, each.owned[0].transient) for each in adoptees if each.owned[0].tensor.numel()
        ]
        return Scan(
            [each for each, goes in moving if not goes],
            [each for each, goes in moving if goes],
            relocated,
            walk.in_place,
        )

    def versions_now(self) -> Versions:
        """The counters of the adopted storages, as of a new look."""
        self.rescan()
        return self.versions

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
        places = {
            entry.ref.cdata: r.layout.addresses.base + entry.offset
            for r in ranges
            for entry in r.placed
        }
        if not keys or list(map(places.get, keys)) != list(
            map(torch.UntypedStorage.data_ptr, storages)
        ):
            return False
        hosts = self._note_borrowed()
        self.discovered, self.versions = frozenset(), Versions(keys, found.versions)
        self._alive = [*(entry.ref for r in ranges for entry in r.placed), *hosts]
        self.aliases = dict(Counter([*keys, *(host.cdata for host in hosts)]))
        self._last = ranges, keys, found.addresses, found.versions
        return True

    def _belong_elsewhere(self, found: Mapping[int, list[Owned]]) -> tuple[list[int], str | None]:
        """The storages among `found` that another handle owns and this object leaves there; and why
        one of them is refused, or None. An optimizer leaves its modules what is theirs. So does a
        sparse gradient, which gets a storage of its own before it is moved, and whatever is handed
        back. Nothing else may be claimed a second time: whose it is was decided when it was first
        seen."""
        owners = RANGES.owners_of(
            each[0].tensor.untyped_storage().data_ptr() for each in found.values()
        )
        theirs = {
            key: owner
            for key, owner in zip(found, owners, strict=True)
            if owner is not None and owner is not self._owner()
        }
        modules: Collection[Owner] = ()
        if self.adapter.kind == "optimizer" and found and not self.adapter.hands_back:
            steps = {
                *RANGES.owners_of(
                    each.untyped_storage().data_ptr() for each in self.adapter.stepped()
                )
            }
            modules = [each for each in steps if each is not None and each is not self._owner()]
        for other in _SCANNERS if found and not self.adapter.hands_back else ():
            owner = other._owner()
            shares = bool(other.discovered) and not other.discovered.isdisjoint(found)
            if owner is None or other is self or not (owner in modules or shares):
                continue
            now = {*map(_CDATA, map(_STORAGE, other.tensors_now()))}
            theirs |= {
                key: owner
                for key in found
                if key in now
                and (owner in modules or key in other.discovered)
                and key not in theirs
            }
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
        return Unadopted.of([each.storage for each in (*new.lasting, *new.transient)])

    def adopt(
        self,
        adoptees: list[Adoptee],
        *,
        transient: bool = False,
        in_parts: bool = False,
    ) -> Range | None:
        """Reserve a range and a slab for new storages and start saving their bytes. The storages
        stay where they are until `move_in`.
        `in_parts`: more will come (bucket by bucket), so only a part of the reserved host memory is
        taken."""
        if not adoptees:
            return None
        self._adopted = self.adapter.steady
        layout = RangeLayout(
            self._device, adoptees, self._device.reserve if in_parts else self._addresses
        )
        nbytes = used_bytes(layout.nbytes)
        spare = self.spare if transient else None
        self.spare = None if transient else self.spare
        if spare is not None and nbytes <= spare.nbytes <= 2 * nbytes and not spare.has_views:
            slab = spare
        elif self.reserved is None or self.reserved.nbytes < nbytes:
            slab = self.new_slab(nbytes)
        else:
            slab, self.reserved = cut(self.reserved, nbytes) if in_parts else (self.reserved, None)
        fresh = Range(self._device, layout, slab, tuple(adoptees), transient)
        fresh.when_unused = self.when_unused
        copies = []
        for adoptee, offset in zip(adoptees, layout.offsets, strict=True):
            if adoptee.storage.device == self._device.torch_device:
                copies.append(
                    Copy(adoptee.storage.data_ptr(), slab.address + offset, adoptee.nbytes)
                )
            else:
                fresh.view(offset, adoptee.nbytes).copy_(byte_view(adoptee.storage))
        if copies:
            self._device.copy(copies, "to_host")
        return fresh

    def host_bytes_for(self, sizes: Sequence[int], parts: int = 1) -> int:
        """Host memory that storages of these sizes (bytes) take, at most, in so many ranges."""
        return (
            used_bytes(expected_bytes(self._device, sizes) + (parts - 1) * ALIGNMENT)
            if sizes
            else 0
        )

    @property
    def reserved_bytes(self) -> int:
        return 0 if self.reserved is None else self.reserved.held_bytes

    @property
    def reserved_file_bytes(self) -> int:
        return 0 if self.reserved is None else self.reserved.file_bytes

    def reserve(self, sizes: Sequence[int], parts: int = 1) -> None:
        """Reserve host memory and addresses for storages of these sizes (bytes) in so many ranges:
        their first offload cannot lack them."""
        if sizes:
            nbytes = self.host_bytes_for(sizes, parts)
            self._reserved_addresses = self._device.reserve(nbytes)
            self.reserved = self.new_slab(nbytes)

    def _addresses(self, nbytes: int) -> Addresses:
        if self._reserved_addresses is not None and self._reserved_addresses.nbytes >= nbytes:
            addresses, self._reserved_addresses = self._reserved_addresses, None
            return addresses
        return self._device.reserve(nbytes)

    # --- the end of adoption

    def unadopt(self, *, on_device: bool, have_left: Callable[[int], object]) -> None:
        """Give every tensor ordinary memory again, on the device or on the host. The ranges stay,
        empty. Idempotent: where memory lacks, it can be repeated.
        `have_left`: called with an address when everything that lay there and above has left, so
        that the memory behind it can go before the rest needs as much."""
        # what was loaded back is the object's own, and goes with what shares its memory
        if on_device:
            self.state_dict_tensors.disown(each.tensor for each in self.adapter.owned())
        self.state_dict_tensors.leave()
        # first, because a registration that broke off may have tensors to point to other storages
        for r in self.ranges.all:
            r.move_in()
        everything = list(self.adapter.owned())
        # On another device only the tensors that are named here follow. Beside the object's own
        # these are what its views were made from, and a shard of an optimizer in the module's
        # buffer.
        own = [
            each
            for owned in everything
            for each in (owned.tensor, owned.tensor._base)
            if each is not None
        ]
        homes: dict[int, torch.UntypedStorage] = {}
        # Some lie in a range without having been adopted there: a state dict showed them, and was
        # loaded back.
        is_alone = not any(True for _ in self.state_dict_tensors.shown())
        self._move_out(
            self._in_range(each.tensor.untyped_storage() for each in everything),
            (*own, *BORROWED),
            homes,
            on_device,
            have_left if is_alone else _nothing_to_do,
        )
        others: list[Owned] = []
        if left := self._in_range(self.state_dict_tensors.shown()):
            # Somebody else has them: an optimizer that outlives the module, a module that got a
            # layer of this one, a variable. To find them takes tens of milliseconds, so nobody is
            # asked before.
            others = _users_in_the_process({storage._cdata for storage, _, _ in left})
            # The parameters that optimizers step are asked for, too, because their modules may be
            # gone.
            registered = [
                each
                for scanner in _SCANNERS
                for each in (*scanner.adapter.stepped(), *scanner.tensors_now())
            ]
            more = (*registered, *(each.tensor for each in others))
            self._move_out(left, more, homes, on_device, _nothing_to_do)
        BORROWED.update(
            each.tensor
            for each in everything
            if RANGES.owner_of(each.tensor.untyped_storage().data_ptr()) is not None
        )
        if self.adapter.kind == "optimizer" and not on_device:
            HANDED_BACK.update(own)
        follow((*everything, *others))
        self.align_wrappers()
        align_all(others)

    def _move_out(
        self,
        placed: list[_InRange],
        tensors: Iterable[torch.Tensor],
        homes: dict[int, torch.UntypedStorage],
        on_device: bool,
        have_left: Callable[[int], object],
    ) -> None:
        """Give these storages, and those of these tensors that use them, ordinary memory. Empties
        the list, which keeps them alive. `have_left`: see `unadopt`."""
        aliases: dict[int, dict[int, torch.Tensor]] = {}
        for tensor in tensors:
            aliases.setdefault(tensor.untyped_storage()._cdata, {})[id(tensor)] = tensor
        placed.sort(key=lambda place: place[1].layout.addresses.base + place[2])
        moved_bytes = 0
        while placed:
            storage, r, offset = placed.pop()
            nbytes = storage.nbytes()
            bytes_now = r.on_device(offset, nbytes) if on_device else r.view(offset, nbytes)
            target = self._device.torch_device if on_device else torch.device("cpu")
            move_out(
                self._device,
                storage,
                [*aliases.get(storage._cdata, {}).values()],
                target,
                bytes_now,
                homes,
            )
            moved_bytes += nbytes
            if moved_bytes >= _LEAVING_TOGETHER_BYTES:
                have_left(r.layout.addresses.base + offset)
                moved_bytes = 0

    def _in_range(self, more: Iterable[torch.UntypedStorage]) -> list[_InRange]:
        """The storages that lie at addresses of a range, among the adopted ones and these."""
        adopted = [
            storage
            for r in self.ranges.all
            for entry in r.placed
            if (storage := entry.storage()) is not None
        ]
        storages = {storage._cdata: storage for storage in (*adopted, *more)}.values()
        places = [
            (storage, *place)
            for storage in storages
            if (place := self.ranges.at(storage.data_ptr())) is not None
        ]
        return [
            (s, r, offset)
            for s, r, offset in places
            if s.data_ptr() == r.layout.addresses.base + offset
        ]


# a storage at the addresses of a range, the range, and its offset there
_InRange = tuple[torch.UntypedStorage, Range, int]
_LEAVING_TOGETHER_BYTES = 1 << 30


def _nothing_to_do(_: int) -> None:
    pass


def _users_in_the_process(storages: Collection[int]) -> list[Owned]:
    """The tensors that use these storages (`_cdata`), among all that Python's garbage collector
    knows. `gc.freeze()` hides some."""
    found: list[Owned] = []
    # the subclasses that anybody made would run code of theirs at each question
    with torch._C.DisableTorchFunctionSubclass():
        for tensor in _tensors_of_the_process():
            # somebody's wrapper that cannot name its parts must not keep this object's values
            with suppress(Exception):
                for path, part in dense_parts(tensor):
                    wrapper, cls = None if part is tensor else tensor, type(part)
                    # A class with a dispatch of its own has not its bytes in a storage of its own,
                    # to be given another.
                    is_plain = (
                        is_plain_type(cls)
                        or cls.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
                    )
                    if is_plain and has_storage(part) and part.untyped_storage()._cdata in storages:
                        found += [
                            Owned(path, each, wrapper=wrapper)
                            for each in (part, part._base)
                            if each is not None
                        ]
    return found


def _tensors_of_the_process() -> Iterator[torch.Tensor]:
    # Not isinstance, which asks some objects for their `__class__`, and lazy ones then run code of
    # theirs.
    known: list[torch.Tensor] = [
        each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)
    ]
    for each in known:
        if not torch._C._functorch.is_functorch_wrapped_tensor(each):
            yield each
            if is_leaf(each) and (gradient := each.grad) is not None:
                yield gradient


# --- stray references: references to adopted storages that others hold, which read poison after the
# offload


def uncounted(ranges: Iterable[Range]) -> list[PlacedStorage]:
    """The storages whose rightful references are not counted yet."""
    return [
        entry for r in ranges if r.counted is None for entry in r.placed if entry.use_count == 0
    ]


def count_uses(ranges: Iterable[Range]) -> None:
    """Count, once for each storage, its references of now without those of known tensors. So many
    it has by right."""
    entries = uncounted(ranges)
    for entry, known in zip(
        entries, known_aliases([entry.ref.cdata for entry in entries]), strict=True
    ):
        entry.use_count = entry.uses() - known
    for r in ranges:
        if r.counted is None:
            r.counted = (
                [entry.ref.cdata for entry in r.placed],
                [entry.use_count for entry in r.placed],
            )


def stray_references(ranges: Iterable[Range], lasting: Collection[int]) -> dict[str, int]:
    """The number of references beyond the rightful ones, by the storage's name, for storages that
    have been counted.
    `lasting`: storages (`_cdata`) that a framework may hold as often as it likes."""
    found: dict[str, int] = {}
    # none is ever changed: a look that finds other numbers makes another
    tables = [scanner.aliases for scanner in _SCANNERS]
    for r in ranges:  # of tens of thousands of storages, so functions implemented in C do the work
        if r.counted is None:
            continue
        storages, uses = r.counted
        counts = list(map(storage_use_count, storages))
        seen = (r.counted, tables, counts)
        if seen == r.without_stray_references:
            continue
        surplus = list(map(operator.sub, counts, map(operator.add, known_aliases(storages), uses)))
        r.without_stray_references = seen if max(surplus, default=0) <= 0 else None
        if r.without_stray_references is None:
            found |= {
                each.name: n
                for each, n in zip(r.placed, surplus, strict=True)
                if n > 0 and each.ref.cdata not in lasting
            }
    return found


def lasting_stray_references(look: Callable[[], dict[str, int]]) -> dict[str, int]:
    """The stray references that `look` still finds after a process group's thread has had time to
    drop its own to what it sent."""
    for seconds in _WAITS_SECONDS:
        if not (found := look()) or not (
            torch.distributed.is_available() and torch.distributed.is_initialized()
        ):
            return found
        time.sleep(seconds)
    return look()
