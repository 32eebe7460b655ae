"""Caches that a forward makes under `torch.inference_mode()` (rotary tables) move with their module, and stay what they are."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import placement
from placement import Manager
from placement.devices import adoption
from placement.testing import assert_nothing_resident
from tests.support.worker import assert_same, in_a_range, learn, make_manager

FORMS = ["attribute", "list", "buffer", "persistent", "view"]


class Rotary(nn.Module):
    """Makes its cache anew wherever it cannot use the one that it has, as model code does."""

    def __init__(self, form: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(64, 8)
        self.form, self.length = form, 0
        self.caches: list[torch.Tensor] = []
        self.table: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > self.length or (torch.is_grad_enabled() and self.cache.is_inference()):
            self.length = len(x)
            table = torch.cos(torch.arange(8.0) * len(x))
            if self.form == "attribute":
                self.table = table
            elif self.form == "list":
                self.caches = [table]
            elif self.form == "view":
                self.caches = [table, table[2:], table.view(2, 4)]
            else:
                self.register_buffer("table", table, persistent=self.form == "persistent")
        return self.linear(x) * self.cache

    @property
    def cache(self) -> torch.Tensor:
        return self.caches[0] if self.caches else self.table


def _managed(model: nn.Module, role: str, **keywords: Any) -> Manager:
    manager = make_manager(**keywords)
    target = placement.TorchEngine(model) if role == "rollout" else model
    manager.register("it", target, role=role, readonly=role == "ref")
    return manager


@pytest.mark.parametrize("swaps", [True, False], ids=["swap", "rebind"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("role", "policy"), [("actor", "colocated"), ("actor", "resident"), ("ref", "colocated"), ("rollout", "colocated")]
)
def test_a_cache_born_in_inference_mode_moves_with_its_module(
    form: str, role: str, policy: str, swaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not swaps:
        monkeypatch.setattr(adoption, "can_swap", lambda: False)
    model, twin = Rotary(form), Rotary(form)
    manager = _managed(model, role, policy=policy)
    phase = "rollout" if role == "rollout" else "log_prob"
    for rows in (2, 5, 5, 3):
        with manager.phase(phase), torch.inference_mode():
            assert_same(model(torch.ones(rows, 64)), twin(torch.ones(rows, 64)))
            assert model.cache.is_inference()
        if policy == "colocated":
            assert in_a_range(model.cache)
            assert bool(model.cache.isnan().all())
            assert_nothing_resident(manager)
    if role == "actor":
        sgd, other = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, twin))
        manager.register("it.optimizer", sgd)
        with manager.phase("train"):
            learn(model, sgd)
        learn(twin, other)
    assert_same(dict(manager.handles["it"].state_dict()) if role != "rollout" else {}, dict(twin.state_dict()) if role != "rollout" else {})
    manager.close()
    assert not in_a_range(model.cache)
    assert_same(model.cache, twin.cache)
    assert_same(dict(model.state_dict()), dict(twin.state_dict()))


@pytest.mark.parametrize("form", FORMS)
def test_a_cache_that_a_warm_up_has_made_is_registered_with_its_module(form: str) -> None:
    model = Rotary(form)
    with torch.inference_mode():
        wanted = model(torch.ones(3, 64)).clone()
    before = copy.deepcopy(model.cache)
    manager = _managed(model, "actor")
    assert_nothing_resident(manager)
    with manager.phase("log_prob"), torch.inference_mode():
        assert_same(model(torch.ones(3, 64)), wanted)
    manager.unregister("it")
    assert_same(model.cache, before)


def test_optimizer_state_born_in_inference_mode_moves() -> None:
    model = nn.Linear(64, 8)
    adam = torch.optim.AdamW(model.parameters())
    manager = _managed(model, "actor")
    handle = manager.register("adam", adam)
    with manager.phase("train"):
        model(torch.ones(1, 64)).sum().backward()
        with torch.inference_mode():
            adam.state[model.weight]["average"] = torch.full((8, 64), 3.0)
        adam.zero_grad()
    assert_nothing_resident(manager)
    assert bool((handle.state_dict()["state"][0]["average"] == 3).all())
