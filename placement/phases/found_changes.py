"""Changes to the tensors of offloaded handles. They are looked for at every phase transition, and
remembered until one raises them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from placement.core.errors import IntegrityError, PlacementError
from placement.core.journal import Journal
from placement.core.states import Plan, State
from placement.devices.base import Device
from placement.engines.tagged import Residency
from placement.phases.transition import Participant, Transition
from placement.registration.handle import Handle
from placement.storage.watch.writes import Change, error_of

_WRITES = ("written", "in a written page")


class FoundChanges(Participant):
    """The changes to tensors of offloaded handles that were found and not raised yet."""

    def __init__(self, device: Device, journal: Journal, handles: Mapping[str, Handle]) -> None:
        self._device = device
        self._journal = journal
        self._handles = handles
        self._changes: list[Change] = []
        # names of handles whose tensors were replaced, as of the last look at each
        self._replaced: set[str] = set()
        self._has_looked = False  # whether this entry has looked before any move

    def prepare(self, transition: Transition) -> None:
        """Raise what is known, before an entry moves a handle. An exit goes on without handles
        whose tensors were replaced."""
        plan = transition.plan
        if transition.is_exit:
            if "load" in transition.decisions or plan.streamed:
                self.look_at(self.coming(plan))
            transition.plan = self.without_replaced(plan)
            return
        # Wait for the comparison of memory only with an offload, which waits for the device anyway.
        self.look_at_poison(wait=transition.offloads)
        self.raise_found()
        any_comes = "load" in transition.decisions or bool(plan.streamed)
        self._has_looked = any_comes and self._looks_first(plan)
        if self._has_looked:
            self._check_coming(plan)

    def while_copying(self, transition: Transition) -> None:
        """Look at the tensors of handles that come. That takes 16 ms for 20,000 tensors, so it
        begins after the first copies: those into a handle that is refused are in vain."""
        if transition.is_exit:
            if transition.offloads:
                self._device.compare_poison()
        elif not self._has_looked:
            self._check_coming(transition.plan)

    def _looks_first(self, plan: Plan) -> bool:
        """Whether to look before any move: a streamed step copies nothing before it begins, what
        was replaced may be in its place again, an engine that leaves may discard its weights, and
        a handle of which every tensor was replaced is refused before the first copy."""
        if plan.streamed or self._replaced:
            return True
        for handle in self._handles.values():
            if isinstance(handle.storage, Residency) and handle.is_on_device:
                return True
        for handle in self.coming(plan):
            ranges = [] if handle.holding is None else handle.holding.ranges
            if not all(r.transient or r.is_alive for r in ranges):
                return True
        return False

    def _check_coming(self, plan: Plan) -> None:
        """Raise the changes to handles that the plan uses, and refuse those of which tensors were
        replaced."""
        coming = self.coming(plan)
        self.look_at(coming)
        if self._changes:
            # else a late comparison would report the same writes once more
            self.look_at_poison(wait=True)
            self.raise_found()
        for handle in coming:
            if handle.holding is not None:
                handle.holding.watch.require_whole()

    def finish(self, transition: Transition) -> None:
        """After an exit: here the memory was compared while the link had work."""
        if transition.is_exit:
            self.look_at_poison(wait=transition.offloads)
            if (error := self.take()) is not None:
                transition.errors.append(error)

    def coming(self, plan: Plan) -> list[Handle]:
        """The offloaded handles that a plan uses, on the device or from their host copies."""
        return [
            handle
            for handle in self._handles.values()
            if not handle.storage.on_device and plan.targets[handle.name] is not State.CPU_OFFLOADED
        ]

    def look_at(self, handles: Iterable[Handle]) -> None:
        """Look at the tensors of these handles, as far as they are offloaded. Call it before they
        are loaded: a load forgets the version counters."""
        for handle in handles:
            holding = handle.holding
            if holding is not None and not holding.on_device:
                # an object whose tensors cannot be listed: a load or an audit reports that itself
                with suppress(PlacementError):
                    self._add(holding.watch.look())
                if holding.watch.replaced:
                    self._replaced.add(handle.name)

    def look_at_poison(self, *, wait: bool) -> None:
        """Ask the device for written poison; without `wait`, a later look has the answer. If it
        found some, look at the tensors of every handle: their version counters tell names."""
        # Wait if changes are known already, so that a late comparison does not report the same
        # writes once more.
        if self._device.heal_poison(wait or bool(self._changes)):
            self.look_at(self._handles.values())
            self._add(self._in_written_pages())

    def look_everywhere(self, *, wait: bool) -> None:
        self.look_at(self._handles.values())
        self.look_at_poison(wait=wait)

    @property
    def writes(self) -> list[Change]:
        """The writes in place, without what was added or replaced."""
        return [change for change in self._changes if change.how in _WRITES]

    def take(self) -> IntegrityError | None:
        """The error for all changes found so far, which are forgotten; None if there are none."""
        changes, self._changes = self._changes, []
        return error_of(changes) if changes else None

    def raise_found(self) -> None:
        """Raise all changes found so far as one IntegrityError, once."""
        if (error := self.take()) is not None:
            raise error

    def without_replaced(self, plan: Plan) -> Plan:
        """The plan without the handles whose tensors were replaced while they were offloaded. They
        stay where they are, and other handles go on."""
        for name in [*self._replaced]:
            handle = self._handles.get(name)
            holding = None if handle is None else handle.holding
            if holding is None or not holding.watch.replaced:
                self._replaced.remove(name)
            elif not holding.on_device:
                plan = plan.giving_up(name)
        return plan

    def forget_replaced(self, handle: str) -> None:
        """The user has had the handle restored: do not raise what was replaced."""
        self._changes = [
            change
            for change in self._changes
            if change.handle != handle or change.how != "replaced"
        ]

    def _add(self, changes: Sequence[Change]) -> None:
        had_writes = bool(self.writes)
        self._changes += changes
        if self.writes and not had_writes:
            self._journal.wrong_writes += 1

    def _in_written_pages(self) -> list[Change]:
        """The tensors that lie in written pages of handles of which no write is known by name."""
        named = {change.handle for change in self.writes}
        changes = []
        for page in self._device.written_poison():
            for handle in self._handles.values():
                ranges = [] if handle.name in named else handle.storage.ranges
                for r in ranges:
                    if r.layout.addresses is not page.addresses:
                        continue
                    for entry in r.placed:
                        if (
                            entry.offset < page.start + page.nbytes
                            and page.start < entry.offset + entry.nbytes
                        ):
                            changes.append(Change(handle.name, entry.name, "in a written page"))
        if not changes and not named:
            return [Change(None, "", "written")]
        return changes
