"""verl 4726 (issue 4657): names and shapes of the weights were asked for while the parameters were offloaded.

`get_actor_weights_info` went through FSDP1's state dict, which unshards and wants the parameters on the GPU ("Expects tensor to be on
the compute device"); the fix loaded them and left them there. `weights_info()` answers from what the framework knows: in every state,
on one rank alone, without a value, a move or a collective. Real FSDP1, both ways of showing its parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from placement import Lazy
from placement.testing import assert_nothing_resident
from tests.sharded.publish_worker import BUILDS, Model, manager_of, tokens, wanted_of
from tests.support.ranks import Ranks


@contextmanager
def no_collectives() -> Iterator[list[str]]:
    """Record every call of a collective of torch.distributed."""
    called: list[str] = []
    names = ("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "broadcast", "barrier", "reduce_scatter_tensor")
    real = {name: getattr(dist, name) for name in names}

    def record(name: str) -> Any:
        def call(*arguments: Any, **keywords: Any) -> Any:
            called.append(name)
            return real[name](*arguments, **keywords)

        return call

    for name in names:
        setattr(dist, name, record(name))
    try:
        yield called
    finally:
        for name in names:
            setattr(dist, name, real[name])


def _ask_in_every_state(build: str) -> None:
    wanted = [(name, tuple(value.shape), value.dtype) for name, value in wanted_of(Model()).items()]
    module = BUILDS[build](Model())
    sgd = torch.optim.SGD(module.parameters(), lr=1e-2, momentum=0.9)
    manager = manager_of(nan_check=False)  # the model has a NaN, which its steps spread
    actor = manager.register("actor", module, role="actor")
    manager.register("sgd", sgd)

    def ask() -> None:
        records, resident = len(manager.journal), actor.resident_bytes
        with no_collectives() as called:
            found = actor.weights_info()
        assert [(info.name, info.shape, info.dtype) for info in found] == wanted
        assert called == []
        assert (len(manager.journal), actor.resident_bytes) == (records, resident)

    ask()  # offloaded, before the first step
    assert_nothing_resident(manager)
    with manager.phase("log_prob") as phase:
        ask()
        with torch.no_grad():
            module(tokens())
        ask()  # the root is unsharded
        phase.switch("train")
        ask()
        module(tokens()).square().nanmean().backward()
        ask()
        sgd.step()
        sgd.zero_grad()
        phase.switch("weight_sync")
        ask()
        phase.switch("checkpoint")
        ask()
    ask()
    assert_nothing_resident(manager)
    actor.broken = "a sticky error in the middle of a move"
    ask()


@pytest.mark.parametrize("build", ["fsdp1_flat", "fsdp1_original", "fsdp2", "fsdp2_external"])
def test_names_and_shapes_in_every_state_without_a_move_or_a_collective(two_ranks: Ranks, build: str) -> None:
    two_ranks.run(_ask_in_every_state, build)


def test_what_is_not_built_has_nothing_to_tell() -> None:
    manager = manager_of()

    def never() -> torch.nn.Module:
        raise AssertionError("built for a question")

    late = manager.register("late", Lazy(never), role="critic")
    assert late.weights_info() == []
    assert late.object is None
