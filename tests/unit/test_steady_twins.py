"""The quick looks, whose passes run in C over flat lists, beside twins in plain Python, and guards of calls, over random changes.

A quick look may say that nothing has changed exactly where its twin does, and shows the tensors of a new walk then.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from placement import RegistrationError
from placement.core.call_guard import CallGuard, GuardedForward
from placement.ownership.adapter import MODULE_FIELDS, Adapter
from placement.ownership.module import ModuleAdapter
from placement.ownership.optimizer import OptimizerAdapter
from tests.unit.test_steady import CHANGES, CPU, MUTATIONS, Net, Scene

_FORWARDS = (type(None), GuardedForward, types.FunctionType, types.MethodType, partial)


def inside(value: object) -> Iterator[torch.Tensor]:
    """The tensors in a container or an object of these tests."""
    if isinstance(value, torch.Tensor):
        yield value
    parts: Any = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    for part in parts:
        yield from inside(part)


class PlainModule:
    """A module tree as it was. It holds all that it saw, so that nothing new gets the identity of what is gone."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._before = self._facts()

    def _facts(self) -> list[tuple[nn.Module, str, Any, object]]:
        """Every value of every module with its type and size, but for the bookkeeping and a `forward`."""
        found = []
        for module in self._root.modules():
            registries = (module._parameters, module._buffers, module._modules)
            own = {name: value for name, value in vars(module).items() if name not in (*MODULE_FIELDS, "forward")}
            for each in (*registries, own):
                found += [(module, name, value, (type(value), getattr(value, "shape", None))) for name, value in each.items()]
        return found

    def is_unchanged(self) -> bool:
        now = self._facts()
        if len(now) != len(self._before):
            return False
        for (*place, value, kind), (*last_place, last_value, last_kind) in zip(now, self._before, strict=True):
            if place != last_place or value is not last_value or kind != last_kind:
                return False
        return self.is_simple()

    def is_simple(self) -> bool:
        """Whether no tensor that moves has a gradient, a graph, or a container around it, and no call may have tensors of its own."""
        for _, _, value, _ in self._facts():
            if isinstance(value, torch.Tensor):
                if value.numel() and (not value.is_leaf or value.grad is not None):
                    return False
            elif [*inside(value)]:
                return False
        return all(isinstance(vars(module).get("forward"), _FORWARDS) for module in self._root.modules())


class PlainState:
    """An optimizer's state as it was, of which a walk has found `owned` to move."""

    def __init__(self, optimizer: Any, owned: Sequence[torch.Tensor]) -> None:
        self._optimizer = optimizer
        self._owned = {id(tensor) for tensor in owned}
        self._before = self._facts()

    def _facts(self) -> list[tuple[Any, ...]]:
        found: list[tuple[Any, ...]] = []
        for group in self._optimizer.param_groups:
            found.append((group, bool(group["fused"]), bool(group["capturable"])))
            found += [(parameter,) for parameter in group["params"]]
        for key, entry in self._optimizer.state.items():
            found.append((key, entry))
            pairs = entry.items() if isinstance(entry, dict) else ()
            found += [(sys.intern(str(name)), value, type(value)) for name, value in pairs]
        return found

    def is_unchanged(self) -> bool:
        now = self._facts()
        return self.is_simple() and [[*map(id, each)] for each in now] == [[*map(id, each)] for each in self._before]

    def is_simple(self) -> bool:
        """Whether each entry has numbers and tensors alone, by name, and what does not move is a number in a tensor."""
        for entry in self._optimizer.state.values():
            if type(entry) is not dict:
                return False
            for value in entry.values():
                if not isinstance(value, (torch.Tensor, int, float, str, type(None))):
                    return False
                if isinstance(value, torch.Tensor) and id(value) not in self._owned and value.dim():
                    return False
        return True


def is_unchanged(adapter: Adapter, twin: PlainModule | PlainState, anew: Callable[[], Adapter]) -> bool:
    """Whether a quick look finds nothing changed, which has to be what its twin finds. `anew`: an adapter that has never looked."""
    seen = adapter.unchanged()
    assert (seen is not None) == twin.is_unchanged()
    if seen is not None:
        walked = [owned.tensor for owned in anew().owned()]
        assert [*map(id, seen.tensors)] == [*map(id, walked)]
        assert seen.versions == [tensor._version for tensor in walked]
        assert seen.addresses == [tensor.data_ptr() for tensor in walked]
    return seen is not None


class Mine(nn.Parameter):
    """Of a class that placement does not know, and so cannot move."""


def become_mine(tensor: torch.Tensor) -> None:
    torch.utils.swap_tensors(tensor, Mine(torch.randn(tensor.shape)))


def zero_grad(net: Net) -> None:
    net.zero_grad()
    net.mean = net.mean.detach()
    net.empty = net.empty.detach()


@settings(deadline=None)
@given(st.lists(st.sampled_from([*CHANGES.values(), zero_grad, lambda net: become_mine(net.body[1].weight)]), max_size=12))
def test_a_quick_look_at_a_module_finds_what_its_twin_finds(changes: list[Callable[[Net], object]]) -> None:
    net = Net()

    def anew() -> ModuleAdapter:
        return ModuleAdapter(net, name="actor", compute_device=CPU)

    adapter = anew()
    for change in [*changes, CHANGES["nothing"]]:
        try:
            [*adapter.owned()]
        except RegistrationError:
            return
        twin = PlainModule(net)
        assert is_unchanged(adapter, twin, anew) == twin.is_simple()
        with contextlib.suppress(AttributeError, RuntimeError):  # what it changes is gone, or part of a graph
            change(net)
        is_unchanged(adapter, twin, anew)


@settings(deadline=None)
@given(st.lists(st.sampled_from([*MUTATIONS.values(), lambda scene: become_mine(scene.tensor)]), max_size=12))
def test_a_quick_look_at_the_state_finds_what_its_twin_finds(mutations: list[Callable[[Scene], object]]) -> None:
    scene = Scene()

    def anew() -> OptimizerAdapter:
        return OptimizerAdapter(scene.optimizer, name="adam", compute_device=CPU)

    adapter = anew()
    scene.step()
    for mutate in [*mutations, MUTATIONS["nothing"]]:
        try:
            twin = PlainState(scene.optimizer, [owned.tensor for owned in adapter.owned()])
        except RegistrationError:
            return
        assert is_unchanged(adapter, twin, anew) == twin.is_simple()
        with contextlib.suppress(Exception):  # what it changes is gone, or a step cannot take what was done to the state
            mutate(scene)
        is_unchanged(adapter, twin, anew)


class Refused(Exception):
    pass


class Refuse:
    """A check that refuses every call."""

    def __call__(self, *_: object) -> None:
        raise Refused


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["refuse", "allow", "patch", "restore", "hook"]), st.integers(0, 3)), max_size=20))
def test_guarded_modules_get_back_what_a_framework_has_put_there(steps: list[tuple[str, int]]) -> None:
    """Whenever it was put there: before the modules are guarded, meanwhile, or between two times."""
    net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    parts = [net, net[0], net[1], net[1][0]]
    guard = CallGuard(Refuse(), [net], "net", 1.0)
    forwards: list[Callable[..., Any] | None] = [None] * len(parts)
    hooks = [0] * len(parts)
    for what, index in [*steps, ("refuse", 0), ("allow", 0)]:
        own = vars(parts[index])
        if what == "refuse":
            guard.refuse()
            for part in parts:
                for call in (part, part.forward):
                    with pytest.raises(Refused):
                        call(torch.ones(2))
        elif what == "allow":
            guard.allow()
            assert [vars(part).get("forward") for part in parts] == forwards
            assert [len(part._forward_pre_hooks) for part in parts] == hooks
        elif what == "patch":
            own["forward"] = forwards[index] = partial(type(parts[index]).forward, parts[index])
        elif what == "restore":
            own.pop("forward", None)
            forwards[index] = None
        else:
            parts[index].register_forward_pre_hook(lambda *_: None)
            hooks[index] += 1
