"""What a policy is shown after one of its plans."""

from __future__ import annotations

from dataclasses import replace

from placement import Plan, View


def after(before: View, plan: Plan) -> View:
    """The same worker once the plan has been carried out."""
    return replace(
        before,
        handles={
            h.name: replace(
                h,
                state=plan[h.name],
                resident_bytes=h.num_bytes if plan.on_device(h.name) else plan.prefetch.get(h.name, 0),
                prefetched_bytes=plan.prefetch.get(h.name, 0),
                streaming=h.name in plan.streamed,
            )
            for h in before.handles.values()
        },
    )
