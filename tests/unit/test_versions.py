"""Version counters of an object whose host copy was written: raised by the load, as torch raises them at the write, and only there."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from placement import Handle, Manager, checkpoint
from placement.policies import Colocated
from tests.support.worker import assert_same, batch, make_manager, net


def by_handle(handle: Handle, path: Path) -> None:
    for value in handle.state_dict().values():
        value.mul_(2)


def by_a_view(handle: Handle, path: Path) -> None:
    for value in [each.flatten() for each in handle.state_dict().values()]:
        value.mul_(2)


def by_a_held_one(handle: Handle, path: Path) -> None:
    held = handle.state_dict()
    with manager_of(handle).phase("log_prob"):
        pass
    for value in held.values():
        value.mul_(2)


def by_a_checkpoint(handle: Handle, path: Path) -> None:
    manager = manager_of(handle)
    by_handle(handle, path)
    checkpoint.save(manager, path, only=["actor"])
    for value in handle.state_dict().values():
        value.zero_()
    with manager.phase("log_prob"):
        pass
    checkpoint.load(manager, path, only=["actor"])


MANAGERS: dict[str, Manager] = {}


def manager_of(handle: Handle) -> Manager:
    return MANAGERS[handle.name]


def placed(policy: Any = "colocated") -> tuple[torch.nn.Module, torch.optim.Optimizer, Handle, Manager]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    manager = MANAGERS["actor"] = make_manager(policy=policy)
    handle = manager.register("actor", model, role="actor")
    manager.register("actor.optimizer", optimizer)
    return model, optimizer, handle, manager


def versions(model: torch.nn.Module) -> list[int]:
    return [parameter._version for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("way", "policy"),
    [*((way, "colocated") for way in (by_handle, by_a_view, by_a_held_one, by_a_checkpoint)), (by_handle, Colocated("streamed"))],
)
def test_a_load_raises_the_counters_of_what_was_written(way: Callable[[Handle, Path], None], policy: Any, tmp_path: Path) -> None:
    model, _, handle, manager = placed(policy)
    wanted = {name: value * 2 for name, value in copy.deepcopy(handle.state_dict()).items()}
    with manager.phase("train"):
        loss, before = model(batch()).sum(), versions(model)
    way(handle, tmp_path)
    with manager.phase("train"):
        assert_same(dict(model.state_dict()), wanted)
        after = versions(model)
        assert all(now > was for now, was in zip(after, before, strict=True))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        model.zero_grad()
    with manager.phase("train"):  # once
        assert versions(model) == after


def test_what_comes_back_as_it_was_keeps_its_counter() -> None:
    model, optimizer, handle, manager = placed()
    with manager.phase("train"):
        used = model[0](batch()).square().sum()  # type: ignore[index]
        before = versions(model)
    shown = handle.state_dict()
    shown["2.weight"].add_(1)
    copy.deepcopy(shown)
    del shown
    with manager.phase("train"):
        assert [now - was for now, was in zip(versions(model), before, strict=True)] == [0, 0, 1, 0]
        used.backward()
        optimizer.step()


def test_the_state_of_an_optimizer() -> None:
    model, optimizer, _, manager = placed()
    with manager.phase("train"):
        model(batch()).sum().backward()
        optimizer.step()
        moment = optimizer.state[next(model.parameters())]["exp_avg"]
        before = moment._version
    optimizer.state_dict()["state"][0]["exp_avg"].zero_()
    with manager.phase("train"):
        assert moment._version == before + 1
        assert not moment.any()


def test_a_state_dicts_tensor_begins_at_the_version_of_the_objects_own() -> None:
    model = torch.nn.Linear(4, 4)
    with torch.no_grad():
        model.weight.mul_(2)
    wanted = {name: value._version for name, value in model.state_dict().items()}
    handle = make_manager().register("actor", model, role="actor")
    assert wanted["weight"] > 0
    assert {name: value._version for name, value in handle.state_dict().items()} == wanted
