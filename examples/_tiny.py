"""A language model of 20,000 parameters with the interface of transformers, for the examples with
several ranks."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from placement.cli.demo import make_worker
from placement.cli.grpo import Characters, Recipe, Worker


@dataclasses.dataclass
class Output:
    logits: Tensor
    past_key_values: Any


class TinyModel(nn.Module):
    """A recurrent model; its hidden state takes the place of a KV cache."""

    def __init__(self, vocabulary_size: int, width: int = 48) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary_size, width)
        self.body = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocabulary_size)

    def forward(self, input_ids: Tensor, past_key_values: Tensor | None = None, **_: Any) -> Output:
        hidden, state = self.body(self.embedding(input_ids), past_key_values)
        return Output(self.head(hidden), state)


def data_parallel(seed: int, device: torch.device, steps: int) -> Worker:
    """The demo's job on this rank: the same weights on all ranks, different questions on each,
    gradients averaged by DDP."""
    torch.manual_seed(seed)
    tokenizer = Characters()
    recipe = Recipe(
        steps=steps,
        prompts=8,
        completions=8,
        new_tokens=3,
        minibatches=2,
        seed=seed + dist.get_rank(),
    )
    worker = make_worker(TinyModel(tokenizer.vocabulary_size), tokenizer, device, recipe)
    actor = DistributedDataParallel(worker.actor, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(actor.parameters(), lr=recipe.learning_rate)
    return dataclasses.replace(worker, actor=actor, optimizer=optimizer)
