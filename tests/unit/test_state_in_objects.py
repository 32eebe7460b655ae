"""Tensors of an optimizer that are attributes of objects in its state."""

from __future__ import annotations

import copy
import io
from collections import deque, namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import placement
from placement import Manager
from placement.tensors.plain import nested_tensors
from placement.testing import assert_nothing_resident
from tests.support.worker import assert_same, learn, make_manager, net


@dataclass
class Factor:
    """A plain object with a tensor."""

    matrix: Any


@dataclass(slots=True)
class Slotted:
    """The same, without a `__dict__`."""

    matrix: Any


def test_the_walk_looks_so_many_objects_deep_as_it_is_told_and_only_into_plain_ones() -> None:
    a, b, c = torch.ones(1), torch.ones(2), torch.ones(3)
    loop = Factor([a])
    loop.matrix.append(loop)
    held = [loop, {"k": Slotted(deque([b]))}, Factor(Slotted(c)), nn.Linear(2, 2), torch.optim.SGD([a], lr=1.0), Factor, Factor(None)]
    assert list(nested_tensors(held, "s")) == []
    one = [("s.0.matrix.0", a), ("s.1.k.matrix.0", b)]
    assert list(nested_tensors(held, "s", levels=1)) == one
    assert list(nested_tensors(held, "s", levels=2)) == [*one, ("s.2.matrix.matrix", c)]


Pair = namedtuple("Pair", ["left", "right"])


class Frozen(Factor):
    """Refuses to have its attributes set, as a frozen dataclass does."""

    def __setattr__(self, name: str, value: Any) -> None:
        assert name not in vars(self)
        super().__setattr__(name, value)


def held(tensor: torch.Tensor, form: str) -> Any:
    forms = {
        "object": Factor(tensor),
        "list of objects": [Factor(tensor)],
        "slots": Slotted({"m": [tensor]}),
        "frozen": Frozen((tensor, 3)),
        "deque": deque([tensor], maxlen=2),
        "named tuple": Pair(Factor(tensor), 0),
    }
    return forms[form]


class Held(torch.optim.SGD):
    """Keeps a mean of squared gradients in objects in its state."""

    form = "object"

    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            entry = self.state[p]
            entry.setdefault("factor", held(torch.zeros_like(p), self.form))
            (mean,) = (tensor for _, tensor in nested_tensors(entry["factor"], "", levels=1))
            mean.lerp_(p.grad.square(), 0.1)
            p.data.sub_(p.grad / (mean.sqrt() + 1e-3), alpha=1e-3)

    def tensors(self) -> list[torch.Tensor]:
        return [tensor for _, tensor in nested_tensors([*self.state.values()], "", levels=4)]


def run(form: str, steps: range, manager: Manager | None = None, started: Any = None) -> tuple[nn.Module, Held]:
    torch.manual_seed(0)
    model = net(8) if started is None else started[0]
    optimizer = Held(model.parameters(), lr=0.1) if started is None else started[1]
    optimizer.form = form
    if manager is not None and started is None:
        manager.register("actor", model, role="actor")
        manager.register("actor.optimizer", optimizer)
    for seed in steps:
        if manager is None:
            learn(model, optimizer, seed, 8)
            continue
        with manager.phase("train"):
            learn(model, optimizer, seed, 8)
    return model, optimizer


@pytest.mark.parametrize("form", ["object", "list of objects", "slots", "frozen", "deque", "named tuple"])
def test_tensors_in_objects_move_and_are_saved(form: str, tmp_path: Path) -> None:
    twin, twins = run(form, range(3))
    manager, other = make_manager(), make_manager()
    model, optimizer = run(form, range(2), manager)
    mine = optimizer.tensors()
    assert len(mine) == 4
    assert all(torch.isnan(each).all() for each in mine)
    assert_nothing_resident(manager)
    handle = manager.handles["actor.optimizer"]
    assert handle.host_bytes >= sum(each.nbytes for each in mine)
    placement.checkpoint.save(manager, tmp_path)
    file = io.BytesIO()
    torch.save(handle.state_dict(), file)
    file.seek(0)
    saved = [tensor for _, tensor in nested_tensors(torch.load(file, weights_only=False), "", levels=1)]
    with manager.phase("train"):
        assert_same(saved, [each.clone() for each in mine])
    loaded = run(form, range(0), other)
    placement.checkpoint.load(other, tmp_path)
    for started, its in (((model, optimizer), manager), (loaded, other)):
        run(form, range(2, 3), its, started)
        assert_same(dict(its.handles["actor"].state_dict()), dict(twin.state_dict()))
        with its.phase("train"):
            assert_same(copy.deepcopy(started[1].tensors()), twins.tensors())
    if form == "deque":
        assert {entry["factor"].maxlen for entry in loaded[1].state.values()} == {2}


def test_what_does_not_move_is_named() -> None:
    class Deep(Held):
        """Has tensors two objects deep, and in an attribute of its own."""

        def step(self, closure: Any = None) -> None:
            self.shadow = {"w": [torch.ones(7)], "scale": torch.ones(())}
            self.grads = [p.grad for p in self.param_groups[0]["params"]]
            for p in self.param_groups[0]["params"]:
                self.state[p]["deep"] = Factor(Factor(torch.ones(5)))

    manager, model = make_manager(), net(8)
    optimizer = Deep(model.parameters(), lr=0.1)
    manager.register("actor", model, role="actor")
    handle = manager.register("actor.optimizer", optimizer)
    with manager.phase("train"):
        learn(model, optimizer, 0, 8)
        del optimizer.grads
    audit = manager.audit()
    named = [f"state.{index}.deep.matrix.matrix" for index in range(4)] + ["Deep.shadow.w.0"]
    assert all(f"foreign: actor.optimizer: {name}, which is no part of its state" in audit.report for name in named)
    assert audit.foreign_bytes == handle.foreign_bytes == 4 * 20 + 28
    with pytest.raises(AssertionError, match=r"28 bytes on the device: .*Deep.shadow.w.0"):
        assert_nothing_resident(manager)
    assert_nothing_resident(manager, allow_foreign=True)
