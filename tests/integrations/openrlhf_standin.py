"""An actor in the shape of OpenRLHF's `PolicyModelActor` (OpenRLHF 0.11.2, openrlhf/trainer/ray/ppo_actor.py).

What it computes is a `Job`'s; OpenRLHF has a DeepSpeed engine there, which placement tracks and does not move.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from tests.integrations.jobs import as_bytes, made, plain
from tests.support.seeds import seed


class Actor:
    """Everything that leaves it is in `seen`, as bytes."""

    def init_model_from_pretrained(self, strategy: Any, pretrain: str, max_steps: int | None = None, vllm_engines: Any = None) -> None:
        seed(0)
        self.seen: list[bytes] = []
        self.job = plain()
        self.actor = SimpleNamespace(model=self.job.parts[0])
        self.actor_optim = self.job.optimizer

    def fit(self, kl_ctl: float = 0) -> None:
        self.seen.append(as_bytes(self.job.learn(0)))

    def forward(
        self,
        sequences: Any,
        action_mask: Any = None,
        attention_mask: Any = None,
        packed_seq_lens: Any = None,
        mm_train_inputs_list: Any = None,
    ) -> None:
        with torch.no_grad():
            self.seen.append(as_bytes(self.job.loss(1)))

    def broadcast_to_vllm(self) -> None:
        self.seen += [as_bytes(each) for _, each in self.job.weights()]

    def reload_states(self) -> None:
        """DeepSpeed's own."""

    def offload_states(self) -> None:
        """DeepSpeed's own."""


def run(actor: Any, steps: int = 2) -> list[bytes]:
    """The calls of `PPOTrainer` with sleep enabled."""
    actor.init_model_from_pretrained(None, "path")
    for _ in range(steps):
        actor.forward(None)
        actor.reload_states()
        actor.fit(kl_ctl=0.0)
        actor.offload_states()
        actor.broadcast_to_vllm()
    seen: list[bytes] = actor.seen
    return seen


def modules(remote: Any) -> dict[str, ModuleType]:
    """OpenRLHF's modules as far as the recipe looks into them. `remote` is `ray.remote`, with which OpenRLHF decorates its actors."""
    contents: dict[str, dict[str, Any]] = {"openrlhf": {}, "openrlhf.trainer": {}, "openrlhf.trainer.ray": {}}
    contents["openrlhf.trainer.ray.ppo_actor"] = {"PolicyModelActor": remote(num_gpus=1)(Actor)}
    return {name: made(name, names) for name, names in contents.items()}
