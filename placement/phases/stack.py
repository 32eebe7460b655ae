"""The stack of open phases, with their plans; entering, switching and leaving a phase."""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from placement.core.errors import CoordinatorLost, PhaseError
from placement.core.journal import Journal, logger
from placement.core.settings import Settings
from placement.core.states import IDLE, Plan
from placement.devices.background import is_background
from placement.devices.base import Device
from placement.group.vote import GroupVote, describe
from placement.phases.enclosing_plans import EnclosingPlans
from placement.phases.executor import PhaseRequest, PlanExecutor
from placement.phases.members import Members
from placement.phases.moving.reconciler import Reconciler
from placement.phases.open_phase import Opener, OpenPhase, check_holder
from placement.phases.transition_lock import TransitionLock
from placement.registration.handle import Handle
from placement.registration.registry import Registry
from placement.registration.streamed_optimizer import SteppedHandle, Streaming
from placement.storage.transfer.load import ALONE, TOGETHER
from placement.storage.transfer.streamed import Streamed

if TYPE_CHECKING:
    from placement.group.agreement import Group
    from placement.group.lease import Lease


class PhaseStack:
    """The open phases and kept handles of one manager, and the phase transitions that change them. Used by `Manager` and `Phase`."""

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
        self.registry = Registry(device, reconciler.callbacks_of, lambda: self.phase_name, gone.append, streaming, settings)
        self._handles = self.registry.handles
        device.when_out_of_memory(partial(_give_up_early, weakref.ref(self)))
        self.executor = PlanExecutor(device, policy, settings, journal, self.registry, reconciler, self._vote, lease)
        self._planner = self.executor.planner
        self._plans = EnclosingPlans(self._planner, self._handles)
        self.members = Members(self, self._plans, gone)
        self.lock = TransitionLock(device, self._vote, self._sweep, lambda: all(each.is_abandoned for each in self.open_phases))
        self.open_phases: tuple[OpenPhase, ...] = ()
        self.kept: frozenset[str] = frozenset()
        """Names of the handles that `Phase.keep` carries from the last phase into this one."""

    @contextmanager
    def _for_a_step(self) -> Iterator[None]:
        with self.lock.step():
            self.executor.prefetcher.hold()  # the step needs the link for itself
            yield

    def _stepped(self, handle: SteppedHandle, streamed: Streamed, seconds: float) -> None:
        self.executor.stepped(handle, streamed, seconds)
        if self.open_phases:
            self.executor.prefetcher.go_on(self.phase_name, self.open_phases[-1].plan)

    @property
    def phase_name(self) -> str:
        """The name of the innermost open phase; "idle" outside every phase."""
        return _named(self.open_phases)

    def enter(self, phase: Opener, name: str, only: tuple[str, ...] | None, holder: Any) -> None:
        with self.lock.transition():
            check_holder(self.open_phases, name)
            open_phases, outer = self.open_phases, self.phase_name
            enclosing, kept = self._plans.around(open_phases, self.kept), self.kept
            stalled = self.executor.stopwatch()
            try:
                self._journal.enter_phase(name, only)
                self.executor.measure()  # others may have freed or taken memory since the last phase transition
                if not open_phases:
                    self._planner.over(IDLE)
                plan = self.executor.advance(describe("enter", name, only), PhaseRequest(name, only, enclosing, open_phases, kept))
                self._expire_keeps(plan)
                opened = self._opened(phase, name, only, plan, holder)
                self.open_phases = (*open_phases, opened)
                phase._open = opened
                self._planner.began(name)
                self._journal.stall_seconds[name] += stalled()
            except BaseException as error:
                self.open_phases, phase._open, self.kept = open_phases, None, kept
                self._journal.enter_phase(outer, _only(open_phases))
                self._went_back(error, self._plans.with_kept(enclosing, self.kept))
                raise

    def _opened(self, phase: Opener, name: str, only: tuple[str, ...] | None, plan: Plan, holder: Any) -> OpenPhase:
        reserved_bytes = self.executor.memory.torch_reserved_bytes
        return OpenPhase(name, only, plan, holder, torch_reserved_bytes=reserved_bytes, in_any_order=phase.in_any_order)

    def switch(self, phase: Opener, name: str, only: tuple[str, ...] | None) -> None:
        with self.lock.transition():
            opened = self._require_innermost(phase, f"switch to {name!r}")
            below = self.open_phases[:-1]
            enclosing, kept = self._plans.around(below, self.kept), self.kept
            stalled = self.executor.stopwatch()
            self._finish(opened)
            try:
                self.kept |= self._worth_keeping(opened)
                self._journal.enter_phase(name, only)
                wanted = PhaseRequest(name, only, enclosing, below, self.kept)
                plan = self.executor.advance(describe("switch to", name, only), wanted)
                self._expire_keeps(plan)
                following = self._opened(phase, name, only, plan, opened.holder)
                self.open_phases = (*below, following)
                phase._open = following
                self._planner.began(name)
                self._journal.stall_seconds[name] += stalled()
            except BaseException as error:
                self.open_phases, phase._open, self.kept = (*below, opened), opened, kept
                self._journal.enter_phase(opened.name, opened.only)
                self._went_back(error, self._plans.with_kept(opened.plan, self.kept))
                raise

    def leave(self, phase: Opener, error: BaseException | None) -> None:
        if error is not None and os.getpid() != self.lock.pid:
            return  # a forked child ends in a phase of its parent, and its own error says why
        with self.lock.transition():
            if isinstance(error, GeneratorExit) and (phase._open not in self.open_phases or self._is_around_others(phase)):
                return  # it was left already, by an error that passed through a phase around it
            if error is not None:
                self._leave_inner(phase)
            opened = self._require_leavable(phase)
            others = tuple(each for each in self.open_phases if each is not opened)
            stalled = self.executor.stopwatch()
            failures: list[Exception] = []
            try:
                self._finish(opened)
                self._expire_keeps()
                plan, failures = self._plans.after_leaving(self.open_phases, opened, self.kept)
                self.kept = self._worth_keeping(opened)
                plan = self._plans.with_kept(plan, self.kept)
                is_patient = error is None or isinstance(error, Exception)
                failures += self.executor.retreat(plan, _named(others), patiently=is_patient, load=TOGETHER if error is None else ALONE)
                failures = self._vote.left(describe("leave", opened.name, None), plan, failures, error)
                failures += self.executor.complete(ALONE if failures else TOGETHER)
            except BaseException as stopped:  # an interrupt while leaving: finish leaving, then raise it
                try:
                    self._expire_keeps()
                    self.executor.retreat(self._plans.after_leaving(self.open_phases, opened, self.kept)[0], _named(others))
                finally:
                    self._vote.failed(stopped)
                raise
            finally:
                self.open_phases, phase._open = others, None
                self._journal.enter_phase(self.phase_name, _only(self.open_phases))
                self._journal.stall_seconds[opened.name] += stalled()
            self._sweep_abandoned()
            self._raise_after(opened.name, failures, error)

    def keep(self, phase: Opener, name: str) -> None:
        opened = self._require_open(phase, "keep a handle")
        self.members.known(name)
        opened.kept.add(name)

    def done_with(self, phase: Opener, name: str) -> None:
        with self.lock.transition():
            opened = self._require_innermost(phase, f"be done with {name!r}")
            handle, plan = self.members.known(name), opened.plan
            if handle.external or not handle.is_on_device:
                return
            stalled = self.executor.stopwatch()
            self._vote.expect_different_plans()  # the other ranks may not give it up
            try:
                opened.plan = plan.giving_up(name)
                opened.kept.discard(name)
                self.executor.carry_out(opened.plan, opened.name)
            except BaseException as error:
                opened.plan = plan
                self._note(error, self.executor.retreat(plan, opened.name))
                raise
            finally:
                self._journal.stall_seconds[opened.name] += stalled()

    def give_up_early(self) -> None:
        """Return the memory of all early chunks to the driver, because torch's allocator has found none. Any thread may call this.

        Does nothing while a phase transition is under way. The open phase gets less room for early chunks from now on.
        """
        with self.lock.if_free() as is_free:
            if is_free:
                self.executor.give_up_early(self.phase_name)

    def _raise_after(self, name: str, failures: list[Exception], error: BaseException | None) -> None:
        """Report the failures of leaving phase `name`: as notes on the user's exception `error`, or by raising if there is none."""
        if not failures:
            return
        if error is not None:
            self._note(error, failures)
            return
        first, *others = failures
        first.add_note(f"placement: while leaving phase {name!r}")
        self._note(first, others)
        raise first

    def _went_back(self, error: BaseException, plan: Plan) -> None:
        """Undo a failed entry or switch: move every handle to where it was before (`plan`), and tell the ranks of the group.

        Raises:
            GroupError: every rank of the group raises it in place of `error`.
        """
        if isinstance(error, CoordinatorLost):
            return  # the decision is unknown: other ranks may have entered the phase, so going back could be as wrong as going on
        self._note(error, self.executor.retreat(plan, self.phase_name))
        if (told := self._vote.failed(error)) is not None:
            try:
                raise told from error
            finally:
                del told  # its traceback has this frame: a cycle would keep the tensors of all frames until they are collected

    def _note(self, error: BaseException, failures: list[Exception]) -> None:
        for failure in failures:
            with suppress(Exception):  # an exception that is a frozen dataclass refuses notes
                error.add_note(f"placement: {type(failure).__name__}: {failure}")

    # --- where everything belongs

    def base_plan(self) -> Plan:
        """The plan that applies now, kept handles included: that of the innermost open phase, or the idle plan outside every phase."""
        return self._plans.with_kept(self._plans.around(self.open_phases, self.kept), self.kept)

    def rejoin(self, group: Group) -> None:
        """See `Manager.rejoin`.

        Raises:
            PhaseError: a phase is open.
            Exception: a handle could not be moved where it belongs. The old group stays in use.
        """
        if self.open_phases:
            raise PhaseError(f"phase {self.phase_name!r} is open; leave it before rejoin()")
        if failures := self.executor.retreat(self.base_plan(), IDLE):
            first, *others = failures
            self._note(first, others)
            raise first
        self._vote.rejoin(group)
        self._planner.least = None

    def close(self, on_device: tuple[str, ...] = ()) -> None:
        """Forget every handle, optimizers first, and close the device. Idempotent, and can be repeated after an interrupt.

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
                if self.open_phases:
                    raise PhaseError(f"phase {self.phase_name!r} is open; leave it before close()")
                if on_device:
                    self.members.bring(on_device)
                self.members.look_for_writes(wait=True)
                failures = self._forget_all()
                if failures:
                    raise failures[0]
                self.executor.host_tier.close()
                self._device.close()
                self.executor.lease_client.close()
                self.lock.is_closed = True
                if (written := self.executor.writes.take()) is not None:
                    logger.error("closed: %s", written)
        finally:
            self.members.is_closing = False

    def _forget_all(self) -> list[Exception]:
        """Forget every handle that can be handed back, optimizers first. Returns the errors of the others."""
        failures: list[Exception] = []
        for handle in sorted(self._handles.values(), key=lambda h: h.kind != "optimizer"):
            try:
                self.members.forget(handle)
            except Exception as error:
                failures.append(error)
        for other in failures[1:]:
            failures[0].add_note(f"placement: {type(other).__name__}: {other}")
        return failures

    def _require_open(self, phase: Opener, what: str) -> OpenPhase:
        opened = phase._open
        if opened is None or opened not in self.open_phases:
            raise PhaseError(f"cannot {what}: phase {phase.name!r} is not open")
        return opened

    def _require_innermost(self, phase: Opener, what: str) -> OpenPhase:
        opened = self._require_open(phase, what)
        if self.open_phases[-1] is not opened:
            raise PhaseError(f"cannot {what}: phase {self.open_phases[-1].name!r} is open inside phase {opened.name!r}; leave it first")
        return opened

    def _require_leavable(self, phase: Opener) -> OpenPhase:
        """The phase, if it is a hold or has only holds inside it."""
        opened = self._require_open(phase, "leave")
        if opened is self.open_phases[-1]:
            return opened
        inner = self.open_phases[self.open_phases.index(opened) + 1 :]
        return opened if opened.in_any_order or all(each.in_any_order for each in inner) else self._require_innermost(phase, "leave")

    def _finish(self, opened: OpenPhase) -> None:
        self.executor.measure()
        self._planner.over(opened.name)

    def _worth_keeping(self, opened: OpenPhase) -> frozenset[str]:
        """Names of handles that the phase keeps and that are on the device. A keep carries residency over; it loads nothing."""
        return frozenset(name for name in opened.kept if name in self._handles and self._handles[name].is_on_device)

    def _expire_keeps(self, plan: Plan | None = None) -> None:
        """End all keeps, which last for one phase transition. Count those that its plan did not take over as expired."""
        for name in self.kept:
            if plan is None or name not in plan.targets or not plan.on_device(name):
                self._journal.expired_keeps += 1
        self.kept = frozenset()

    # --- phases that were garbage-collected

    def abandon(self, phase: Opener) -> None:
        """Leave a phase whose context was garbage-collected while open (a generator that never finished), now or at the next transition."""
        opened = phase._open
        if opened is None or os.getpid() != self.lock.pid:
            return
        opened.is_abandoned = True
        if not is_background():
            self.lock.sweep_if_free()

    def _leave_inner(self, phase: Opener) -> None:
        """Leave the phases inside a phase that an exception passes through: their own `with` statements will not do it any more."""
        if phase._open in self.open_phases:
            for inner in self.open_phases[self.open_phases.index(phase._open) + 1 :]:
                inner.is_abandoned |= not inner.in_any_order
            self._sweep_abandoned()

    def _is_around_others(self, phase: Opener) -> bool:
        """Whether a closed generator's phase has phases of the generator's caller open inside. It then ends with the last of these."""
        if phase._open not in self.open_phases[:-1] or self.open_phases[-1].holder is None:
            return False
        self.open_phases[self.open_phases.index(phase._open)].is_abandoned = True
        return True

    def _sweep(self) -> None:
        self.members.forget_collected()
        self._sweep_abandoned()

    def _sweep_abandoned(self) -> None:
        while (gone := self._abandoned()) is not None:
            others = tuple(each for each in self.open_phases if each is not gone)
            self._expire_keeps()  # leaving an abandoned phase offloads handles that an inner phase kept, and keeps none itself
            failures = self.executor.retreat(self._plans.after_leaving(self.open_phases, gone, self.kept)[0], _named(others))
            self._vote.abandoned(gone.name)
            self.open_phases = others  # last, so that after an interrupt the next phase transition does all of this again
            self._journal.enter_phase(self.phase_name, _only(self.open_phases))
            for failure in failures:
                logger.error("leaving abandoned phase %s: %s", gone.name, str(failure))

    def _abandoned(self) -> OpenPhase | None:
        """An abandoned phase that can be left now."""
        for each in self.open_phases:
            if each.is_abandoned and (each.in_any_order or each is self.open_phases[-1]):
                return each
        return None


def _only(open_phases: tuple[OpenPhase, ...]) -> tuple[str, ...] | None:
    """The handles that the innermost of these phases is for; None: all."""
    return open_phases[-1].only if open_phases else None


def _named(open_phases: tuple[OpenPhase, ...]) -> str:
    """The name of the innermost of these phases; "idle" if there is none."""
    return open_phases[-1].name if open_phases else IDLE


def _give_up_early(stack: weakref.ref[PhaseStack]) -> None:
    """See `PhaseStack.give_up_early`. Torch's allocator calls this, and an exception would take the place of its own."""
    if (living := stack()) is not None:
        try:
            living.give_up_early()
        except Exception as error:
            logger.warning("early chunks could not be given up: %s", str(error))
