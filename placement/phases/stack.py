"""Entering, switching and leaving phases. Each is one phase transition: an entry or a switch all or
nothing, an exit as far as it goes."""

from __future__ import annotations

import math
import os
import sys
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from placement.core import interrupts
from placement.core.errors import CoordinatorLost, DeviceMemoryError, PhaseError
from placement.core.interrupts import is_background
from placement.core.journal import Journal, logger
from placement.core.modes import uncompiled
from placement.core.settings import Settings
from placement.core.states import IDLE, Plan
from placement.devices.base import Device
from placement.group.vote import GroupVote, Suspended
from placement.phases import audit
from placement.phases.incidents import Incidents
from placement.phases.members import Members
from placement.phases.phase import OpenPhase, OpenPhases, TransitionLock
from placement.phases.plan_maker import PhaseRequest
from placement.phases.ranks import LeavingRanks
from placement.phases.reconciler import Reconciler
from placement.phases.suspension import Suspension
from placement.planning.advice import Advisor
from placement.registration.handle import Handle
from placement.registration.registry import Registry
from placement.registration.streamed_optimizer import SteppedHandle, Streaming
from placement.storage.transfer.streamed import Streamed

if TYPE_CHECKING:
    from placement.group.protocol import Group


class PhaseStack:
    """The phase transitions of one manager. Used by `Manager` and `Phase`."""

    def __init__(
        self, device: Device, policy: Any, settings: Settings, journal: Journal, group: Group | None
    ) -> None:
        self._device = device
        self._journal = journal
        self._gone: deque[Handle] = deque()  # see `Members`
        streaming = Streaming(self._for_a_step, self._stepped)
        self.registry = Registry(
            device,
            lambda: self.phases.name,
            self._gone.append,
            streaming,
            settings,
            partial(_give_back_unused, weakref.ref(self)),
        )
        self._handles = self.registry.handles
        device.when_out_of_memory(partial(_give_up_early, weakref.ref(self)))
        vote = None if group is None else GroupVote(group)
        self.reconciler = Reconciler(device, policy, settings, journal, self.registry, vote)
        self._planner = self.reconciler.planner
        self._advisor = Advisor(policy, settings, self._planner, self._handles, journal)
        if group is not None and group.rank != 0:
            self._advisor.look_at = math.inf  # the first rank tells it for all
        self.phases = OpenPhases(self._planner, self._handles)
        self.members = Members(
            self.registry,
            self.phases,
            self.reconciler,
            journal,
            self._gone,
            partial(_restore, weakref.ref(self)),
        )
        parts = self._handles, self.phases, self.reconciler
        named = policy.name, settings.worker_role
        self.take_snapshot = partial(audit.take_snapshot, *parts, *named, device, journal)
        self.take_audit = partial(audit.audit, self._handles, device, self.reconciler)
        self.incidents = Incidents(
            settings, self.take_snapshot, self.take_audit, journal, device.torch_device
        )
        self.lock = TransitionLock(
            device,
            vote,
            self._sweep,
            None if self.reconciler.turn is None else self._end_turn,
            self.incidents.report,
            lambda: all(phase.is_abandoned for phase in self.phases.all),
        )
        self.suspension = Suspension(
            self.lock, self.phases, self._handles, self.take_snapshot, self._offload_all
        )

    @contextmanager
    def _for_a_step(self) -> Iterator[None]:
        """Hold the lock while a step of an optimizer streams its state. torch's modes stay on,
        because the step runs inside."""
        inside = (
            "a policy or a Lazy's factory must not call step(): it runs inside a phase transition"
        )
        with self.lock.busy(
            inside,
            "a step that streams its state cannot be captured in a graph: use optimizer_in='train'",
        ):
            self.reconciler.prefetcher.pause()  # the step needs the link for itself
            yield

    def _stepped(self, handle: SteppedHandle, streamed: Streamed, seconds: float) -> None:
        """Count a streamed step: its bytes, and the most that all handles together held on the
        device meanwhile. Then prefetching goes on, which `_for_a_step` has paused."""
        handle.counters.loaded_bytes += streamed.to_device_bytes
        handle.counters.prefetch_used_bytes += streamed.early_bytes
        handle.counters.offloaded_bytes += streamed.to_host_bytes
        held_bytes = streamed.peak_bytes  # those of the stepped optimizer
        for other in self._handles.values():
            if other is not handle:
                held_bytes += other.resident_bytes
        self._journal.note_held(self.phases.name, held_bytes)
        logger.debug(
            "%s: step streamed %d bytes in %.3f s", handle.name, streamed.to_device_bytes, seconds
        )
        if self.phases.all:
            plan = self.phases.all[-1].plan
            self.reconciler.prefetcher.go_on(self.phases.name, plan)

    # --- entering and switching

    @uncompiled
    def enter(self, phase: OpenPhase) -> None:
        """Open a phase: see `_change`. An outermost one waits for the end of a suspension."""
        while True:
            with suppress(Suspended):
                self._enter(phase)
                return
            self.suspension.wait()

    def _enter(self, phase: OpenPhase) -> None:
        """Open a phase. Raises Suspended: an outermost one has to wait first."""
        with self.lock.attempt(begins_phase=True), self.lock.transition():
            phases = self.phases
            phases.check_holder(phase.name)
            if not phases.all and phases.is_suspended:
                raise Suspended
            # others may have freed or taken memory since the last phase transition
            self.reconciler.measure(phases.name)
            plan_of_others = None if phase.only is None else phases.plan_of(phases.all)
            if not phases.all:
                self._planner.note_memory_of_others_in(IDLE)  # which ends here
            request = PhaseRequest(phase.name, phase.only, plan_of_others, phases.all, phases.kept)
            self._change(phase, "enter", request)

    @uncompiled
    def switch(self, phase: OpenPhase, name: str, only: tuple[str, ...] | None) -> None:
        """End the innermost phase and begin another in its place: see `_change`. Raises PhaseError,
        with nothing noted: `phase` is not open, or not the innermost."""
        with self.lock.transition():
            phases = self.phases
            phases.require_innermost(phase, f"switch to {name!r}")
            around = phases.all[:-1]
            plan_of_others = None if only is None else phases.plan_of(around)
            self._note_end(phase)
            kept = phases.kept
            if phase.to_keep:
                kept |= self._worth_keeping(phase)
            request = PhaseRequest(name, only, plan_of_others, around, kept)
            self._change(phase, "switch to", request)

    def _change(self, phase: OpenPhase, verb: str, request: PhaseRequest) -> None:
        """Have the phase begin as the request says, by an entry or a switch (`verb`). After an
        error `_go_back` runs, and the error is raised again. `_end_turn` gives back a turn that was
        taken for nothing."""
        phases = self.phases
        self.reconciler.plan_maker.latest = Plan({})  # an incident must not show an older plan
        self._journal.enter_phase(request.name, request.only)
        with self.reconciler.stall_of(request.name):
            try:
                if self.reconciler.turn is not None:
                    self.reconciler.turn.take(request.name)
                    # the process that had the turn before may have given back memory
                    self.reconciler.measure(phases.name)
                vote = self.lock.vote
                with nullcontext() if phases.all or vote is None else self.suspension.telling(vote):
                    plan, room_bytes = self.reconciler.plan_maker.make(verb, request)
                self.reconciler.enter(request.name, plan, room_bytes)
                interrupts.check()  # the last look: from here on the phase is open
            except BaseException as error:
                self._go_back(error)
                raise
        phases.all, phases.kept = (*request.around, phase), request.kept
        self._end_keeps(taken_over_by=plan)
        phase.name, phase.only = request.name, request.only
        phase.plan, phase.to_keep = plan, set()
        self._planner.history.began(request.name)

    def _go_back(self, error: BaseException) -> None:
        """After an error of an entry or a switch: report it, and bring every handle where the
        phases that are still open want it. Errors of that become notes of `error`. After
        `CoordinatorLost` no handle goes back: other ranks may have entered the phase, so going back
        could be as wrong as going on."""
        phases = self.phases
        self.incidents.report(error, self.reconciler.plan_maker.latest)
        self._journal.enter_phase(phases.name, phases.only)
        if isinstance(error, DeviceMemoryError):
            for engine in self.reconciler.take_back_restarted_engines(asks_all=True):
                error.add_note(f"placement: engine {engine!r} was restarted: begin the phase again")
        if not isinstance(error, CoordinatorLost):
            plan, _ = phases.plan_in_any_case(phases.all)  # `error` says more than the policy's
            _note(error, self.reconciler.retreat(phases.name, phases.with_kept(plan)))

    # --- leaving

    @uncompiled
    def leave(self, phase: OpenPhase, error: BaseException | None) -> None:
        """Leave a phase: see `_leave`. A suspension that was asked for follows the outermost."""
        try:
            with self.lock.attempt(raises_own_error=True, error=error):
                self._leave(phase, error)
        finally:
            if not self.phases.all:
                self.suspension.carry_out()

    def _leave(self, phase: OpenPhase, error: BaseException | None) -> None:
        """Leave a phase, and bring every handle where the phases that stay open want it, as far as
        possible. The phase is over even after an error, other than a PhaseError that it may not be
        left. `error`: the user's exception that ends the phase, which gets the errors of leaving as
        notes; None: the first of these is raised."""
        if error is not None and os.getpid() != self.lock.pid:
            return  # a forked child ends in a phase of its parent, and its own error says why
        with self.lock.transition():
            phases = self.phases
            if error is not None:
                self.incidents.report(error, phase.plan)
                if isinstance(error, GeneratorExit) and self._is_around_others(phase):
                    phase.is_abandoned = True  # it ends with the last of these
                    return
                self._leave_phases_inside(phase)
            phases.require_leavable(phase)
            around = phases.without(phase)
            leaving = None
            if (vote := self.lock.vote) is not None:
                leaving = LeavingRanks(vote, f"leave {phase.name}", error)
            telling = nullcontext() if around or vote is None else self.suspension.telling(vote)
            with telling, self._leaving_to(around) as left_to:
                try:
                    self._note_end(phase)
                    if phases.kept:
                        self._end_keeps()
                    plan, failures = phases.plan_after(phase)
                    if phase.to_keep:
                        phases.kept = self._worth_keeping(phase)
                        plan = phases.with_kept(plan)
                    failures = self.reconciler.retreat(left_to, plan, failures, leaving=leaving)
                except BaseException as stopped:  # finish leaving, then raise it
                    self._end_keeps()
                    failures = self.reconciler.retreat(left_to, phases.plan_after(phase)[0])
                    if error is None or not isinstance(stopped, Exception):
                        raise
                    failures.insert(0, stopped)  # notes on the user's own error
                finally:
                    phases.all = around
            self._leave_abandoned()
            if error is not None:
                _note(error, failures)
                for failure in failures:
                    self.incidents.report(failure, raised=error)
            elif failures:
                failures[0].add_note(f"placement: while leaving phase {phase.name!r}")
                _raise_all(failures)

    def _leave_phases_inside(self, phase: OpenPhase) -> None:
        """Leave the phases inside one through which an exception passes: their own `with`
        statements leave them no more."""
        if phase in self.phases.all:
            for inner in self.phases.inside(phase):
                inner.is_abandoned |= not inner.in_any_order
            self._leave_abandoned()

    @contextmanager
    def _leaving_to(self, phases: Sequence[OpenPhase]) -> Iterator[str]:
        """Count what happens inside for the innermost of the phases that stay open. Gives its
        name."""
        name, only = (phases[-1].name, phases[-1].only) if phases else (IDLE, None)
        self._journal.enter_phase(name, only)
        with self.reconciler.stall_of(name):
            yield name

    def _is_around_others(self, phase: OpenPhase) -> bool:
        """Whether a closed generator's phase has phases of the generator's caller open inside."""
        phases = self.phases.all
        return phase in phases and phases[-1] is not phase and phases[-1].holder is not None

    # --- suspending

    def _offload_all(self, action: str, drop: Sequence[str]) -> None:
        """Have engines drop their weights, and take every handle off the device, outside of phases.
        Raises what failed, but not changes to offloaded handles: the next phase does."""
        with self.lock.attempt(raises_own_error=True), self.lock.transition():
            vote = self.lock.vote
            leaving = None if vote is None else LeavingRanks(vote, action)
            self._end_keeps()
            self.reconciler.take_back_restarted_engines(asks_all=True)
            failures = self.reconciler.drop(drop) if drop else []
            failures = self.reconciler.retreat(
                IDLE, self.phases.all_offloaded(), failures, leaving=leaving, raises_changes=False
            )
            if failures:
                _raise_all(failures)
            self.reconciler.trim()
            self.reconciler.measure(IDLE)

    # --- within a phase

    def keep(self, phase: OpenPhase, handle_or_name: Handle | str) -> None:
        """Note that a handle stays for the phase after this one: see `Phase.keep`."""
        self.phases.require_open(phase, "keep a handle")
        phase.to_keep.add(self.members.find(handle_or_name).name)

    @uncompiled
    def done_with(self, phase: OpenPhase, handle_or_name: Handle | str) -> None:
        """Offload a handle for the rest of the innermost phase: see `Phase.done_with`."""
        with self.lock.transition():
            handle, plan = self.members.find(handle_or_name), phase.plan
            self.phases.require_innermost(phase, f"be done with {handle.name!r}")
            if handle.external or not handle.is_on_device:
                return
            if self.lock.vote is not None:
                self.lock.vote.group.plans_may_differ = True  # the other ranks may not give it up
            with self.reconciler.stall_of(phase.name):
                try:
                    phase.plan = plan.giving_up(handle.name)
                    phase.to_keep.discard(handle.name)
                    self.reconciler.carry_out_within(phase.name, phase.plan)
                except BaseException as error:
                    phase.plan = plan
                    _note(error, self.reconciler.retreat(phase.name, plan))
                    raise

    def _note_end(self, phase: OpenPhase) -> None:
        """Measure, and note how much torch memory the phase has used beside the handles'."""
        self.reconciler.measure(phase.name)
        self._planner.note_memory_of_others_in(phase.name)

    def _worth_keeping(self, phase: OpenPhase) -> frozenset[str]:
        """Names of handles that the phase was asked to keep and that are on the device. A keep
        carries residency over; it loads nothing."""
        return frozenset(
            name
            for name in phase.to_keep
            if name in self._handles and self._handles[name].is_on_device
        )

    def _end_keeps(self, taken_over_by: Plan | None = None) -> None:
        """End all keeps (`OpenPhases.kept`), which last for one phase transition.
        `taken_over_by`: its plan. Keeps that are not in it count as expired; None: all do."""
        plan = taken_over_by
        for name in self.phases.kept:
            if plan is None or name not in plan.targets or not plan.on_device(name):
                self._journal.expired_keeps += 1
        self.phases.kept = frozenset()

    # --- outside every phase

    def rejoin(self, group: Group) -> None:
        """See `Manager.rejoin`."""
        if self.phases.all:
            raise PhaseError(f"phase {self.phases.name!r} is open; leave it before rejoin()")
        if failures := self.reconciler.retreat(IDLE, self.phases.base_plan()):
            _raise_all(failures)
        self.lock.vote = GroupVote.rejoin(group)
        self.reconciler.set_vote(self.lock.vote)
        self._planner.least = None

    def close(self, on_device: tuple[str, ...] = ()) -> None:
        """See `Manager.close`. It can be repeated after an error, before which all handles were
        handed back that could be."""
        if self.lock.is_closed:
            return
        self.members.is_closing = True
        try:
            with self.lock.transition():
                if self.phases.all:
                    raise PhaseError(f"phase {self.phases.name!r} is open; leave it before close()")
                if on_device:
                    self.members.bring(on_device)
                if failures := self.members.forget_all():
                    _raise_all(failures)
                self._device.close()
                self.lock.is_closed = True
                changed = self.reconciler.changes.take()
                if changed is not None:
                    logger.error("closed: %s", changed)
        finally:
            self.members.is_closing = False

    # --- phases that were garbage-collected

    def abandon(self, phase: OpenPhase) -> None:
        """Leave a phase whose context was garbage-collected while open (a generator that never
        finished), now or at the next transition."""
        if phase not in self.phases.all or os.getpid() != self.lock.pid:
            return
        phase.is_abandoned = True
        if not is_background():
            with self.lock.if_free() as is_free:
                # else the phase transition that is under way in this or another thread is followed
                # by one that sweeps
                if is_free:
                    self.lock.sweep_now()

    def _sweep(self) -> None:
        """Called at the beginning of every phase transition: forget handles that were
        garbage-collected, take back engines that were restarted, and leave abandoned phases. Have
        the advisor look at the steps so far, when it is time for that."""
        if self._gone:
            self.members.forget_collected()
        if self.reconciler.has_engines:
            self.reconciler.take_back_restarted_engines()
        self._leave_abandoned()
        if self._journal.num_spans >= self._advisor.look_at:
            self._advisor.look()

    def _end_turn(self) -> None:
        if not self.phases.all:
            self.reconciler.end_turn()

    def _leave_abandoned(self) -> None:
        """Leave the abandoned phases that have no other phase open inside, and holds. Errors are
        logged, because no caller left these phases."""
        phases = self.phases
        while (phase := phases.first_abandoned()) is not None:
            # leaving an abandoned phase offloads handles that an inner phase kept, and keeps none
            # itself
            self._end_keeps()
            around = phases.without(phase)
            with self._leaving_to(around) as left_to:
                failures = self.reconciler.retreat(left_to, phases.plan_after(phase)[0])
            if self.lock.vote is not None:
                self.lock.vote.abandoned(phase.name)
            # last, so that after an interrupt the next phase transition does all of this again
            phases.all = around
            for failure in failures:
                logger.error("leaving abandoned phase %s: %s", phase.name, str(failure))


def _note(error: BaseException, failures: list[Exception]) -> None:
    for failure in failures:
        with suppress(Exception):  # an exception that is a frozen dataclass refuses notes
            error.add_note(f"placement: {type(failure).__name__}: {failure}")


def _raise_all(failures: list[Exception]) -> None:
    """Raise the first of these errors, with the others as notes."""
    first, *others = failures
    _note(first, others)
    raise first


def _give_up_early(stack: weakref.ref[PhaseStack]) -> None:
    """Return the memory of all pages aside to the driver: torch's allocator, which has found none,
    calls this in any thread. While a phase transition is under way, nothing is done. The open phase
    gets less room for pages aside from now on."""
    if (living := stack()) is None:
        return
    try:
        with living.lock.if_free() as is_free:
            if is_free:
                with living.lock.occupied():
                    living.reconciler.prefetcher.give_up(living.phases.name)
    except Exception as error:  # it would take the place of the allocator's own
        logger.warning("pages aside could not be given up: %s", str(error))


def _restore(stack: weakref.ref[PhaseStack], handle: Handle) -> None:
    if (living := stack()) is not None:
        with living.lock.transition():
            living.members.restore(handle)


def _give_back_unused(stack: weakref.ref[PhaseStack]) -> None:
    """Return the memory of dropped gradients to the driver: called by the thread that has dropped
    the last reference. Where that cannot be now, `has_unused` has the next phase transition do it.
    Torch has not finished dropping the gradient: nothing inside may read a parameter's `.grad`."""
    if sys.is_finalizing() or (living := stack()) is None:
        return
    living.reconciler.has_unused = True
    if not is_background():
        with interrupts.postponed(), living.lock.if_free() as is_free:
            if is_free:
                with living.lock.occupied():
                    living.reconciler.give_back_unused()
