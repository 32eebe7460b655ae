"""Replicated handles over NCCL, a rank a GPU: the bodies of tests/group/replicated_worker.py and
tuned_worker.py. Skipped where there is one GPU."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from tests.gpu.on_gpus import gpus
from tests.group import part_worker, tuned_worker
from tests.group import replicated_worker as worker
from tests.group.test_replicated import check_shares
from tests.support.ranks import Ranks

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

DEADLINE_SECONDS = 120.0
_generations = itertools.count(1)


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    yield from gpus(request.param)


def test_values_host_memory_and_bytes_over_the_link(ranks: Ranks) -> None:
    check_shares(
        ranks.run(worker.loads, next(_generations), True, deadline_seconds=DEADLINE_SECONDS),
        worker.CUDA_CHUNK,
    )


def test_an_fsdp2_actor_and_its_reference_train_on_after_one_rank_was_full(ranks: Ranks) -> None:
    for told in ranks.run(
        part_worker.full, next(_generations), "cuda", 1, deadline_seconds=DEADLINE_SECONDS
    ):
        assert len(told) == 2
        assert all("rank 1: DeviceMemoryError" in each for each in told)


def test_the_host_does_not_wait_for_the_gpu(ranks: Ranks) -> None:
    """With much work queued, entering a phase returns while it is still running."""
    assert all(
        ranks.run(worker.loads_behind_work, next(_generations), deadline_seconds=DEADLINE_SECONDS)
    )


def test_frozen_weights_that_change_are_kept_by_the_rank_that_changed_them(two_gpus: Ranks) -> None:
    two_gpus.run(
        tuned_worker.merges, next(_generations), [1], True, deadline_seconds=DEADLINE_SECONDS
    )


def test_ranks_of_a_mesh_that_replicates_share_their_shards(two_gpus: Ranks) -> None:
    seen = two_gpus.run(
        part_worker.hybrid, next(_generations), "cuda", deadline_seconds=DEADLINE_SECONDS
    )
    assert all(members == [(0, 1)] for members, _ in seen)
    assert sum(share for _, share in seen) == pytest.approx(1, rel=0.15)  # whole pages
