"""Every optimizer of torch's own database, with every set of options, steps under placement as without,
also from values that diverge: bit for bit, NaN included."""

from __future__ import annotations

import contextlib
import copy
import sys
import types
import unittest
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from placement import PolicyError
from placement.policies import Colocated
from placement.testing import assert_nothing_resident
from tests.support.worker import assert_same, make_manager

GRADIENTS = {
    "converges": (1.0, 1.0, 1.0, 1.0),
    "diverges": (1e30, float("inf"), float("nan"), 1.0),
}
"""By what a few factors of the gradients, one a step, lead to."""


@pytest.fixture(scope="module")
def database() -> Iterator[list[tuple[Any, list[dict[str, Any]]]]]:
    """Each optimizer's entry, and its sets of options."""
    # The database's module imports a package for tests of printed text, which it does not use.
    with pytest.MonkeyPatch.context() as patch:
        stand_in: Any = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase
        patch.setitem(sys.modules, "expecttest", stand_in)
        from torch.testing._internal import common_optimizers as common
    yield [
        (
            info,
            [
                each.kwargs
                for each in common._get_optim_inputs_including_global_cliquey_kwargs(
                    "cpu", torch.float32, info, skip=("differentiable",)
                )
            ],
        )
        for info in common.optim_db
    ]


def dense(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient


def outcome(info: Any, options: dict[str, Any], factors: tuple[float, ...], policy: Any) -> Any:
    """Weights, gradients and state after a few steps, with gradients that outlive a phase."""
    numbers = torch.Generator().manual_seed(0)
    model = torch.nn.ParameterList(
        torch.nn.Parameter(torch.randn(size, generator=numbers)) for size in ((6, 8), (3, 3))
    )
    optimizer = info.optim_cls(model.parameters(), **copy.deepcopy(options))
    manager = None if policy is None else make_manager(policy=policy)
    if manager is not None:
        manager.register("actor", model, role="actor")
        manager.register("actor.optimizer", optimizer)

    def phase(name: str) -> Any:
        return contextlib.nullcontext() if manager is None else manager.phase(name)

    for factor in factors:

        def gradients(factor: float = factor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = sum(((each - 0.5).square() * factor).sum() for each in model)
            assert isinstance(loss, torch.Tensor)
            loss.backward()
            if info.only_supports_sparse_grads:
                for each in model:
                    assert each.grad is not None
                    each.grad = each.grad.to_sparse()
            return loss.detach()

        with phase("train"):
            gradients()
            optimizer.step(*([gradients] if info.step_requires_closure else ()))
        with phase("rollout"):
            pass
    with phase("train"):
        found = copy.deepcopy(
            ([*model], [dense(each.grad) for each in model], optimizer.state_dict())
        )
    if manager is not None:
        assert manager.audit().ok
        assert_nothing_resident(manager)
        manager.close()
    return found


@pytest.mark.parametrize("how", GRADIENTS)
def test_every_optimizer_with_every_set_of_options(
    database: list[tuple[Any, list[dict[str, Any]]]], how: str
) -> None:
    count = 0
    for info, sets in database:
        for options in sets:
            for optimizer_in in ("train", "streamed"):
                with contextlib.suppress(PolicyError):
                    assert_same(
                        outcome(info, options, GRADIENTS[how], Colocated(optimizer_in)),
                        outcome(info, options, GRADIENTS[how], None),
                    )
                    count += 1
    print("COUNT", count)
    assert count > 100
