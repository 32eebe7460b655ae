"""A policy that has handles on the device early, as a test says, and a wait for the copies of what is early."""

from __future__ import annotations

from collections.abc import Mapping

import placement
from placement import Plan, View
from placement.policies import Colocated
from tests.support.threads import until


class Early(Colocated):
    """Colocated, and in each phase it prefetches what the test says, of the handles that there are."""

    name = "early"

    def __init__(self, wanted: Mapping[str, Mapping[str, int]]) -> None:
        super().__init__()
        self.wanted = wanted

    def plan(self, view: View) -> Plan:
        plan = super().plan(view)
        wanted = {n: b for n, b in self.wanted.get(view.phase, {}).items() if n in view.handles}
        return view.total_plan(plan.targets, plan.streamed, plan.dropped, plan.parts, wanted)


def wait_for_copies(manager: placement.Manager) -> None:
    for holding in [handle.holding for handle in manager.handles.values() if handle.holding is not None]:
        until(lambda holding=holding: not any(r.pages.unfilled() for r in holding.ranges))  # type: ignore[misc]
