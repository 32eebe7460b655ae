"""What a policy is shown, and shown again after one of its plans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from placement import HandleView, Plan, State, View


def handle(name: str, kind: str = "module", role: str | None = None, **fields: Any) -> HandleView:
    """Ten bytes off the device. Its role is its name, where a test says no other."""
    return HandleView(
        **{
            "name": name,
            "kind": kind,
            "role": role or name,
            "state": State.CPU_OFFLOADED,
            "num_bytes": 10,
            **fields,
        }
    )


def used(plan: Plan) -> dict[str, State]:
    """What a plan has on the device, or in use."""
    return {name: state for name, state in plan.targets.items() if state is not State.CPU_OFFLOADED}


def after(before: View, plan: Plan) -> View:
    """The same worker once the plan has been carried out."""
    return replace(
        before,
        handles={
            h.name: replace(
                h,
                state=plan[h.name],
                resident_bytes=h.num_bytes
                if plan.on_device(h.name)
                else plan.prefetch.get(h.name, 0),
                prefetched_bytes=plan.prefetch.get(h.name, 0),
                streaming=h.name in plan.streamed,
            )
            for h in before.handles.values()
        },
    )
