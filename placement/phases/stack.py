"""Entering, switching and leaving phases: each is one phase transition, all or nothing."""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from placement.core import interrupts
from placement.core.errors import CoordinatorLost, PhaseError
from placement.core.journal import Journal, logger
from placement.core.settings import Settings
from placement.core.states import IDLE, Plan
from placement.devices.background import is_background
from placement.devices.base import Device
from placement.group.vote import GroupVote, describe
from placement.phases.executor import PhaseRequest, PlanExecutor
from placement.phases.members import Members
from placement.phases.open_phases import OpenPhase, OpenPhases, innermost
from placement.phases.reconciler import Reconciler
from placement.phases.transition_lock import TransitionLock
from placement.registration.handle import Handle
from placement.registration.registry import Registry
from placement.registration.streamed_optimizer import SteppedHandle, Streaming
from placement.storage.transfer.streamed import Streamed

if TYPE_CHECKING:
    from placement.group.lease import Lease
    from placement.group.protocol import Group


class PhaseStack:
    """The phase transitions of one manager. Used by `Manager` and `Phase`."""

    def __init__(
        self,
        device: Device,
        policy: Any,
        settings: Settings,
        journal: Journal,
        group: Group | None = None,
        lease: Lease | None = None,
    ) -> None:
        self._device = device
        self._vote = GroupVote(group)
        self._journal = journal
        reconciler = Reconciler(device, journal, strict=settings.strict, verify=settings.verify, annotate=settings.annotate)
        gone: deque[Handle] = deque()
        streaming = Streaming(settings.streamed_bucket_bytes, self._for_a_step, self._stepped)
        self.registry = Registry(device, lambda: self.phases.name, gone.append, streaming, settings)
        self._handles = self.registry.handles
        device.when_out_of_memory(partial(_give_up_early, weakref.ref(self)))
        self.executor = PlanExecutor(device, policy, settings, journal, self.registry, reconciler, self._vote, lease)
        self._planner = self.executor.planner
        self.phases = OpenPhases(self._planner, self._handles)
        self.members = Members(self.phases, self.registry, self.executor, gone)
        self.lock = TransitionLock(device, self._vote, self._sweep, lambda: all(each.is_abandoned for each in self.phases.all))

    @contextmanager
    def _for_a_step(self) -> Iterator[None]:
        with self.lock.step():
            self.executor.prefetcher.hold()  # the step needs the link for itself
            yield

    def _stepped(self, handle: SteppedHandle, streamed: Streamed, seconds: float) -> None:
        self.executor.stepped(handle, streamed, seconds)
        if self.phases.all:
            self.executor.prefetcher.go_on(self.phases.name, self.phases.all[-1].plan)

    # --- entering and switching

    def enter(self, phase: OpenPhase) -> None:
        with self.lock.transition():
            phases = self.phases
            phases.check_holder(phase.name)
            stalled, back = self.executor.stopwatch(), phases.plan_of(phases.all)
            self.executor.measure()  # others may have freed or taken memory since the last phase transition
            if not phases.all:
                self._planner.over(IDLE)
            wanted = PhaseRequest(phase.name, phase.only, back, phases.all, phases.kept)
            self._journal.enter_phase(phase.name, phase.only)
            try:
                plan = self.executor.advance(describe("enter", phase.name, phase.only), wanted)
                interrupts.check()  # the last look: from here on the phase is open
            except BaseException as error:
                self._went_back(error, back)
                raise
            phases.all = (*phases.all, phase)
            self._begin(phase, wanted, plan)
            self._journal.stall_seconds[phase.name] += stalled()

    def switch(self, phase: OpenPhase, name: str, only: tuple[str, ...] | None) -> None:
        with self.lock.transition():
            phases = self.phases
            phases.require_innermost(phase, f"switch to {name!r}")
            stalled, around, kept = self.executor.stopwatch(), phases.all[:-1], phases.kept
            enclosing = phases.plan_of(around)
            self._finish(phase)
            phases.kept |= self._worth_keeping(phase)
            wanted = PhaseRequest(name, only, enclosing, around, phases.kept)
            self._journal.enter_phase(name, only)
            try:
                plan = self.executor.advance(describe("switch to", name, only), wanted)
                interrupts.check()
            except BaseException as error:
                phases.kept = kept
                self._went_back(error, phase.plan)
                raise
            self._begin(phase, wanted, plan)
            self._journal.stall_seconds[name] += stalled()

    def _begin(self, phase: OpenPhase, wanted: PhaseRequest, plan: Plan) -> None:
        self._expire_keeps(plan)
        phase.begin(wanted.name, wanted.only, plan, self.executor.memory.torch_reserved_bytes)
        self._planner.began(wanted.name)

    def _went_back(self, error: BaseException, plan: Plan) -> None:
        """After a failed entry or switch: move every handle to where it was before (`plan` and the keeps), and tell the ranks of the group.

        Raises:
            GroupError: every rank of the group raises it in place of `error`.
        """
        self._journal.enter_phase(self.phases.name, self.phases.only)
        plan = self.phases.with_kept(plan)
        if isinstance(error, CoordinatorLost):
            return  # the decision is unknown: other ranks may have entered the phase, so going back could be as wrong as going on
        _note(error, self.executor.retreat(plan, self.phases.name))
        if (told := self._vote.failed(error)) is not None:
            try:
                raise told from error
            finally:
                del told  # its traceback has this frame: a cycle would keep the tensors of all frames until they are collected

    # --- leaving

    def leave(self, phase: OpenPhase, error: BaseException | None) -> None:
        if error is not None and os.getpid() != self.lock.pid:
            return  # a forked child ends in a phase of its parent, and its own error says why
        with self.lock.transition():
            phases = self.phases
            if isinstance(error, GeneratorExit) and self._is_around_others(phase):
                return
            if error is not None:
                self._leave_inner(phase)
            phases.require_leavable(phase)
            stalled, others = self.executor.stopwatch(), phases.without(phase)
            left_to = innermost(others) or IDLE
            try:
                self._finish(phase)
                self._expire_keeps()
                plan, failures = phases.plan_after(phase)
                phases.kept = self._worth_keeping(phase)
                plan = phases.with_kept(plan)
                is_patient = error is None or isinstance(error, Exception)
                action, refused = describe("leave", phase.name, None), failures
                failures = self.executor.retreat(
                    plan, left_to, patiently=is_patient, vote=lambda found: self._vote.left(action, plan, refused + found, error)
                )
            except BaseException as stopped:  # an interrupt while leaving: finish leaving, then raise it
                try:
                    self._expire_keeps()
                    self.executor.retreat(phases.plan_after(phase)[0], left_to)
                finally:
                    self._vote.failed(stopped)
                raise
            finally:
                phases.all = others
                self._journal.enter_phase(phases.name, phases.only)
                self._journal.stall_seconds[phase.name] += stalled()
            self._sweep_abandoned()
            _raise_after(phase.name, failures, error)

    def _leave_inner(self, phase: OpenPhase) -> None:
        """Leave the phases inside a phase that an exception passes through: their own `with` statements will not do it any more."""
        if phase in self.phases.all:
            for inner in self.phases.inside(phase):
                inner.is_abandoned |= not inner.in_any_order
            self._sweep_abandoned()

    def _is_around_others(self, phase: OpenPhase) -> bool:
        """Whether a closed generator's phase has phases of the generator's caller open inside. It then ends with the last of these."""
        if not self.phases.inside(phase) or self.phases.all[-1].holder is None:
            return False
        phase.is_abandoned = True
        return True

    # --- within a phase

    def keep(self, phase: OpenPhase, name: str) -> None:
        self.phases.require_open(phase, "keep a handle")
        phase.kept.add(self.members.known(name).name)

    def done_with(self, phase: OpenPhase, name: str) -> None:
        with self.lock.transition():
            self.phases.require_innermost(phase, f"be done with {name!r}")
            handle, plan = self.members.known(name), phase.plan
            if handle.external or not handle.is_on_device:
                return
            stalled = self.executor.stopwatch()
            self._vote.expect_different_plans()  # the other ranks may not give it up
            try:
                phase.plan = plan.giving_up(name)
                phase.kept.discard(name)
                self.executor.carry_out(phase.plan, phase.name)
            except BaseException as error:
                phase.plan = plan
                _note(error, self.executor.retreat(plan, phase.name))
                raise
            finally:
                self._journal.stall_seconds[phase.name] += stalled()

    def give_up_early(self) -> None:
        """Return the memory of all pages aside to the driver, because torch's allocator has found none. Any thread may call this.

        Does nothing while a phase transition is under way. The open phase gets less room for pages aside from now on.
        """
        with self.lock.if_free() as is_free:
            if is_free:
                self.executor.prefetcher.give_up(self.phases.name)

    def _finish(self, phase: OpenPhase) -> None:
        self.executor.measure()
        self._planner.over(phase.name)

    def _worth_keeping(self, phase: OpenPhase) -> frozenset[str]:
        """Names of handles that the phase keeps and that are on the device. A keep carries residency over; it loads nothing."""
        return frozenset(name for name in phase.kept if name in self._handles and self._handles[name].is_on_device)

    def _expire_keeps(self, plan: Plan | None = None) -> None:
        """End all keeps, which last for one phase transition. Count those that its plan did not take over as expired."""
        for name in self.phases.kept:
            if plan is None or name not in plan.targets or not plan.on_device(name):
                self._journal.expired_keeps += 1
        self.phases.kept = frozenset()

    # --- outside every phase

    def rejoin(self, group: Group) -> None:
        """See `Manager.rejoin`.

        Raises:
            PhaseError: a phase is open.
            Exception: a handle could not be moved where it belongs. The old group stays in use.
        """
        if self.phases.all:
            raise PhaseError(f"phase {self.phases.name!r} is open; leave it before rejoin()")
        if failures := self.executor.retreat(self.phases.base_plan(), IDLE):
            _raise_all(failures)
        self._vote.rejoin(group)
        self._planner.least = None

    def close(self, on_device: tuple[str, ...] = ()) -> None:
        """Forget every handle, optimizers first, and close the device. Idempotent, and can be repeated after an error.

        Args:
            on_device: names of handles that are loaded first, so that their tensors are handed back on the device.

        Raises:
            PhaseError: a phase is open, or no handle has one of the names.
            DeviceMemoryError: these handles do not fit.
            Exception: the first error of a handle that could not be handed back. All others were; `close` can be repeated.
        """
        if self.lock.is_closed:
            return
        self.members.is_closing = True
        try:
            with self.lock.transition():
                if self.phases.all:
                    raise PhaseError(f"phase {self.phases.name!r} is open; leave it before close()")
                if on_device:
                    self.members.bring(on_device)
                self.members.look_for_writes(wait=True)
                if failures := self.members.forget_all():
                    _raise_all(failures)
                self.executor.host_tier.close()
                self._device.close()
                self.executor.lease_client.close()
                self.lock.is_closed = True
                if (written := self.executor.writes.take()) is not None:
                    logger.error("closed: %s", written)
        finally:
            self.members.is_closing = False

    # --- phases that were garbage-collected

    def abandon(self, phase: OpenPhase) -> None:
        """Leave a phase whose context was garbage-collected while open (a generator that never finished), now or at the next transition."""
        if phase not in self.phases.all or os.getpid() != self.lock.pid:
            return
        phase.is_abandoned = True
        if not is_background():
            self.lock.sweep_if_free()

    def _sweep(self) -> None:
        self.members.forget_collected()
        self._sweep_abandoned()

    def _sweep_abandoned(self) -> None:
        phases = self.phases
        while (gone := self._abandoned()) is not None:
            self._expire_keeps()  # leaving an abandoned phase offloads handles that an inner phase kept, and keeps none itself
            failures = self.executor.retreat(phases.plan_after(gone)[0], innermost(phases.without(gone)) or IDLE)
            self._vote.abandoned(gone.name)
            phases.all = phases.without(gone)  # last, so that after an interrupt the next phase transition does all of this again
            self._journal.enter_phase(phases.name, phases.only)
            for failure in failures:
                logger.error("leaving abandoned phase %s: %s", gone.name, str(failure))

    def _abandoned(self) -> OpenPhase | None:
        """An abandoned phase that can be left now."""
        for each in self.phases.all:
            if each.is_abandoned and (each.in_any_order or each is self.phases.all[-1]):
                return each
        return None


def _note(error: BaseException, failures: list[Exception]) -> None:
    for failure in failures:
        with suppress(Exception):  # an exception that is a frozen dataclass refuses notes
            error.add_note(f"placement: {type(failure).__name__}: {failure}")


def _raise_all(failures: list[Exception]) -> None:
    """Raise the first of these errors, with the others as notes."""
    first, *others = failures
    _note(first, others)
    raise first


def _raise_after(name: str, failures: list[Exception], error: BaseException | None) -> None:
    """Report the failures of leaving phase `name`: as notes on the user's exception `error`, or by raising if there is none."""
    if error is not None:
        _note(error, failures)
    elif failures:
        failures[0].add_note(f"placement: while leaving phase {name!r}")
        _raise_all(failures)


def _give_up_early(stack: weakref.ref[PhaseStack]) -> None:
    """See `PhaseStack.give_up_early`. Torch's allocator calls this, and an exception would take the place of its own."""
    if (living := stack()) is not None:
        try:
            living.give_up_early()
        except Exception as error:
            logger.warning("pages aside could not be given up: %s", str(error))
