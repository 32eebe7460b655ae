"""Optimizers of a user's own over parameters sharded by FSDP2: state in objects, and masters in the state."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.distributed.fsdp import fully_shard

import placement
from tests.sharded import training
from tests.support.ranks import Ranks, on_ranks
from tests.support.worker import batch
from tests.unit.test_cast import MasterAdam


@dataclass
class Mean:
    value: torch.Tensor


class Averaging(optim.AdamW):
    """Keeps a mean of the weights in an object."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault("mean", Mean(torch.zeros_like(p))).value.lerp_(p.detach(), 0.1)


class Program(training.Program):
    """The means are values, too."""

    def values(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from super().values()
        for index, entry in enumerate(self.optimizer.state.values()):
            if "mean" in entry:
                yield f"mean.{index}", entry["mean"].value


def build(make: Any, dtype: torch.dtype) -> Program:
    model = nn.Sequential(nn.Linear(8, 21), nn.Tanh(), nn.Linear(21, 3)).to(dtype)
    for part in (model[0], model[2], model):
        fully_shard(part)

    def loss(number: int) -> torch.Tensor:
        found: torch.Tensor = model(batch(number, 8).to(dtype)).float().square().mean()
        return found

    phases = (("log_prob", "evaluate"), ("train", "learn"))
    return Program(model, make(model.parameters()), loss, phases=phases, has_masters=make is MasterAdam)


@pytest.mark.parametrize(("make", "dtype"), [(Averaging, torch.float32), (MasterAdam, torch.bfloat16)])
def test_steps_are_those_without_placement(two_ranks: Ranks, make: Any, dtype: torch.dtype) -> None:
    for outcome in two_ranks.run(training.compare, functools.partial(build, make, dtype)):
        # Masters make the weights, of which nothing is copied to the host.
        assert (outcome.offloaded_bytes["actor"] == 0) == (make is MasterAdam)


@on_ranks("two_ranks")
def test_sharded_state_in_objects_cannot_be_saved(tmp_path: Path) -> None:
    program = build(Averaging, torch.float32)
    manager = training.managed(program)
    with manager.phase("train"):
        program.learn(0)
    with pytest.raises(placement.CheckpointError, match=r"state of '0.weight' is sharded and has tensors in objects"):
        placement.checkpoint.save(manager, tmp_path)
