"""Replicated handles over NCCL, a rank a GPU: the bodies of tests/group/replicated_worker.py and
trained_worker.py. Skipped where there is one GPU."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from tests.gpu.on_gpus import gpus
from tests.group import part_worker
from tests.group import replicated_worker as worker
from tests.group import trained_worker as trained
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


@pytest.mark.parametrize("switches", [False, True])
def test_training_is_bit_exact_with_one_host_copy_of_weights_and_optimizer_state(
    two_gpus: Ranks, switches: bool
) -> None:
    together = two_gpus.run(
        trained.trains,
        next(_generations),
        20,
        True,
        True,
        {},
        switches,
        deadline_seconds=DEADLINE_SECONDS,
    )
    alone = two_gpus.run(
        trained.trains,
        next(_generations),
        20,
        True,
        False,
        {},
        switches,
        deadline_seconds=DEADLINE_SECONDS,
    )
    for ours, theirs in zip(together, alone, strict=True):
        assert all(
            ours["values"][name] == theirs["values"][name]
            for name in ours["values"]
            if name != "seen"
        )
        for nbytes in (ours["host"] - ours["own"], ours["to_host"], ours["first"]):
            # a range's last chunk has one writer
            assert nbytes == pytest.approx(ours["shared"] / 2, abs=2 * worker.CUDA_CHUNK)
        assert theirs["host"] > 0.95 * ours["shared"] < 1.05 * theirs["to_host"]


def test_ranks_of_a_mesh_that_replicates_share_their_shards(two_gpus: Ranks) -> None:
    seen = two_gpus.run(
        part_worker.hybrid, next(_generations), "cuda", deadline_seconds=DEADLINE_SECONDS
    )
    assert all(set(members) == {(0, 1)} for members, _ in seen)
    assert sum(share for _, share in seen) == pytest.approx(1, rel=0.15)  # whole pages


def test_trained_replicas_that_differ_are_told(two_gpus: Ranks) -> None:
    for told in two_gpus.run(
        trained.differs, next(_generations), 1, False, True, deadline_seconds=DEADLINE_SECONDS
    ):
        assert all("has other bytes on rank 1 than on the rest" in each for each in told)


@pytest.mark.parametrize(("method", "when"), trained.STEPS)
def test_a_rank_dies_while_all_write(two_gpus: Ranks, method: str, when: str) -> None:
    arguments = (next(_generations), 1, method, when, False, False, True)
    (shares, told), _ = two_gpus.run(
        trained.killed, *arguments, deadline_seconds=DEADLINE_SECONDS, dies=1
    )
    assert shares[0] == ((method, when) != ("meet", "before"))
    assert shares[0] or "rank 1 has died" in told[0]
