"""One phase transition: ask the policy for a plan, agree on it with the group, and move the
handles; or go back.

`WrongWrites` finds writes into the memory of offloaded handles. They are looked for at every phase
transition, and remembered until one raises them.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, NamedTuple

from placement.core.errors import (
    EngineError,
    IntegrityError,
    PhaseError,
    PlacementError,
    listed,
)
from placement.core.journal import Journal, logger
from placement.core.settings import Settings
from placement.core.states import IDLE, HandleView, Plan, State, View
from placement.devices.base import Device
from placement.devices.memory import Outside, WrittenPoison
from placement.group.turn import turn_for
from placement.group.vote import Agree, GroupVote
from placement.phases.moves import Mover
from placement.phases.phase import OpenPhase, innermost
from placement.planning.planner import (
    Planner,
    check_fits,
    is_there,
    meant,
    unknown_handle,
    with_kept,
    without_surplus,
)
from placement.planning.prefetcher import NOTHING_AHEAD, Ahead, Prefetcher
from placement.registration.handle import Handle
from placement.registration.registry import Registry
from placement.storage.managed import ManagedStorage
from placement.storage.transfer.verification import Verifier
from placement.storage.writes import LostWritesError


class PhaseRequest(NamedTuple):
    """A phase that is to begin, and the phases and keeps around it."""

    name: str
    only: tuple[str, ...] | None
    # the plan for the handles that `only` leaves out, without kept handles. Not used where `only`
    # is None.
    enclosing: Plan | None
    around: tuple[OpenPhase, ...]  # the enclosing phases, outermost first
    kept: frozenset[str]  # names of the handles that the phase before kept


class Reconciler:
    """Brings all handles where a plan wants them, and measures memory before and after.
    `PhaseStack` keeps track of the open phases."""

    def __init__(
        self,
        device: Device,
        policy: Any,
        settings: Settings,
        journal: Journal,
        registry: Registry,
        vote: GroupVote | None,
    ) -> None:
        self._device = device
        self._journal = journal
        self._registry = registry
        self._handles = registry.handles
        self._verifier = None if settings.verify == "off" else Verifier()
        self._mover = Mover(device, journal, settings.strict, self._verifier, self._finish)
        self.vote = vote
        # None: this process takes whatever is free
        self.turn = turn_for(device, settings, None if vote is None else vote.group)
        self.writes = WrongWrites(device, journal, registry.handles)
        self.planner = Planner(policy, settings, self._handles, device.memory())
        self.prefetcher = Prefetcher(device, self._handles, self.planner)
        self.outside = Outside(device.communicators, self.planner.memory)
        # handles that are on the device although the last phase transition wanted them off it
        self.left_behind: tuple[Handle, ...] = ()
        # the seconds in which phase transitions waited for the worker's own kernels
        self._work_seconds = 0.0
        # whether gradients may have been dropped of which memory is still to be given back
        self.has_unused = False
        # the largest number of device bytes that all handles together have held so far
        self.peak_bytes = 0

    def prepare(self, verb: str, wanted: PhaseRequest) -> tuple[Plan, int, bool]:
        """Make the plan for a phase and get ready to carry it out: build lazies that it needs, wait
        for the worker's kernels if anything leaves, stop a prefetch, raise writes into offloaded
        memory. Moves no handle. Call `measure` first. Every rank of a group does the same (`verb`).
        Returns the plan, what `check_fits` returns for it, and whether all handles are there."""
        name, handles = wanted.name, self._handles
        if self.vote is not None:
            action = (
                f"{verb} {name}"
                if wanted.only is None
                else (f"{verb} {name} only={','.join(sorted(wanted.only))}")
            )
            self.planner.least = self.vote.propose(
                action, lambda: self.planner.budget_bytes(name), self.planner.whereabouts
            )
        try:
            view, plan = self._ask(wanted)
            for handle in list(handles.values()):
                if handle.adapter is None and plan.targets[handle.name] is not State.CPU_OFFLOADED:
                    self._registry.build(handle)
                    view, plan = self._ask(wanted)  # ask again, because its size is known only now
            if self.vote is not None and self.vote.group.compares_plans:
                plan = self._without_what_others_lack(self.vote, wanted, plan)
            room_bytes = check_fits(view, plan, self.planner.other_rank(name))
        except PlacementError:
            self._journal.decisions["refuse"] += 1
            raise
        self._refuse_stale(name, plan)
        all_are_there = is_there(handles, plan)
        decisions = (
            ["keep"] * len(handles)
            if all_are_there
            else [_decision(handle, plan) for handle in view.handles.values()]
        )
        leaves = "offload" in decisions
        if leaves:
            self._wait_for_work()
        if self.prefetcher.has_any:
            self.prefetcher.pause()
        if leaves or "load" in decisions:
            self.writes.look_at_gradients()
        # Wait for the comparison of memory only with an offload, which waits for the device anyway;
        # other transitions must not wait.
        self.writes.look_at_poison(wait=leaves)
        if (written := self.writes.take()) is not None:
            raise written
        self._journal.decisions.update(decisions)
        return plan, room_bytes, all_are_there

    def carry_out_within(
        self, name: str, plan: Plan, kept: frozenset[str] = frozenset(), agree: Agree | None = None
    ) -> None:
        """Check a plan, and carry it out while the phase `name` is and stays open."""
        self.measure()
        if self.prefetcher.has_any:
            self.prefetcher.pause()
        room_bytes = check_fits(
            self.planner.view(name, None, kept), plan, self.planner.other_rank(name)
        )
        if not (all_are_there := is_there(self._handles, plan)):
            # before anything is loaded over them; the next phase transition raises them
            self.writes.look(wait=False)
        self.carry_out(name, plan, room_bytes, all_are_there, agree)

    def carry_out(
        self, name: str, plan: Plan, room_bytes: int, all_are_there: bool, agree: Agree | None
    ) -> None:
        """Move every handle where the plan wants it, all or nothing. If `all_are_there`, only a
        group (`agree`) is asked.
        `room_bytes`: see `check_fits`."""
        ahead, freed_bytes = self._look_ahead(name, plan)
        before = self._journal.num_moves
        propose = (lambda _: None) if self.vote is None else self.vote.propose
        try:
            if all_are_there and agree is None:
                self._end_without_moves(ahead)
            else:
                self._mover.advance(
                    self._handles, plan, room_bytes + freed_bytes, agree, propose, ahead
                )
        except LostWritesError as error:
            self.writes.count(error)
            raise
        self._end_transition(name, before)

    def retreat(
        self,
        plan: Plan,
        name: str,
        failures: Iterable[Exception] = (),
        *,
        tell_ranks: Callable[[list[Exception]], list[Exception]] | None = None,
    ) -> list[Exception]:
        """Move every handle as far towards the plan as possible, and count those that wrongly stay
        on the device. Returns `failures` and the errors.
        `tell_ranks` tells the other ranks how far this one came. It gets the errors, and returns
        them with those of the others."""
        all_are_there = is_there(self._handles, plan)
        leaves = not all_are_there and bool(self._left_behind(plan))
        if leaves:
            with suppress(Exception):  # a device that failed says so below
                self._wait_for_work()
        if self.prefetcher.has_any:
            self.prefetcher.pause()
        failures = [*failures]
        ahead, before = NOTHING_AHEAD, self._journal.num_moves
        try:
            ahead, _ = self._look_ahead(name, plan)
        except Exception as error:  # the device failed
            failures.append(error)
        if all_are_there:
            self._end_without_moves(ahead)
        else:
            try:
                self.writes.look_at_gradients()
            except Exception as error:
                failures.append(error)
            failures += self._mover.retreat(
                self._handles,
                plan,
                while_copying=self._device.compare_poison,
                ahead=ahead,
            )
            failures += self._mover.complete(self._handles.values()) if tell_ranks is None else []
            for failure in failures:
                if isinstance(failure, LostWritesError):
                    self.writes.count(failure)
        # a failed load may have brought one there
        self.left_behind = () if all_are_there else self._left_behind(plan)
        self._journal.pairing_violations += len(self.left_behind)
        self._end_transition(name, before)
        self.writes.look_at_poison(wait=leaves)  # as at an entry, only an offload waits
        if (written := self.writes.take()) is not None:
            failures.append(written)
        if tell_ranks is not None:
            failures = tell_ranks(failures) + self._mover.complete(self._handles.values())
        if name == IDLE:
            self.end_turn()
        return failures

    def end_turn(self) -> None:
        """Let others have the device, unless something of this manager is left on it. Called
        outside every phase."""
        if self.turn is None or not self.turn.is_held:
            return
        if not any(each.is_on_device and not each.external for each in self._handles.values()):
            if self._device.memory().torch_reserved_bytes > self._device.torch_allocated_bytes():
                self._device.trim()  # what torch's allocator has cached
            self.turn.give_back()

    def _look_ahead(self, name: str, plan: Plan) -> tuple[Ahead, int]:
        if plan.prefetch or plan.streamed or self.prefetcher.has_any:
            return self.prefetcher.look_ahead(name, plan, self._mover.chunk_pool)
        return NOTHING_AHEAD, 0

    def _end_without_moves(self, ahead: Ahead) -> None:
        self._finish()
        if ahead is not NOTHING_AHEAD or self._mover.chunk_pool:  # the pool has chunks
            self._mover.end_with(ahead)

    def _finish(self) -> None:
        """Everything is where it belongs: take in state that modules have dropped as their
        gradient, note host copies for verification."""
        for handle in self._handles.values():
            if handle.kind == "optimizer" and (holding := handle.holding) is not None:
                holding.adopt_dropped()
        if self._verifier is not None:
            self._verifier.note(
                each for handle in self._handles.values() if (each := handle.holding) is not None
            )

    def _end_transition(self, name: str, before: int) -> None:
        """End a phase transition: measure if anything has moved (`Journal.num_moves` was `before`),
        and give back what is not needed."""
        if self._journal.num_moves != before:
            self.measure()
            self.outside.measure(self.planner.memory)

    @contextmanager
    def stall_of(self, name: str) -> Iterator[None]:
        """Count the seconds inside as a stall of this phase, without those in which the worker's
        own kernels were waited for."""
        began, worked = time.monotonic(), self._work_seconds
        try:
            yield
        finally:
            waited = time.monotonic() - began
            self._journal.stall_seconds[name] += waited - (self._work_seconds - worked)

    def _wait_for_work(self) -> None:
        """Wait for the worker's own kernels, as an offload has to. Bytes still arrive early
        meanwhile."""
        began = time.monotonic()
        self._device.wait_for_work()
        self._work_seconds += time.monotonic() - began

    def _left_behind(self, plan: Plan) -> tuple[Handle, ...]:
        return tuple(
            [
                each
                for each in self._handles.values()
                if each.is_on_device and not each.external and not plan.on_device(each.name)
            ]
        )

    def measure(self) -> None:
        """Measure the device's memory and the handles' bytes on it, and update the peak."""
        if self.has_unused:
            self.give_back_unused()
        self.peak_bytes = max(self.peak_bytes, self.planner.measure(self._device.memory()))

    def give_back_unused(self) -> None:
        """Give back the memory of gradients that were dropped. Where that cannot be now, the next
        phase transition does it."""
        try:
            if self._device.is_capturing():  # to wait would break the capture
                return
            self.has_unused = False  # first, because more may be dropped meanwhile
            for handle in self._handles.values():
                if handle.holding is not None:
                    handle.holding.give_back_unused()
            self.planner.memory = self._device.memory()
        except BaseException as error:
            self.has_unused = True
            if not isinstance(error, Exception):
                raise
            # what needs the device next says so
            logger.warning("dropped gradients keep their memory: %s", str(error))

    def _ask(self, wanted: PhaseRequest) -> tuple[View, Plan]:
        view, plan = self.planner.ask(wanted.name, innermost(wanted.around), wanted.kept)
        for name in wanted.only or ():
            if name not in self._handles:
                raise PhaseError(f"only=: {unknown_handle(name, self._handles)}")
        chosen = meant(wanted.only, self._handles)
        if chosen is None or wanted.enclosing is None:
            return view, plan
        taken_over = [name for name in wanted.kept if plan.on_device(name)]
        plan = plan.limited_to(chosen, with_kept(wanted.enclosing, taken_over, self._handles))
        return view, plan if view.fits(plan) else without_surplus(view, plan, self._needed(wanted))

    def _without_what_others_lack(self, vote: GroupVote, wanted: PhaseRequest, plan: Plan) -> Plan:
        """The plan without what merely stays on this rank's device and not on every other's,
        streaming what any rank streams. A policy that keeps what is on the device, or streams what
        does not fit, gives another plan to a rank that was restarted, or has larger handles."""
        chosen = meant(wanted.only, self._handles)
        needed = self.planner.needed(
            wanted.name, innermost(wanted.around), wanted.kept, at_rest=True
        )
        # the tag, by the handle's name and the text that the other ranks are told: state and tag
        staying: dict[tuple[str, str], str] = {}
        for name, state in plan.targets.items():
            needed_tags = (
                self._tags(name, needed) if chosen is None or name in chosen else frozenset()
            )
            staying |= {
                (name, f"{state.value} {tag}"): tag for tag in self._tags(name, plan) - needed_tags
            }
        stays, streamed = vote.in_common(staying, plan.streamed)
        for name, lacked in staying.keys() - stays:
            tags = self._tags(name, plan) - {staying[name, lacked]}
            plan = replace(plan, parts={**plan.parts, name: tags}) if tags else plan.giving_up(name)
        used = {name for name, state in plan.targets.items() if state is not State.CPU_OFFLOADED}
        return replace(plan, streamed=plan.streamed | (streamed & used))

    def _tags(self, name: str, plan: Plan) -> frozenset[str]:
        """The tags of an engine that a plan uses. Another handle that it uses has one, the empty
        text."""
        if plan.targets[name] is State.CPU_OFFLOADED:
            return frozenset()
        return plan.parts.get(name, frozenset(self._handles[name].storage.tags or ("",)))

    def _needed(self, wanted: PhaseRequest) -> Plan:
        """The plan with only what is needed: the phase decides about handles in `only`, the
        enclosing phases about the others."""
        needed = self.planner.needed(IDLE, None, wanted.kept)
        levels = [*((each.name, each.only) for each in wanted.around), (wanted.name, wanted.only)]
        for index, (name, only) in enumerate(levels):
            asked = self.planner.needed(name, levels[index - 1][0] if index else None, wanted.kept)
            chosen = meant(only, self._handles)
            needed = asked if chosen is None else asked.limited_to(chosen, needed)
        return needed

    def _refuse_stale(self, name: str, plan: Plan) -> None:
        """Raise EngineError for a phase that would generate with an engine that needs weights."""
        roles = self.planner.computing_roles(name)
        for handle in self._handles.values():
            if (
                handle.kind == "engine"
                and (stale := handle.stale) is not None
                and plan.on_device(handle.name)
                and (handle.role or "rollout") in roles
            ):
                raise EngineError(
                    f"the weights of {handle.name!r} mean nothing now, so phase {name!r} cannot "
                    f"use it: {stale}. Publish first: inside manager.phase('weight_sync'), pass "
                    "every bucket of the actor's weights() to its update_weights()"
                )


def _decision(handle: HandleView, plan: Plan) -> str:
    """The word under which the journal counts what a plan does with a handle
    (`Journal.decisions`)."""
    on, wanted = (
        handle.state is not State.CPU_OFFLOADED and not handle.streaming,
        plan.on_device(handle.name),
    )
    return "keep" if on is wanted else "load" if wanted else "offload"


# --- writes into the memory of offloaded handles


class WrongWrites:
    """Finds writes into the memory of offloaded handles, and remembers them until `take` returns
    them as an error."""

    def __init__(self, device: Device, journal: Journal, handles: Mapping[str, Handle]) -> None:
        self._device = device
        self._journal = journal
        self._handles = handles
        self._found: dict[str | None, list[str]] = {}
        """Descriptions of the writes, by name of the handle; under None if the handle is not
        known."""

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
