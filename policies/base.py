"""Questions about a view that several policies ask."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from placement import HandleView, Plan, PolicyError, State, View


def models(view: View, *roles: str) -> list[HandleView]:
    """Modules and engines with these roles, in registration order. Optimizers have their owner's role, and are left out."""
    return [h for h in view.with_role(*roles) if h.kind != "optimizer"]


def rollout_models(view: View) -> list[HandleView]:
    """The models that generate: every model with the role `rollout`, and every engine without a role."""
    return [h for h in view.handles.values() if h.kind != "optimizer" and (h.role == "rollout" or (h.kind == "engine" and h.role is None))]


def optimizers(view: View) -> list[HandleView]:
    """Every optimizer, in registration order."""
    return [h for h in view.handles.values() if h.kind == "optimizer"]


def stepped(view: View) -> list[HandleView]:
    """The modules whose parameters an optimizer steps. Owners that are not in the view are left out."""
    owners = dict.fromkeys(owner for optimizer in optimizers(view) for owner in optimizer.owners)
    return [view.handles[name] for name in owners if name in view.handles]


def targets(handles: Iterable[HandleView], state: State) -> dict[str, State]:
    """The same target for several handles. A readonly handle cannot be TRAINING, so it gets GPU_RESIDENT instead."""
    readonly_state = State.GPU_RESIDENT if state is State.TRAINING else state
    return {h.name: readonly_state if h.readonly else state for h in handles}


def present(view: View) -> Plan:
    """The plan that changes nothing."""
    # A plan without `streamed` would load what is used from its host copy.
    streamed = [h.name for h in view.handles.values() if h.streaming]
    parts = {h.name: h.resident_tags for h in view.handles.values() if h.resident_tags and h.resident_tags != h.tags.keys()}
    return view.total_plan({h.name: h.state for h in view.handles.values()}, streamed, parts=parts)


def readable(view: View) -> Plan:
    """The plan for reading every value. It moves only handles whose values can be read on the device alone."""
    plan = present(view)
    for handle in view.handles.values():
        if handle.gathers and handle.built:
            plan = plan.also(handle, State.GPU_RESIDENT)
    return plan


def unknown_phase(view: View) -> PolicyError:
    """The error for a phase that is neither shipped nor in `Settings.phases`."""
    nearest = difflib.get_close_matches(view.phase, view.known_phases, n=1)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    return PolicyError(
        f"unknown phase {view.phase!r}.{hint} Known phases: {', '.join(view.known_phases)}. "
        "Declare a phase of your own in Settings.phases, with the roles that it needs."
    )
