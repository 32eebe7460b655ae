"""Checkpoints of objects that show copies in their state dicts: restored in every state, or refused with every value as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from placement import CheckpointError, Manager, NotResidentError, checkpoint
from placement.testing import SimulatedDevice, assert_nothing_resident
from tests.support.worker import assert_same, learn

PHASES = [None, "restore", "train", "checkpoint"]


class Layers(torch.nn.Sequential):
    """Two layers, a buffer, and a plain tensor attribute that no state dict shows."""

    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(6, 6), torch.nn.Linear(6, 6, bias=False))
        self.register_buffer("seen", torch.arange(3.0))
        self.scale = torch.ones(5)


class Exported(Layers):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {name: value.float() * 1 for name, value in super().state_dict(*args, **kwargs).items()}


class Renamed(Layers):
    """Packed into one tensor, and unpacked again."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        values = super().state_dict(*args, **kwargs)
        return {"packed": torch.cat([value.flatten() for value in values.values()])}

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        start, given = 0, {}
        for name, value in super().state_dict().items():
            given[name] = state_dict["packed"][start : start + value.numel()].view_as(value)
            start += value.numel()
        return super().load_state_dict(given, strict, assign)


class Replacing(Exported):
    """It takes over the very tensors that it is given."""

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict(state_dict, strict, True)


class Deaf(Exported):
    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        return torch.nn.modules.module._IncompatibleKeys([], [])


class Lossy(Exported):
    """It restores one layer, forgets another, and changes what it should leave alone."""

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        with torch.no_grad():
            self[0].weight.copy_(state_dict["0.weight"])
            self[1].weight.fill_(3.0)
            self.scale.zero_()
            self[0].bias = torch.nn.Parameter(torch.full((6,), 7.0))
            self.extra = torch.ones(3)
        return torch.nn.modules.module._IncompatibleKeys([], [])


class Raising(Lossy):
    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        super().load_state_dict(state_dict)
        raise ValueError("half way")


def cloning(model: torch.nn.Module) -> None:
    model._register_state_dict_hook(lambda _, found, *__: found.update({name: value.clone() for name, value in found.items()}))


def casting(model: torch.nn.Module) -> None:
    """As an export in half the bytes: what comes back has lost the rest, and shows the same."""
    model._register_state_dict_hook(lambda _, found, *__: found.update({name: value.bfloat16() for name, value in found.items()}))


def summing(model: torch.nn.Module) -> None:
    """One entry is computed from the others, which are the module's own memory."""
    model._register_state_dict_hook(lambda _, found, *__: found.update(total=found["0.weight"].sum()))


MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "clones": lambda: _with(cloning),
    "casts": lambda: _with(casting),
    "sums": lambda: _with(summing),
    "exported": Exported,
    "renamed": Renamed,
    "replacing": Replacing,
}


def _with(hook: Callable[[torch.nn.Module], None]) -> torch.nn.Module:
    model = Layers()
    hook(model)
    return model


def in_phase(manager: Manager, phase: str | None, act: Callable[[], None]) -> None:
    if phase is None:
        act()
    else:
        with manager.phase(phase):
            act()


def registered(model: torch.nn.Module) -> Manager:
    manager = Manager(device=SimulatedDevice(16 << 20, chunk_bytes=4096))
    manager.register("actor", model, role="actor")
    return manager


def scramble(manager: Manager, model: torch.nn.Module) -> None:
    with manager.phase("train"), torch.no_grad():
        for index, value in enumerate([*model.parameters(), *model.buffers()]):
            value.copy_(torch.full_like(value, float(index)))


def own(model: Any) -> dict[str, torch.Tensor]:
    """The values themselves, past every hook; on the device."""
    found = {name: value.detach().clone() for name, value in [*model.named_parameters(), *model.named_buffers()]}
    return {**found, "scale": model.scale.clone()}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("kind", MODELS)
def test_what_shows_copies_is_restored_in_every_state(kind: str, phase: str | None, tmp_path: Path) -> None:
    model = MODELS[kind]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = registered(model)
    manager.register("actor.optimizer", optimizer)
    shown = copy.deepcopy(dict(model.state_dict()))
    with manager.phase("log_prob"):
        wanted = own(model)
    if kind == "casts":
        wanted = {name: value if name == "scale" else value.bfloat16().float() for name, value in wanted.items()}
    checkpoint.save(manager, tmp_path)
    scramble(manager, model)
    held, objects = manager.handles["actor"].state_dict(), [(id(each), each.data_ptr()) for each in model.parameters()]
    in_phase(manager, phase, lambda: checkpoint.load(manager, tmp_path))
    assert_nothing_resident(manager)
    assert_same(dict(model.state_dict()), shown)
    for again in ("log_prob", "train"):
        with manager.phase(again):
            assert_same(own(model), wanted)
        assert [(id(each), each.data_ptr()) for each in model.parameters()] == objects
    manager.check_integrity()
    del held
    with manager.phase("train"):  # the optimizer still steps the module's own parameters
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert not torch.equal(own(model)["0.weight"], wanted["0.weight"])
    assert_nothing_resident(manager)


@pytest.mark.parametrize("phase", [None, "restore"])
@pytest.mark.parametrize(
    ("cls", "said"),
    [
        (Deaf, "It ran, but seen, 0.weight, 0.bias, 1.weight of the state dict differ from the saved ones"),
        (Lossy, "It ran, but .* of the state dict differ from the saved ones"),
        (Raising, "That raised ValueError: half way"),
    ],
)
def test_what_cannot_be_restored_is_as_it_was(cls: type[Layers], said: str, phase: str | None, tmp_path: Path) -> None:
    model, other = cls(), Layers()
    manager = registered(model)
    manager.register("critic", other, role="critic")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager.register("actor.optimizer", optimizer)
    checkpoint.save(manager, tmp_path)
    scramble(manager, model)
    objects = [(id(value), value.data_ptr()) for value in (*model.parameters(), *model.buffers(), model.scale)]
    with manager.phase("train"):
        values = own(model)
    other.state_dict()["0.weight"].zero_()
    with pytest.raises(CheckpointError, match=rf"'actor': its state dict shows copies .*{said}"):
        in_phase(manager, phase, lambda: checkpoint.load(manager, tmp_path))
    assert_nothing_resident(manager)
    with manager.phase("train"):
        assert_same(own(model), values)
        assert [(id(value), value.data_ptr()) for value in (*model.parameters(), *model.buffers(), model.scale)] == objects
        assert not hasattr(model, "extra")
    assert not other.state_dict()["0.weight"].any(), "no handle is restored where one cannot be"
    manager.check_integrity()
    assert manager.audit().ok, manager.audit()


class Packing(torch.optim.SGD):
    """State of another form in its state dict, and back; `fails` says how the way back goes wrong."""

    fails = ""

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        if self.fails:
            for entry in self.state.values():
                entry["momentum_buffer"].mul_(2)
                entry["more"] = torch.ones(2)
            self.param_groups[0]["lr"] = 9.0
        if self.fails == "raises":
            raise ValueError("half way")


@pytest.mark.parametrize(
    ("fails", "said"), [("", ""), ("differs", "the state of '0.weight' is not as saved"), ("raises", "raised ValueError: half way")]
)
def test_an_optimizer_with_a_load_of_its_own(fails: str, said: str, tmp_path: Path) -> None:
    model = Layers()
    manager = registered(model)
    optimizer = Packing(model.parameters(), lr=0.1, momentum=0.9)
    handle = manager.register("actor.optimizer", optimizer)
    with manager.phase("train"):
        learn(model, optimizer, width=6)
        optimizer.zero_grad()
    saved = copy.deepcopy(optimizer.state_dict())
    checkpoint.save(manager, tmp_path)
    with manager.phase("train"):
        learn(model, optimizer, 1, width=6)
        optimizer.zero_grad()
    changed, weights = copy.deepcopy(handle.state_dict()), copy.deepcopy(dict(model.state_dict()))
    optimizer.fails = fails
    with pytest.raises(NotResidentError, match=r"'actor.optimizer'.*inside manager.phase\('restore'\)"):
        checkpoint.load(manager, tmp_path)
    assert_same(handle.state_dict(), changed)
    with manager.phase("restore"):
        if not fails:
            checkpoint.load(manager, tmp_path)
        else:
            with pytest.raises(CheckpointError, match=f"'actor.optimizer': Packing loads state .*{said}.*Every value is as it was"):
                checkpoint.load(manager, tmp_path)
    assert_same(handle.state_dict(), changed if fails else saved)
    if fails:
        assert_same(dict(model.state_dict()), weights)
    with manager.phase("train"):
        learn(model, optimizer, 2, width=6)
    manager.check_integrity()


def test_a_file_that_was_cut_short_is_named(tmp_path: Path) -> None:
    model = Layers()
    manager = registered(model)
    checkpoint.save(manager, tmp_path)
    data = next(tmp_path.glob("*.distcp"))
    whole = data.read_bytes()
    for kept in (0, 10, len(whole) // 2, len(whole) - 1):
        data.write_bytes(whole[:kept])
        with pytest.raises(CheckpointError, match=rf"(?s)rank 0: \w+.*[^.]\. Damaged files: {data.name} ends after {kept:,} of \S+ bytes"):
            checkpoint.load(manager, tmp_path)
    data.unlink()
    with pytest.raises(CheckpointError, match=rf"Damaged files: {data.name} is missing"):
        checkpoint.load(manager, tmp_path)
