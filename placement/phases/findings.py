"""Findings of phase transitions: writes into the memory of offloaded handles, and errors that a move has met.

Writes are looked for at every phase transition, and remembered until one raises them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

from placement.core.errors import IntegrityError, PlacementError, RegistrationError
from placement.core.journal import Journal, logger
from placement.devices.base import Device
from placement.devices.memory import WrittenPoison
from placement.registration.handle import Handle
from placement.storage.managed import ManagedStorage, MoveResult
from placement.storage.writes import WrittenWhileOffloaded

_NAMES = 8
"""The largest number of tensors that a message names for one handle."""


class WrongWrites:
    """Finds writes into the memory of offloaded handles, and remembers them until `take` returns them as an error."""

    def __init__(self, device: Device, journal: Journal, handles: Mapping[str, Handle]) -> None:
        self._device = device
        self._journal = journal
        self._handles = handles
        self._found: dict[str | None, list[str]] = {}
        """Descriptions of the writes, by name of the handle; under None if the handle is not known."""

    def look(self, *, wait: bool, at_counters: bool = False) -> None:
        """Look for writes since the last look.

        Args:
            wait: wait for the device to compare the memory. Otherwise a result that is not ready is used by a later look.
            at_counters: also look at the version counter of every tensor, as a load does for the handles that it loads.
        """
        self.look_at_gradients()
        self.look_at_poison(wait=wait, at_counters=at_counters)

    def look_at_gradients(self) -> None:
        """Look at the version counters of gradients. Call it before anything is loaded: a load forgets them."""
        for handle, holding in self._offloaded():
            if names := holding.writes.take_gradients():
                self._note_values(handle.name, names)

    def look_at_poison(self, *, wait: bool, at_counters: bool = False) -> None:
        """Ask the device for changed poison. If it found some, look at the version counters, too, because they tell the tensors' names."""
        # Wait if writes are known by name already, so that a late comparison does not report the same writes once more.
        is_damaged = self._device.heal_poison(wait or bool(self._found))
        if is_damaged or at_counters:
            for handle, holding in self._offloaded():
                with suppress(PlacementError):  # an object whose tensors cannot be listed: a load or an audit reports that itself
                    if names := holding.writes.found():
                        self._note_values(handle.name, names)
                        holding.writes.forget()
        if is_damaged:
            self._note_damage(self._device.written_poison())

    @property
    def findings(self) -> list[tuple[str | None, str]]:
        """Handle's name (None: unknown) and description of each write that has not been raised yet."""
        return [(name, what) for name, parts in self._found.items() for what in parts]

    def take(self) -> IntegrityError | None:
        """The error for all writes found so far, which are forgotten; None if there are none."""
        if not self._found:
            return None
        named = "; ".join(what for name, what in self.findings if name is not None)
        also = [what for handle, holding in self._offloaded() if {handle.name, None} & {*self._found} and (what := _changed(holding))]
        self._found = {}
        return IntegrityError(
            f"something wrote into the memory of an offloaded handle since the last phase transition{named and ': '}{named}; the written "
            "values are lost, and the handles' values are unchanged. Look for writes outside the phases that have the handle on the device "
            "(EMA updates, initialisers, clipped or unscaled gradients, late collectives); manager.audit() lists the offloaded handles."
            + "".join(f" {what}" for what in also)
        )

    def count(self, error: WrittenWhileOffloaded) -> None:
        """Count a write that a load has found and raises. Writes found in the bytes become a note on it: most likely it is the same one."""
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
        self._note(handle, f"{_listed(names)} of {handle!r} were written while it was offloaded")

    def _note_damage(self, places: Iterable[WrittenPoison]) -> None:
        """Note which handles' tensors lie in the damaged pages, unless the version counters have named the tensors already."""
        by_handle: dict[str, list[str]] = {}
        for place in places:
            for name, tensors in self._at(place):
                by_handle.setdefault(name, []).extend(tensors)
        for name, tensors in by_handle.items():
            if name not in self._found:
                self._note(name, f"in the memory pages of {_listed(tensors)} of {name!r}")
        if not self._found:
            self._note(None, "something wrote into offloaded memory, and it cannot be told which handle's memory it is")

    def _at(self, place: WrittenPoison) -> Iterator[tuple[str, list[str]]]:
        """The handle to which the addresses belong, and its tensors in these pages."""
        end = place.start + place.nbytes
        for handle in self._handles.values():
            for r in handle.storage.ranges:
                if r.layout.addresses is place.addresses:
                    yield handle.name, [each.name for each in r.placed if each.offset < end and place.start < each.offset + each.nbytes]

    def _offloaded(self) -> Iterator[tuple[Handle, ManagedStorage]]:
        for handle in self._handles.values():
            storage = handle.storage
            if isinstance(storage, ManagedStorage) and not storage.on_device:
                yield handle, storage


def _changed(holding: ManagedStorage) -> str:
    """The text of an error about tensors put in place of others or beside them, so that one error tells all; empty for none."""
    with suppress(PlacementError):  # as above
        try:
            holding.writes.new_unless_changed()
        except IntegrityError as error:
            return str(error)
    return ""


def _listed(names: Sequence[str]) -> str:
    distinct = list(dict.fromkeys(names))
    return ", ".join(distinct[:_NAMES]) + (f" and {len(distinct) - _NAMES} more" if len(distinct) > _NAMES else "")


def immovable(handle: Handle, holding: ManagedStorage) -> Iterator[RegistrationError]:
    """Errors about tensors that an offload has left on the device."""
    for name, problem in holding.adapter.immovable():
        yield RegistrationError(f"{handle.name!r}: {name!r} {problem}. The rest of the handle was offloaded; this tensor stays.")


def complaints(handle: Handle, moved: MoveResult, *, strict: bool) -> Iterator[IntegrityError]:
    """Errors about a move, to be raised once its phase transition is complete."""
    if moved.rewritten_chunks:
        yield IntegrityError(
            f"{handle.name!r} is readonly, but {moved.rewritten_chunks} of its chunks changed on the device; the registered values "
            "were kept. Register it without readonly=True if it is meant to be written."
        )
    if moved.nan:
        yield IntegrityError(moved.nan)
    if moved.brought_back:
        yield IntegrityError(
            f"{moved.brought_back} of {handle.name!r} lay in other memory than theirs when it was offloaded: something moved them "
            "out of the handle's memory on the device (share_memory(), a torch.multiprocessing queue). They have new places there, "
            "with the values that they had; a process that received the shared memory no longer sees changes. Share memory before "
            "registering, or send copies (clone())."
        )
    if moved.stray_references and strict:
        handle.look_for_strays()  # which of them still exist
        if handle.stray_references:
            yield IntegrityError(
                f"{handle.stray_references} references to storages of {handle.name!r} were alive at its offload ({handle.stray_names}). "
                "They read poison now. Drop such references before the phase ends, or use handle.state_dict() instead."
            )


def warn_of_views(handle: Handle, holding: ManagedStorage) -> bool:
    """Log a warning if views show the host copy of a loaded handle. Returns whether there are any."""
    names = holding.views_left_on_host()
    if names:
        logger.warning(
            "%r: views of tensors of a state dict (%s) were taken while it was offloaded, and somebody still holds them. The tensors "
            "themselves show the device now, these views show the host copy: they do not see what is changed from here on, and what is "
            "written to them is %s. Take views anew in each phase, or clone() them",
            handle.name,
            ", ".join(names[:8]),
            "the handle's value from the next offload on" if handle.readonly else "lost",
        )
    return bool(names)
