"""The gradients of an object, and changes to its tensors while it is offloaded: written in place,
replaced, added, moved to other memory.

Such values cannot be kept, because the host copy has the object's values. Writes in place show in
version counters. `half()`, `to()`, `resize_token_embeddings()` or `.data =` read poison and put new
tensors in place of the registered ones; poison spreads as NaN, so a NaN in a tensor that is new
since the offload gives it away. `share_memory()` takes storages away from their places, with poison
for values. All is reported once, and every registered tensor points to its place again.

A tensor is known by the name under which its object owns it, because nothing else of it may be
left: `to()` on a DTensor exchanges the tensor inside, `half()` every dtype.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from placement.core.errors import IntegrityError, PlacementError, listed
from placement.devices.base import Device
from placement.devices.poisoned import has_nan, is_poison
from placement.ownership.adapter import Adapter
from placement.storage.layout import Adoptee, Form, exchange, form_of, point
from placement.storage.range import Place, Range
from placement.storage.scan import Relocated, Scan, StorageScanner, lent_gradients
from placement.tensors.plain import Outline, dense_parts, is_sparse, parts_of, restore


@dataclass(frozen=True, slots=True)
class FoundChanges:
    """The changes that were found in one offloaded object."""

    # tensors that were computed from poison and put in place of registered ones
    replaced: Sequence[Adoptee] = ()
    # tensors that were computed from poison, under names that no registered tensor had
    added: Sequence[Adoptee] = ()
    gradients: Sequence[Adoptee] = ()
    moved: Sequence[Adoptee] = ()  # storages that were taken away from their places
    # words for what could not be undone, and what to do; None where everything could
    lost: str | None = None

    def __bool__(self) -> bool:
        return bool(self.replaced or self.added or self.gradients or self.moved)

    def message(self, name: str) -> str:
        told = []
        if self.moved:
            told.append(
                f"{_names(self.moved)} of {name!r} were moved to other memory while it was "
                "offloaded (share_memory(), a torch.multiprocessing queue, resize_()). Whoever "
                "received them got poison (NaN). They have their places and their registered "
                "values again. Share memory before registering, or send copies of "
                "handle.state_dict()."
            )
        if self.replaced:
            told.append(
                f"{_names(self.replaced)} of {name!r} were replaced while it was offloaded, by "
                "tensors computed from poison (NaN), which offloaded tensors read: half(), to(), "
                "resize_token_embeddings(), .data =. The registered values were put back. Do it "
                "inside a phase that has it on the device, or before you register it."
            )
        if self.added:
            told.append(
                f"{_names(self.added)} were added to {name!r} while it was offloaded, and were "
                "computed from poison (NaN), which offloaded tensors read: add_adapter(), "
                "register_buffer(), a copy of a weight. They have no registered values and stay "
                "NaN until you give them values or remove them; this is not raised again. Add them "
                "inside a phase that has it on the device."
            )
        if self.gradients and not self.replaced:
            told.append(
                f"{_names(self.gradients)} of {name!r} were computed while it was offloaded, from "
                "poison (NaN), which offloaded tensors read: a backward, or pruning, ran outside a "
                "phase. Gradients were dropped, as by zero_grad(). Use manager.phase('train')."
            )
        return " ".join([*told, f"But {self.lost}."] if self.lost is not None else told)


def _names(adoptees: Sequence[Adoptee]) -> str:
    return listed([adoptee.name for adoptee in adoptees])


# --- gradients


class Gradients:
    """The gradients that the adapter reports, asked anew at each call: which ranges hold nothing
    else, and how they are dropped."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter

    def tensors(self) -> dict[int, torch.Tensor]:
        """The tensors that hold the gradients' bytes, by identity."""
        gradients = [
            owner.grad for owner in self._adapter.with_gradients() if owner.grad is not None
        ]
        gradients += itertools.chain.from_iterable(
            each.unreduced_gradients() for each in self._adapter.frameworks
        )
        return {id(part): part for gradient in gradients for _, part in dense_parts(gradient)}

    def besides(self, adoptees: Iterable[Adoptee]) -> list[Adoptee]:
        """The adoptees, among these transient ones, that hold anything but gradients."""
        dead = self.tensors()
        # A sparse gradient's parts are new objects at each access, so they are known by their
        # storages, which nothing else uses.
        owners = self._adapter.with_gradients()
        sparse = [
            part
            for owner in owners
            if owner.grad is not None and is_sparse(owner.grad)
            for _, part in dense_parts(owner.grad)
        ]
        theirs = {part.untyped_storage()._cdata for part in sparse}
        lent = lent_gradients()

        def is_more(each: Adoptee) -> bool:
            return each.storage._cdata not in theirs and not all(
                id(alias) in dead for alias in each.aliases
            )

        return [each for each in adoptees if each.storage._cdata in lent or is_more(each)]

    def ranges(self, among: Iterable[Range]) -> tuple[Range, ...]:
        """The ranges, among these, that hold nothing but gradients. They need not be saved when
        gradients are dropped."""
        dead = self._adapter.lasting_gradients()
        dead |= {
            part.untyped_storage()._cdata
            for part in self.tensors().values()
            if part.layout is torch.strided
        }
        dead -= {
            each.tensor.untyped_storage()._cdata
            for each in self._adapter.owned()
            if not each.transient
        } | lent_gradients()
        return tuple(
            r
            for r in among
            if r.transient and all(p.ref.expired() or p.ref.cdata in dead for p in r.placed)
        )

    def drop(self, *, zero_buffers: bool) -> None:
        """Set every gradient to None. Ranges that this empties are dropped at the next move.
        `zero_buffers`: also zero the framework's gradient buffers, which it keeps. Only while they
        are on the device."""
        for owner in self._adapter.with_gradients():
            owner.grad = None
        for framework in self._adapter.frameworks:
            framework.drop_unreduced()
            for buffer in framework.gradient_buffers() if zero_buffers else ():
                buffer.detach().zero_()

    def drop_in(self, storages: Set[int]) -> None:
        for owner in self._adapter.with_gradients():
            if owner.grad is not None and any(
                part.untyped_storage()._cdata in storages for _, part in dense_parts(owner.grad)
            ):
                owner.grad = None

    def zero_lasting(self, dropped: Iterable[Range]) -> list[Range]:
        """Zero the host copies of the ranges that hold the framework's lasting buffers: they will
        load as zeros. Returns these ranges."""
        lasting = self._adapter.lasting_gradients()
        staying = [
            r
            for r in dropped
            if any(entry.ref.cdata in lasting and not entry.ref.expired() for entry in r.placed)
        ]
        for r in staying:
            r.note_written()
            r.view(0, r.nbytes).zero_()
        return staying


# --- writes


class LostWritesError(IntegrityError):
    """Raised by a load when version counters show that values were written in place while
    offloaded. The host copy has the old ones."""

    def __init__(self, name: str, names: Sequence[str], also: str) -> None:
        super().__init__(
            f"{', '.join(names[:8])} of {name!r} were written while it was offloaded, when only "
            "poison lies behind its tensors; the written values are lost, and the handle's values "
            "are unchanged. Look for writes outside the phases that have it on the device (EMA "
            f"updates, initialisers).{also and ' '}{also}"
        )


class WritesWhileOffloaded:
    """The changes to one object's tensors since its offload, as far as version counters, poison and
    addresses tell."""

    def __init__(self, scanner: StorageScanner, gradients: Gradients, device: Device) -> None:
        self._scanner = scanner
        self._ranges = scanner.ranges
        self._gradients = gradients
        self._device = device

    def found(self) -> list[str]:
        """Names of the storages that were written in place since the offload, without gradients, as
        far as version counters tell."""
        self._scanner.rescan()
        return self._written(transient=False)

    def take_gradients(self) -> list[str]:
        """Names of the gradients that were written since, other than by `zero_grad()` (see
        `ZeroCall`). They are not reported again."""
        if not any(r.transient and r.is_alive for r in self._ranges.all):
            return []
        # an object whose tensors cannot be listed: a load or an audit reports that itself
        with suppress(PlacementError):
            self._scanner.rescan()
        if names := self._written(transient=True):
            values = {
                entry.ref.cdata for r in self._ranges.all if not r.transient for entry in r.placed
            }
            self._ranges.versions = self._scanner.versions.but(self._ranges.versions, among=values)
        return names

    def _written(self, *, transient: bool) -> list[str]:
        is_asked = transient or not self._ranges.may_be_written
        written = self._scanner.versions.written_since(self._ranges.versions) if is_asked else ()
        ranges = [r for r in self._ranges.all if r.transient is transient] if written else []
        return [entry.name for r in ranges for entry in r.placed if entry.ref.cdata in written]

    def forget(self) -> None:
        """Do not report again the writes that the last look has found."""
        self._ranges.versions = self._scanner.versions

    def new_unless_changed(self) -> Scan:
        """The new storages of the offloaded object. If registered tensors were changed, this is
        undone as far as possible, and raised."""
        scanner = self._scanner
        born = scanner.rescan()
        names = self._written(transient=False)
        changes = self.put_back(born)
        if not changes and not names:
            scanner.note_places(born)  # two tensors may have changed places
            return born
        message = changes.message(scanner.name)
        scanner.ranges.told |= {
            adoptee.storage._cdata: StorageWeakRef(adoptee.storage)
            for adoptee in (*changes.added, *changes.gradients)
        }
        del born, changes  # so that an error that somebody keeps does not keep tensors
        # the tensors that were put back have other storages now, which were never counted
        scanner.rescan()
        self.forget()
        if names:
            raise LostWritesError(scanner.name, names, message)
        raise IntegrityError(message)

    def put_back(self, born: Scan) -> FoundChanges:
        """Undo changes to registered tensors of the offloaded object, and return them. Gradients
        are put back only together with replaced values. Those that changed alone come from a
        backward, and are dropped."""
        if not born:
            return FoundChanges()
        scanner = self._scanner
        places = scanner.ranges.named_places()
        every = scanner.ranges.places(scanner.ranges.all) | places  # gradients, too
        self._bring_back(born.relocated, every)
        told = scanner.ranges.told
        stay = [
            c
            for c in born.lasting
            if c.storage._cdata not in told or any(owned.name in places for owned in c.owned)
        ]
        # a graph's tensor in an attribute is told, not dropped
        transient = [c for c in born.transient if c.storage._cdata not in told]
        changes = replace(
            _computed_from_poison(stay, transient, places),
            moved=[each.adoptee for each in born.relocated],
        )
        if changes.replaced:
            gradients = [
                adoptee
                for adoptee in changes.gradients
                if any(owned.name in every for owned in adoptee.owned)
            ]
            if self._put_back([*changes.replaced, *gradients], every, scanner.ranges.outlines()):
                changes = replace(
                    changes,
                    lost=next(
                        filter(
                            None, (each.lost_by_conversion for each in scanner.adapter.frameworks)
                        ),
                        None,
                    ),
                )
            scanner.align_wrappers()
            _renew_empty(scanner.adapter.with_gradients())
            for framework in scanner.adapter.frameworks:
                framework.follow_parameters()
        if changes.gradients:
            self._gradients.drop_in({adoptee.storage._cdata for adoptee in transient})
        if changes:
            scanner.state_dict_tensors.point_to_host()
        return changes

    def _put_back(
        self,
        adoptees: Sequence[Adoptee],
        places: Mapping[str, Place],
        outlines: Mapping[str, Outline],
    ) -> bool:
        """Give the tensors of these adoptees their places and forms again. Returns whether any of
        them had got another dtype or device."""
        converted = False
        for adoptee in adoptees:
            for tensor, place, form in _targets(adoptee, places):
                converted = (
                    converted
                    or tensor.dtype is not form[0]
                    or tensor.device != self._device.torch_device
                )
                if (home := place.entry.storage()) is None:
                    home = place.home()
                    place.range.replace(place.entry, home)
                point(tensor, home, form)
        # Gradients first: a wrapper refuses a gradient of another dtype than its own.
        for owned in sorted(
            (owned for adoptee in adoptees for owned in adoptee.owned),
            key=lambda owned: not owned.transient,
        ):
            if owned.wrapper is not None and (known := outlines.get(owned.name)) is not None:
                restore(owned.wrapper, known)
        return converted

    def _bring_back(self, relocated: Sequence[Relocated], places: Mapping[str, Place]) -> None:
        """Point relocated storages to their places again. The bytes of the other memory are
        dropped."""
        for r, entry, adoptee in relocated:
            home = r.on_device(entry.offset, entry.nbytes).untyped_storage()
            if exchange(adoptee.storage, home):
                home = adoptee.storage
            else:
                r.replace(entry, home)
            known = {
                id(owned.tensor): places[owned.name].form
                for owned in adoptee.owned
                if owned.name in places
            }
            for tensor in (*adoptee.bases, *adoptee.aliases):
                form = known.get(id(tensor), form_of(tensor))
                if (
                    form != form_of(tensor)
                    or tensor.untyped_storage().data_ptr() != home.data_ptr()
                ):
                    point(tensor, home, form)


def _computed_from_poison(
    stay: Sequence[Adoptee], transient: Sequence[Adoptee], places: Mapping[str, Place]
) -> FoundChanges:
    """Find out which of these tensors, all new since the offload, were computed from poison. The
    transient ones are gradients."""
    placed = {id(adoptee): any(owned.name in places for owned in adoptee.owned) for adoptee in stay}
    # Nobody replaces a value by NaN on purpose, so one NaN proves it. A tensor of a new name may be
    # memory that is still to be filled.
    values = [c for c in stay if has_nan(c.aliases[0].detach(), throughout=not placed[id(c)])]
    gradients = [c for c in transient if has_nan(c.aliases[0].detach(), throughout=False)]
    # Integers have no NaN. They were copied from poison if they hold only its numbers and are
    # weights, or came together with a NaN.
    values += [
        c
        for c in stay
        if placed[id(c)]
        and (values or isinstance(c.aliases[0], torch.nn.Parameter))
        and is_poison(c.aliases[0].detach())
    ]
    # a tensor with its registered values, such as padding of zeros, or of another dtype, was
    # replaced by the same call
    if values:
        known = {id(adoptee) for adoptee in values}
        values += [
            c for c in stay if placed[id(c)] and id(c) not in known and _is_as_registered(c, places)
        ]
    return FoundChanges(
        [c for c in values if placed[id(c)]], [c for c in values if not placed[id(c)]], gradients
    )


def _is_as_registered(adoptee: Adoptee, places: Mapping[str, Place]) -> bool:
    """Whether the adoptee can be put back without losing anything: every tensor has its registered
    values. One of another dtype was converted from what a wrong write had left in its place."""
    for owned in adoptee.owned:
        if (place := places.get(owned.name)) is None:
            return False
        if owned.tensor.dtype is not place.form[0]:
            continue
        registered, now = place.on_host(), owned.tensor.detach()
        if now.size() != registered.size() or not torch.equal(
            now.cpu().to(registered.dtype), registered
        ):
            return False
    return True


def _renew_empty(owners: Iterable[torch.Tensor]) -> None:
    """Give gradients without an element on this rank, which have no place, the dtype of their
    owners again."""
    for owner in owners:
        gradient = owner.grad
        if (
            gradient is not None
            and gradient.dtype is not owner.dtype
            and not any(part.numel() for _, part in parts_of(gradient, ""))
        ):
            owner.grad = None
            owner.grad = torch.zeros_like(owner)


def _targets(
    adoptee: Adoptee, places: Mapping[str, Place]
) -> list[tuple[torch.Tensor, Place, Form]]:
    """Every tensor of an adoptee, its place and its form. One without a name goes where the named
    one of the same form goes."""
    named = [(owned.tensor, places[owned.name]) for owned in adoptee.owned if owned.name in places]
    done = {id(tensor) for tensor, _ in named}
    by_form = {form_of(tensor): place for tensor, place in named}
    first, place = named[0]
    targets = [(tensor, place, place.form) for tensor, place in named]
    for tensor in (*adoptee.bases, *adoptee.aliases):
        if id(tensor) not in done:
            same = by_form.get(form_of(tensor))
            targets.append(
                (tensor, place, _translated(tensor, first.dtype, place))
                if same is None
                else (tensor, same, same.form)
            )
    return targets


def _translated(tensor: torch.Tensor, dtype: torch.dtype, place: Place) -> Form:
    """The form that an unknown tensor gets at a place, in the dtype that belongs there. It gets no
    elements if the place is too small."""
    now, offset, size, stride = form_of(tensor)
    wanted = place.form[0] if now == dtype else now
    end = offset + 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    if not tensor.numel() or end * wanted.itemsize > place.entry.nbytes:
        return wanted, 0, torch.Size((0,)), (1,)
    return wanted, offset, size, stride
