"""The part of `placement explain` about a policy that looks at the phases to come: what it keeps and prefetches in a cycle, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from placement.core.states import HandleView, Plan, View
from placement.core.summary import readable
from placement.planning.simulated_handles import PlainHandle
from placement.planning.simulation import SimulatedPhase, Simulation

if TYPE_CHECKING:
    from placement.core.states import Policy

_ROUNDS = 3
"""In the first the cycle is not known yet, and in the second not everything is where it will be."""


def in_a_known_cycle(policy: Policy, handles: Sequence[HandleView], cycle: Sequence[str], budget_bytes: int, worker_role: str) -> list[str]:
    """Lines about each phase of a cycle that the policy has seen before.

    None for a policy to which that makes no difference, and for a cycle with a phase that has no plan or does not fit.

    Args:
        cycle: the phases of one cycle in order.
    """
    simulation = Simulation(policy, [PlainHandle(facts) for facts in handles], budget_bytes, worker_role)
    lines, looks_ahead = ["", "in a cycle that it has seen, one phase after the other:"], False
    for index, phase in enumerate([*cycle] * _ROUNDS):
        view = simulation.view(SimulatedPhase(phase))
        step = simulation.enter(SimulatedPhase(phase))
        if step.plan is None or step.is_refused:
            return []
        looks_ahead |= bool(step.plan.prefetch) or step.plan != policy.plan(replace(view, upcoming=()))
        if index >= (_ROUNDS - 1) * len(cycle):
            lines += _lines_about(policy, view, step.plan)
    return lines if looks_ahead else []


def _lines_about(policy: Policy, view: View, plan: Plan) -> Iterator[str]:
    reasons: Mapping[str, str] = policy.reasons(view) if hasattr(policy, "reasons") else {}
    early = sum(plan.prefetch.values())
    arrives = f", {readable(early)} arrive early" if early else ""
    yield f"  in {view.phase}: {readable(view.bytes_of(plan))} on the device{arrives}"
    width = max((len(name) for name in view.handles), default=0)
    for name in view.handles:
        where = "on" if plan.on_device(name) else "early" if name in plan.prefetch else "off"
        yield f"    {name:<{width}}  {where:<5}  {reasons.get(name) or plan[name]}"
