"""A phase as its user sees it (`Phase`), the open phases of one manager with their plans
(`OpenPhases`), and the manager's lock (`TransitionLock`).

`manager.phase(...)` returns a `PhaseContext`, and its `with` statement gives a `Phase`. A phase
belongs to the thread or asyncio task that opened it. `Manager.enter` opens a phase that belongs to
none, for frameworks whose hooks run in different threads.
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol

import torch

from placement.core.errors import PhaseError, PlacementError, PolicyError
from placement.core.interrupts import deferred, is_background
from placement.core.modes import without_modes
from placement.core.states import IDLE, Plan, State
from placement.devices.base import Device
from placement.group.vote import GroupVote
from placement.planning.planner import Planner, meant, with_kept
from placement.registration.handle import Handle


def here() -> Any:
    """The asyncio task that runs now; outside asyncio the current thread."""
    task = None if asyncio._get_running_loop() is None else asyncio.current_task()
    return threading.current_thread() if task is None else task


def _holder_name(holder: Any) -> str:
    if holder is None:
        return "enter()"
    if isinstance(holder, asyncio.Task):
        return f"task {holder.get_name()!r}"
    return f"thread {holder.name!r}"


_NO_PLAN = Plan({})
_NOTHING = nullcontext()


@dataclass(eq=False, slots=True)
class OpenPhase:
    """One phase, made before it is entered. A switch changes its name, its handles and its plan."""

    name: str
    only: tuple[str, ...] | None
    holder: Any
    # whether the phase may be left while others are open inside it: it is a hold
    in_any_order: bool = False
    plan: Plan = _NO_PLAN
    # names of the handles that `Phase.keep` was called with, to be kept when the phase ends
    to_keep: set[str] = field(default_factory=set)
    is_abandoned: bool = False
    """Whether nobody will leave it any more: its context or manager was collected, or an exception
    or an interrupt has passed through it. It is left as soon as no other phase is open inside it, a
    hold at once."""


@dataclass
class LastSuspension:
    """The last suspension of a manager."""

    epoch: int = 0  # its number; 0: there was none
    drop: tuple[str, ...] = ()  # the engines that it has dropped
    until_seconds: float = -math.inf  # its end on the monotonic clock


def innermost(phases: Sequence[OpenPhase]) -> str | None:
    return phases[-1].name if phases else None


class OpenPhases:
    """The open phases and the kept handles of one manager. Any thread may read them."""

    def __init__(self, planner: Planner, handles: Mapping[str, Handle]) -> None:
        self._planner = planner
        self._handles = handles
        self.all: tuple[OpenPhase, ...] = ()  # the open phases, outermost first
        # names of the handles that the last phase has kept on the device, until the next phase
        # transition
        self.kept: frozenset[str] = frozenset()
        self.suspension = LastSuspension()
        self.suspended_seconds = 0.0  # the seconds for which phases have waited for that

    @property
    def is_suspended(self) -> bool:
        """Whether nothing belongs on the device outside every phase, whatever the policy says."""
        return time.monotonic() < self.suspension.until_seconds

    @property
    def name(self) -> str:
        """The name of the innermost open phase; "idle" outside every phase."""
        return innermost(self.all) or IDLE

    @property
    def only(self) -> tuple[str, ...] | None:
        """The handles that the innermost open phase is for; None: all."""
        return self.all[-1].only if self.all else None

    # --- what may be done with a phase

    def check_holder(self, name: str) -> None:
        """Raise PhaseError unless all open phases belong to this task, to this thread, or to none
        (`enter`). So a task may open phase `name` in one of its thread's, but not the reverse."""
        for phase in self.all:
            if phase.holder in (None, threading.current_thread()):
                continue
            if phase.holder is not (me := here()):
                raise PhaseError(
                    f"{_holder_name(me)} wants phase {name!r} while {_holder_name(phase.holder)} "
                    f"holds phase {phase.name!r}: one manager is in one phase at a time. Use "
                    "enter() and leave() for a phase that spans threads."
                )

    def require_open(self, phase: OpenPhase, verb: str) -> None:
        if phase not in self.all:
            raise PhaseError(
                f"cannot {verb}: phase {phase.name!r} is not open; it was left before or never "
                "entered"
            )

    def require_innermost(self, phase: OpenPhase, verb: str) -> None:
        self.require_open(phase, verb)
        if self.all[-1] is not phase:
            raise PhaseError(
                f"cannot {verb}: phase {self.all[-1].name!r} is open inside phase {phase.name!r}; "
                "leave it first"
            )

    def require_leavable(self, phase: OpenPhase) -> None:
        self.require_open(phase, "leave")
        may_leave_others = phase.in_any_order or all(
            inner.in_any_order for inner in self.inside(phase)
        )
        if not may_leave_others:
            self.require_innermost(phase, "leave")

    def inside(self, phase: OpenPhase) -> tuple[OpenPhase, ...]:
        return self.all[self.all.index(phase) + 1 :]

    def without(self, phase: OpenPhase) -> tuple[OpenPhase, ...]:
        return tuple(other for other in self.all if other is not phase)

    def first_abandoned(self) -> OpenPhase | None:
        """The first abandoned phase that may be left now; None: there is none."""
        for phase in self.all:
            if phase.is_abandoned and (phase.in_any_order or phase is self.all[-1]):
                return phase
        return None

    # --- where everything belongs

    def base_plan(self) -> Plan:
        """The plan that applies now, with kept handles."""
        return self.with_kept(self.plan_of(self.all))

    def plan_of(self, phases: Sequence[OpenPhase]) -> Plan:
        """The plan that applies while these phases are open, without kept handles: the innermost
        one's, or the idle plan."""
        if phases:
            return phases[-1].plan
        if self.is_suspended:
            return self.all_offloaded()
        return self._planner.ask(IDLE, None, self.kept)[1]

    def all_offloaded(self) -> Plan:
        return Plan(dict.fromkeys(self._handles, State.CPU_OFFLOADED))

    def with_kept(self, plan: Plan) -> Plan:
        return with_kept(plan, self.kept, self._handles)

    def plan_in_any_case(self, phases: Sequence[OpenPhase]) -> tuple[Plan, list[Exception]]:
        """As `plan_of`. If the policy gives no plan: everything is offloaded, and the error."""
        try:
            return self.plan_of(phases), []
        except PolicyError as error:
            return self.all_offloaded(), [error]

    def plan_after(self, leaving: OpenPhase) -> tuple[Plan, list[Exception]]:
        """The plan that applies once an open phase has ended, and the error of a policy that gives
        none (see `plan_in_any_case`). The plans of the phases inside it are changed to that: each
        goes on deciding about the handles of its `only`. For all others the phase around the one
        that ends decides, except that nothing is loaded: the room may be taken."""
        plan, failures = self.plan_in_any_case(self.all[: self.all.index(leaving)])
        for inner in self.inside(leaving):
            own = meant(inner.only, self._handles)
            if own is not None:
                # also those that it has off the device, so that nothing is loaded
                for name, state in inner.plan.targets.items():
                    if state is State.CPU_OFFLOADED:
                        own.add(name)
                inner.plan = inner.plan.limited_to(own, plan)
            plan = inner.plan
        return plan, failures

    def extend(self, handle: Handle) -> None:
        """Add a new handle to the plan of every open phase. Its owners are planned anew, too: with
        an optimizer they can be trained."""
        joining = {handle.name, *(owner.name for owner in handle.owners)}
        enclosing = self.plan_of(())
        for index, phase in enumerate(self.all):
            around = innermost(self.all[:index])
            _, plan = self._planner.ask(phase.name, around, self.kept)
            chosen = meant(phase.only, self._handles)
            planned_anew = joining if chosen is None else joining & chosen
            # where `only` leaves it out, a new handle is as in the enclosing phase
            base = enclosing.limited_to({handle.name}, phase.plan)
            phase.plan = enclosing = plan.limited_to(planned_anew, base)

    def forget(self, name: str) -> None:
        self.kept -= {name}
        for phase in self.all:
            phase.to_keep.discard(name)
            phase.plan = phase.plan.without(name)


class TransitionLock:
    """The lock of one manager. It is held during every phase transition.
    `vote`: with which phases are entered and left; None: without a group.
    `sweep`: called at the beginning of each; `at_end`, if there is one: at its end, also after an
    error.
    `report`: called with the error of one that failed.
    `is_outside`: whether no phase is open. Then this rank may have missed phase transitions of the
    other ranks."""

    def __init__(
        self,
        device: Device,
        vote: GroupVote | None,
        sweep: Callable[[], None],
        at_end: Callable[[], None] | None,
        report: Callable[[BaseException], None],
        is_outside: Callable[[], bool],
    ) -> None:
        self._device = device
        self.vote = vote
        self._sweep, self._at_end = sweep, at_end
        self._report = report
        self.is_outside = is_outside
        self._lock = threading.RLock()
        self._is_busy = False
        """Whether a phase transition is under way. Code that runs inside it (a policy, a factory, a
        finalizer) must not begin another."""
        self.pid = os.getpid()
        self.is_closed = False

    def attempt(
        self,
        vote: GroupVote | None = None,
        *,
        begins_phase: bool = False,
        raises_own_error: bool = False,
        error: BaseException | None = None,
    ) -> AbstractContextManager[None]:
        """Tell every rank of the group, once, if the block fails, even if it fails before a phase
        transition begins. Does nothing without a group.
        `vote`: tells the group; None: `self.vote`.
        `begins_phase`: a phase is about to begin. Outside every phase this rank catches up first.
        `raises_own_error`: the error of the block goes on. Otherwise all ranks raise the same
        GroupError in its place.
        `error`: the user's exception with which a phase is left, if any."""
        vote = self.vote if vote is None else vote
        if vote is None or os.getpid() != self.pid:  # a forked child is not a rank
            return _NOTHING
        return self._attempt(vote, begins_phase, raises_own_error, error)

    @contextmanager
    def _attempt(
        self,
        vote: GroupVote,
        begins_phase: bool,
        raises_own_error: bool,
        error: BaseException | None,
    ) -> Iterator[None]:
        """The block of `attempt` on a rank of a group. Its error goes to the group, which answers
        with the error that all ranks raise."""
        with self._lock, deferred():
            if self._is_busy:  # the transition around this one tells the group
                yield
                return
            with vote.attempt(catches_up=begins_phase and self.is_outside(), error=error):
                try:
                    yield
                except BaseException as raised:
                    # objects that are garbage-collected while this waits must not begin a phase
                    # transition
                    self._is_busy = True
                    try:
                        agreed = vote.failed(raised)
                    finally:
                        self._is_busy = False
                    if raises_own_error or agreed is None:
                        raise
                    for note in getattr(raised, "__notes__", None) or ():
                        agreed.add_note(str(note))
                    try:
                        raise agreed from raised
                    finally:
                        # its traceback has this frame: a cycle would keep the tensors of all frames
                        # until they are collected
                        del agreed

    @contextmanager
    def transition(self) -> Iterator[None]:
        """Hold the lock for a phase transition, with torch's modes off. First, abandoned phases are
        left."""
        inside = (
            "a policy or a Lazy's factory must not change phases or register: it runs inside a "
            "phase transition"
        )
        capturing = (
            "phases cannot change while a graph is being captured: moving memory would become part "
            "of it"
        )
        inference = torch.inference_mode(False) if torch.is_inference_mode_enabled() else _NOTHING
        with (
            self.busy(inside, capturing),
            without_modes(),
            inference,
            torch.set_grad_enabled(False),
        ):
            try:
                self._sweep()
                yield
            except BaseException as error:
                self._report(error)
                raise
            finally:
                if self._at_end is not None:
                    self._at_end()

    def sweep_now(self) -> None:
        """Make a phase transition that moves nothing itself, for the sweep at its beginning."""
        with self.transition():
            pass

    @contextmanager
    def busy(self, inside: str, capturing: str) -> Iterator[None]:
        """Hold the lock for a phase transition or a streamed step, with Ctrl-C deferred. Refuses it
        in another process, after `close`, and on a thread that phase transitions wait for.
        `inside`, `capturing`: the errors inside a phase transition and in a graph's capture."""
        if is_background():
            raise PhaseError(
                "an object was garbage-collected on a thread of placement, and its code (__del__) "
                "uses a manager there: it would wait for itself. Do it in a thread of its own"
            )
        with self._lock, deferred():
            self.check_process()
            if self._is_busy:
                raise PhaseError(inside)
            if self._device.is_capturing():
                raise PhaseError(capturing)
            self._is_busy = True  # as in `occupied`, in fewer calls
            try:
                yield
            finally:
                self._is_busy = False

    @contextmanager
    def occupied(self) -> Iterator[None]:
        """Let no phase transition begin inside, on the thread that holds the lock: what is
        garbage-collected there waits for the next one."""
        self._is_busy = True
        try:
            yield
        finally:
            self._is_busy = False

    @contextmanager
    def if_free(self) -> Iterator[bool]:
        """Hold the lock if that is possible at once, and give whether a phase transition may begin
        inside. It may not while one is under way, after `close`, or in another process."""
        with deferred():
            is_held = self._lock.acquire(blocking=False)
            try:
                is_usable = not self.is_closed and os.getpid() == self.pid
                yield is_held and not self._is_busy and is_usable
            finally:
                if is_held:
                    self._lock.release()

    def check_process(self) -> None:
        """Refuse any use by a forked child process, or after `close`."""
        if os.getpid() != self.pid:
            raise PlacementError(
                f"this manager belongs to process {self.pid}; a forked child has neither its "
                "device memory nor its host copies. Make a manager of its own there."
            )
        if self.is_closed:
            raise PlacementError("this manager is closed")


class Transitions(Protocol):
    """The `PhaseStack`, whose module is above this one."""

    phases: OpenPhases
    lock: TransitionLock

    def enter(self, phase: OpenPhase) -> None: ...
    def switch(self, phase: OpenPhase, name: str, only: tuple[str, ...] | None) -> None: ...
    def leave(self, phase: OpenPhase, error: BaseException | None) -> None: ...
    def keep(self, phase: OpenPhase, handle_or_name: Handle | str) -> None: ...
    def done_with(self, phase: OpenPhase, handle_or_name: Handle | str) -> None: ...
    def abandon(self, phase: OpenPhase) -> None: ...


def checked(name: str) -> str:
    """Return a phase's name. Raises TypeError if it is not a string."""
    if not isinstance(name, str):
        raise TypeError(f"a phase has a string for a name, not {name!r}")
    return name


def names_of(
    only: Iterable[str | Handle] | None,
    option: str = "only",
) -> tuple[str, ...] | None:
    """An option such as `only=` as a tuple of names. Raises TypeError: it is one string, whose
    letters would be taken for names, or has anything else."""
    if only is None:
        return None
    if isinstance(only, str) or not isinstance(only, Iterable):
        raise TypeError(f"{option}= takes a list of names: {option}=[{only!r}]")
    names = []
    for handle_or_name in only:
        name: Any = getattr(handle_or_name, "name", handle_or_name)
        if not isinstance(name, str):
            raise TypeError(f"{option}= takes names or handles, not {name!r}")
        names.append(name)
    return tuple(names)


class Phase:
    """An open phase, from `with manager.phase(...) as phase`.

    This object does not keep the phase open, only the `with` statement does. The reason: an
    interrupt can end the statement before a line of `__exit__` has run. The phase is then left
    although the variable `phase` still exists.
    """

    def __init__(self, stack: Transitions, opened: OpenPhase) -> None:
        self._stack = stack
        self.phase = opened

    @property
    def name(self) -> str:
        """The name of the phase, which `switch` changes."""
        return self.phase.name

    @property
    def is_open(self) -> bool:
        """Whether the phase is open."""
        return self.phase in self._stack.phases.all and not self.phase.is_abandoned

    def __repr__(self) -> str:
        return f"<phase {self.name!r}, {'open' if self.is_open else 'not open'}>"

    def switch(self, name: str, *, only: Iterable[str | Handle] | None = None) -> None:
        """End this phase and begin phase `name` in its place, in one phase transition.

        Handles that both phases need stay on the device; the others are offloaded and loaded at the
        same time. After an error the phase stays open as it was. In a group all ranks raise the
        same GroupError in its place.

        Args:
            name: one of `placement.PHASES`, or a key of `Settings.phases`.
            only: handles or their names that the new phase concerns, see `Manager.phase`.

        Raises:
            PhaseError: this phase is not open, or another phase is open inside it.
            PolicyError: the policy gave no valid plan for the new phase.
            DeviceMemoryError: the plan does not fit the budget.
            TypeError: `name` is no string, or `only` no list of handles and names.
            CoordinatorLost: the ranks' decision is unknown. The phase stays open, and its handles
                may be where the new one wants them.
            Exception: another error stopped the phase transition.
        """
        with self._stack.lock.attempt():  # the other ranks hear of a wrong name, too
            self._stack.switch(self.phase, checked(name), names_of(only))

    def keep(self, handle: Handle | str) -> None:
        """Keep a handle on the device when this phase ends, so that the next phase finds it there.

        If the next phase's plan does not want the handle on the device, it is offloaded then and
        counted as an expired keep.

        Args:
            handle: the handle or its name.

        Raises:
            PhaseError: this phase is not open, or no handle has this name.
        """
        self._stack.keep(self.phase, handle)

    def done_with(self, handle: Handle | str) -> None:
        """Offload a handle now, because the rest of this phase needs it no more. Its memory is used
        for what the plan prefetches.

        An optimizer that steps the handle stays. Using the handle before the next phase that loads
        it raises `NotResidentError`. In a group each rank calls this for itself, or does not. Does
        nothing if the handle is off the device.

        Args:
            handle: the handle or its name.

        Raises:
            PhaseError: this phase is not open, another phase is open inside it, or no handle has
                this name.
            Exception: the handle could not be offloaded. It stays on the device.
        """
        self._stack.done_with(self.phase, handle)


class PhaseContext(Phase):
    """The object that `Manager.phase` returns, for a `with` statement. It can be entered once. The
    phase is left if it is collected.

    `holder`: the thread or asyncio task that the phase belongs to; None: any may leave it.
    `keeps_alive`: the manager, which must not be collected before the phase is left.
    `in_any_order`: see `OpenPhase`.
    Raises TypeError: the name or `only` is wrong. In a group all ranks raise a GroupError instead.
    """

    _is_finalizing = staticmethod(sys.is_finalizing)
    """Whether the interpreter is exiting: nothing is left to move then, and the names of modules
    may be gone, so the class has its own."""
    _was_entered = False

    def __init__(
        self,
        stack: Transitions,
        name: str,
        only: Iterable[str | Handle] | None,
        holder: Any,
        keeps_alive: object = None,
        in_any_order: bool = False,
    ) -> None:
        self._keeps_alive = keeps_alive
        try:
            super().__init__(stack, OpenPhase(checked(name), names_of(only), holder, in_any_order))
        except Exception:
            with stack.lock.attempt(begins_phase=True):  # so that the other ranks hear of it
                raise

    def __enter__(self) -> Phase:
        if self._was_entered:
            with self._stack.lock.attempt(begins_phase=True):  # so that the other ranks hear of it
                raise PhaseError(
                    f"phase {self.name!r} was entered before; call manager.phase() again"
                )
        self._was_entered = True
        try:
            self._stack.enter(self.phase)
        except (KeyboardInterrupt, SystemExit):  # an interrupt may come after the phase was entered
            self.abandon()
            raise
        return Phase(self._stack, self.phase)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the phase. It is over afterwards, whatever is raised. Errors of leaving are raised;
        if the `with` statement ends with an error of its own, they become notes of that one."""
        if self._is_finalizing():
            return
        if is_background():
            # A generator was collected on a thread that phase transitions wait for, which would
            # wait for itself. The next transition leaves the phase.
            self.abandon()
            return
        if (
            isinstance(error, GeneratorExit)
            and self._was_entered
            and self.phase not in self._stack.phases.all
        ):
            return  # an error that passed through an enclosing phase has left this one with it
        self._stack.leave(self.phase, error)

    def abandon(self) -> None:
        """Leave the phase, if it is open, where nothing may be raised (in `__del__`): now, or in
        the next phase transition."""
        if self._was_entered and not self._is_finalizing():
            self._stack.abandon(self.phase)

    def __del__(self) -> None:
        self.abandon()
