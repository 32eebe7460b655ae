"""The table of docs/offloaded.md, row by row: each way to read or write an offloaded value is
tried, and does what the table says."""

from __future__ import annotations

import copy
import pickle
import re
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.utils._python_dispatch import TorchDispatchMode

import placement
import placement.checkpoint
from placement.tensors.plain import nested_tensors
from placement.testing import SimulatedDevice, assert_nothing_resident
from tests.support.early import Foresight
from tests.support.late_device import LateDevice
from tests.support.sweeps import few
from tests.support.threads import HANG_SECONDS
from tests.support.worker import through_a_file

_PAGE = Path(__file__).parents[2] / "docs" / "offloaded.md"


class Hooked(nn.Linear):
    """A layer whose state dict is made by code that reads values, in every way that torch has for
    it."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self._register_state_dict_hook(
            lambda _, found, prefix, __: found.update(
                {f"{prefix}weight": found[f"{prefix}weight"].double()}
            )
        )

    def get_extra_state(self) -> dict[str, torch.Tensor]:
        return {"amax": self.weight.detach().abs().max()}

    def set_extra_state(self, state: object) -> None:
        pass

    def _save_to_state_dict(
        self, destination: dict[str, torch.Tensor], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}norm"] = self.weight.detach().norm()


class World:
    """An actor that was trained for a step, its optimizer and its gradients; all offloaded."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.manager = self.make_manager()
        self.model = nn.Sequential(nn.Linear(4, 4), Hooked(4, 4))
        self.adam = torch.optim.AdamW(self.model.parameters())
        self.adam.register_state_dict_post_hook(lambda _, found: copy.deepcopy(found))
        self.actor = self.manager.register("actor", self.model, role="actor")
        self.optimizer = self.manager.register("actor.optimizer", self.adam)
        self.x = torch.ones(1, 4)
        with self.manager.phase("train"):
            self.model(self.x).sum().backward()
            self.adam.step()
            self.values = {name: p.detach().clone() for name, p in self.model.named_parameters()}
            self.gradients = {name: p.grad.clone() for name, p in self.model.named_parameters()}
            self.moments = {
                name: self.adam.state[p]["exp_avg"].clone()
                for name, p in self.model.named_parameters()
            }
        self.check_left()

    def make_manager(self) -> placement.Manager:
        return placement.Manager(device=SimulatedDevice(capacity_bytes=1 << 28))

    def check_left(self) -> None:
        assert_nothing_resident(self.manager)

    def entered(self) -> None:
        """The next phase transition that loads everything."""
        with self.manager.phase("train"):
            pass

    def check_values(self) -> None:
        """Nothing is lost: parameters, gradients and moments are what they were."""
        with self.manager.phase("train"):
            for name, parameter in self.model.named_parameters():
                assert torch.equal(parameter, self.values[name]), name
                assert torch.equal(parameter.grad, self.gradients[name]), name
                assert torch.equal(self.adam.state[parameter]["exp_avg"], self.moments[name]), name
        self.check_left()
        assert self.manager.audit().ok, self.manager.audit().report


class EarlyWorld(World):
    """The same while everything stays on the device as pages aside, which are being saved to the
    host copy."""

    def make_manager(self) -> placement.Manager:
        return placement.Manager(
            device=LateDevice(1 << 28, chunk_bytes=1 << 18), policy=Foresight(in_idle=True)
        )

    def check_left(self) -> None:
        handles = self.manager.handles.values()
        assert all(handle.resident_bytes == handle.prefetched_bytes for handle in handles)

    def check_values(self) -> None:
        super().check_values()
        self.manager.close()


Way = Callable[[World], object]
"""Tries one way. Raises AssertionError where what it reads is not the true value."""


def _equal(found: torch.Tensor, true: torch.Tensor) -> None:
    assert torch.equal(found.to(true.dtype), true), found


def _read_state_dicts(world: World) -> None:
    for found in (world.actor.state_dict(), world.model.state_dict()):
        _equal(found["0.weight"], world.values["0.weight"])
    for found in (world.model[0].state_dict(), get_model_state_dict(world.model[0])):
        _equal(found["weight"], world.values["0.weight"])
    _equal(through_a_file(world.model.state_dict())["0.weight"], world.values["0.weight"])


def _read_hooked(world: World) -> None:
    found = world.model.state_dict()
    _equal(found["1.weight"], world.values["1.weight"])
    _equal(found["1._extra_state"]["amax"], world.values["1.weight"].abs().max())
    _equal(found["1.norm"], world.values["1.weight"].norm())


def _read_moments(world: World) -> None:
    _equal(world.optimizer.state_dict()["state"][0]["exp_avg"], world.moments["0.weight"])
    _equal(world.adam.state_dict()["state"][0]["exp_avg"], world.moments["0.weight"])


def _compiled_in_place(world: World) -> object:
    world.model.compile(backend="eager")
    return world.model(world.x)


def _is_nan(found: torch.Tensor) -> None:
    assert found.isnan().any(), found


def _write(change: Callable[[torch.Tensor], object]) -> Way:
    def way(world: World) -> None:
        with torch.no_grad():
            change(world.model[0].weight)

    return way


def _write_gradient(change: Callable[[torch.Tensor], object]) -> Way:
    return lambda world: change(world.model[0].weight.grad)


def _unscale(world: World) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(1))
    scaler.unscale_(world.adam)


def _write_moment(change: Callable[[torch.Tensor], object]) -> Way:
    return lambda world: change(world.adam.state[world.model[0].weight]["exp_avg"])


def _sent_through_a_queue(world: World) -> None:
    queue = torch.multiprocessing.get_context("fork").Queue()
    queue.put([parameter.detach() for parameter in world.model.parameters()])
    queue.get()


def _kept_state_dict(world: World) -> None:
    found = world.model.state_dict()
    found["0.weight"].add_(1)
    world.values["0.weight"] = world.values["0.weight"] + 1


def _zeroed(world: World, *objects: Any) -> None:
    for each in objects:
        each.zero_grad(set_to_none=False)
    world.gradients = {
        name: torch.zeros_like(gradient) for name, gradient in world.gradients.items()
    }


def _late_call(world: World) -> object:
    """A call that another thread is in when the phase ends."""
    is_inside, has_left = threading.Event(), threading.Event()

    def wait(*_: object) -> None:
        is_inside.set()
        assert has_left.wait(HANG_SECONDS)
        _is_nan(world.model[0].weight.clone())

    hook = world.model[0].register_forward_hook(wait)
    with ThreadPoolExecutor(1) as pool:
        with world.manager.phase("train"):
            call = pool.submit(world.model, world.x)
            assert is_inside.wait(HANG_SECONDS)
        has_left.set()
        hook.remove()
        return call.result(HANG_SECONDS)


def _checkpointed(world: World) -> None:
    """Of the optimizer: torch cannot name the tensors of the model's hooks."""
    with tempfile.TemporaryDirectory() as folder:
        placement.checkpoint.save(world.manager, folder, only=["actor.optimizer"])
        world.optimizer.state_dict()["state"][0]["exp_avg"].zero_()
        placement.checkpoint.load(world.manager, folder, only=["actor.optimizer"])
    _read_moments(world)


def _add(world: World) -> None:
    world.model.register_buffer("extra", torch.ones(3))


def _add_parameter(world: World) -> None:
    world.model.extra = nn.Parameter(world.model[0].weight.detach().clone())


def _add_state(world: World) -> None:
    world.adam.state[world.model[0].weight]["extra"] = torch.ones(3)


def _backward(world: World) -> None:
    world.model.zero_grad()
    world.gradients = dict.fromkeys(world.gradients)
    world.model[0].weight.square().sum().backward()


def _exchange(world: World) -> None:
    first, second = world.model[0].weight, world.model[1].weight
    first.data, second.data = second.data, first.data


def _swap_layers(world: World) -> None:
    world.model[0], world.model[1] = world.model[1], world.model[0]
    for values in (world.values, world.gradients, world.moments):
        for name in ("weight", "bias"):
            first, second = f"0.{name}", f"1.{name}"
            values[first], values[second] = values[second], values[first]


def _tie(world: World) -> None:
    world.model[1].weight = world.model[0].weight


ROWS: dict[str, tuple[Way, ...]] = {
    ("`state_dict()` of the handle, the module, a submodule or the optimizer; `checkpoint.save`"): (
        _read_state_dicts,
        _read_hooked,
        _read_moments,
        _checkpointed,
    ),
    "a write into a tensor of a state dict": (_kept_state_dict,),
    "`zero_grad()` of the module, a submodule or the optimizer": (
        lambda world: _zeroed(world, world.model),
        lambda world: _zeroed(world, *world.model),
        lambda world: _zeroed(world, world.adam),
    ),
    "layers, or parameters of a group, change places": (
        _swap_layers,
        lambda world: world.adam.param_groups[0]["params"].reverse(),
    ),
    "`module(x)`, `module.forward(x)`, a call of a submodule, a compiled call": (
        lambda world: world.model(world.x),
        lambda world: world.model.forward(world.x),
        lambda world: world.model[0](world.x),
        lambda world: torch.compile(world.model, backend="eager")(world.x),
        lambda world: torch.compile(lambda x: world.model(x) * 2, backend="eager")(world.x),
        _compiled_in_place,
    ),
    "`optimizer.step()`, registered or not": (
        lambda world: world.adam.step(),
        lambda world: torch.optim.SGD(world.model.parameters()).step(),
    ),
    ("`load_state_dict` of the module, a submodule or the optimizer; `set_model_state_dict`"): (
        lambda world: world.model.load_state_dict(world.model.state_dict()),
        lambda world: world.model[0].load_state_dict(world.model[0].state_dict()),
        lambda world: world.adam.load_state_dict(world.adam.state_dict()),
        lambda world: set_model_state_dict(
            world.model,
            dict(world.model.state_dict()),
            options=StateDictOptions(full_state_dict=True, strict=False),
        ),
    ),
    "`copy.deepcopy`, `pickle` or `torch.save` of the module or the optimizer": (
        lambda world: copy.deepcopy(world.model),
        lambda world: pickle.dumps(world.model),
        lambda world: through_a_file(world.model),
        lambda world: copy.deepcopy(world.adam),
        lambda world: pickle.dumps(world.adam),
        lambda world: through_a_file({"optimizer": world.adam}),
    ),
    "a call in another thread that is late": (_late_call,),
    (
        "a parameter read without its module: `functional.linear(x, weight)`, `weight.clone()`, "
        "`torch.save(weight)`"
    ): (
        lambda world: _is_nan(torch.nn.functional.linear(world.x, world.model[0].weight)),
        lambda world: _is_nan(world.model[0].weight.clone()),
        lambda world: _is_nan(copy.deepcopy(world.model[0].weight)),
        lambda world: _is_nan(through_a_file(world.model[0].weight)),
    ),
    (
        "a parameter, buffer or state written in place: `mul_`, `copy_`, `out=`, a foreach "
        "function, a view, `.data.mul_()`, a numpy alias"
    ): (
        _write(lambda t: t.mul_(0.5)),
        _write(lambda t: t.copy_(torch.ones_like(t))),
        _write(lambda t: torch.mul(t, 2, out=t)),
        _write(lambda t: torch._foreach_mul_([t], 2)),
        _write(lambda t: t[0].fill_(1)),
        _write(lambda t: t.data.mul_(0.4).add_(torch.ones_like(t), alpha=0.6)),
        _write(lambda t: t.detach().numpy().__setitem__((0, 0), 3.0)),
        _write_moment(lambda t: t.mul_(0.5)),
        _write_moment(lambda t: t.data.mul_(0.4)),
    ),
    "a gradient written in place: `clip_grad_norm_`, `GradScaler.unscale_`, `mul_`": (
        lambda world: torch.nn.utils.clip_grad_norm_(world.model.parameters(), 0.1),
        _unscale,
        _write_gradient(lambda t: t.mul_(0.5)),
        _write_gradient(lambda t: t.zero_()),
        lambda world: torch.optim.SGD(world.model.parameters()).zero_grad(set_to_none=False),
    ),
    "a tensor added: a buffer, a parameter, an entry of the optimizer's state": (
        _add,
        _add_parameter,
        _add_state,
    ),
    "a backward pass that makes gradients": (_backward,),
    "`half()`, `to()`, `.data =`, two tensors exchanged": (
        lambda world: world.model.half(),
        lambda world: world.model._apply(lambda t: t.clone()),  # as to() another device does
        _write(lambda t: setattr(t, "data", torch.ones(t.shape))),
        _write_moment(lambda t: setattr(t, "data", t.data * 2)),
        _write(lambda t: setattr(t, "data", torch.empty(0))),  # to free its memory
        _write_moment(lambda t: setattr(t, "data", torch.empty(0))),
        _exchange,
    ),
    "a new `nn.Parameter` or module in the place of a registered one, tied weights": (
        lambda world: setattr(world.model[0], "weight", nn.Parameter(torch.ones(4, 4))),
        lambda world: world.model.__setitem__(0, nn.Linear(4, 4)),
        _tie,
    ),
    "`share_memory()`, parameters sent through a queue": (
        lambda world: world.model.share_memory(),
        _sent_through_a_queue,
    ),
}
"""The ways that are tried, by the first column of the page."""
PAGE_ROWS = re.findall(
    r"^\| (?!while the)(.+?) \| (.+?) \| (.+?) \|$", _PAGE.read_text(encoding="utf-8"), re.MULTILINE
)


def test_the_page_has_these_rows() -> None:
    assert [what for what, *_ in PAGE_ROWS] == [*ROWS]


@pytest.mark.filterwarnings("ignore:.*TypedStorage")
@pytest.mark.parametrize("make_world", few([World, EarlyWorld], World))
@pytest.mark.parametrize(("what", "at_the_call", "later"), PAGE_ROWS)
def test_the_page_is_right(
    make_world: type[World], what: str, at_the_call: str, later: str
) -> None:
    for way in ROWS[what] if make_world is World else ROWS[what][:1]:
        torch._dynamo.reset()
        world = make_world()
        if at_the_call.endswith("`NotResidentError`"):
            with pytest.raises(placement.NotResidentError, match="'actor"):
                way(world)
        else:
            assert at_the_call in ("right values", "NaN", "nothing")
            way(world)
        LATER[later](world)


def _is_told(world: World, said: str) -> None:
    """By findings of audits, and once by the next transition."""
    for _ in range(2):
        assert world.manager.audit().findings
    with pytest.raises(placement.IntegrityError, match=f"were {said}|{said} into"):
        world.entered()


def _nothing(world: World) -> None:
    assert world.manager.audit().ok, world.manager.audit().report
    world.check_values()


def _written(world: World) -> None:
    _is_told(world, "(written|wrote)")
    assert world.manager.snapshot().wrong_writes == 1
    world.check_values()


def _added(world: World) -> None:
    state = [world.model.state_dict(), world.adam.state_dict()]
    _is_told(world, "added")
    with world.manager.phase("train"):
        for name, parameter in world.model.named_parameters():
            assert name == "extra" or torch.equal(parameter, world.values[name])
        found = [world.model.state_dict(), world.adam.state_dict()]
        assert _as_text(found) == _as_text(state)
    assert world.manager.audit().ok, world.manager.audit().report
    world.manager.close()


def _as_text(state: object) -> list[str]:
    return [f"{name}: {tensor.tolist()}" for name, tensor in nested_tensors(state, "")]


def _replaced(world: World) -> None:
    state = _as_text(world.model.state_dict())
    _is_told(world, "replaced")
    with pytest.raises(placement.IntegrityError, match=r"restore\(\)"):
        world.entered()
    with world.manager.phase("reward"):
        pass
    assert _as_text(world.model.state_dict()) == state
    parameters = [*world.model.parameters()]
    for handle in (world.actor, world.optimizer):
        handle.restore()
        handle.restore()
    assert all(a is b for a, b in zip(parameters, world.model.parameters(), strict=True))
    is_tied = world.model[1].weight is world.model[0].weight
    with world.manager.phase("train"):
        for name, parameter in world.model.named_parameters():
            assert torch.equal(parameter, world.values[name]), name
        for index, name in enumerate(world.values):
            assert is_tied or torch.equal(
                world.adam.state_dict()["state"][index]["exp_avg"], world.moments[name]
            )
    assert world.actor.resident_bytes == world.actor.prefetched_bytes
    world.manager.close()


LATER: dict[str, Callable[[World], None]] = {
    "nothing": _nothing,
    "`IntegrityError`: written. Every value is as it was": _written,
    "`IntegrityError`: added. It stays as it is": _added,
    "`IntegrityError`: replaced. The handle does not move": _replaced,
}


class Passing(TorchDispatchMode):
    """A mode that changes nothing, as `FlopCounterMode` does."""

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Any = None,
    ) -> object:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("set_to_none", [False, True])
def test_zero_grad_under_a_mode(set_to_none: bool) -> None:
    world = World()
    adam = torch.optim.AdamW(world.model.parameters(), fused=True)
    world.manager.register("more", adam)
    for each in (adam, world.model, world.adam):
        with Passing():
            each.zero_grad(set_to_none=set_to_none)
        with world.manager.phase("train"):
            assert all(
                p.grad is None if set_to_none else not p.grad.any()
                for p in world.model.parameters()
            )
            world.model(world.x).sum().backward()
    assert world.manager.audit().ok
