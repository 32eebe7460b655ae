"""Megatron-Core's own DistributedDataParallel and optimizers under placement, on a CPU that pretends to be CUDA (`pretend_cuda`)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from placement.tensors.plain import nested_tensors
from tests.sharded import megatron_traps as traps
from tests.sharded import megatron_worker as worker
from tests.support.frameworks import needs
from tests.support.ranks import Ranks

needs("megatron.core")


@pytest.mark.parametrize("kind", worker.KINDS, ids=str)
def test_steps_are_the_same_on_two_ranks(two_ranks: Ranks, kind: worker.Kind) -> None:
    outcomes = two_ranks.run(worker.compare, kind)
    assert all(outcome.resident_bytes["actor"] > 0 and outcome.offloaded_bytes["actor.optimizer"] > 0 for outcome in outcomes)


@pytest.mark.parametrize("kind", worker.KINDS[:1] + worker.KINDS[3:4], ids=str)
def test_steps_are_the_same_on_one_rank(one_rank: Ranks, kind: worker.Kind) -> None:
    (outcome,) = one_rank.run(worker.compare, kind)
    assert outcome.resident_bytes["actor"] > 0


ALONE = (
    traps.the_step_stays,
    traps.dropped_on_the_device,
    traps.zeroed_outside,
    traps.guards,
    traps.state_dict_in_every_state,
    traps.caches,
    traps.workspaces_of_transformer_engine,
    traps.user_buffers,
)


@pytest.mark.parametrize("body", ALONE, ids=lambda body: body.__name__)
def test_trap(one_rank: Ranks, body: Callable[[], None]) -> None:
    """What each is about stands at the body."""
    one_rank.run(body)


@pytest.mark.parametrize("can_swap", [False, True])
@pytest.mark.parametrize("kind", [traps.PRECISION_AWARE, worker.Kind(dtype=torch.float32)], ids=str)
def test_shards_that_are_views_of_the_buffer_stay_views(one_rank: Ranks, kind: worker.Kind, can_swap: bool) -> None:
    one_rank.run(traps.aliases, kind, can_swap)


@pytest.mark.parametrize("drops", [False, True])
def test_gradients_live_or_become_zero(one_rank: Ranks, drops: bool) -> None:
    one_rank.run(traps.gradients, drops)


@pytest.mark.parametrize("kind", [worker.Kind(gradients_in_fp32=False), traps.PRECISION_AWARE, worker.Kind(is_distributed=False)], ids=str)
def test_gradients_of_main_parameters_move(one_rank: Ranks, kind: worker.Kind) -> None:
    one_rank.run(traps.gradients_of_main_parameters, kind)


def test_a_rank_that_steps_nothing_has_the_owner_too(two_ranks: Ranks) -> None:
    assert two_ranks.run(traps.owners_on_every_rank) == [True, True]


def test_a_key_that_is_a_tensor_is_not_turned_into_text() -> None:
    """`param_to_bucket_group` has parameters for keys, and the text of a tensor is its values: read at every phase transition, over
    poison."""

    class Key:
        def __format__(self, spec: str) -> str:
            raise AssertionError("the key was read")

    tensor = torch.ones(1)
    assert list(nested_tensors({"named": [tensor], Key(): {Key(): tensor}}, "map")) == [("map.named.0", tensor), ("map.[1].[0]", tensor)]
