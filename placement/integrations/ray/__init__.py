"""placement on Ray: each worker registers its models once, and the driver declares phases for all workers.

In the driver:

    fleet = placement.ray.Fleet("grpo-7")
    workers = [Trainer.remote(rank, 4) for rank in range(4)]
    fleet.join(workers)
    with fleet.phase("rollout") as step:
        ray.get([worker.rollout.remote() for worker in workers])
        step.switch("train")
        ray.get([worker.train.remote() for worker in workers])

In a worker:

    @ray.remote(num_gpus=1)
    class Trainer(placement.ray.Worker):
        def __init__(self, rank, world_size):
            manager = self.join_fleet("grpo-7", rank=rank, together=range(world_size))
            manager.register("actor", build_actor(), role="actor")
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from placement.core.lazy_names import on_demand as _on_demand
from placement.integrations.ray.messages import WorkerStatus

if TYPE_CHECKING:
    from placement.integrations.ray.fleet import Fleet, FleetPhase
    from placement.integrations.ray.worker import Worker, in_phase

__all__ = ["Fleet", "FleetPhase", "Worker", "WorkerStatus", "in_phase"]

__getattr__ = _on_demand(__name__, {**dict.fromkeys(("Fleet", "FleetPhase"), "fleet"), **dict.fromkeys(("Worker", "in_phase"), "worker")})
