"""Optimizers of a user's own over parameters sharded by FSDP2: state in objects, and masters in the state."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.distributed.fsdp import fully_shard

import placement
from tests.support.ranks import on_ranks
from tests.support.worker import assert_same, batch, make_manager
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


def outputs(make: Any, dtype: torch.dtype, manager: placement.Manager | None) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What each of three steps computes first, and the local parts of the means."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 21), nn.Tanh(), nn.Linear(21, 3)).to(dtype)
    for part in (model[0], model[2], model):
        fully_shard(part)
    optimizer = make(model.parameters())
    if manager is not None:
        actor = manager.register("actor", model, role="actor", masters=optimizer if make is MasterAdam else None)
        manager.register("actor.optimizer", optimizer)
    found = []
    for seed in range(3):
        with nullcontext() if manager is None else manager.phase("log_prob"), torch.no_grad():
            found.append(model(batch(seed, 8).to(dtype)))
        with nullcontext() if manager is None else manager.phase("train"):
            model(batch(seed, 8).to(dtype)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert manager is None or make is not MasterAdam or actor.host_bytes == 0, "masters make the weights, which need no host copy"
    with nullcontext() if manager is None else manager.phase("train"):
        means = [entry["mean"].value.to_local().clone() for entry in optimizer.state.values() if "mean" in entry]
    return found, means


@pytest.mark.parametrize(("make", "dtype"), [(Averaging, torch.float32), (MasterAdam, torch.bfloat16)])
@on_ranks("two_ranks")
def test_steps_are_those_without_placement(make: Any, dtype: torch.dtype) -> None:
    manager = make_manager()
    plain = outputs(make, dtype, None)
    assert_same(outputs(make, dtype, manager), plain)
    assert not plain[0][0].equal(plain[0][1])


@on_ranks("two_ranks")
def test_sharded_state_in_objects_cannot_be_saved(tmp_path: Path) -> None:
    model = fully_shard(nn.Linear(8, 21))
    optimizer, manager = Averaging(model.parameters()), make_manager()
    manager.register("actor", model, role="actor")
    manager.register("actor.optimizer", optimizer)
    with manager.phase("train"):
        model(batch(0, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with pytest.raises(placement.CheckpointError, match=r"state of 'weight' is sharded and has tensors in objects"):
        placement.checkpoint.save(manager, tmp_path)
