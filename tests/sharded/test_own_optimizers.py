"""Containers of optimizers, methods of their own and state in objects, of parameters sharded by FSDP2."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import placement
from placement.testing import assert_nothing_resident
from tests.support.ranks import Ranks
from tests.support.worker import assert_same, batch, make_manager
from tests.unit.test_cast import MasterAdam


@dataclass
class Mean:
    value: torch.Tensor


class Averaging(optim.AdamW):
    """Keeps a mean of the weights in an object, and puts it in place of them when it is told to."""

    is_training = True

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            mean = self.state[p].setdefault("mean", Mean(torch.zeros_like(p)))
            mean.value.lerp_(p.detach(), 0.1)

    @torch.no_grad()
    def eval(self) -> None:
        self.is_training = False
        for p in self.param_groups[0]["params"]:
            p.lerp_(self.state[p]["mean"].value, 0.5)


class Container(optim.Optimizer):
    def __init__(self, model: nn.Module) -> None:
        parameters = [*model.parameters()]
        self.optimizers = [Averaging(parameters[:2], lr=0.01), Averaging(parameters[2:], lr=0.02)]
        super().__init__(parameters, {"lr": 1.0})

    def step(self, closure: Any = None) -> None:
        for each in self.optimizers:
            each.step()

    def eval(self) -> None:
        for each in self.optimizers:
            each.eval()


def make(manager: placement.Manager | None) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 21), nn.Tanh(), nn.Linear(21, 3))
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh)
    optimizer = Container(model)
    if manager is not None:
        manager.register("actor", model, role="actor")
        manager.register("actor.optimizer", optimizer, owner="actor")
    return model, optimizer


def learn(model: nn.Module, optimizer: Any, seed: int) -> None:
    model(batch(seed, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def shards(model: nn.Module) -> list[torch.Tensor]:
    return [p.to_local().detach().clone() for p in model.parameters() if isinstance(p, DTensor)]


def compare(folder: Path) -> None:
    twin, its = make(None)
    manager = make_manager()
    model, optimizer = make(manager)
    for seed in range(2):
        learn(twin, its, seed)
        with manager.phase("train"):
            learn(model, optimizer, seed)
    assert_nothing_resident(manager)
    held = [entry["mean"].value for each in optimizer.optimizers for entry in each.state.values()]
    assert len(held) == 4
    assert all(torch.isnan(each.to_local()).all() for each in held)
    its.eval()
    with pytest.raises(placement.NotResidentError, match=r"eval\(\) of 'actor.optimizer'"):
        optimizer.eval()
    assert all(each.is_training for each in optimizer.optimizers)
    with manager.phase("train"):
        optimizer.eval()
    with pytest.raises(placement.CheckpointError, match=r"state of '0.weight' is sharded and has tensors in objects"):
        placement.checkpoint.save(manager, folder)
    learn(twin, its, 2)
    with manager.phase("train"):
        learn(model, optimizer, 2)
        assert all(map(torch.equal, shards(model), shards(twin)))


def test_two_ranks(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(compare, tmp_path)


def weights_of_masters() -> None:
    outcomes = []
    for manager in (None, make_manager()):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 21), nn.Tanh(), nn.Linear(21, 3)).bfloat16()
        for part in (model[0], model[2], model):
            fully_shard(part, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
        adam = MasterAdam(model.parameters())
        if manager is not None:
            actor = manager.register("actor", model, role="actor", masters=adam)
            manager.register("actor.optimizer", adam)
            assert actor.host_bytes == 0
        for seed in range(3):
            with nullcontext() if manager is None else manager.phase("log_prob"), torch.no_grad():
                outcomes.append(model(batch(seed, 8).bfloat16()))
            with nullcontext() if manager is None else manager.phase("train"):
                model(batch(seed, 8).bfloat16()).float().square().mean().backward()
                adam.step()
                adam.zero_grad()
            assert manager is None or actor.host_bytes == 0
    assert_same(outcomes[3:], outcomes[:3])
    assert not outcomes[0].equal(outcomes[1])


def test_shards_that_are_the_cast_of_masters_have_no_host_copy(two_ranks: Ranks) -> None:
    two_ranks.run(weights_of_masters)
