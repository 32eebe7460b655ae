"""Nothing leaves the device unless somebody needs its place."""

from __future__ import annotations

from placement import HandleView, Plan, State, View

from .colocated import Colocated, OptimizerIn


class Resident(Colocated):
    """What a phase needs, and beside it whatever is on the device already and fits the budget.

    Evicts only for the deficit: first what need not be copied back (readonly, or a module that no optimizer steps), then the
    rest; of each, the smallest handle that covers the deficit, else the largest. Outside every phase it also loads what fits,
    in registration order, so that handles registered first come first. A `Lazy` is never built only because it would fit.

    A handle that a phase does not need is GPU_RESIDENT at most: it can be read there and not written.
    """

    name = "resident"

    def __init__(self, optimizer_in: OptimizerIn = "train", *, drop_gradients: bool = False) -> None:
        # No streamed sync: the actor is on the device as a rule, and streaming would first have to offload it.
        super().__init__(optimizer_in, drop_gradients=drop_gradients)

    def plan(self, view: View) -> Plan:
        """What the phase needs, and what may stay."""
        plan = super().plan(view)
        if view.phase == "checkpoint":
            return plan
        plan = _whole_where_it_fits(view, plan)
        rest = [h for h in view.handles.values() if h.built and not h.external and plan[h.name] is State.CPU_OFFLOADED]
        staying = [h for h in rest if h.state is not State.CPU_OFFLOADED]
        room = view.budget_bytes - view.bytes_of(plan)
        evicted = view.evicted({h.name: h.num_bytes for h in staying}, sum(h.num_bytes for h in staying) - room)
        kept = [h for h in staying if h.name not in evicted]
        if view.phase == "idle":
            room -= sum(h.num_bytes for h in kept)
            for handle in rest:
                if handle.state is State.CPU_OFFLOADED and handle.num_bytes <= room:
                    kept.append(handle)
                    room -= handle.num_bytes
        targets = {**plan.targets, **{h.name: State.GPU_RESIDENT for h in kept}}
        return view.total_plan(targets, plan.streamed, plan.dropped, {**plan.parts, **_parts_that_stay(kept)})


def _whole_where_it_fits(view: View, plan: Plan) -> Plan:
    """The parts of an engine that a phase does not need stay while they fit; none is loaded for that."""
    for name, needed in plan.parts.items():
        stays = view.handles[name].resident_tags | needed
        more = {**plan.parts, name: stays}
        wider = view.total_plan(plan.targets, plan.streamed, plan.dropped, more)
        if view.fits(wider):
            plan = wider
    return plan


def _parts_that_stay(kept: list[HandleView]) -> dict[str, frozenset[str]]:
    """What is on the device in part stays so."""
    return {h.name: h.resident_tags for h in kept if h.resident_tags and h.resident_tags != h.tags.keys()}
