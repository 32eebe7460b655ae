"""A train actor in the shape of slime's `MegatronTrainRayActor` (slime 624b824, slime/backends/megatron_utils/actor.py).

Its methods, their parameters, what they read of `args`, and the order in which they copy weights between the one model and the copies
in host memory are slime's. What it computes is a `Job`'s.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch

from tests.integrations.jobs import Job, as_bytes


def arguments(job: Any, **options: Any) -> Namespace:
    """slime's arguments, as far as the actor reads them. `job` builds the model."""
    return Namespace(
        **{
            "build": job,
            "debug_rollout_only": False,
            "offload_train": False,
            "colocate": True,
            "update_weight_transport": "nccl",
            "keep_old_actor": False,
            "num_rollout": 3,
            **options,
        }
    )


class TrainActor:
    """Everything that leaves it is in `seen`, as bytes: losses, log-probabilities, published weights, checkpoints."""

    def __init__(self, world_size: int, rank: int, master_addr: str | None, master_port: int | None) -> None:
        self.seen: list[bytes] = []

    def init(self, args: Namespace, role: str, with_ref: bool = False, with_opd_teacher: bool = False) -> int | None:
        self.args = args
        if args.debug_rollout_only:
            return 0
        self.role = role
        self.job: Job = args.build()
        self.model = self.job.parts
        self.optimizer = self.job.optimizer if args.num_rollout else None
        if role == "critic":
            return 1
        self.copies: dict[str, dict[str, torch.Tensor]] = {}
        self._backup("actor")
        if with_ref:
            for _, weight in self.job.weights():
                weight.data.mul_(0.5)
            self._backup("ref")  # the model has the reference's weights now, and slime leaves it so
        if args.keep_old_actor:
            self._backup("old_actor")
        return 1

    def train(self, rollout_id: int, rollout_data_ref: Any, external_data: Any = None) -> Any:
        if self.args.debug_rollout_only:
            return None
        if self.role == "critic":
            with self.job.within():
                with torch.no_grad():
                    values = self.job.loss(rollout_id)
                self._see(self.job.learn(rollout_id))
            return {"values": [values.cpu()]}
        with self.job.within(), torch.no_grad():
            if "ref" in self.copies:
                self._restore("ref")
                self._see(self.job.loss(rollout_id))
            self._restore("old_actor" if self.args.keep_old_actor else "actor")
            self._see(self.job.loss(rollout_id))
            self._restore("actor")
        with self.job.within():
            for step in range(2):
                self._see(self.job.learn(2 * rollout_id + step))
        self._backup("actor")
        return None

    def save_model(self, rollout_id: int, force_sync: bool = False) -> None:
        if self.args.debug_rollout_only:
            return
        for _, weight in self.job.weights():
            self._see(weight)
        for each in self.job.state():
            self._see(each)

    def update_weights(self) -> None:
        if self.args.debug_rollout_only:
            return
        if self.args.colocate and self.args.update_weight_transport != "disk":
            for copy in self.copies["actor"].values():
                self._see(copy)
        else:
            for _, weight in self.job.weights():
                self._see(weight)
        if self.args.keep_old_actor:
            self._backup("old_actor")

    def clear_memory(self) -> None:
        """Nothing to clear on a CPU."""

    def _backup(self, tag: str) -> None:
        self.copies[tag] = {name: weight.detach().clone() for name, weight in self.job.weights()}

    def _restore(self, tag: str) -> None:
        for name, weight in self.job.weights():
            weight.data.copy_(self.copies[tag][name])

    def _see(self, tensor: torch.Tensor) -> None:
        self.seen.append(as_bytes(tensor))


def run(actor: Any, args: Namespace, role: str = "actor", *, rollouts: int = 3, **models: bool) -> list[bytes]:
    """The calls of slime's train.py, in its order. What they let be seen."""
    assert actor.init(args, role, **models) == (0 if args.debug_rollout_only else 1)
    if role == "actor":
        actor.update_weights()
    for rollout_id in range(rollouts):
        actor.train(rollout_id, None, external_data=None)
        if rollout_id == 1:
            actor.save_model(rollout_id, force_sync=False)
        actor.clear_memory()
        if role == "actor":
            actor.update_weights()
    seen: list[bytes] = actor.seen
    return seen
