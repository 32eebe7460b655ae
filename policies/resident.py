"""A policy by which handles stay on the device until their memory is needed."""

from __future__ import annotations

from dataclasses import replace

from placement import HandleView, Plan, State, View

from .colocated import Colocated, OptimizerIn, parts_of


class Resident(Colocated):
    """The handles that a phase needs, and also those that are on the device already and fit the
    budget.

    It evicts only to cover a deficit. Handles that need not be copied back go first (readonly, or a
    module that no optimizer steps), then the others; in each group the smallest handle that covers
    the deficit, else the largest. Outside every phase it also loads handles that fit, in
    registration order. A `Lazy` is never built only because it would fit.

    With `optimizer_in="streamed"` an optimizer's steps stream its state only where the whole of it
    does not fit the budget.

    A handle that a phase does not need is at most GPU_RESIDENT: it can be read on the device, but
    not written.

    Example:
        ::

            manager = placement.Manager(policy="resident", budget_bytes="60GiB")
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
        present: list[HandleView] = []  # handles that the phase does not need, by where they are
        offloaded: list[HandleView] = []
        for handle in view.handles.values():
            if not handle.built or handle.external:
                continue
            if plan.targets[handle.name] is State.CPU_OFFLOADED:
                is_offloaded = handle.state is State.CPU_OFFLOADED
                (offloaded if is_offloaded else present).append(handle)
        room = view.budget_bytes - view.bytes_of(plan)
        sizes = {handle.name: handle.num_bytes for handle in present}
        evicted = view.evicted(sizes, sum(sizes.values()) - room)
        kept = [handle for handle in present if handle.name not in evicted]
        if view.phase == "idle":
            room -= sum(handle.num_bytes for handle in kept)
            for handle in offloaded:
                if handle.num_bytes <= room:
                    kept.append(handle)
                    room -= handle.num_bytes
        if not kept:
            return plan
        targets = dict(plan.targets)
        for handle in kept:
            targets[handle.name] = State.GPU_RESIDENT
        parts = {**plan.parts, **parts_of(kept)}
        return view.total_plan(targets, plan.streamed, plan.dropped, parts)


def _whole_where_it_fits(view: View, plan: Plan) -> Plan:
    """Keep parts of an engine that a phase does not need, as long as they fit. Loads none of them.
    And have optimizers on the device for their steps as long as they fit, in registration order;
    the others stream their state."""
    for name, needed in plan.parts.items():
        tags = view.handles[name].resident_tags | needed
        wider = replace(plan, parts={**plan.parts, name: tags})
        if view.fits(wider):
            plan = wider
    for name in [name for name in view.handles if name in plan.streamed]:
        whole = replace(plan, streamed=plan.streamed - {name})
        if view.fits(whole):
            plan = whole
    return plan
