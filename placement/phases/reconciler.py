"""Carries out plans: moves the handles to where a plan wants them, and measures memory before and
after."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from placement.core.errors import DeviceMemoryError, EngineError
from placement.core.journal import Journal, logger
from placement.core.settings import Settings
from placement.core.states import IDLE, Plan
from placement.devices.base import Device
from placement.devices.memory import Outside
from placement.engines.http import ServedEngine
from placement.group.turn import turn_for
from placement.group.vote import Agree, GroupVote
from placement.phases.early import EarlyCopies
from placement.phases.engines import Engines, drop, droppable
from placement.phases.found_changes import FoundChanges
from placement.phases.moves import Mover
from placement.phases.plan_maker import GroupPlanMaker, PlanMaker
from placement.phases.ranks import LeavingRanks, Ranks
from placement.phases.transition import Participant, Transition, Verification
from placement.planning.planner import Planner, check_fits, is_there
from placement.planning.prefetcher import Prefetcher
from placement.registration.handle import Handle
from placement.registration.registry import Registry
from placement.storage.transfer.verification import Verifier


class Reconciler:
    """Brings all handles where a plan wants them. `PhaseStack` keeps track of the open phases.

    Every way in makes a `Transition` and runs it with the list of participants that it needs.
    """

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
        self.planner = Planner(policy, settings, self._handles, device.memory())
        self.prefetcher = Prefetcher(device, self._handles, self.planner)
        self.outside = Outside(device.communicators, self.planner.memory)
        self.changes = FoundChanges(device, journal, self._handles)
        # None: this process takes whatever is free
        self.turn = turn_for(device, settings)
        verifier = None if settings.verify == "off" else Verifier()
        self._mover = Mover(device, journal, settings.strict, verifier)
        self._participants: list[Participant] = [EarlyCopies(self.prefetcher, self._mover)]
        """The participants of every transition, beside the look for changes and the other ranks."""
        if verifier is not None:
            self._participants.insert(0, Verification(verifier))
        self.has_engines = False  # whether a handle was registered that is an engine, or may be one
        self.set_vote(vote)
        # handles that were on the device although the last exit wanted them off it
        self.left_behind: tuple[Handle, ...] = ()
        # the seconds in which phase transitions waited for the worker's own kernels
        self._work_seconds = 0.0
        self._last_name = IDLE  # the phase of the last transition, whose loads may still arrive
        # whether gradients may have been dropped of which memory is still to be given back
        self.has_unused = False

    def set_vote(self, vote: GroupVote | None) -> None:
        """Change phases together with the ranks of this vote's group; None: alone."""
        self._vote = vote
        if self.turn is not None and vote is not None:
            self.turn.give_up_before(vote.group)
        self.plan_maker = PlanMaker(self.planner, self._registry, self._journal)
        if vote is not None:
            self.plan_maker = GroupPlanMaker(self.planner, self._registry, self._journal, vote)

    def take_in(self, handle: Handle) -> None:
        """Have what moves a new handle take part from now on."""
        may_be_engine = handle.kind == "engine" or not handle.is_built
        if may_be_engine and not self.has_engines:
            self.has_engines = True
            self._participants.insert(0, Engines(self._mover))

    def take_back_restarted_engines(self, *, asks_all: bool = False) -> list[str]:
        """Have restarted engines take part again, and return their names. `asks_all`: also those
        that nothing was sent to since."""
        names = []
        for handle in self._handles.values():
            engine = handle.object
            if isinstance(engine, ServedEngine) and (asks_all or engine.residency.doubt):
                with suppress(EngineError):  # it was not, or does not answer yet
                    engine.reattach()
                    self._mover.each_repaired([handle], lambda _: None)
                    names.append(handle.name)
        return names

    def drop(self, names: Iterable[str]) -> list[Exception]:
        """Have engines discard their weights: see `droppable` and `drop`. Returns the errors."""
        engines = droppable(self._handles, names)
        if self.turn is not None:
            self.turn.take(IDLE)
        return self._mover.each_repaired(engines, lambda engine: drop(engine, self._mover))

    # --- all or nothing

    def enter(self, name: str, plan: Plan, room_bytes: int) -> None:
        """Begin a phase, on all ranks of a group or on none. Call `measure` before its plan is
        made. `room_bytes`: see `check_fits`."""
        participants = [self.changes, *self._participants]
        if self._vote is not None:
            participants.append(Ranks(self._vote.agree, self._vote.propose))
        transition = Transition(name, plan, self._handles, participants, room_bytes)
        if transition.offloads:
            self._wait_for_work()
        self._journal.decisions.update(transition.decisions)
        self._run(transition)

    def carry_out_within(
        self, name: str, plan: Plan, kept: frozenset[str] = frozenset(), agree: Agree | None = None
    ) -> None:
        """Check a plan, and carry it out while the phase `name` is and stays open. After an error
        every handle is where it was. `kept`: names of the handles that count as kept. `agree` asks
        the ranks that share a handle."""
        self.measure(name)
        view = self.planner.view(name, None, kept)
        room_bytes = check_fits(view, plan, self.planner)
        participants = self._participants
        if agree is not None and self._vote is not None:
            participants = [*participants, Ranks(agree, self._vote.propose)]
        if not is_there(self._handles, plan):
            # A load would hide changes to the handles that come. The next phase transition raises
            # what is found.
            self.changes.look_at(self.changes.coming(plan))
            self.changes.look_at_poison(wait=False)
            plan = self.changes.without_replaced(plan)
        self._run(Transition(name, plan, self._handles, participants, room_bytes))

    def _run(self, transition: Transition) -> None:
        """Move every handle where the plan wants it, or leave every handle where it was."""
        num_moves = self._journal.num_moves
        mover, participants = self._mover, transition.participants
        if self.prefetcher.has_any:
            self.prefetcher.pause()
        if not transition.is_there:
            mover.repair(self._handles.values())
        try:
            for participant in participants:
                participant.prepare(transition)
            mover.begin(transition)
            mover.move(transition)
            for participant in participants:
                participant.moved(transition)
            mover.commit(transition)
        except BaseException as error:
            if isinstance(error, DeviceMemoryError):  # the driver's, which names no handle
                error.add_note(transition.unmet_loads())
            mover.go_back(error)
            raise
        try:
            if transition.lacks_engines:
                mover.end()  # before any rank is told that this one is so far
            for participant in participants:
                participant.commit(transition)
            for participant in participants:
                participant.finish(transition)
        finally:
            mover.end()
        self._end_transition(transition.name, num_moves)

    # --- as far as possible

    def retreat(
        self,
        name: str,
        plan: Plan,
        failures: Sequence[Exception] = (),
        *,
        leaving: LeavingRanks | None = None,
        raises_changes: bool = True,
    ) -> list[Exception]:
        """Move every handle as far towards the plan as possible, and count those that wrongly stay
        on the device (`left_behind`). Returns `failures` and the errors.
        `leaving`: tells the other ranks how far this one came, and adds the group's error.
        `raises_changes`: whether changes to offloaded handles are errors of this transition."""
        num_moves = self._journal.num_moves
        mover, participants = self._mover, [*self._participants]
        if raises_changes:
            participants.insert(0, self.changes)
        if leaving is not None:
            participants.append(leaving)
        transition = Transition(
            name,
            plan,
            self._handles,
            participants,
            is_exit=True,
            errors=[*failures],
        )
        if transition.offloads:
            with suppress(Exception):  # a device that failed says so below
                self._wait_for_work()
        if self.prefetcher.has_any:
            self.prefetcher.pause()
        for participant in participants:
            try:
                participant.prepare(transition)
            except Exception as error:
                transition.errors.append(error)
        mover.begin(transition)
        transition.errors += mover.move_as_far_as_possible(transition)
        # a failed load may have brought one there
        self.left_behind = () if transition.is_there else self._left_behind(plan)
        self._journal.pairing_violations += len(self.left_behind)
        for participant in participants:
            try:
                participant.finish(transition)
            except Exception as error:
                transition.errors.append(error)
        try:
            mover.end()
            self._end_transition(name, num_moves)
        except Exception as error:  # the device failed
            transition.errors.append(error)
        if not transition.is_there:
            transition.errors += mover.complete_loads(self._handles.values())
        return transition.errors

    def end_turn(self) -> None:
        """Let others have the device, unless something of this manager is left on it. Called
        outside every phase."""
        if self.turn is None or not self.turn.is_held:
            return
        if self._mover.chunk_pool:  # kept to go back: the group's decision is unknown
            return
        for handle in self._handles.values():
            # a broken engine cannot say whether it still has memory there
            may_be_there = handle.is_on_device or (
                handle.kind == "engine" and handle.broken is not None
            )
            if may_be_there and not handle.external:  # external ones never leave
                return
        self.trim()
        self.turn.give_back()

    def trim(self) -> None:
        """Return to the driver what torch's allocator has cached."""
        with suppress(Exception):  # a device that failed keeps no other manager waiting
            if self._device.memory().torch_reserved_bytes > self._device.torch_allocated_bytes():
                self._device.trim()

    def _left_behind(self, plan: Plan) -> tuple[Handle, ...]:
        handles = []
        for handle in self._handles.values():
            if handle.is_on_device and not handle.external and not plan.on_device(handle.name):
                handles.append(handle)
        return tuple(handles)

    # --- measuring

    def _end_transition(self, phase: str, num_moves: int) -> None:
        """Measure if anything has moved since the journal had `num_moves`, or may have come
        early."""
        if self._journal.num_moves != num_moves or self.prefetcher.has_any:
            self.measure(phase)
            self.outside.measure(self.planner.memory)

    @contextmanager
    def stall_of(self, name: str) -> Iterator[None]:
        """Count the seconds inside as a stall of this phase, without those in which the worker's
        own kernels were waited for. See also `_count_arrivals`."""
        if self._device.waits:
            self._count_arrivals()
        began, worked = time.monotonic(), self._work_seconds
        try:
            yield
        finally:
            waited = time.monotonic() - began
            self._journal.stall_seconds[name] += waited - (self._work_seconds - worked)
            self._last_name = name

    def _count_arrivals(self) -> None:
        """Count the seconds in which the device's own work has waited for bytes of the last
        transition, as far as they have arrived. The host does not wait for these."""
        with suppress(RuntimeError):  # a device that failed says so where it is used
            if seconds := self._device.waited_seconds():
                self._journal.stall_seconds[self._last_name] += seconds
                self._journal.arrival_seconds += seconds

    def _wait_for_work(self) -> None:
        """Wait for the worker's own kernels, as an offload has to. Bytes still arrive early
        meanwhile."""
        began = time.monotonic()
        self._device.wait_for_work()
        self._work_seconds += time.monotonic() - began
        self._count_arrivals()

    def measure(self, phase: str) -> None:
        """Measure the device's memory and the handles' bytes on it, which count for the peak of
        this phase."""
        if self.has_unused:
            self.give_back_unused()
        self._journal.note_held(phase, self.planner.measure(self._device.memory()))

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
