"""Changes to the tensors of an object that is offloaded.

Tensors of an offloaded object lie over poison, and the host copy has their values. So a write in
place changes no value. A tensor that was put in the place of a registered one, by `half()`, `to()`,
`.data =` or `share_memory()`, lies elsewhere. Both are found, and reported once by name. No change
is undone before the user calls `restore`.

A tensor is identified by the name under which its object owns it, because all the rest of it may
change: `to()` on a DTensor exchanges the tensor inside, `half()` every dtype.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from placement.core.errors import IntegrityError, listed
from placement.storage.layout import Adoptee, exchange, form_of, point
from placement.storage.places import Place
from placement.storage.scan import Scan, StorageScanner
from placement.tensors.plain import Owned, restore


class Change(NamedTuple):
    """One change that was found in an offloaded handle."""

    handle: str | None  # None: it cannot be told which handle's memory was written
    tensor: str
    how: Literal["written", "in a written page", "added", "replaced"]


_LOOK_FOR = (
    "The written values are lost, and the handle's are unchanged. Look for writes outside the "
    "phases that have it on the device (EMA updates, initialisers, clipped or unscaled gradients, "
    "late collectives)."
)
_TEXTS = {
    "written": "{names} of {handle!r} were written while it was offloaded. " + _LOOK_FOR,
    "in a written page": (
        "Something wrote into the memory pages of {names} of {handle!r} while it was offloaded. "
    )
    + _LOOK_FOR,
    "added": (
        "{names} were added to {handle!r} while it was offloaded. They are the handle's from now "
        "on, and stay as they are: NaN where they were computed from its tensors. Add them inside "
        "a phase that has it on the device."
    ),
    "replaced": (
        "{names} of {handle!r} were replaced while it was offloaded (half(), to(), .data =, "
        "share_memory(), a new parameter). The handle stays as it is, and does not move: "
        "handle.restore() points its tensors to their places again, with the registered values; "
        "manager.unregister({handle!r}) lets it go with the new ones. Do such things inside a "
        "phase that has it on the device, or before you register it."
    ),
}


def message(changes: Iterable[Change]) -> str:
    """The text of the error about these changes."""
    names: dict[tuple[str, str | None], list[str]] = {}
    for change in changes:
        names.setdefault((change.how, change.handle), []).append(change.tensor)
    texts = []
    for (how, handle), tensors in names.items():
        if handle is None:
            texts.append(
                "Something wrote into offloaded memory, and it cannot be told which handle's it "
                f"is. {_LOOK_FOR}"
            )
        else:
            distinct = listed([*dict.fromkeys(tensors)])
            texts.append(_TEXTS[how].format(names=distinct, handle=handle))
    return " ".join(texts)


def error_of(changes: Iterable[Change]) -> IntegrityError:
    error = IntegrityError(message(changes))
    error.is_change = True
    return error


class Watch:
    """Finds changes to the tensors of one object since its offload, as far as version counters and
    addresses tell."""

    def __init__(self, scanner: StorageScanner) -> None:
        self._scanner = scanner
        self._ranges = scanner.ranges
        # names of tensors whose places other tensors have taken. While there are any, the handle
        # does not move.
        self.replaced: tuple[str, ...] = ()
        # whether the last look found storages that have no place, or failed
        self.has_new = False
        # storages (`_cdata`) without a place that need not be reported
        self._expected: dict[int, StorageWeakRef] = {}

    def look(self) -> list[Change]:
        """The changes since the last look. None of them is returned again."""
        replaced_before = {*self.replaced}
        scan = self.scan()
        replaced = {*self.replaced}
        handle = self._scanner.name
        # a counter goes with its tensor to another place
        written = [name for name in self._written() if name not in replaced]
        changes = [Change(handle, name, "written") for name in written]
        outside = scan.outside
        for adoptee in outside:
            if adoptee.storage._cdata not in self._expected:
                added = [name for name in _names([adoptee]) if name not in replaced]
                changes += [Change(handle, name, "added") for name in added]
        self._expect(outside)
        for name in self.replaced:
            if name not in replaced_before:
                changes.append(Change(handle, name, "replaced"))
        return changes

    def scan(self) -> Scan:
        """Look at the tensors, and note which were replaced."""
        self.has_new = True  # until the look has ended without an error
        scan = self._scanner.rescan(anew=bool(self.replaced))
        self.has_new = bool(scan.outside)
        replaced = _names(relocated.adoptee for relocated in scan.relocated)
        if scan.lasting:
            places = self._ranges.named_places()
            at_home = self._ranges.at_home(scan.in_place or ())
            for name in _names(scan.lasting):
                if name in places and not self._ranges.has_taken_name(name, at_home):
                    replaced.append(name)
        emptied = [name for name, _ in self._scanner.adapter.empty()]
        if emptied:  # `.data = torch.empty(0)`
            places = self._ranges.named_places()
            replaced += [name for name in emptied if name in places]
        if replaced:  # half() and to() convert gradients, too
            places = self._ranges.places(self._ranges.all)
            replaced += [name for name in _names(scan.transient) if name in places]
        if not replaced and scan.in_place is not None:
            # two tensors may have changed places, or one may lie in the place of another, too
            other_names = self._scanner.adapter.other_names()
            replaced = self._ranges.note_unless_moved(scan.in_place, other_names)
        self.replaced = tuple(replaced)
        return scan

    def _written(self) -> list[str]:
        """Names of the storages that were written in place since the last look."""
        written = self._scanner.versions.written_since(self._ranges.versions)
        self._ranges.versions = self._scanner.versions
        names: list[str] = []
        if not written:
            return names
        for r in self._ranges.all:
            if r.transient or not self._ranges.are_values_lent:
                names += [entry.name for entry in r.placed if entry.ref.cdata in written]
        return names

    def expect(self, scan: Scan) -> None:
        """Do not report these storages: placement itself has left them where they are."""
        self._expect(scan.new)

    def _expect(self, adoptees: Iterable[Adoptee]) -> None:
        references = self._expected.items()
        expected = {key: reference for key, reference in references if not reference.expired()}
        for adoptee in adoptees:
            expected[adoptee.storage._cdata] = StorageWeakRef(adoptee.storage)
        self._expected = expected

    def forget_written(self) -> None:
        """Do not report writes in place until now."""
        self._ranges.versions = self._scanner.versions_now()

    def require_whole(self) -> None:
        """Raise IntegrityError if the last look has shown that tensors were replaced."""
        if self.replaced:
            handle = self._scanner.name
            changes = [Change(handle, name, "replaced") for name in self.replaced]
            raise error_of(changes)

    def drifted(self, *, on_device: bool) -> list[tuple[str, int]]:
        """Name and bytes of all storages that are not where they should be, for `audit`: relocated
        ones, those that a framework uses in place of the module's, and the object's new ones. On
        the device, only a module's new tensor with the name of an adopted one is drift: loading
        replaces an optimizer's state. Off it, so are tensors that the last look found replaced."""
        ranges = self._ranges.all
        adapter = self._scanner.adapter
        drifted = list[tuple[str, int]]()
        for r in ranges:
            drifted += [(entry.name, entry.nbytes) for entry in r.relocated()]
        for framework in adapter.frameworks:
            drifted += framework.replaced()
        # relocated storages are in `drifted` already, by their addresses
        scan = self._scanner.rescan()
        if not on_device:
            drifted += [(adoptee.name, adoptee.nbytes) for adoptee in scan.new]
            names = {name for name, _ in drifted}
            places = self._ranges.named_places()
            for name in self.replaced:
                if name not in names and name in places:
                    drifted.append((name, places[name].entry.nbytes))
        elif adapter.kind != "optimizer":
            names = set()
            for r in ranges:
                if not r.transient:
                    names.update([entry.name for entry in r.placed])
            for adoptee in scan.lasting:
                if adoptee.name in names:
                    drifted.append((adoptee.name, adoptee.nbytes))
        return drifted

    # --- restoring

    def restore(self) -> None:
        """After a look, point every tensor to its place again, in its registered form. Its present
        values are dropped. A tensor whose name has no place stays as it is. So does a tensor that
        lies under several names."""
        scan = self._scanner.rescan(anew=True)
        places = self._ranges.places(self._ranges.all)
        for r, entry, adoptee in scan.relocated:
            home = r.on_device(entry.offset, entry.nbytes).untyped_storage()
            if exchange(adoptee.storage, home):
                home = adoptee.storage
            else:
                r.replace(entry, home)
            for tensor in (*adoptee.bases, *adoptee.aliases):
                if tensor.untyped_storage().data_ptr() != home.data_ptr():
                    point(tensor, home, form_of(tensor))
        # two that were exchanged are in places, though not in their own
        tensors = [*(scan.in_place or ())]
        for adoptee in scan.outside:
            tensors += adoptee.owned
        tensors += [Owned(name, tensor) for name, tensor in self._scanner.adapter.empty()]
        names = {*self.replaced} & places.keys()
        replaced = [owned for owned in tensors if owned.name in names]
        for owned in replaced:
            _point_home(owned.tensor, places[owned.name])
        # gradients first: a wrapper refuses a gradient of another dtype than its own
        outlines = self._ranges.outlines()
        for owned in sorted(replaced, key=lambda owned: not owned.transient):
            if owned.wrapper is not None and owned.name in outlines:
                restore(owned.wrapper, outlines[owned.name])
        self._scanner.align_wrappers()
        self._scanner.state_dict_tensors.point_to_host()
        self._scanner.note_places(self._scanner.rescan(anew=True))
        self.replaced = ()
        self.forget_written()


def _names(adoptees: Iterable[Adoptee]) -> list[str]:
    """The names of the tensors in these storages."""
    names = list[str]()
    for adoptee in adoptees:
        names += [owned.name for owned in adoptee.owned]
    return names


def _point_home(tensor: torch.Tensor, place: Place) -> None:
    home = place.entry.storage()
    if home is None:  # the tensors that lay there have died
        home = place.home()
        place.range.replace(place.entry, home)
    if tensor.untyped_storage()._cdata != home._cdata or form_of(tensor) != place.form:
        point(tensor, home, place.form)
