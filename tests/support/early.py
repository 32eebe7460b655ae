"""A policy that has handles on the device early, as a test says, and a wait for the copies of what is early."""

from __future__ import annotations

import time
from collections.abc import Mapping

import placement
from placement import Plan, View
from placement.policies import Colocated


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
    deadline = time.monotonic() + 60
    for handle in manager.handles.values():
        for r in () if handle.holding is None else handle.holding.ranges:
            while r.pages.unfilled():
                assert time.monotonic() < deadline, f"the copies of what is early of {handle.name!r} were not started within a minute"
                time.sleep(0.001)  # a thread starts them, and tells nobody
