"""The cost of a phase transition: Python calls and tensors looked at, for few tensors and for
many."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import placement
from placement import Manager, State
from placement.frameworks import base
from placement.frameworks.base import Framework, Named
from placement.testing import SimulatedDevice

SIZES = (1, 300, 1_200)
OWN = str(Path(placement.__file__).parent)


class Counting(nn.Parameter):
    """A parameter that counts how often anything is asked of it."""

    num_questions: ClassVar[int] = 0

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        Counting.num_questions += 1
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.size = 2
        self.weight = Counting(torch.zeros(self.size))


class Carrying(Framework):
    """Makes `Counting` a plain parameter."""

    carriers = (Named(__name__, "Counting"),)


class Trained:
    """A model with its AdamW. Under the policy "resident" they never leave the device."""

    def __init__(self, num_parameters: int, policy: str = "resident") -> None:
        self.net = nn.Sequential(*(Layer() for _ in range(num_parameters)))
        self.adam = torch.optim.AdamW(self.net.parameters())
        self.manager = Manager(device=SimulatedDevice(1 << 30), policy=policy)
        self.actor = self.manager.register("actor", self.net, role="actor")
        self.manager.register("adam", self.adam)

    def train(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            for parameter in self.net.parameters():
                parameter.grad = torch.ones(2)
            self.adam.step()
            self.adam.zero_grad()


class Cost:
    """The Python calls and the questions to parameters in a block, those of the garbage collector
    aside."""

    def __enter__(self) -> Cost:
        gc.disable()
        self.calls: Counter[str] = Counter()
        self._before = Counting.num_questions
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        gc.enable()
        self.num_questions = Counting.num_questions - self._before

    @property
    def num_own_calls(self) -> int:
        """The calls of placement's own Python functions."""
        return sum(
            count
            for where, count in self.calls.items()
            if where.startswith(OWN) and ": " not in where
        )

    def _profile(self, frame: Any, event: str, called: Any) -> None:
        if frame.f_globals.get("__name__") == __name__:
            return
        if event == "call":
            self.calls[f"{frame.f_code.co_filename}:{frame.f_code.co_name}"] += 1
        elif event == "c_call":
            self.calls[
                (
                    f"{frame.f_code.co_filename}:{frame.f_code.co_name}: "
                    f"{getattr(called, '__qualname__', called)}"
                )
            ] += 1


@pytest.fixture(autouse=True)
def _plain_counting() -> Iterator[None]:
    base.add(Carrying)
    yield
    base.remove(Carrying)


@pytest.mark.sweep  # the two below count the calls of smaller jobs
def test_a_switch_of_two_handles_that_stay_costs_the_same_for_many_tensors_as_for_few() -> None:
    """And a training's end asks a few parameters for their gradient, and whether each is a leaf,
    which torch wants to be asked first."""
    costs: dict[str, list[Cost]] = {"begin": [], "end": [], "none": []}
    for size in SIZES:
        trained = Trained(size)
        with trained.manager.phase("log_prob") as phase:
            for _ in range(3):  # state is made, phases repeat
                with Cost() as begin:
                    phase.switch("train")
                trained.train()
                with Cost() as end:
                    phase.switch("log_prob")
                with Cost() as none:
                    phase.switch("eval")
                phase.switch("log_prob")
                assert trained.actor.state is State.GPU_RESIDENT
        costs = {
            name: [*costs[name], cost]
            for name, cost in (("begin", begin), ("end", end), ("none", none))
        }
        trained.manager.close()
    for name, most, questions in (
        ("begin", 200, [0, 0, 0]),
        ("end", 220, [2, 16, 16]),
        ("none", 158, [0, 0, 0]),
    ):
        one, *others = (cost.calls for cost in costs[name])
        assert all(each == one for each in others), [(each - one, one - each) for each in others]
        assert 0 < costs[name][0].num_own_calls <= most
        assert [cost.num_questions for cost in costs[name]] == questions


def test_a_phase_in_which_six_handles_stay_makes_few_calls() -> None:
    manager = Manager(device=SimulatedDevice(1 << 30))
    layers = [nn.Linear(2, 2) for _ in range(6)]
    for index, layer in enumerate(layers):
        manager.register(f"handle{index}", layer, role="reward" if index else "actor")
    with manager.phase("eval"):
        for _ in range(3):
            with Cost() as cost, manager.phase("eval"):
                pass
    assert cost.num_own_calls <= 310


def test_a_move_asks_each_parameter_once_in_few_calls() -> None:
    """And, where it was written, whether it is a leaf. A model has one parameter in each module;
    AdamW's state does not count here."""
    moves: list[tuple[Cost, Cost]] = []
    for size in (50, 500):
        trained = Trained(size, "colocated")
        for _ in range(3):  # state is made, and gets its places
            with Cost() as enter:
                trained.manager.enter("train")
            trained.train()
            with Cost() as leave:
                trained.manager.leave()
            assert trained.actor.state is State.CPU_OFFLOADED
        assert (enter.num_questions, leave.num_questions) == (3 * size, 4 * size)
        moves.append((enter, leave))
        trained.manager.close()
    for few, many in zip(*moves, strict=True):
        assert many.num_own_calls - few.num_own_calls < (500 - 50) / 20
