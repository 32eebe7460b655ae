"""Handles that grow between moves: new layers, new state, new gradients, each of which becomes a
range of its own."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from placement import Handle, Manager
from placement.devices.base import Device
from placement.testing import assert_nothing_resident
from tests.support.worker import Turns

SIDES = ("rollout", "eval")
"""The phases, each of which has one side's handles on the device."""


def _of_side(side: str) -> Callable[[str], bool]:
    return lambda name: name.startswith(f"{side}.")


def sizes(granularity: int, chunk_bytes: int) -> tuple[int, ...]:
    """Bytes of a tensor: less than a page, exactly what the device counts in, a word more or less,
    many chunks, a tail behind them."""
    exact = (granularity, chunk_bytes, 2 * chunk_bytes, 5 * chunk_bytes)
    return (
        4,
        100,
        granularity // 2,
        *(size + more for size in exact for more in (-8, 0, 8)),
        3 * chunk_bytes + granularity,
    )


def of_random_bytes(nbytes: int, device: torch.device) -> torch.Tensor:
    """Any bits at all, NaN of every kind among them."""
    return torch.randint(0, 256, (nbytes // 4 * 4,), dtype=torch.uint8, device=device).view(
        torch.float32
    )


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


class Growing:
    """A module, and an optimizer of it where wanted, with what they must hold."""

    def __init__(
        self, manager: Manager, name: str, layers: Sequence[int], *, trained: bool
    ) -> None:
        self.device = manager.device.torch_device
        self.module = nn.ParameterList()
        self.add(layers)
        self.adam = torch.optim.AdamW(self.module.parameters()) if trained else None
        self.note()
        self.handles: list[Handle] = [manager.register(name, self.module)]
        if self.adam is not None:
            self.handles.append(manager.register(f"{name}.adam", self.adam))

    def add(self, layers: Iterable[int]) -> None:
        for nbytes in layers:
            self.module.append(nn.Parameter(of_random_bytes(nbytes, self.device)))

    def add_to_optimizer(self) -> None:
        if self.adam is not None:
            known = {
                id(parameter) for group in self.adam.param_groups for parameter in group["params"]
            }
            new = [parameter for parameter in self.module if id(parameter) not in known]
            if new:
                self.adam.add_param_group({"params": new})

    def bear_state(self, parameters: Iterable[torch.Tensor]) -> None:
        """What a step does for a parameter that it steps for the first time."""
        for parameter in parameters if self.adam is not None else ():
            moments = {
                name: of_random_bytes(parameter.nbytes, self.device)
                for name in ("exp_avg", "exp_avg_sq")
            }
            self.adam.state[parameter] = {"step": torch.tensor(1.0), **moments}

    def bear_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        for parameter in parameters:
            parameter.grad = of_random_bytes(parameter.nbytes, self.device)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """While on the device."""
        for index, parameter in enumerate(self.module):
            yield str(index), parameter
            if parameter.grad is not None:
                yield f"{index}.grad", parameter.grad
            for name, value in (
                {} if self.adam is None else self.adam.state.get(parameter, {})
            ).items():
                yield f"{index}.{name}", value

    def shown(self) -> dict[str, torch.Tensor]:
        """By the state dicts, in every state; gradients are in none."""
        found = dict(self.handles[0].state_dict())
        for index, entry in (
            self.handles[1].state_dict()["state"].items() if self.adam is not None else ()
        ):
            found |= {f"{index}.{name}": value for name, value in entry.items()}
        return found

    def note(self) -> None:
        self.wanted: dict[str, torch.Tensor] = {
            name: bits(tensor).cpu().clone() for name, tensor in self.tensors()
        }

    def check(self, *, on_device: bool) -> None:
        found: dict[str, Any] = dict(self.tensors()) if on_device else self.shown()
        assert found.keys() == {
            name for name in self.wanted if on_device or not name.endswith(".grad")
        }
        for name, tensor in found.items():
            assert torch.equal(bits(tensor).cpu(), self.wanted[name]), name

    @property
    def num_ranges(self) -> int:
        return sum(
            len(handle.holding.ranges) for handle in self.handles if handle.holding is not None
        )


class Scene:
    """Two sides of growing handles that take turns on a device."""

    def __init__(
        self, device: Device, layers: dict[str, Sequence[int]], trained: Collection[str]
    ) -> None:
        self.manager = Manager(
            device=device,
            policy=Turns(**{side: _of_side(side) for side in SIDES}),
            budget_bytes=1 << 40,
        )
        self.all = {
            name: Growing(self.manager, name, each, trained=name in trained)
            for name, each in layers.items()
        }

    def of(self, side: str) -> list[Growing]:
        return [each for name, each in self.all.items() if name.startswith(f"{side}.")]

    def check(self, side: str | None) -> None:
        self.manager.check_integrity()
        for name, each in self.all.items():
            each.check(on_device=side is not None and name.startswith(f"{side}."))

    def needs(self, side: str) -> int:
        """Device bytes of the ranges of one side."""
        return sum(
            h.holding.device_bytes
            for each in self.of(side)
            for h in each.handles
            if h.holding is not None
        )

    def grow(self, side: str, chance: random.Random, drawn: Sequence[int]) -> None:
        """Some of the side gets layers, state and gradients, and some loses gradients."""
        for each in self.of(side):
            if chance.random() < 0.5:
                each.add(chance.choices(drawn, k=chance.randint(1, 2)))
                each.add_to_optimizer()
            stateless = [
                p for p in each.module if each.adam is not None and not each.adam.state.get(p)
            ]
            each.bear_state(p for p in stateless if chance.random() < 0.5)
            if chance.random() < 0.2:
                each.module.zero_grad()
            each.bear_gradients(p for p in each.module if p.grad is None and chance.random() < 0.3)
            if chance.random() < 0.5:
                parameter = chance.choice(list(each.module))
                parameter.data.copy_(of_random_bytes(parameter.nbytes, each.device))
            each.note()

    def leave(self) -> None:
        self.check(None)
        assert_nothing_resident(self.manager)
        self.manager.close()
        for each in self.all.values():
            each.check(on_device=True)
