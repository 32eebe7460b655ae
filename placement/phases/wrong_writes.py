"""Writes into the memory of offloaded handles.

They are looked for at every phase transition, and remembered until one raises them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

from placement.core.errors import IntegrityError, PlacementError, listed
from placement.core.journal import Journal
from placement.devices.base import Device
from placement.devices.memory import WrittenPoison
from placement.phases.transition import Participant, Transition
from placement.registration.handle import Handle
from placement.storage.managed import ManagedStorage
from placement.storage.writes import LostWritesError


class WrongWrites(Participant):
    """Finds writes into the memory of offloaded handles, and remembers them until `take` returns
    them as an error."""

    def __init__(self, device: Device, journal: Journal, handles: Mapping[str, Handle]) -> None:
        self._device = device
        self._journal = journal
        self._handles = handles
        self._found: dict[str | None, list[str]] = {}
        """Descriptions of the writes, by name of the handle; under None if the handle is not
        known."""

    def prepare(self, transition: Transition) -> None:
        """Raise what is found before an entry moves a handle. Wait for the comparison of memory
        only with an offload, which waits for the device anyway."""
        if transition.offloads or "load" in transition.decisions:
            self.look_at_gradients()
        if not transition.is_exit:
            self.look_at_poison(wait=transition.offloads)
            self.raise_found()

    def finish(self, transition: Transition) -> None:
        """After an exit: here the memory was compared while the link had work."""
        if transition.is_exit:
            self.look_at_poison(wait=transition.offloads)
            if (written := self.take()) is not None:
                transition.errors.append(written)

    def raise_found(self) -> None:
        """Raise all writes found so far as one IntegrityError, once."""
        if (written := self.take()) is not None:
            raise written

    def look(self, *, wait: bool, at_counters: bool = False) -> None:
        """Look for writes since the last look. See `look_at_poison`."""
        self.look_at_gradients()
        self.look_at_poison(wait=wait, at_counters=at_counters)

    def look_at_gradients(self) -> None:
        """Look at the version counters of gradients. Call it before anything is loaded: a load
        forgets them."""
        for handle, holding in self._offloaded():
            if names := holding.writes.take_gradients():
                self._note_values(handle.name, names)

    def look_at_poison(self, *, wait: bool, at_counters: bool = False) -> None:
        """Ask the device for changed poison; without `wait`, a later look has the answer. If it
        found some, or `at_counters`, look at every tensor's version counter, too: it tells the
        tensor's name."""
        # Wait if writes are known by name already, so that a late comparison does not report the
        # same writes once more.
        is_damaged = self._device.heal_poison(wait or bool(self._found))
        if is_damaged or at_counters:
            self.look_at_gradients()  # so that all writes since the last look are one error
            for handle, holding in self._offloaded():
                # an object whose tensors cannot be listed: a load or an audit reports that itself
                with suppress(PlacementError):
                    if names := holding.writes.found():
                        self._note_values(handle.name, names)
                        holding.writes.forget()
        if is_damaged:
            self._note_damage(self._device.written_poison())

    @property
    def findings(self) -> list[tuple[str | None, str]]:
        """Handle's name (None: unknown) and description of each write that has not been raised
        yet."""
        return [(name, what) for name, parts in self._found.items() for what in parts]

    def take(self) -> IntegrityError | None:
        """The error for all writes found so far, which are forgotten; None if there are none."""
        if not self._found:
            return None
        named = "; ".join(what for name, what in self.findings if name is not None)
        also = [
            what
            for handle, holding in self._offloaded()
            if {handle.name, None} & {*self._found} and (what := _changed(holding))
        ]
        self._found = {}
        return IntegrityError(
            "something wrote into the memory of an offloaded handle since the last phase "
            f"transition{named and ': '}{named}; the written values are lost, and the handles' "
            "values are unchanged. Look for writes outside the phases that have the handle on the "
            "device (EMA updates, initialisers, clipped or unscaled gradients, late collectives); "
            "manager.audit() lists the offloaded handles." + "".join(f" {what}" for what in also)
        )

    def count(self, error: LostWritesError) -> None:
        """Count a write that a load has found and raises. Writes found in the bytes become a note
        on it: most likely it is the same one."""
        self.look_at_poison(wait=True)
        if (written := self.take()) is not None:
            error.add_note(f"placement: {written}")
        else:
            self._journal.wrong_writes += 1

    def _note(self, handle: str | None, what: str) -> None:
        if not self._found:
            self._journal.wrong_writes += 1
        self._found.setdefault(handle, []).append(what)

    def _note_values(self, handle: str, names: Sequence[str]) -> None:
        self._note(
            handle,
            f"{listed([*dict.fromkeys(names)])} of {handle!r} were written while it was offloaded",
        )

    def _note_damage(self, places: Iterable[WrittenPoison]) -> None:
        """Note which handles' tensors lie in the damaged pages, unless the version counters have
        named the tensors already."""
        by_handle: dict[str, list[str]] = {}
        for place, handle in itertools.product(places, self._handles.values()):
            for r in [
                each for each in handle.storage.ranges if each.layout.addresses is place.addresses
            ]:
                end = place.start + place.nbytes
                hit = [
                    each.name
                    for each in r.placed
                    if each.offset < end and place.start < each.offset + each.nbytes
                ]
                by_handle.setdefault(handle.name, []).extend(hit)
        for name, tensors in by_handle.items():
            if name not in self._found:
                self._note(
                    name, f"in the memory pages of {listed([*dict.fromkeys(tensors)])} of {name!r}"
                )
        if not self._found:
            self._note(
                None,
                "something wrote into offloaded memory, and it cannot be told which handle's "
                "memory it is",
            )

    def _offloaded(self) -> Iterator[tuple[Handle, ManagedStorage]]:
        for handle in self._handles.values():
            storage = handle.storage
            if isinstance(storage, ManagedStorage) and not storage.on_device:
                yield handle, storage


def _changed(holding: ManagedStorage) -> str:
    """The text of an error about tensors put in place of others or beside them, so that one error
    tells all; empty for none."""
    with suppress(PlacementError):  # as above
        try:
            holding.writes.new_unless_changed()
        except IntegrityError as error:
            return str(error)
    return ""
