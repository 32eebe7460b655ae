"""A policy that has handles on the device early, as a test says, and a wait for the copies of what
is early."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import placement
from placement import Plan, State, View
from placement.policies import Colocated
from tests.support.threads import until


class Early(Colocated):
    """Colocated, and in each phase it prefetches what the test says, of the handles that there
    are."""

    name = "early"

    def __init__(self, wanted: Mapping[str, Mapping[str, int]]) -> None:
        super().__init__()
        self.wanted = wanted

    def plan(self, view: View) -> Plan:
        plan = super().plan(view)
        wanted = {n: b for n, b in self.wanted.get(view.phase, {}).items() if n in view.handles}
        return view.total_plan(plan.targets, plan.streamed, plan.dropped, plan.parts, wanted)


class Foresight(Colocated):
    """Colocated, and whatever is off the device arrives early, as far as there is room; where a
    test says so also outside every phase."""

    name = "foresight"

    def __init__(self, *, in_idle: bool = False) -> None:
        super().__init__()
        self.in_idle = in_idle

    def plan(self, view: View) -> Plan:
        plan = super().plan(view)
        if view.phase == "idle" and not self.in_idle:
            return plan
        away = {
            h.name: h.num_bytes
            for h in view.handles.values()
            if h.can_prefetch and plan[h.name] is State.CPU_OFFLOADED
        }
        return replace(plan, prefetch=away)


def wait_for_copies(manager: placement.Manager) -> None:
    for holding in [
        handle.holding for handle in manager.handles.values() if handle.holding is not None
    ]:
        until(lambda holding=holding: not any(r.pages.unfilled() for r in holding.ranges))  # type: ignore[misc]
