"""A policy for rollout and training in different processes at the same time."""

from __future__ import annotations

from dataclasses import replace

from placement import Plan, View

from .colocated import Colocated, OptimizerIn, rollout_models
from .resident import Resident


class AsyncRollout:
    """Each worker keeps its own handles resident, and keeps handles of the other side offloaded.

    | `worker_role` | behaviour |
    |---|---|
    | `rollout` | its engines as in `Resident`; a trainer's handles are never built or loaded |
    | `trainer` | all but the rollout engines as in `Resident`; those are never touched |
    | `hybrid` | behaves like `Colocated` |

    Args:
        optimizer_in: as in `Colocated`.
        stream_sync: as in `Colocated`, for a hybrid worker; the others hold their weights on the
            device.
        drop_gradients: as in `Colocated`.

    Example:
        ::

            manager = placement.Manager(policy="async_rollout", worker_role="trainer")
    """

    name = "async_rollout"

    def __init__(
        self,
        optimizer_in: OptimizerIn = "train",
        *,
        stream_sync: bool = False,
        drop_gradients: bool = False,
    ) -> None:
        self._together = Colocated(
            optimizer_in, stream_sync=stream_sync, drop_gradients=drop_gradients
        )
        self._apart = Resident(optimizer_in, drop_gradients=drop_gradients)

    def plan(self, view: View) -> Plan:
        """The plan for the handles of this worker's side; CPU_OFFLOADED for the other side's."""
        if view.worker_role == "hybrid":
            return self._together.plan(view)
        generating = {handle.name for handle in rollout_models(view)}
        generates = view.worker_role == "rollout"
        handles = view.handles.items()
        own = {name: handle for name, handle in handles if (name in generating) is generates}
        plan = self._apart.plan(replace(view, handles=own))
        return view.total_plan(plan.targets, plan.streamed, plan.dropped, plan.parts)
