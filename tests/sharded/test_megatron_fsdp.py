"""Megatron-FSDP's own classes under placement, on a CPU that pretends to be CUDA (`pretend_cuda`), in both versions."""

from __future__ import annotations

import pytest

from tests.sharded import megatron_fsdp_worker as worker
from tests.support.frameworks import needs
from tests.support.ranks import Ranks

needs("megatron_fsdp")


@pytest.mark.parametrize("strategy", ["optim_grads_params", "no_shard"])
def test_steps_are_the_same_on_two_ranks(two_ranks: Ranks, strategy: str) -> None:
    outcomes = two_ranks.run(worker.compare, "0.6.1", strategy)
    assert all(outcome.resident_bytes["actor"] > 0 and outcome.offloaded_bytes["actor.optimizer"] > 0 for outcome in outcomes)


@pytest.mark.slow
def test_steps_are_the_same_with_the_version_in_megatron_core(two_ranks: Ranks) -> None:
    two_ranks.run(worker.compare, "in megatron-core", "optim_grads_params")


@pytest.mark.parametrize("strategy", ["optim_grads_params", "optim"])
def test_nothing_is_left_on_the_device(two_ranks: Ranks, strategy: str) -> None:
    gathered = two_ranks.run(worker.nothing_is_left, strategy)
    assert [nbytes > 0 for nbytes in gathered] == [strategy == "optim_grads_params"] * 2


def test_dropped_gradients_and_memory_of_nccl(two_ranks: Ranks) -> None:
    two_ranks.run(worker.dropped_gradients_and_user_buffers)
