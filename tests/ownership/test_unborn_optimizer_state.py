"""State of an optimizer that its steps have still to create: it counts before it is there, and
never twice."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import placement
from placement import DeviceMemoryError, Handle, Manager
from placement.devices.memory import DeviceMemory
from placement.testing import SimulatedDevice, assert_nothing_resident
from tests.contract.test_clean_skip import OPTIMIZERS
from tests.support.worker import OFF

MIB = 1 << 20
PAGE = 4096


def step(parameters: Iterable[torch.Tensor], optimizer: torch.optim.Optimizer) -> None:
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def registered(
    shapes: Iterable[tuple[int, ...]], make: Callable[..., torch.optim.Optimizer], **keywords: Any
) -> tuple[Manager, nn.ParameterList, torch.optim.Optimizer, Handle]:
    manager = Manager(**{"device": SimulatedDevice(64 * MIB), **keywords})
    model = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes])
    manager.register("actor", model, role="actor")
    optimizer = make(model.parameters())
    return manager, model, optimizer, manager.register("adam", optimizer)


def test_the_first_phase_that_does_not_fit_is_refused_and_names_the_optimizer() -> None:
    # 4 MiB, and 8 for the moments
    manager, model, optimizer, adam = registered(
        [(1024, 1024)], torch.optim.AdamW, budget_bytes=6 * MIB
    )
    assert (adam.num_bytes, adam.resident_bytes, adam.host_bytes) == (8 * MIB, 0, 8 * MIB)
    for _ in range(2):
        with (
            pytest.raises(
                DeviceMemoryError,
                match=rf"needs 12\.0 MiB .*\n.*\n  adam +0 +{8 * MIB:,}\n",
            ),
            manager.phase("train"),
        ):
            raise AssertionError("entered")
        assert {handle.state for handle in manager.handles.values()} == {OFF}
    assert not optimizer.state
    with manager.phase("log_prob"):
        model[0].detach().sum()
    assert_nothing_resident(manager)


MAKES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    **{
        name: cls
        for name, cls in OPTIMIZERS.items()
        if name not in ("Adafactor", "ASGD", "LBFGS", "SparseAdam", "Muon")
    },
    "Adam, amsgrad, fused": functools.partial(torch.optim.Adam, amsgrad=True, fused=True),
    "RMSprop, centered": functools.partial(torch.optim.RMSprop, centered=True, momentum=0.9),
    "SGD, momentum": functools.partial(torch.optim.SGD, momentum=0.9),
}
"""All but those that have to make a step to say what they keep, and one that is for matrices
alone."""


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_what_is_needed_is_the_same_before_the_first_step_and_after_every_one(
    make: Callable[..., torch.optim.Optimizer],
) -> None:
    manager, model, optimizer, adam = registered([(64, 64), (64,), (3,)], make)
    needed = adam.num_bytes
    for _ in range(3):
        with manager.phase("train"):
            step(model, optimizer)
            with manager.phase("eval", only=[]):
                assert adam.num_bytes == needed
        assert adam.num_bytes == needed
        assert adam.holding is not None
        assert (adam.holding.unborn_bytes, adam.holding.born_bytes) == (0, 0)
    with manager.phase("train"):
        assert adam.resident_bytes == needed


@settings(max_examples=15, deadline=None)
@given(
    elements=st.lists(st.integers(1, 3000), min_size=1, max_size=12),
    seen=st.lists(st.sets(st.integers(0, 11), max_size=4), max_size=8),
    policy=st.sampled_from(["colocated", "resident"]),
)
def test_state_that_is_born_in_portions_never_counts_twice_and_never_too_little(
    elements: list[int], seen: list[set[int]], policy: str
) -> None:
    """A mixture of experts: each step gives some of the parameters a gradient."""
    manager, model, optimizer, adam = registered(
        [(each,) for each in elements],
        torch.optim.AdamW,
        device=SimulatedDevice(64 * MIB, granularity=PAGE),
        policy=policy,
    )
    whole = sum(2 * 4 * each for each in elements)
    holding = adam.holding
    assert holding is not None

    def check() -> None:
        born = sum(
            2 * 4 * parameter.numel() for parameter in model if optimizer.state.get(parameter)
        )
        padding = PAGE * (1 + len(holding.ranges)) + 512 * 2 * len(elements)
        assert whole <= adam.num_bytes <= whole + padding
        assert born <= adam.num_bytes - holding.unborn_bytes
        assert (holding.unborn_bytes == 0) is (born == whole)

    check()
    for portion in seen:
        with manager.phase("train"):
            step([model[index] for index in portion if index < len(model)], optimizer)
            with manager.phase("eval", only=[]):
                assert whole <= adam.num_bytes
        check()
    with manager.phase("train"):
        step(model, optimizer)
    check()
    assert holding.unborn_bytes == 0


def _replaced(model: nn.ParameterList, optimizer: torch.optim.Optimizer) -> None:
    """What `load_state_dict(assign=True)` or a resized embedding leaves, once the optimizer is
    told."""
    optimizer.state.clear()
    for index, old in enumerate([*model]):
        model[index] = nn.Parameter(old.detach().clone())
    optimizer.param_groups[0]["params"] = [*model]


def _removed(model: nn.ParameterList, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state.clear()
    optimizer.param_groups[0]["params"] = [model[0]]


def _frozen(model: nn.ParameterList, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state.clear()
    model[1].requires_grad_(False)


@pytest.mark.parametrize(("change", "pages"), [(_replaced, 4), (_removed, 2), (_frozen, 2)])
@pytest.mark.parametrize("is_born", [False, True], ids=["before the first step", "after it"])
def test_parameters_that_are_stepped_no_longer_are_not_awaited(
    change: Callable[[nn.ParameterList, torch.optim.Optimizer], None], pages: int, is_born: bool
) -> None:
    manager, model, optimizer, adam = registered([(PAGE // 4,)] * 2, torch.optim.AdamW)
    if is_born:
        with manager.phase("train"):
            step(model, optimizer)
    with manager.phase("train"):
        change(model, optimizer)
    for _ in range(2):
        with manager.phase("train"):
            step(
                [each for each in optimizer.param_groups[0]["params"] if each.requires_grad],
                optimizer,
            )
        assert (adam.num_bytes, adam.holding.unborn_bytes if adam.holding else None) == (
            pages * PAGE,
            0,
        )
    manager.check_integrity()


@pytest.mark.parametrize(
    "is_born", [False, True], ids=["before the first step", ("registered with all state")]
)
@pytest.mark.parametrize("how", ["added", "unfrozen"])
def test_parameters_that_come_later_count_before_their_first_step(how: str, is_born: bool) -> None:
    manager = Manager(device=SimulatedDevice(64 * MIB), budget_bytes=MIB)
    model = nn.ParameterList(
        [nn.Parameter(torch.randn(shape)) for shape in (PAGE // 4, 100 * PAGE // 4)]
    )
    model[1].requires_grad_(how == "added")
    adam = torch.optim.AdamW([model[0]] if how == "added" else [*model])
    if is_born:
        step([model[0]], adam)
    manager.register("actor", model, role="actor")
    handle = manager.register("adam", adam)
    with manager.phase("train"):
        step([model[0]], adam)
    if how == "added":
        adam.add_param_group({"params": [model[1]]})
    model[1].requires_grad_()
    with (
        pytest.raises(DeviceMemoryError, match=rf"adam +0 +{202 * PAGE:,}\n"),
        manager.phase("train"),
    ):
        raise AssertionError("entered")
    assert handle.num_bytes == 202 * PAGE


class WithTorch(SimulatedDevice):
    """A device on which torch's allocator holds something, as it does on a GPU."""

    torch_bytes = 0

    def memory(self) -> DeviceMemory:
        seen = super().memory()
        return replace(
            seen,
            free_bytes=seen.free_bytes - self.torch_bytes,
            torch_reserved_bytes=self.torch_bytes,
        )

    def trim(self) -> None:
        self.torch_bytes = 0


def test_state_in_torchs_memory_is_not_taken_for_that_of_others() -> None:
    device = WithTorch(100 * PAGE)
    manager, model, optimizer, adam = registered(
        [(10 * PAGE // 4,)] * 2, torch.optim.AdamW, device=device
    )  # 20 pages, and 40 for the moments
    for number in range(3):
        with manager.phase("train"):
            step(model, optimizer)
            # 20 pages of activations; after the first step the state, too
            device.torch_bytes = (20 if number else 60) * PAGE
            with manager.phase("optimizer_step"):
                assert adam.state is placement.State.TRAINING
        device.torch_bytes = 0  # freed, or behind the range by now
    assert adam.num_bytes == 40 * PAGE
