"""The demo's GRPO loop on Ray: workers register once, and the driver declares each phase for all of
them.

python examples/ray_grpo.py
"""

from __future__ import annotations

import random
import sys
from datetime import timedelta
from pathlib import Path

import ray
import torch
import torch.distributed as dist

import placement
import placement.ray
from placement.cli.demo import digest_of
from placement.testing import SimulatedDevice, assert_nothing_resident

sys.path.insert(0, str(Path(__file__).parents[1]))
from examples._tiny import data_parallel


class Trainer(placement.ray.Worker):
    """The worker on each GPU. Its methods only compute; no method says where a model is."""

    def __init__(self, rank: int, world_size: int, store: tuple[str, int]) -> None:
        torch.set_num_threads(1)
        cuda = torch.cuda.is_available()
        device = "cuda:0" if cuda else SimulatedDevice(capacity_bytes=16 << 20)
        rendezvous = dist.TCPStore(*store, is_master=False)
        dist.init_process_group(
            "nccl" if cuda else "gloo", store=rendezvous, rank=rank, world_size=world_size
        )

        self.manager = manager = placement.Manager(device=device)
        self.job = job = data_parallel(seed=0, device=manager.device.torch_device, steps=1)
        self.actor = manager.register("actor", job.actor, role="actor")
        manager.register("actor.optimizer", job.optimizer)
        manager.register("ref", job.reference, role="ref", readonly=True)
        manager.register("rollout", job.engine, role="rollout")
        self.questions = random.Random(rank)  # noqa: S311 - repeatable on purpose
        self.generator = torch.Generator(job.device).manual_seed(rank)

    def rollout(self) -> float:
        """Sample answers. Returns the mean reward."""
        sums = [
            (self.questions.randint(0, 9), self.questions.randint(0, 9))
            for _ in range(self.job.recipe.prompts)
        ]
        self.rollouts, _ = self.job.rollout(sums, self.generator)
        return self.rollouts.rewards.mean().item()

    @torch.no_grad()
    def log_probs(self) -> None:
        self.old = self.job.log_probs(self.job.actor, self.rollouts)
        self.ref = self.job.log_probs(self.job.reference, self.rollouts)

    def update(self) -> float:
        """Update the actor. Returns the loss."""
        return self.job.update(self.rollouts, self.old, self.ref)[0]

    def publish(self) -> str:
        """Bring the weights to the engine. Returns a hash of them."""
        for bucket in self.actor.weights(bucket_bytes=1 << 20):
            self.job.engine.update_weights(bucket)
        return digest_of(self.actor.state_dict())

    def finish(self) -> None:
        """Called outside every phase, where nothing may be left on the device."""
        assert_nothing_resident(self.manager)


def main(world_size: int = 4, steps: int = 3) -> list[list[str]]:
    """Run the driver. Returns a hash of each worker's weights after each step."""
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )
    gpus = 1 if ray.cluster_resources().get("GPU", 0) >= world_size else 0
    weights = []
    # without GPUs any number of workers can run
    actor = ray.remote(Trainer).options(num_cpus=gpus, num_gpus=gpus)
    workers = [
        actor.remote(rank, world_size, ("127.0.0.1", store.port)) for rank in range(world_size)
    ]
    fleet = placement.ray.Fleet(workers)
    with fleet.phase("rollout") as step:  # one open phase across the steps
        for number in range(1, steps + 1):
            step.switch("rollout")
            rewards = ray.get([worker.rollout.remote() for worker in workers])
            step.switch("log_prob", only=["actor", "ref"])
            ray.get([worker.log_probs.remote() for worker in workers])
            step.switch("train")
            losses = ray.get([worker.update.remote() for worker in workers])
            step.switch("weight_sync")
            weights.append(ray.get([worker.publish.remote() for worker in workers]))
            print(
                f"step {number}: loss {sum(losses) / world_size:+.4f} reward "
                f"{sum(rewards) / world_size:.3f}"
            )
    ray.get([worker.finish.remote() for worker in workers])
    print("0 bytes left on any device")
    for worker in workers:
        ray.kill(worker)
    return weights


if __name__ == "__main__":
    ray.init()
    main()
    ray.shutdown()
