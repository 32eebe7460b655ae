"""Weights that are the cast of float32 masters in an optimizer's state: such an optimizer, a model,
and the same without placement."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from placement.registration.streamed_optimizer import allow
from placement.storage.cast import CastRange
from placement.testing import assert_nothing_resident
from tests.support.worker import assert_same, batch, make_manager

WIDTH = 96


@allow
class MasterAdam(torch.optim.Optimizer):
    """Adam on float32 masters in its state, from which it writes the weights."""

    writes_weights = True

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-2})
        for parameter in self.param_groups[0]["params"]:
            master = parameter.detach().float()
            self.state[parameter] = {
                "exp_avg": torch.zeros_like(master),
                "exp_avg_sq": torch.zeros_like(master),
                "master": master,
            }

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                state, gradient = self.state[parameter], parameter.grad.float()
                state["exp_avg"].lerp_(gradient, 0.1)
                state["exp_avg_sq"].lerp_(gradient.square(), 0.1)
                state["master"].addcdiv_(
                    state["exp_avg"], state["exp_avg_sq"].sqrt().add_(1e-8), value=-1e-2
                )
                if self.writes_weights:
                    parameter.copy_(state["master"])

    def _init_group(self, *_: Any) -> None:
        """A step in parts is known to be right for classes that have it."""

    def load_state_dict(self, state_dict: Any) -> None:
        """Torch's own would cast the state to the weights' dtype."""
        for parameter, state in zip(
            self.param_groups[0]["params"], state_dict["state"].values(), strict=True
        ):
            self.state[parameter] = dict(state)


def net(dtype: torch.dtype = torch.bfloat16) -> torch.nn.Sequential:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH),
        torch.nn.Tanh(),
        torch.nn.Linear(WIDTH, WIDTH),
        torch.nn.LayerNorm(WIDTH),
    )
    model[:3].to(dtype)
    model[3].requires_grad_(False)
    return model


def loss(model: torch.nn.Module, seed: int) -> torch.Tensor:
    inner = torch.nn.Sequential(*list(model)[:3])  # type: ignore[call-overload]
    return inner(batch(seed, WIDTH).to(model[0].weight.dtype)).float().square().mean()  # type: ignore[index]


class Job:
    """A model in bfloat16 beside a plain copy of it, which placement does not know and which learns
    the same."""

    def __init__(
        self,
        *,
        has_masters: bool = True,
        replicated: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        **keywords: Any,
    ) -> None:
        self.model, self.plain = net(dtype), net(dtype)
        self.adam = MasterAdam([p for p in self.model.parameters() if p.requires_grad])
        self.plain_adam = MasterAdam([p for p in self.plain.parameters() if p.requires_grad])
        self.manager = make_manager(**keywords)
        self.actor = self.manager.register(
            "actor", self.model, role="actor", masters=self.adam if has_masters else None
        )
        self.optimizer = self.manager.register("actor.optimizer", self.adam, replicated=replicated)

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

    def write(self, change: Callable[[Any], object]) -> None:
        """Change both models alike."""
        for model in (self.model, self.plain):
            change(model)

    def add_to_masters(self) -> None:
        """To those of both, whose weights are their cast no longer."""
        for state in (*self.adam.state.values(), *self.plain_adam.state.values()):
            state["master"].add_(1.0)

    def train(self, seed: int = 0) -> None:
        with self.manager.phase("train"):
            self.check_masters()
            self.learn(seed)

    def check_masters(self) -> None:
        """Values are left to masters only while both are offloaded."""
        holding = self.actor.holding
        assert holding is not None
        for r in holding.ranges:
            if isinstance(r, CastRange) and r.is_cast and holding.is_consistent:
                assert not holding.on_device
                assert not r.optimizer.on_device

    def check(self) -> None:
        """The values are those of the plain copy, on the device and in the host copy."""
        self.check_masters()
        with self.manager.phase("log_prob"):
            assert_same(self.model.state_dict(), self.plain.state_dict())
        with self.manager.phase("restore"):
            assert_same([*self.adam.state.values()], [*self.plain_adam.state.values()])
        assert_same(self.actor.state_dict(), self.plain.state_dict())
        assert_same(self.optimizer.state_dict()["state"], self.plain_adam.state_dict()["state"])
        self.manager.check_integrity()
        assert self.manager.audit().ok
        assert_nothing_resident(self.manager)
