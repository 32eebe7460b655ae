"""The plans that apply around and between phases: where every handle belongs while a given stack of phases is open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from placement.core.errors import PolicyError
from placement.core.states import Plan, State
from placement.phases.open_phase import OpenPhase, innermost
from placement.planning import plan_checks
from placement.planning.planner import Planner
from placement.registration.handle import Handle


class EnclosingPlans:
    """Answers for one manager. Holds no state but references to the planner and the handles."""

    def __init__(self, planner: Planner, handles: Mapping[str, Handle]) -> None:
        self._planner = planner
        self._handles = handles

    def around(self, below: Sequence[OpenPhase], kept: frozenset[str]) -> Plan:
        """The plan that applies while the phases `below` are open, without kept handles: the innermost one's, or the idle plan.

        Raises:
            PolicyError: the policy has no idle plan.
        """
        return below[-1].plan if below else self._planner.idle(kept)

    def after(self, below: Sequence[OpenPhase], kept: frozenset[str]) -> tuple[Plan, list[Exception]]:
        """The plan that applies after leaving to `below`. If the policy gives none: a plan that offloads everything, and the error."""
        try:
            return self.around(below, kept), []
        except PolicyError as error:
            return Plan(dict.fromkeys(self._handles, State.CPU_OFFLOADED)), [error]

    def after_leaving(self, open_phases: Sequence[OpenPhase], leaving: OpenPhase, kept: frozenset[str]) -> tuple[Plan, list[Exception]]:
        """The plan that applies once one of these phases has ended, like `after`. Phases inside it are open still, and get a new plan.

        A phase inside goes on deciding about the handles of its `only`. For all others the phase around the one that ends decides, except
        that nothing is loaded: the room may be taken.
        """
        index = open_phases.index(leaving)
        plan, failures = self.after(open_phases[:index], kept)
        for inner in open_phases[index + 1 :]:
            own = plan_checks.still_meant(inner.only, self._handles)
            if own is not None:
                away = {name for name, state in inner.plan.targets.items() if state is State.CPU_OFFLOADED}
                inner.plan = inner.plan.limited_to(own | away, plan)
            plan = inner.plan
        return plan, failures

    def with_kept(self, plan: Plan, kept: frozenset[str]) -> Plan:
        """A plan in which kept handles stay on the device."""
        return plan_checks.with_kept(plan, kept, self._handles)

    def extend(self, open_phases: Sequence[OpenPhase], handle: Handle, kept: frozenset[str]) -> None:
        """Add a new handle to the plan of every open phase. Its owners are planned anew, too: with an optimizer they can be trained."""
        joining = {handle.name, *(owner.name for owner in handle.owners)}
        below = self._planner.idle(kept)
        for index, each in enumerate(open_phases):
            asked = self._planner.plan(each.name, innermost(tuple(open_phases[:index])), kept)
            meant = plan_checks.still_meant(each.only, self._handles)
            streamed = each.plan.streamed | (below.streamed & {handle.name})
            dropped = each.plan.dropped | (below.dropped & {handle.name})
            parts = {**each.plan.parts, **{name: tags for name, tags in below.parts.items() if name == handle.name}}
            base = Plan({**each.plan.targets, handle.name: below.targets[handle.name]}, streamed, dropped, parts, each.plan.prefetch)
            each.plan = below = asked.limited_to(joining if meant is None else joining & meant, base)
