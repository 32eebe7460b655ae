"""The open phases of one manager: their holders, and the plans that apply around and between them.

A phase belongs to the thread or asyncio task that opened it. `Manager.enter` opens a phase that belongs to none, for frameworks
whose hooks run in different threads.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from placement.core.errors import PhaseError, PolicyError
from placement.core.states import IDLE, Plan, State
from placement.planning import plan_checks
from placement.planning.planner import Planner
from placement.registration.handle import Handle


def here() -> Any:
    """The asyncio task that runs now; outside asyncio the current thread."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    return task if task is not None else threading.current_thread()


def _words(holder: Any) -> str:
    if holder is None:
        return "enter()"
    return f"task {holder.get_name()!r}" if isinstance(holder, asyncio.Task) else f"thread {holder.name!r}"


_NO_PLAN = Plan({})


@dataclass(eq=False, slots=True)
class OpenPhase:
    """One phase, made before it is entered. A switch changes its name, its handles and its plan."""

    name: str
    only: tuple[str, ...] | None
    holder: Any
    in_any_order: bool = False
    """Whether the phase may be left while others are open inside it: it is a hold."""
    plan: Plan = _NO_PLAN
    kept: set[str] = field(default_factory=set)
    torch_reserved_bytes: int = 0
    """Device bytes that torch's allocator had reserved when the phase was entered."""
    is_abandoned: bool = False
    """Whether its `PhaseContext` was garbage-collected. The phase is left as soon as no other phase is open inside it."""

    def begin(self, name: str, only: tuple[str, ...] | None, plan: Plan, torch_reserved_bytes: int) -> None:
        """Begin a phase: this one, or another in its place."""
        self.name, self.only, self.plan, self.torch_reserved_bytes = name, only, plan, torch_reserved_bytes
        self.kept = set()


def innermost(phases: Sequence[OpenPhase]) -> str | None:
    """The name of the innermost of these phases; None if there is none."""
    return phases[-1].name if phases else None


class OpenPhases:
    """The open phases and the kept handles of one manager. Any thread may read them."""

    def __init__(self, planner: Planner, handles: Mapping[str, Handle]) -> None:
        self._planner = planner
        self._handles = handles
        self.all: tuple[OpenPhase, ...] = ()
        """The open phases, outermost first."""
        self.kept: frozenset[str] = frozenset()
        """Names of the handles that `Phase.keep` carries from the last phase into this one."""

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
        """Refuse to open phase `name` unless all open phases belong to this task, to this thread, or to nobody.

        Raises:
            PhaseError: another thread or task holds a phase.
        """
        me = here()
        for each in self.all:
            if each.holder is not None and each.holder is not me and each.holder is not threading.current_thread():
                raise PhaseError(
                    f"{_words(me)} wants phase {name!r} while {_words(each.holder)} holds phase {each.name!r}: one manager is in one phase "
                    "at a time. Use enter() and leave() for a phase that spans threads."
                )

    def require_open(self, phase: OpenPhase, what: str) -> None:
        if phase not in self.all:
            raise PhaseError(f"cannot {what}: phase {phase.name!r} is not open")

    def require_innermost(self, phase: OpenPhase, what: str) -> None:
        self.require_open(phase, what)
        if self.all[-1] is not phase:
            raise PhaseError(f"cannot {what}: phase {self.all[-1].name!r} is open inside phase {phase.name!r}; leave it first")

    def require_leavable(self, phase: OpenPhase) -> None:
        """Require that the phase is a hold or has only holds inside it."""
        self.require_open(phase, "leave")
        if self.all[-1] is not phase and not phase.in_any_order and not all(each.in_any_order for each in self.inside(phase)):
            self.require_innermost(phase, "leave")

    def inside(self, phase: OpenPhase) -> tuple[OpenPhase, ...]:
        """The phases that are open inside an open phase."""
        return self.all[self.all.index(phase) + 1 :]

    def without(self, phase: OpenPhase) -> tuple[OpenPhase, ...]:
        return tuple(each for each in self.all if each is not phase)

    # --- where everything belongs

    def base_plan(self) -> Plan:
        """The plan that applies now, kept handles included: that of the innermost open phase, or the idle plan outside every phase."""
        return self.with_kept(self.plan_of(self.all))

    def plan_of(self, phases: Sequence[OpenPhase]) -> Plan:
        """The plan that applies while these phases are open, without kept handles: the innermost one's, or the idle plan.

        Raises:
            PolicyError: the policy has no idle plan.
        """
        return phases[-1].plan if phases else self._planner.idle(self.kept)

    def with_kept(self, plan: Plan) -> Plan:
        """A plan in which kept handles stay on the device."""
        return plan_checks.with_kept(plan, self.kept, self._handles)

    def plan_after(self, leaving: OpenPhase) -> tuple[Plan, list[Exception]]:
        """The plan that applies once an open phase has ended. Phases inside it are open still, and get a new plan.

        A phase inside goes on deciding about the handles of its `only`. For all others the phase around the one that ends decides, except
        that nothing is loaded: the room may be taken. If the policy gives no plan: a plan that offloads everything, and the error.
        """
        failures: list[Exception] = []
        try:
            plan = self.plan_of(self.all[: self.all.index(leaving)])
        except PolicyError as error:
            plan, failures = Plan(dict.fromkeys(self._handles, State.CPU_OFFLOADED)), [error]
        for inner in self.inside(leaving):
            own = plan_checks.still_meant(inner.only, self._handles)
            if own is not None:
                away = {name for name, state in inner.plan.targets.items() if state is State.CPU_OFFLOADED}
                inner.plan = inner.plan.limited_to(own | away, plan)
            plan = inner.plan
        return plan, failures

    def extend(self, handle: Handle) -> None:
        """Add a new handle to the plan of every open phase. Its owners are planned anew, too: with an optimizer they can be trained."""
        joining = {handle.name, *(owner.name for owner in handle.owners)}
        below = self._planner.idle(self.kept)
        for index, each in enumerate(self.all):
            asked = self._planner.plan(each.name, innermost(self.all[:index]), self.kept)
            meant = plan_checks.still_meant(each.only, self._handles)
            streamed = each.plan.streamed | (below.streamed & {handle.name})
            dropped = each.plan.dropped | (below.dropped & {handle.name})
            parts = {**each.plan.parts, **{name: tags for name, tags in below.parts.items() if name == handle.name}}
            base = Plan({**each.plan.targets, handle.name: below.targets[handle.name]}, streamed, dropped, parts, each.plan.prefetch)
            each.plan = below = asked.limited_to(joining if meant is None else joining & meant, base)

    def forget(self, name: str) -> None:
        """Remove a handle from the keeps and plans of all open phases."""
        self.kept -= {name}
        for each in self.all:
            each.kept.discard(name)
            each.plan = each.plan.without(name)
