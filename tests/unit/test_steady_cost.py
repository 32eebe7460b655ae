"""The cost of a phase transition: Python calls and tensors looked at, for few tensors and for many."""

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

SIZES = (1, 300, 2_000)
OWN = str(Path(placement.__file__).parent)


class Counting(nn.Parameter):
    """A parameter that counts how often anything is asked of it."""

    num_questions: ClassVar[int] = 0

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
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
    """The Python calls and the questions to parameters in a block, those of the garbage collector aside."""

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
        return sum(count for where, count in self.calls.items() if where.startswith(OWN) and ": " not in where)

    def _profile(self, frame: Any, event: str, called: Any) -> None:
        if frame.f_globals.get("__name__") == __name__:
            return
        if event == "call":
            self.calls[f"{frame.f_code.co_filename}:{frame.f_code.co_name}"] += 1
        elif event == "c_call":
            self.calls[f"{frame.f_code.co_filename}:{frame.f_code.co_name}: {getattr(called, '__qualname__', called)}"] += 1


@pytest.fixture(scope="module", autouse=True)
def _plain_counting() -> Iterator[None]:
    base.add(Carrying)
    yield
    base.remove(Carrying)


@pytest.fixture(scope="module")
def costs(_plain_counting: None) -> dict[int, dict[str, Cost]]:
    """The cost of each switch, by the number of parameters."""
    found: dict[int, dict[str, Cost]] = {}
    for size in SIZES:
        trained = Trained(size)
        with trained.manager.phase("log_prob") as phase:
            for _ in range(4):  # state is made, phases repeat
                with Cost() as begin:
                    phase.switch("train")
                trained.train()
                with Cost() as end:
                    phase.switch("log_prob")
                with Cost() as none:
                    phase.switch("eval")
                phase.switch("log_prob")
                assert trained.actor.state is State.GPU_RESIDENT
        found[size] = {"begin": begin, "end": end, "none": none}
        trained.manager.close()
    return found


@pytest.mark.parametrize("switch", ["begin", "end", "none"])
def test_the_number_of_python_calls_is_constant(costs: dict[int, dict[str, Cost]], switch: str) -> None:
    one, *others = (costs[size][switch].calls for size in SIZES)
    assert one
    assert all(each == one for each in others), [(each - one, one - each) for each in others]


@pytest.mark.parametrize("switch", ["begin", "none"])
def test_no_tensor_is_looked_at_if_no_training_ends(costs: dict[int, dict[str, Cost]], switch: str) -> None:
    assert [costs[size][switch].num_questions for size in SIZES] == [0, 0, 0]


def test_the_end_of_a_training_asks_a_few_parameters_for_their_gradient(costs: dict[int, dict[str, Cost]]) -> None:
    """And whether each is a leaf, which torch wants to be asked first."""
    assert [costs[size]["end"].num_questions for size in SIZES] == [2, 16, 16]


@pytest.mark.parametrize(("switch", "most"), [("begin", 380), ("end", 440), ("none", 290)])
def test_a_switch_of_two_handles_that_stay_makes_few_calls(costs: dict[int, dict[str, Cost]], switch: str, most: int) -> None:
    assert costs[300][switch].num_own_calls <= most


@pytest.fixture(scope="module")
def moves(_plain_counting: None) -> dict[int, tuple[Cost, Cost]]:
    """The cost of entering and of leaving a training whose model and AdamW are offloaded outside of it, by the number of parameters."""
    found: dict[int, tuple[Cost, Cost]] = {}
    for size in (50, 500):
        trained = Trained(size, "colocated")
        for _ in range(3):  # state is made, and gets its places
            with Cost() as enter:
                trained.manager.enter("train")
            trained.train()
            with Cost() as leave:
                trained.manager.leave()
            assert trained.actor.state is State.CPU_OFFLOADED
        found[size] = enter, leave
        trained.manager.close()
    return found


def test_a_move_asks_each_parameter_once_for_its_version_its_address_and_its_gradient(moves: dict[int, tuple[Cost, Cost]]) -> None:
    """And, where it was written, whether it is a leaf. A model has one parameter in each module; AdamW's state does not count here."""
    assert [[cost.num_questions for cost in moves[size]] for size in moves] == [[3 * size, 4 * size] for size in moves]


@pytest.mark.parametrize("way", [0, 1])
def test_a_move_makes_few_calls_of_python_functions_for_many_tensors(moves: dict[int, tuple[Cost, Cost]], way: int) -> None:
    few, many = (moves[size][way].num_own_calls for size in moves)
    assert many - few < (500 - 50) / 20
