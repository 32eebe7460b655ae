"""What is refused and what is recognised as placed by its framework.

torch's own wrappers are the real ones. Frameworks that are not installed are stood in for by classes of the same shape, put
into a module of the framework's name: recognition goes by the classes an object is made of, and imports no framework.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn, optim

from placement.core.errors import RegistrationError
from placement.ownership.module import ModuleAdapter
from placement.ownership.optimizer import OptimizerAdapter

CPU = torch.device("cpu")


def adapt(obj: Any, **options: Any) -> Any:
    cls = ModuleAdapter if isinstance(obj, nn.Module) else OptimizerAdapter
    return cls(obj, name="actor", compute_device=CPU, **options)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make a class as if `module` had defined it."""

    def make(module: str, name: str, *bases: type, **fields: Any) -> Any:
        fake = ModuleType(module)
        cls = type(name, bases, {**fields, "__module__": module})
        setattr(fake, name, cls)
        monkeypatch.setitem(sys.modules, module, fake)
        package = module.partition(".")[0]
        monkeypatch.setitem(sys.modules, package, sys.modules.get(package) or ModuleType(package))
        return cls

    return make


def assert_refused(obj: Any, found: str, advice: str) -> None:
    with pytest.raises(RegistrationError) as caught:
        adapt(obj)
    message = str(caught.value)
    assert message.startswith("'actor'")
    assert found in message
    assert "Supported: " in message
    assert advice in message
    assert adapt(obj, external=True).external == "the caller says so (external=True)"


def test_a_device_map_over_several_places_is_refused_and_one_place_is_plain(stand_in: Any) -> None:
    stand_in("accelerate", "Accelerator")
    module = nn.Linear(2, 2)
    module.hf_device_map = {"embed": 0, "layers": "cpu"}
    assert_refused(module, "a device map with 2 entries on several devices", "load without device_map")
    module.hf_device_map = {"": 0}
    assert len(list(adapt(module).owned())) == 2


def test_an_optimizer_that_places_its_state_itself_is_external(stand_in: Any) -> None:
    """DeepSpeed's class has to be compiled before its constructor runs; this one has its name, place and shape."""
    parameter = nn.Parameter(torch.zeros(2))
    placed = stand_in("deepspeed.ops.adam.cpu_adam", "DeepSpeedCPUAdam", optim.AdamW)([parameter])
    parameter.grad = torch.ones(2)
    placed.step()
    adapter = adapt(placed)
    assert adapter.external == "DeepSpeed's CPU Adam keeps its state on the CPU"
    assert len(list(adapter.owned())) == 3
    assert adapter.expected_sizes() == ()


@pytest.mark.parametrize("make", [lambda z: z.conj(), lambda z: z.conj().imag, lambda z: z.conj().imag.unsqueeze(0)])
def test_values_that_are_not_those_of_the_bytes_are_refused(make: Any) -> None:
    """A tensor over the same bytes elsewhere, such as that of a state dict, would have other values."""
    net = nn.Linear(2, 2)
    net.register_buffer("freqs", make(torch.tensor([1 + 2j, 3 + 4j])))
    with pytest.raises(RegistrationError, match=r"'freqs' is a lazily conjugated or negated view.*resolve_conj\(\) or resolve_neg\(\)"):
        adapt(net)
    net.freqs = net.freqs.resolve_conj().resolve_neg()
    assert "freqs" in [each.name for each in adapt(net).owned()]


def test_such_values_in_an_optimizers_state_are_refused_too() -> None:
    adam = optim.Adam(nn.Linear(2, 2).parameters())
    first = adam.param_groups[0]["params"][0]
    adam.state[first]["exp_avg"] = torch.zeros(2, 2, dtype=torch.complex64).conj()
    with pytest.raises(RegistrationError, match=r"'state.0.exp_avg' is a lazily conjugated"):
        adapt(adam)
