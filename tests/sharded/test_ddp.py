"""DistributedDataParallel and what steps it, the real ones, on CPU ranks with gloo."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

from placement import Manager, RegistrationError
from placement.testing import SimulatedDevice, assert_nothing_resident
from tests.sharded import training
from tests.support.ranks import Ranks, on_ranks
from tests.support.sweeps import few

BUCKET_MB = 0.0003
"""Several buckets, so that the reducer makes new ones after its first iteration."""


class Net(torch.nn.Module):
    """Buffers that every forward pass writes, a frozen part, and one that only every other batch
    uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(5, 7)
        self.norm = torch.nn.BatchNorm1d(7)
        self.other = torch.nn.Linear(7, 7)
        self.frozen = torch.nn.Linear(7, 7).requires_grad_(False)
        self.last = torch.nn.Linear(7, 3)

    def forward(self, x: torch.Tensor, use_other: bool) -> torch.Tensor:
        x = self.norm(torch.tanh(self.first(x)))
        x = self.frozen(self.other(x) if use_other else x)
        return self.last(x)


@dataclass(frozen=True)
class Variant:
    keywords: dict[str, Any] = field(default_factory=dict)
    optimizer: Callable[..., Any] = torch.optim.AdamW
    hook: str | None = None
    accumulates: bool = False
    """The first backward pass of a step is not averaged."""
    leaves_out: bool = False
    """Every other batch uses only some of the parameters."""

    def model(self) -> DistributedDataParallel:
        # PowerSGD's buckets go through several collectives each, which ranks with gloo may start in
        # different orders.
        bucket_mb = 25 if self.hook == "power_sgd" else BUCKET_MB
        model = DistributedDataParallel(Net(), bucket_cap_mb=bucket_mb, **self.keywords)
        if self.hook == "power_sgd":
            state = powerSGD_hook.PowerSGDState(
                None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=1
            )
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return model

    def program(self, **keywords: Any) -> Program:
        model = self.model()
        optimizer = self.optimizer([p for p in model.parameters() if p.requires_grad], lr=0.05)
        return Program(
            model, optimizer, self.loss_of(model), accumulates=self.accumulates, **keywords
        )

    def loss_of(self, model: torch.nn.Module) -> Callable[[int], torch.Tensor]:
        return lambda number: (
            model(batch(number), not self.leaves_out or number % 4 < 2).square().mean()
        )


def batch(number: int) -> torch.Tensor:
    return torch.randn(
        6, 5, generator=torch.Generator().manual_seed(1000 * number + dist.get_rank())
    )


def zero(
    optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW, **keywords: Any
) -> Callable[..., Any]:
    return functools.partial(_zero, optimizer_class=optimizer_class, **keywords)


def _zero(parameters: list[torch.Tensor], **keywords: Any) -> torch.optim.Optimizer:
    # its package warns when it is imported, which fails the test process
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(parameters, **keywords)


@dataclass
class Program(training.Wrapped):
    def optimizers(self) -> list[Any]:
        return [getattr(self.optimizer, "optim", self.optimizer)]

    def values(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from super().values()
        for index, (_, state) in enumerate(self.model._comm_hooks):
            for bucket, error in sorted(getattr(state, "error_dict", {}).items()):
                yield f"hook.{index}.error.{bucket}", error


def managed(variant: Variant, **keywords: Any) -> tuple[Manager, Program]:
    program = variant.program()
    return training.managed(program, **keywords), program


# --- single cases


def trained(variant: Variant, steps: int) -> tuple[Manager, Program]:
    """After some steps, each of which sets the gradients to None before its phase ends."""
    manager, program = managed(variant)
    for step in range(steps):
        with manager.phase("train"):
            program.learn(step)
    return manager, program


VIEWS = {"gradient_as_bucket_view": True}
UNUSED = {**VIEWS, "find_unused_parameters": True}

VARIANTS = {
    "apart": Variant(),
    "apart-no_sync": Variant(accumulates=True),
    "views": Variant(VIEWS),
    "views-no_sync": Variant(VIEWS, accumulates=True),
    "views-static": Variant({**VIEWS, "static_graph": True}),
    "views-unused": Variant(UNUSED, leaves_out=True),
    "views-power_sgd": Variant(VIEWS, hook="power_sgd"),
    "views-zero": Variant(VIEWS, optimizer=zero()),
    "apart-zero-views": Variant(
        optimizer=zero(torch.optim.SGD, momentum=0.9, parameters_as_bucket_view=True)
    ),
}


@pytest.mark.parametrize("name", few(VARIANTS, "apart", "views-unused"))
def test_training_between_offloads_is_bit_identical(two_ranks: Ranks, name: str) -> None:
    for outcome in two_ranks.run(training.compare, VARIANTS[name].program):
        assert outcome.resident_bytes["actor"] > 0
        assert outcome.offloaded_bytes["actor.optimizer"] > 0


def test_so_it_is_in_a_world_of_one(one_rank: Ranks) -> None:
    (outcome,) = one_rank.run(training.compare, VARIANTS["apart-zero-views"].program)
    assert outcome.offloaded_bytes["actor"] > 0


@pytest.mark.parametrize("name", ["apart", "views-unused"])
def test_gradients_that_die_with_their_phase_leave_the_reducer_working(
    two_ranks: Ranks, name: str
) -> None:
    """The trap: a bucket is gone with its gradients, and the reducer goes on adding up in memory
    that is nobody's."""
    assert two_ranks.run(training.compare_dropping, VARIANTS[name].program)


def test_gradients_zeroed_while_they_are_offloaded(two_ranks: Ranks) -> None:
    assert two_ranks.run(training.compare_zeroing, VARIANTS["views"].program)


@pytest.mark.parametrize("name", ["apart", "views"])
@on_ranks("two_ranks")
def test_the_assertion_that_nothing_is_resident_names_them(name: str) -> None:
    """DDP as it is by default keeps a copy of every gradient; with views it keeps nothing once a
    gradient has shown its bucket."""
    nbytes = sum(
        parameter.nbytes
        for parameter in VARIANTS[name].model().parameters()
        if parameter.requires_grad
    )
    wanted = (
        "gradient_as_bucket_view=False"
        if name == "apart"
        else ("no gradient is a view of them yet")
    )
    kept = (
        f"actor is CPU_OFFLOADED, and its framework keeps {nbytes:,} bytes on the device: "
        f"reducer's buckets ({wanted})"
    )
    for steps in (0, 3):
        manager, _program = trained(VARIANTS[name], steps)
        with (
            nullcontext()
            if name == "views" and steps
            else pytest.raises(AssertionError, match=re.escape(kept)) as caught
        ):
            assert_nothing_resident(manager)
        if caught is not None:
            assert "gradient_as_bucket_view=True" in str(caught.value)
            assert "allow_foreign=True" in str(caught.value)
        assert_nothing_resident(manager, allow_foreign=True)
    audit = manager.audit()
    foreign_bytes = nbytes if name == "apart" else 0
    assert (audit.foreign_bytes, manager.handles["actor"].foreign_bytes, audit.ok) == (
        foreign_bytes,
        foreign_bytes,
        True,
    )
    assert (
        (f"foreign: actor: reducer's buckets ({wanted}) ({nbytes:,} bytes)") in audit.report
    ) is (name == "apart")


@on_ranks("two_ranks")
def test_the_map_of_used_parameters_is_foreign() -> None:
    manager, _program = trained(VARIANTS["views-unused"], 1)
    assert manager.audit().ok
    assert "map of used parameters" in manager.audit().report


@on_ranks("two_ranks")
def test_what_cannot_be_moved_is_refused() -> None:
    """A wrapper that puts other parameters in place of its own, and a sharded optimizer that steps
    inside the backward pass."""
    model = DistributedDataParallel(
        Net(), mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16)
    )
    with pytest.raises(RegistrationError, match=r"torch\.autocast"):
        Manager(device=SimulatedDevice(training.CAPACITY)).register("actor", model)
    manager, program = managed(Variant())
    parameters = [parameter for parameter in program.model.parameters() if parameter.requires_grad]
    optimizer = zero(torch.optim.SGD, lr=0.1, overlap_with_ddp=True)(parameters)
    with pytest.raises(RegistrationError, match="leave overlap_with_ddp out"):
        manager.register("overlapping", optimizer)
