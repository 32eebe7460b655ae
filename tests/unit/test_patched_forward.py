"""A module's `forward` is replaced and put back, while the module is offloaded or on the device. It works as without placement."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable

import pytest
import torch
from torch import nn

import placement
from placement import NotResidentError
from placement.testing import SimulatedDevice

Patch = Callable[[nn.Module], Callable[[], object]]
"""Replaces the `forward` of a module, and returns what undoes it."""


def _wrapped(module: nn.Module) -> Callable[[], object]:
    old = module.forward

    @functools.wraps(old)
    def forward(*args: torch.Tensor) -> torch.Tensor:
        return old(*args) + 1

    module.forward = forward
    return lambda: setattr(module, "forward", old)


def _partial(module: nn.Module) -> Callable[[], object]:
    old = module.forward
    module.forward = functools.partial(old)
    return lambda: setattr(module, "forward", old)


def _method(module: nn.Module) -> Callable[[], object]:
    module.forward = types.MethodType(lambda self, x: type(self).forward(self, x) * 3, module)
    return lambda: vars(module).pop("forward")


def _bound_anew(module: nn.Module) -> Callable[[], object]:
    module.forward = types.MethodType(module.forward.__func__, module)
    return lambda: vars(module).pop("forward")


def _accelerate_hook(module: nn.Module) -> Callable[[], object]:
    hooks = pytest.importorskip("accelerate.hooks")
    hooks.add_hook_to_module(module, hooks.ModelHook())
    return lambda: hooks.remove_hook_from_module(module)


def _accelerate_mixed_precision(module: nn.Module) -> Callable[[], object]:
    accelerate = pytest.importorskip("accelerate")
    _forget_precision(accelerate)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    accelerator.prepare(module)
    _forget_precision(accelerate)
    return lambda: accelerator.unwrap_model(module, keep_fp32_wrapper=False)


def _forget_precision(accelerate: types.ModuleType) -> None:
    """accelerate keeps the first precision that is chosen for the whole process, and refuses another one."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def _net(leaf: bool) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 4) if leaf else nn.Sequential(nn.Linear(4, 4), nn.Tanh())


@pytest.mark.parametrize("leaf", [False, True])
@pytest.mark.parametrize("patch", [_wrapped, _partial, _method, _bound_anew, _accelerate_hook, _accelerate_mixed_precision])
@pytest.mark.parametrize("patched_in", ["before", "log_prob", "idle"])
@pytest.mark.parametrize("undone_in", ["log_prob", "idle"])
def test_a_forward_is_patched_and_put_back(patch: Patch, patched_in: str, undone_in: str, leaf: bool) -> None:
    if patch is _accelerate_hook and patched_in == "before":
        return  # refused at registration
    x, plain, model = torch.ones(2, 4), _net(leaf), _net(leaf)
    undo_plain = patch(plain)
    patched = plain(x)
    undo_plain()
    manager = placement.Manager(device=SimulatedDevice(capacity_bytes=1 << 26))
    undo = patch(model) if patched_in == "before" else None
    handle = manager.register("actor", model, role="actor")

    def check(true: torch.Tensor) -> None:
        with manager.phase("log_prob"):
            assert torch.equal(model(x), true)
        with pytest.raises(NotResidentError, match="cannot be called"):
            model(x)

    if undo is None:
        with manager.phase(patched_in):
            undo = patch(model)
        with pytest.raises(NotResidentError, match="cannot be called"):
            model(x)
    check(patched)
    with manager.phase(undone_in):
        undo()
    with pytest.raises(NotResidentError, match="cannot be called"):
        model(x)
    check(plain(x))
    manager.unregister(handle.name)
    assert torch.equal(copy.deepcopy(model)(x), model(x))
    assert not model._forward_pre_hooks
