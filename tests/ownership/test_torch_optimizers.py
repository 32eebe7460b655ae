"""Every optimizer of torch's own database, with every set of options, steps under placement as
without, also from values that diverge: bit for bit, NaN included."""

from __future__ import annotations

import contextlib
import copy
import sys
import types
import unittest
from typing import Any

import pytest
import torch

from placement.devices import base
from placement.policies import Colocated
from placement.testing import assert_nothing_resident
from tests.support.worker import assert_same, make_manager

pytestmark = pytest.mark.sweep  # each optimizer trains in tests/contract/test_clean_skip.py, too

FACTORS = (1.0, 1.0, 1e30, float("nan"))
"""A factor of the gradients for each step: the values converge, and then diverge."""

Database = list[tuple[Any, dict[str, Any]]]


@pytest.fixture(scope="module")
def database() -> Database:
    """The entry of each optimizer with each of its sets of options."""
    # The database's module imports a package that compares printed text, and does not use it.
    with pytest.MonkeyPatch.context() as patch:
        stand_in: Any = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase
        patch.setitem(sys.modules, "expecttest", stand_in)
        from torch.testing._internal import common_optimizers as common
    return [
        (info, each.kwargs)
        for info in common.optim_db
        for each in common._get_optim_inputs_including_global_cliquey_kwargs(
            "cpu", torch.float32, info, skip=("differentiable",)
        )
    ]


def outcome(info: Any, options: dict[str, Any], policy: Any = None) -> Any:
    """Weights after each step, gradients and state after the last. Gradients outlive a phase."""
    numbers = torch.Generator().manual_seed(0)
    model = torch.nn.ParameterList(
        torch.nn.Parameter(torch.randn(size, generator=numbers)) for size in ((6, 8), (3, 3))
    )
    optimizer = info.optim_cls(model.parameters(), **copy.deepcopy(options))
    manager = None if policy is None else make_manager(policy=policy)
    if manager is not None:
        manager.register("actor", model, role="actor")
        manager.register("actor.optimizer", optimizer)

    def phase() -> Any:
        return contextlib.nullcontext() if manager is None else manager.phase("train")

    weights = []
    for factor in FACTORS:

        def backward(factor: float = factor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = torch.stack([((each - 0.5).square() * factor).sum() for each in model]).sum()
            loss.backward()
            if info.only_supports_sparse_grads:
                for each in model:
                    assert each.grad is not None
                    each.grad = each.grad.to_sparse()
            return loss.detach()

        with phase():
            backward()
            optimizer.step(*([backward] if info.step_requires_closure else ()))
            weights.append([each.detach().clone() for each in model])
    with phase():
        gradients = [each.grad for each in model if each.grad is not None]
        found = copy.deepcopy(
            (
                weights,
                [each.to_dense() if each.is_sparse else each for each in gradients],
                optimizer.state_dict(),
            )
        )
    if manager is not None:
        assert manager.audit().ok
        assert_nothing_resident(manager)
        manager.close()
    return found


@pytest.mark.parametrize("part", range(4))
def test_every_optimizer_with_every_set_of_options(database: Database, part: int) -> None:
    """A quarter of the database at a time: every fourth set, of all optimizers."""
    for info, options in database[part::4]:
        if info.only_supports_sparse_grads and not base.can_swap():
            continue  # torch before 2.13 cannot take in such a gradient on a device in host memory
        assert_same(outcome(info, options, Colocated()), outcome(info, options))


@pytest.mark.parametrize("part", range(4))
def test_steps_that_stream_their_state_diverge_alike(database: Database, part: int) -> None:
    """Of those that are fused or not, the ones that are not."""
    num_streamed = 0
    for info, options in database[part::4]:
        is_streamed = info.optim_cls.__name__ in ("Adam", "AdamW", "Adagrad", "RMSprop", "SGD")
        if is_streamed and not options.get("fused"):
            assert_same(outcome(info, options, Colocated("streamed")), outcome(info, options))
            num_streamed += 1
    assert num_streamed
