"""Whoever wants to lose or spoil a value of a sharded model: exceptions half-way, odd orders, early
ends. On 2 ranks with gloo.

A script runs plain and under a manager and must see the same bytes; the others say what must hold.
All of it is torch's own.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Collection, Iterator
from typing import Any

import pytest
import torch

import placement
from placement.testing import assert_nothing_resident
from tests.sharded import training
from tests.sharded.one_of_each import PROGRAMS, Block
from tests.support.ranks import on_ranks
from tests.support.sweeps import few


class Stage:
    """A program with a manager, or without one: then phases do nothing."""

    def __init__(self, name: str, is_managed: bool) -> None:
        torch.manual_seed(0)
        self.name = name
        self.program = PROGRAMS[name]("cpu")
        self.manager: placement.Manager | None = None
        self.seen: list[Any] = []
        """What must be the same with and without a manager."""
        self.reported: set[str] = {"stray_reference"}
        """What an audit may find: somebody (a live graph, a traceback) holds storages of an
        offloaded model."""
        if is_managed:
            self.manager = placement.Manager(device=training.device_of("cpu"))
            self.program.register(self.manager)

    @property
    def blocks(self) -> list[Block]:
        return [module for module in self.program.model.modules() if isinstance(module, Block)]

    @contextlib.contextmanager
    def phase(self, name: str, **keywords: Any) -> Iterator[Any]:
        """A phase of the manager; at the end of the outermost everything is off the device."""
        with (
            contextlib.nullcontext()
            if self.manager is None
            else self.manager.phase(name, **keywords) as phase
        ):
            yield phase
        if self.manager is not None and not self.manager.snapshot().phases:
            check_off(self.manager, self.reported)

    def see(self, value: torch.Tensor) -> None:
        self.seen.append(training.as_bytes(value))

    def step(self, number: int) -> None:
        for phase, method in self.program.phases:
            with self.phase(phase):
                self.see(getattr(self.program, method)(number))

    def end(self) -> None:
        """Leave placement; the values of everything are seen."""
        if self.manager is not None:
            self.manager.close()
            assert self.manager.device.memory().chunk_bytes == 0
        self.program.reshard()
        self.seen.append(training.digest(self.program))


def check_off(manager: placement.Manager, reported: Collection[str] = ("stray_reference",)) -> None:
    """Everything is off the device, and nothing is wrong beyond what has to be reported."""
    findings = [finding for finding in manager.audit().findings if finding.what not in reported]
    assert not findings, findings
    manager.check_integrity()
    assert manager.device.memory().chunk_bytes == 0
    training.assert_off(manager)


class UserError(Exception):
    """What the user's own code raises."""


Script = Callable[[Stage], None]


def _short(value: Any) -> str:
    return repr(value)[:200]


# --- scripts


class Raise(torch.autograd.Function):
    """Raises in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise UserError("backward")


def refuse(*_: object) -> None:
    raise UserError("forward")


def _broken_off(
    stage: Stage, install: Callable[[], Any], phases: Collection[tuple[str, str]]
) -> None:
    """Steps that are given up half-way between steps that are not; training goes on as if they had
    not been tried."""
    for number in range(2):
        stage.step(number)
        if stage.manager is None:
            continue
        handle = install()
        stage.program.model.eval()  # it counts its forward passes in training
        for phase, method in phases:
            with contextlib.suppress(UserError), stage.manager.phase(phase):
                getattr(stage.program, method)(number)
            check_off(stage.manager)
        stage.program.model.train()
        handle.remove()
        stage.program.optimizer.zero_grad()


def forward_raises(stage: Stage) -> None:
    """The last block's forward raises, with everything before it gathered, with and without
    gradients.

    FSDP1 alone would train something else afterwards.
    """
    _broken_off(
        stage, lambda: stage.blocks[1].up.register_forward_pre_hook(refuse), stage.program.phases
    )


def backward_raises(stage: Stage) -> None:
    """A backward pass raises between the two blocks.

    FSDP2 and DDP alone would not go on: the one trains nothing in the next step, the other raises.
    """
    _broken_off(
        stage,
        lambda: stage.blocks[0].register_forward_hook(lambda _, __, out: Raise.apply(out)),
        [("train", "learn")],
    )


def graph_over_a_transition(stage: Stage) -> None:
    """Forward in one phase, backward in the next, the optimizer's step in a third."""
    for number in range(2):
        with stage.phase("train"):
            loss = stage.program.loss(number)
            stage.see(loss)
        with stage.phase("train"):
            loss.backward()
        del loss
        with stage.phase("train"):
            stage.program.optimizer.step()
            stage.program.optimizer.zero_grad()
    stage.step(9)


def left_for_good(stage: Stage) -> None:
    """Placement is closed in the middle of the training, which goes on, and the same objects are
    registered once more."""
    stage.step(0)
    with stage.phase("train"):
        stage.see(stage.program.backward(0))
    if stage.manager is not None:
        stage.manager.close()
        manager, stage.manager = stage.manager, None
        assert manager.device.memory().chunk_bytes == 0
        stage.step(1)
        stage.manager = placement.Manager(device=training.device_of("cpu"))
        stage.program.register(stage.manager)
        stage.step(2)
        return
    stage.step(1)
    stage.step(2)


# A case for each way that something could be lost. Not with all: DDP itself raises after a backward
# that broke off.
SCRIPTS = {
    forward_raises: ("fsdp2", "fsdp1_original", "fsdp1_flat"),
    backward_raises: ("fsdp2", "fsdp1_original", "fsdp1_flat"),
    graph_over_a_transition: ("fsdp2", "fsdp1_original", "fsdp1_flat", "ddp"),
    left_for_good: ("fsdp2", "fsdp1_original"),
}


CASES = [(script, name) for script, names in SCRIPTS.items() for name in names]


@pytest.mark.parametrize(
    "case",
    few(
        CASES,
        (backward_raises, "fsdp2"),
        (graph_over_a_transition, "ddp"),
    ),
    ids=[f"{script.__name__}-{name}" for script, name in CASES],
)
@on_ranks("two_ranks")
def test_a_script_sees_the_same_bytes_as_without_placement(case: tuple[Script, str]) -> None:
    """Run a script plain and managed; what it sees must not differ."""
    script, name = case
    outcomes = []
    for is_managed in (False, True):
        stage = Stage(name, is_managed)
        script(stage)
        stage.end()
        outcomes.append(stage.seen)
    plain, managed = outcomes
    assert len(plain) == len(managed), f"{len(managed)} results for {len(plain)}"
    for index, (one, other) in enumerate(zip(plain, managed, strict=True)):
        assert one == other, f"result {index} differs: {_short(other)} for {_short(one)}"


@pytest.mark.parametrize("name", ["fsdp2", "fsdp1_original", "ddp"])
@on_ranks("two_ranks")
def test_a_model_that_nobody_holds_any_more_goes_with_its_handle_and_every_byte(name: str) -> None:
    device = training.device_of("cpu")
    manager = placement.Manager(device=device)
    program: Any = PROGRAMS[name]("cpu")
    program.register(manager)
    with manager.phase("train"):
        program.learn(0)
    with manager.phase("train"):
        program.backward(0)
        del program
        gc.collect()
    gc.collect()
    assert not manager.handles, [*manager.handles]
    assert device.memory().chunk_bytes == 0
    assert_nothing_resident(manager)
    manager.close()
