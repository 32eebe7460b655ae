"""A policy by which handles stay on the device until their memory is needed."""

from __future__ import annotations

from dataclasses import replace

from placement import Plan, State, View

from .colocated import Colocated, OptimizerIn, parts_of


class Resident(Colocated):
    """The handles that a phase needs, and also those that are on the device already and fit the
    budget.

    It evicts only to cover a deficit. Handles that need not be copied back go first (readonly, or a
    module that no optimizer steps), then the others; in each group the smallest handle that covers
    the deficit, else the largest. Outside every phase it also loads what fits, in registration
    order. A `Lazy` is never built only because it would fit.

    With `optimizer_in="streamed"` an optimizer's steps stream its state only where the whole of it
    does not fit the budget.

    A handle that a phase does not need is at most GPU_RESIDENT: it can be read on the device, but
    not written.
    """

    name = "resident"

    def __init__(
        self, optimizer_in: OptimizerIn = "train", *, drop_gradients: bool = False
    ) -> None:
        # No streamed sync: the actor usually is on the device, and streaming would first have to
        # offload it.
        super().__init__(optimizer_in, drop_gradients=drop_gradients)

    def plan(self, view: View) -> Plan:
        """The handles that the phase needs, and those that may stay."""
        plan = super().plan(view)
        if view.phase == "checkpoint":
            return plan
        plan = _whole_where_it_fits(view, plan)
        rest = [
            h
            for h in view.handles.values()
            if h.built and not h.external and plan.targets[h.name] is State.CPU_OFFLOADED
        ]
        staying = [h for h in rest if h.state is not State.CPU_OFFLOADED]
        room = view.budget_bytes - view.bytes_of(plan)
        sizes = {h.name: h.num_bytes for h in staying}
        evicted = view.evicted(sizes, sum(sizes.values()) - room)
        kept = [h for h in staying if h.name not in evicted]
        if view.phase == "idle":
            room -= sum(h.num_bytes for h in kept)
            for handle in rest:
                if handle.state is State.CPU_OFFLOADED and handle.num_bytes <= room:
                    kept.append(handle)
                    room -= handle.num_bytes
        if not kept:
            return plan
        targets = {**plan.targets, **{h.name: State.GPU_RESIDENT for h in kept}}
        return view.total_plan(
            targets, plan.streamed, plan.dropped, {**plan.parts, **parts_of(kept)}
        )


def _whole_where_it_fits(view: View, plan: Plan) -> Plan:
    """Keep parts of an engine that a phase does not need, as long as they fit. Loads none of them.
    And have optimizers on the device for their steps as long as they fit, in registration order;
    the others stream their state."""
    for name, needed in plan.parts.items():
        wider = replace(plan, parts={**plan.parts, name: view.handles[name].resident_tags | needed})
        if view.fits(wider):
            plan = wider
    for name in [name for name in view.handles if name in plan.streamed]:
        whole = replace(plan, streamed=plan.streamed - {name})
        if view.fits(whole):
            plan = whole
    return plan
