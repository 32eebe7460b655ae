"""Writes into offloaded memory: looked for at every phase transition, and kept until one of them raises."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

from placement.core.errors import IntegrityError, PlacementError
from placement.core.journal import Journal
from placement.devices.base import Device, WrittenPoison
from placement.registration.handle import Handle
from placement.storage.managed import ManagedStorage
from placement.storage.offloaded.changes import WrittenWhileOffloaded

_NAMES = 8
"""As many tensors of a handle are named."""


class WrongWrites:
    """What was written into the memory of offloaded handles, and has not been raised yet.

    Looking changes no answer: what was found stays until `take`. Gradients that were zeroed are no wrong write, and are taken over.
    """

    def __init__(self, device: Device, journal: Journal, handles: Mapping[str, Handle]) -> None:
        self._device = device
        self._journal = journal
        self._handles = handles
        self._found: dict[str | None, list[str]] = {}
        """By handle what was written there, in words; None: nobody can tell whose memory it was."""

    def look(self, *, wait: bool, at_counters: bool = False) -> None:
        """Look for what was written since the last look.

        Args:
            wait: wait for the device's comparison; else a late answer comes at a later look.
            at_counters: also at the version counter of every tensor, as a load does for the handles that come.
        """
        was_zeroed = self.look_at_gradients()
        self.look_at_poison(wait=wait or was_zeroed, at_counters=at_counters)  # a load must not change what is under the refilling

    def look_at_gradients(self) -> bool:
        """Whether gradients were zeroed while offloaded, which zero_grad() may do anywhere; their host copies are zero then.

        To be asked before anything is loaded, because a load would revive the old ones.
        """
        found = [(handle, holding, holding.written_gradients()) for handle, holding in self._offloaded()]
        for handle, holding, what in found:
            if what.written:
                self._note_values(handle.name, what.written)
            if what.zeroed or what.written:
                holding.take_gradients(what)
        return any(what.zeroed for *_, what in found)

    def look_at_poison(self, *, wait: bool, at_counters: bool = False) -> None:
        """Ask the device, and where it has found something, the version counters, too: they name tensors."""
        is_damaged = self._device.heal_poison(wait or bool(self._found))  # what is known by name is not to be found again by its bytes
        if is_damaged or at_counters:
            for handle, holding in self._offloaded():
                with suppress(PlacementError):  # of an object that cannot be looked through: a load and an audit say so themselves
                    if names := holding.written():
                        self._note_values(handle.name, names)
                        holding.forget_writes()
        if is_damaged:
            self._note_damage(self._device.written_poison())

    @property
    def findings(self) -> list[tuple[str | None, str]]:
        """By handle, what was written there and has not been raised yet."""
        return [(name, what) for name, parts in self._found.items() for what in parts]

    def take(self) -> IntegrityError | None:
        """The error to raise, once."""
        if not self._found:
            return None
        named = "; ".join(what for name, what in self.findings if name is not None)
        self._found = {}
        return IntegrityError(
            f"something wrote into the memory of an offloaded handle since the last phase transition{named and ': '}{named}; what it "
            "wrote is lost, every value of a handle is as it was. Look for writes outside a phase that has it on the device (EMA "
            "updates, initialisers, clipped or unscaled gradients, late collectives); manager.audit() names what is offloaded."
        )

    def count(self, error: WrittenWhileOffloaded) -> None:
        """A load raises what it has found. What the bytes tell goes with it: most likely of the same write, which is reported once."""
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
        """Say whose memory it was, where the counters have not said more."""
        by_handle: dict[str, list[str]] = {}
        for place in places:
            for name, tensors in self._at(place):
                by_handle.setdefault(name, []).extend(tensors)
        for name, tensors in by_handle.items():
            if name not in self._found:
                self._note(name, f"in the memory pages of {_listed(tensors)} of {name!r}")
        if not self._found:
            self._note(None, "something wrote into offloaded memory, and nobody can tell whose")

    def _at(self, place: WrittenPoison) -> Iterator[tuple[str, list[str]]]:
        """The handle that has its addresses there, and its tensors in these pages."""
        end = place.start + place.nbytes
        for handle in self._handles.values():
            for r in handle.storage.ranges:
                if r.layout.addresses is place.addresses:
                    yield handle.name, [each.name for each in r.placed if each.offset < end and place.start < each.offset + each.nbytes]

    def _offloaded(self) -> Iterator[tuple[Handle, ManagedStorage]]:
        for handle in self._handles.values():
            if (holding := handle.holding) is not None and holding.is_offloaded:
                yield handle, holding


def _listed(names: Sequence[str]) -> str:
    distinct = list(dict.fromkeys(names))
    return ", ".join(distinct[:_NAMES]) + (f" and {len(distinct) - _NAMES} more" if len(distinct) > _NAMES else "")
