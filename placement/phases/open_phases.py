"""The open phases of one manager: their holders, the plans that apply around and between them, and the lock under which they change.

A phase belongs to the thread or asyncio task that opened it. `Manager.enter` opens a phase that belongs to none, for frameworks
whose hooks run in different threads.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from placement.core.call_guard import without_modes
from placement.core.errors import PhaseError, PlacementError, PolicyError
from placement.core.interrupts import deferred
from placement.core.states import IDLE, Plan, State
from placement.devices.base import Device
from placement.group.vote import GroupVote
from placement.planning.planner import Planner, meant, with_kept
from placement.registration.handle import Handle


def here() -> Any:
    """The asyncio task that runs now; outside asyncio the current thread."""
    task = None if asyncio._get_running_loop() is None else asyncio.current_task()
    return threading.current_thread() if task is None else task


def _words(holder: Any) -> str:
    if holder is None:
        return "enter()"
    return f"task {holder.get_name()!r}" if isinstance(holder, asyncio.Task) else f"thread {holder.name!r}"


_NO_PLAN = Plan({})
_NOTHING = nullcontext()


@dataclass(eq=False, slots=True)
class OpenPhase:
    """One phase, made before it is entered. A switch changes its name, its handles and its plan."""

    name: str
    only: tuple[str, ...] | None
    holder: Any
    in_any_order: bool = False  # whether the phase may be left while others are open inside it: it is a hold
    plan: Plan = _NO_PLAN
    kept: set[str] = field(default_factory=set)
    is_abandoned: bool = False
    """Whether nobody will leave it any more: its context or manager was collected, or an exception or an interrupt has passed through it.
    It is left as soon as no other phase is open inside it, a hold at once."""


def innermost(phases: Sequence[OpenPhase]) -> str | None:
    return phases[-1].name if phases else None


class OpenPhases:
    """The open phases and the kept handles of one manager. Any thread may read them."""

    def __init__(self, planner: Planner, handles: Mapping[str, Handle]) -> None:
        self._planner = planner
        self._handles = handles
        self.all: tuple[OpenPhase, ...] = ()  # the open phases, outermost first
        self.kept: frozenset[str] = frozenset()  # names of the handles that `Phase.keep` carries from the last phase into this one

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
        """Refuse to open phase `name` unless all open phases belong to this task, to this thread, or to nobody."""
        for each in self.all:
            if each.holder not in (None, threading.current_thread()) and each.holder is not (me := here()):
                raise PhaseError(
                    f"{_words(me)} wants phase {name!r} while {_words(each.holder)} holds phase {each.name!r}: one manager is in one phase "
                    "at a time. Use enter() and leave() for a phase that spans threads."
                )

    def require_open(self, phase: OpenPhase, what: str) -> None:
        if phase not in self.all:
            raise PhaseError(f"cannot {what}: phase {phase.name!r} is not open; it was left before or never entered")

    def require_innermost(self, phase: OpenPhase, what: str) -> None:
        self.require_open(phase, what)
        if self.all[-1] is not phase:
            raise PhaseError(f"cannot {what}: phase {self.all[-1].name!r} is open inside phase {phase.name!r}; leave it first")

    def require_leavable(self, phase: OpenPhase) -> None:
        self.require_open(phase, "leave")
        if self.all[-1] is not phase and not phase.in_any_order and not all(each.in_any_order for each in self.inside(phase)):
            self.require_innermost(phase, "leave")

    def inside(self, phase: OpenPhase) -> tuple[OpenPhase, ...]:
        return self.all[self.all.index(phase) + 1 :]

    def without(self, phase: OpenPhase) -> tuple[OpenPhase, ...]:
        return tuple(each for each in self.all if each is not phase)

    # --- where everything belongs

    def base_plan(self) -> Plan:
        return self.with_kept(self.plan_of(self.all))

    def plan_of(self, phases: Sequence[OpenPhase]) -> Plan:
        """The plan that applies while these phases are open, without kept handles: the innermost one's, or the idle plan."""
        return phases[-1].plan if phases else self._planner.ask(IDLE, None, self.kept)[1]

    def with_kept(self, plan: Plan) -> Plan:
        return with_kept(plan, self.kept, self._handles)

    def plan_after(self, leaving: OpenPhase) -> tuple[Plan, list[Exception]]:
        """The plan that applies once an open phase has ended. A phase inside it goes on deciding about the handles of its `only`. For all
        others the phase around the one that ends decides, except that nothing is loaded: the room may be taken. If the policy gives no
        plan: everything is offloaded, and the error."""
        failures: list[Exception] = []
        try:
            plan = self.plan_of(self.all[: self.all.index(leaving)])
        except PolicyError as error:
            plan, failures = Plan(dict.fromkeys(self._handles, State.CPU_OFFLOADED)), [error]
        for inner in self.inside(leaving):
            own = meant(inner.only, self._handles)
            if own is not None:
                away = {name for name, state in inner.plan.targets.items() if state is State.CPU_OFFLOADED}
                inner.plan = inner.plan.limited_to(own | away, plan)
            plan = inner.plan
        return plan, failures

    def extend(self, handle: Handle) -> None:
        """Add a new handle to the plan of every open phase. Its owners are planned anew, too: with an optimizer they can be trained."""
        joining = {handle.name, *(owner.name for owner in handle.owners)}
        enclosing = self.plan_of(())
        for index, each in enumerate(self.all):
            _, asked = self._planner.ask(each.name, innermost(self.all[:index]), self.kept)
            chosen = meant(each.only, self._handles)
            base = enclosing.limited_to({handle.name}, each.plan)  # where `only` leaves it out, a new handle is as in the enclosing phase
            each.plan = enclosing = asked.limited_to(joining if chosen is None else joining & chosen, base)

    def forget(self, name: str) -> None:
        self.kept -= {name}
        for each in self.all:
            each.kept.discard(name)
            each.plan = each.plan.without(name)


class TransitionLock:
    """The lock of one manager. It is held during every phase transition.
    `vote`: with which phases are entered and left; None: without a group.
    `sweep`: called at the beginning of each.
    `is_outside`: whether no phase is open. Then this rank may have missed phase transitions of the other ranks."""

    def __init__(self, device: Device, vote: GroupVote | None, sweep: Callable[[], None], is_outside: Callable[[], bool]) -> None:
        self._device = device
        self.vote = vote
        self._sweep = sweep
        self._is_outside = is_outside
        self._lock = threading.RLock()
        self._is_busy = False
        """Whether a phase transition is under way. Code that runs inside it (a policy, a factory, a finalizer) must not begin another."""
        self.pid = os.getpid()
        self.is_closed = False

    def attempt(
        self, vote: GroupVote | None = None, *, begins: bool = False, own: bool = False, error: BaseException | None = None
    ) -> AbstractContextManager[None]:
        """Tell every rank of the group, once, if the block fails, even if it fails before a phase transition begins.
        `vote`: tells the group; None: `self.vote`.
        `begins`: a phase is about to begin.
        `own`: a rank that fails raises its own error. Otherwise all ranks raise the same error.
        `error`: the user's exception with which a phase is left, if any."""
        vote = self.vote if vote is None else vote
        if vote is None or os.getpid() != self.pid:  # a forked child is not a rank
            return _NOTHING
        return self._attempt(vote, begins, own, error)

    @contextmanager
    def _attempt(self, vote: GroupVote, begins: bool, own: bool, error: BaseException | None) -> Iterator[None]:
        with self._lock, deferred():
            if self._is_busy:  # the transition around this one tells the group
                yield
                return
            with vote.attempt(catches_up=begins and self._is_outside(), error=error):
                try:
                    yield
                except BaseException as raised:
                    self._is_busy = True  # objects that are garbage-collected while this waits must not begin a phase transition
                    try:
                        told = vote.failed(raised)
                    finally:
                        self._is_busy = False
                    if own or told is None:
                        raise
                    try:
                        raise told from raised
                    finally:
                        del told  # its traceback has this frame: a cycle would keep the tensors of all frames until they are collected

    @contextmanager
    def transition(self) -> Iterator[None]:
        """Hold the lock for a phase transition, with torch's modes off. First, abandoned phases are left."""
        inside = "a policy or a Lazy's factory must not change phases or register: it runs inside a phase transition"
        capturing = "phases cannot change while a graph is being captured: moving memory would become part of it"
        inference = torch.inference_mode(False) if torch.is_inference_mode_enabled() else _NOTHING
        with self.busy(inside, capturing), without_modes(), inference, torch.set_grad_enabled(False):
            self._sweep()
            yield

    @contextmanager
    def busy(self, inside: str, capturing: str) -> Iterator[None]:
        """Hold the lock, with Ctrl-C deferred. Refuses what must not begin now: in another process, after `close`, inside a phase
        transition, or in a graph's capture."""
        with self._lock, deferred():
            self.check_process()
            if self._is_busy:
                raise PhaseError(inside)
            if self._device.is_capturing():
                raise PhaseError(capturing)
            self._is_busy = True
            try:
                yield
            finally:
                self._is_busy = False

    @contextmanager
    def if_free(self) -> Iterator[bool]:
        """Hold the lock if that is possible at once, outside of any phase transition. Gives whether it is held."""
        with deferred():
            held = self._lock.acquire(blocking=False)
            try:
                yield held and not self._is_busy and not self.is_closed and os.getpid() == self.pid
            finally:
                if held:
                    self._lock.release()

    def check_process(self) -> None:
        """Refuse any use by a forked child process, or after `close`."""
        if os.getpid() != self.pid:
            raise PlacementError(
                f"this manager belongs to process {self.pid}; a forked child has neither its device memory nor its host copies. "
                "Make a manager of its own there."
            )
        if self.is_closed:
            raise PlacementError("this manager is closed")
