"""Weights in 16 bits that have no host copy of their own, because an optimizer has the float32 masters of which they are the cast."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch

import placement
from placement import HostMemoryError, IntegrityError, Manager, RegistrationError
from placement.policies import Colocated
from placement.testing import Faults, InjectedFault, SimulatedDevice, assert_nothing_resident
from tests.support.worker import assert_same, batch

CAPACITY = 64 << 20
WIDTH = 96


class MasterAdam(torch.optim.Optimizer):
    """Adam on float32 masters in its state, from which it writes the weights."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-2})
        for parameter in self.param_groups[0]["params"]:
            master = parameter.detach().float()
            self.state[parameter] = {"exp_avg": torch.zeros_like(master), "exp_avg_sq": torch.zeros_like(master), "master": master}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                state, gradient = self.state[parameter], parameter.grad.float()
                state["exp_avg"].lerp_(gradient, 0.1)
                state["exp_avg_sq"].lerp_(gradient.square(), 0.1)
                state["master"].addcdiv_(state["exp_avg"], state["exp_avg_sq"].sqrt().add_(1e-8), value=-1e-2)
                parameter.copy_(state["master"])


def net(dtype: torch.dtype = torch.bfloat16) -> torch.nn.Sequential:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, WIDTH), torch.nn.LayerNorm(WIDTH))
    model[:3].to(dtype)
    model[3].requires_grad_(False)
    return model


class Job:
    """A model in bfloat16 beside a plain copy of it, which placement does not know and which learns the same."""

    def __init__(self, *, has_masters: bool = True, dtype: torch.dtype = torch.bfloat16, **keywords: Any) -> None:
        self.model, self.plain = net(dtype), net(dtype)
        self.adam = MasterAdam([p for p in self.model.parameters() if p.requires_grad])
        self.plain_adam = MasterAdam([p for p in self.plain.parameters() if p.requires_grad])
        self.device = SimulatedDevice(CAPACITY)
        self.manager = Manager(**{"device": self.device, **keywords})
        self.actor = self.manager.register("actor", self.model, role="actor", masters=self.adam if has_masters else None)
        self.optimizer = self.manager.register("actor.optimizer", self.adam)

    @property
    def weight_bytes(self) -> int:
        return sum(p.nbytes for p in self.model.parameters() if p.requires_grad)

    @property
    def is_cast(self) -> bool:
        """Whether the weights have no host memory."""
        return self.actor.host_bytes < self.weight_bytes

    def learn(self, seed: int = 0) -> None:
        for model, adam in ((self.model, self.adam), (self.plain, self.plain_adam)):
            adam.zero_grad()
            loss(model, seed).backward()
            adam.step()
            adam.zero_grad()

    def train(self, seed: int = 0) -> None:
        with self.manager.phase("train"):
            self.learn(seed)

    def check(self) -> None:
        """The values are those of the plain copy, on the device and in the host copy."""
        with self.manager.phase("log_prob"):
            assert_same(self.model.state_dict(), self.plain.state_dict())
        with self.manager.phase("train"):
            assert_same([*self.adam.state.values()], [*self.plain_adam.state.values()])
        assert_same(self.actor.state_dict(), self.plain.state_dict())
        assert_same(self.optimizer.state_dict()["state"], self.plain_adam.state_dict()["state"])
        self.manager.check_integrity()
        assert self.manager.audit().ok
        assert_nothing_resident(self.manager)


def loss(model: torch.nn.Module, seed: int) -> torch.Tensor:
    inner = torch.nn.Sequential(*list(model)[:3])  # type: ignore[call-overload]
    return inner(batch(seed, WIDTH).to(model[0].weight.dtype)).float().square().mean()  # type: ignore[index]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_trains_the_same_and_saves_the_weights_host_memory(dtype: torch.dtype) -> None:
    job, usual = Job(dtype=dtype), Job(has_masters=False, dtype=dtype)
    for seed in range(3):
        job.train(seed)
        usual.train(seed)
        held = {name: each.host_bytes for name, each in ((one.name, one) for one in job.manager.snapshot().handles)}
        others = {each.name: each.host_bytes for each in usual.manager.snapshot().handles}
        assert others["actor"] - held["actor"] >= job.weight_bytes
        assert held["actor.optimizer"] == others["actor.optimizer"]
    job.check()
    assert_same(job.actor.state_dict(), usual.actor.state_dict())


def test_has_no_host_copy_from_the_registration_of_the_optimizer_on() -> None:
    assert Job().is_cast


def test_an_offload_copies_nothing_of_them_and_a_load_brings_masters_only_where_they_stay() -> None:
    job = Job()
    before = job.actor.counters.offloaded_bytes
    job.train()
    assert job.actor.counters.offloaded_bytes == before
    loaded = job.actor.counters.loaded_bytes
    with job.manager.phase("log_prob"):
        assert not job.optimizer.resident_bytes
        assert job.actor.counters.loaded_bytes - loaded >= 2 * job.weight_bytes
    assert job.is_cast
    job.check()
