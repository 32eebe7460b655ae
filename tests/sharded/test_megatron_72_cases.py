"""The matrix of Megatron's own test of optimizer offloading (test_optimizer_cpu_offloading.py: 48 and 24 cases), moved by placement.

There a part of the optimizer lives and steps on the CPU, and the results are close to a reference. Here everything steps on the device,
a part of it is taken off the device between any two steps, and the results are the reference's, bit for bit. What the parameters mean:

* `fraction`: how much of the model's bytes is stepped by an optimizer that leaves between two steps; the rest's stays on the device.
* `overlap`: between two steps another model is on the device, so that each phase transition moves both ways at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import placement
from placement import Manager, State
from placement.policies import Colocated
from placement.testing import SimulatedDevice
from tests.sharded.training import as_bytes

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
CASES = [
    *itertools.product(["convolutions"], [1, 10], [False, True], [0.0, 0.5, 1.0], OPTIMIZERS, [False, True]),
    *itertools.product(["big"], [1, 2], [True], [0.0, 0.5, 1.0], OPTIMIZERS, [False, True]),
]


class Convolutions(torch.nn.Module):
    """Two convolutions and three linear layers on small pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.features = torch.nn.Sequential(
            *(torch.nn.Conv2d(3, 6, 5), torch.nn.ReLU(), torch.nn.MaxPool2d(2)),
            *(torch.nn.Conv2d(6, 16, 5), torch.nn.ReLU(), torch.nn.MaxPool2d(2)),
        )
        self.head = torch.nn.Sequential(
            torch.nn.Linear(400, 120), torch.nn.ReLU(), torch.nn.Linear(120, 84), torch.nn.ReLU(), torch.nn.Linear(84, 10)
        )

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(pictures).flatten(1))


class Big(torch.nn.Sequential):
    """Many layers and some megabytes, so that each phase transition has many chunks under way."""

    def __init__(self) -> None:
        super().__init__(torch.nn.Flatten(), *(torch.nn.Linear(3072 if not layer else 128, 128) for layer in range(12)))


class Fraction(Colocated):
    """Colocated, but the optimizers named stay on the device."""

    def __init__(self, stay: list[str]) -> None:
        super().__init__()
        self.stay = stay

    def plan(self, view: placement.View) -> placement.Plan:
        plan = super().plan(view)
        for name in self.stay:
            if name in view.handles:
                plan = plan.also(name, State.GPU_RESIDENT)
        return plan


def split(parameters: list[torch.nn.Parameter], fraction: float) -> list[list[torch.nn.Parameter]]:
    """Whole parameters in their order until the fraction is reached, as HybridDeviceOptimizer does it, and the rest."""
    wanted = fraction * sum(each.numel() for each in parameters)
    sizes = itertools.accumulate((each.numel() for each in parameters), initial=0)
    first = sum(size < wanted for size in list(sizes)[:-1])
    return [parameters[:first], parameters[first:]]


def build(kind: str, optimizer: str, with_groups: bool, fraction: float) -> tuple[torch.nn.Module, dict[str, torch.optim.Optimizer]]:
    torch.manual_seed(42)
    net = Convolutions() if kind == "convolutions" else Big()
    optimizers = {}
    options: dict[str, Any] = {"lr": 1e-3, "momentum": 0.9} if optimizer == "sgd" else {"lr": 1e-3}
    for name, part in zip(("leaving", "staying"), split(list(net.parameters()), fraction), strict=True):
        if part:
            half = len(part) // 2
            groups = [{"params": part[:half], "lr": 1e-4}, {"params": part[half:], "lr": 2e-4}] if with_groups and half else part
            optimizers[name] = OPTIMIZERS[optimizer](groups, **options)
    return net, optimizers


def step(net: torch.nn.Module, optimizers: dict[str, torch.optim.Optimizer], number: int) -> bytes:
    pictures = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(number))
    loss = net(pictures).sum()
    loss.backward()
    for each in optimizers.values():
        each.step()
        each.zero_grad()
    return as_bytes(loss)


def values(net: torch.nn.Module, optimizers: dict[str, torch.optim.Optimizer]) -> Iterator[bytes]:
    yield from (as_bytes(parameter) for parameter in net.parameters())
    for optimizer in optimizers.values():
        yield from (as_bytes(value) for entry in optimizer.state.values() for value in entry.values() if isinstance(value, torch.Tensor))


def identities(net: torch.nn.Module, optimizers: dict[str, torch.optim.Optimizer]) -> list[int]:
    return [id(each) for each in (*net.parameters(), *(key for optimizer in optimizers.values() for key in optimizer.state))]


@pytest.mark.parametrize(("kind", "steps", "overlap", "fraction", "optimizer", "with_groups"), CASES)
def test_what_moves_between_every_step_computes_the_same(
    kind: str, steps: int, overlap: bool, fraction: float, optimizer: str, with_groups: bool, counted: Callable[[str], None]
) -> None:
    net, optimizers = build(kind, optimizer, with_groups, fraction)
    losses = [step(net, optimizers, number) for number in range(steps)]
    expected = list(values(net, optimizers))

    net, optimizers = build(kind, optimizer, with_groups, fraction)
    device = SimulatedDevice(256 << 20, chunk_bytes=64 << 10)
    manager = Manager(device=device, policy=Fraction([name for name in optimizers if name == "staying"]))
    actor = manager.register("actor", net, role="actor")
    handles = {name: manager.register(name, each) for name, each in optimizers.items()}
    if overlap:
        manager.register("critic", torch.nn.Linear(512, 512), role="critic")
    seen = []
    with manager.phase("idle") as phase:
        for number in range(steps):
            phase.switch("train")
            seen.append(step(net, optimizers, number))
            if number == 0:
                known = identities(net, optimizers)
            phase.switch("values" if overlap else "idle")
            assert actor.resident_bytes == 0
            assert identities(net, optimizers) == known
            assert [handle.resident_bytes > 0 for name, handle in handles.items()] == [name == "staying" for name in handles]
    assert manager.audit().ok
    assert seen == losses
    with manager.phase("restore"):
        assert list(values(net, optimizers)) == expected
    manager.close()
    assert list(values(net, optimizers)) == expected
    assert device.memory().chunk_bytes == 0
    assert len(CASES) == 72
    counted("72 cases of Megatron's matrix of optimizer offloading: bit-identical")
