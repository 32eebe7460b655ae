"""Whatever mode of torch the caller is in, placement does what it does outside of it: byte for
byte."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import placement
from placement import checkpoint
from placement.core.modes import uncompiled
from placement.testing import SimulatedDevice, assert_nothing_resident
from tests.support.sweeps import few
from tests.support.worker import assert_same, learn, net

Result = TypeVar("Result")
Inside = Callable[[Callable[[], Result]], Result]
"""Calls a function in a mode."""


class RefusesFunctions(TorchFunctionMode):
    """Nothing of ours may pass through it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was called in the caller's mode")


class RefusesOperations(TorchDispatchMode):
    """The same, a level below."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was called in the caller's mode")


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def all_at_once() -> Iterator[None]:
    with (
        torch.inference_mode(),
        torch.autocast("cpu", torch.bfloat16),
        torch.device("meta"),
        RefusesFunctions(),
        RefusesOperations(),
    ):
        yield


def under(context: Callable[[], AbstractContextManager[Any]]) -> Callable[[Callable[[], Any]], Any]:
    def inside(call: Callable[[], Any]) -> Any:
        with context():
            return call()

    return inside


def transformed(
    transform: Callable[..., Any], *, rows: int = 1
) -> Callable[[Callable[[], Any]], Any]:
    """Inside a function that is being transformed: `torch.func.grad(f)(x)`."""

    def inside(call: Callable[[], Any]) -> Any:
        results: list[Any] = []

        def function(x: torch.Tensor) -> torch.Tensor:
            results.append(call())
            return x.sum()

        transform(function)(torch.ones(rows, 2))
        return results[0]

    return inside


MODES: dict[str, Inside[Any]] = {
    "inference_mode": under(torch.inference_mode),
    "default device": under(lambda: torch.device("meta")),
    "default dtype bfloat16": under(lambda: default_dtype(torch.bfloat16)),
    "autocast": under(lambda: torch.autocast("cpu", torch.bfloat16)),
    "function mode": under(RefusesFunctions),
    "dispatch mode": under(RefusesOperations),
    "fake tensors": under(FakeTensorMode),
    "vmap": transformed(torch.func.vmap, rows=3),
    "functionalize": transformed(torch.func.functionalize),
    "all at once": under(all_at_once),
}
SHOWN = ("vmap", "functionalize")
"""The others run in CI alone, and here all of them together, as "streamed"."""
every_mode = pytest.mark.parametrize("inside", MODES.values(), ids=MODES.keys())
a_few_modes = pytest.mark.parametrize(
    "inside",
    few(MODES.values(), *(MODES[name] for name in (*SHOWN, "all at once"))),
    ids=MODES.keys(),
)


class Life:
    """A worker whose every call of placement is made in a mode, and whose computing is done outside
    of it."""

    def __init__(self, inside: Inside[Any], folder: Path, policy: Any) -> None:
        torch.manual_seed(0)
        self.inside = inside
        self.seen: list[Any] = []
        """What it was shown on its way, as memory of its own."""
        self.net, self.ref = net(), net()
        self.ref.requires_grad_(False)
        self.adam = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        device = SimulatedDevice(8 << 20, chunk_bytes=8192, granularity=4096)
        self.manager = placement.Manager(device=device, verify="always", policy=policy)
        self.actor = self.register("actor", self.net, role="actor")
        self.optimizer = self.register("adam", self.adam)
        self.register("ref", self.ref, role="ref", readonly=True)
        self.train(0)
        self.train(1)
        with torch.no_grad():
            self.net[0].weight.grad = None
        self.publish()
        self.restore(folder)
        self.train(2)
        self.leave()

    def register(self, name: str, target: object, **keywords: Any) -> placement.Handle:
        handle: placement.Handle = self.inside(
            lambda: self.manager.register(name, target, **keywords)
        )
        return handle

    def note(self, what: Any) -> None:
        self.seen.append(copy.deepcopy(what))

    def train(self, seed: int) -> None:
        self.inside(lambda: self.manager.enter("train"))
        self.note(learn(self.net, self.adam, seed))
        self.inside(lambda: self.manager.switch("log_prob"))
        self.note(self.ref(torch.ones(2, 64)))
        self.inside(self.manager.leave)
        for handle in (self.actor, self.optimizer):
            self.note(self.inside(handle.state_dict))
        self.inside(self.manager.check_integrity)
        assert self.inside(self.manager.audit).ok
        assert_nothing_resident(self.manager)

    def publish(self) -> None:
        self.inside(lambda: self.manager.enter("weight_sync"))
        self.note(
            [(each.name, each.shape, each.dtype) for each in self.inside(self.actor.weights_info)]
        )
        buckets = self.inside(lambda: self.actor.weights(bucket_bytes=1 << 13))
        while (bucket := self.inside(lambda: next(buckets, None))) is not None:
            self.note(list(bucket))
        (cast,) = self.inside(lambda: list(self.actor.weights(dtype=torch.float16)))
        self.note(list(cast))
        self.inside(self.manager.leave)

    def restore(self, folder: Path) -> None:
        """Save, go on, and come back to what was saved; then the same by state dicts of one's
        own."""
        self.inside(lambda: checkpoint.save(self.manager, folder / "saved"))
        self.inside(lambda: checkpoint.async_save(self.manager, folder / "behind")).result()
        parts = [checkpoint.Model(self.actor), checkpoint.Optimizer(self.optimizer)]
        kept = [copy.deepcopy(dict(self.inside(part.state_dict))) for part in parts]
        self.train(5)
        self.inside(lambda: checkpoint.load(self.manager, folder / "behind"))
        self.note([dict(part.state_dict()) for part in parts])
        self.train(6)
        for part, values in zip(parts, kept, strict=True):
            self.inside(lambda part=part, values=values: part.load_state_dict(values))
        self.note([dict(part.state_dict()) for part in parts])

    def leave(self) -> None:
        self.inside(lambda: self.manager.unregister("ref"))
        self.inside(self.manager.close)
        self.note([self.net.state_dict(), self.adam.state_dict(), self.ref.state_dict()])
        self.note([parameter.grad for parameter in self.net.parameters()])


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], Path]:
    """What is seen outside of every mode, and the checkpoint that is saved on the way."""
    folder = tmp_path_factory.mktemp("plain")
    return Life(under(nullcontext), folder, "colocated").seen, folder / "saved"


@pytest.mark.parametrize(
    ("inside", "streams"),
    [
        *(
            pytest.param(inside, False, id=name, marks=[] if name in SHOWN else [pytest.mark.sweep])
            for name, inside in MODES.items()
        ),
        pytest.param(MODES["all at once"], True, id="streamed"),
    ],
)
def test_every_byte_is_what_it_is_outside_the_mode(
    inside: Inside[Any], streams: bool, plain: tuple[list[Any], Path], tmp_path: Path
) -> None:
    assert_same(
        Life(inside, tmp_path, placement.policies.Colocated(stream_sync=streams)).seen, plain[0]
    )


@a_few_modes
def test_a_state_that_is_read_into_an_unborn_optimizer_is_what_was_saved(
    inside: Inside[Any], plain: tuple[list[Any], Path]
) -> None:
    fresh = net()
    adam = torch.optim.AdamW(fresh.parameters(), lr=1.0)
    manager = placement.Manager(device=SimulatedDevice(8 << 20))
    inside(lambda: manager.register("actor", fresh, role="actor"))
    inside(lambda: manager.register("adam", adam))
    inside(lambda: checkpoint.load(manager, plain[1]))
    read = [manager.handles[name].state_dict() for name in ("actor", "adam")]
    for _ in range(2):
        inside(lambda: manager.enter("restore"))
        inside(manager.leave)
    assert_same([manager.handles[name].state_dict() for name in ("actor", "adam")], read)
    assert {parameter.device.type for parameter in fresh.parameters()} == {"cpu"}


@every_mode
def test_the_caller_is_in_the_same_modes_afterwards(inside: Inside[Any]) -> None:
    manager = placement.Manager(device=SimulatedDevice(8 << 20))
    model = net()
    manager.register("actor", model, role="actor")

    def modes() -> tuple[Any, ...]:
        function_modes = [
            torch._C._get_function_stack_at(index)
            for index in range(torch._C._len_torch_function_stack())
        ]
        dispatch_modes = [
            torch._C._get_dispatch_stack_at(index)
            for index in range(torch._C._len_torch_dispatch_stack())
        ]
        level = torch._C._functorch.maybe_current_level()
        return (
            function_modes,
            dispatch_modes,
            torch.is_autocast_enabled("cpu"),
            torch.is_inference_mode_enabled(),
            level,
        )

    def call() -> None:
        before, had_gradients = modes(), torch.is_grad_enabled()
        with manager.phase("log_prob"):
            assert modes() == before
        with pytest.raises(placement.PolicyError), manager.phase("no such phase"):
            pass
        with pytest.raises(placement.PlacementError):
            manager.register("actor", model)
        assert modes() == before
        assert torch.is_grad_enabled() is had_gradients

    inside(call)


class Notes(TorchFunctionMode):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_a_lazy_model_is_built_where_its_builder_stands() -> None:
    manager = placement.Manager(device=SimulatedDevice(8 << 20))
    built: list[torch.device] = []

    def build() -> nn.Module:
        built.append(torch.get_default_device())
        built.append(torch.arange(3).device)
        return nn.Linear(4, 4, device="cpu")

    manager.register("critic", placement.Lazy(build), role="critic")
    with Notes() as notes, torch.device("meta"), manager.phase("values"):
        pass
    assert built == [torch.device("meta")] * 2
    assert notes.seen.count("arange") == 1
    assert manager.handles["critic"].is_built
    assert_nothing_resident(manager)


def test_a_half_imported_dynamo_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An object may be collected while dynamo is imported, and end a phase."""
    monkeypatch.setitem(sys.modules, "torch._dynamo", ModuleType("torch._dynamo"))
    assert uncompiled(abs)(-3) == 3
