"""The ranks that other tests run on."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import RankError, Ranks


def _sum() -> tuple[int, float]:
    value = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(value)
    return dist.get_rank(), value.item()


def _fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("no such layer")
    dist.all_reduce(torch.ones(1))


def _hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(60)


def test_every_rank_answers(two_ranks: Ranks, one_rank: Ranks) -> None:
    assert two_ranks.run(_sum) == [(0, 3.0), (1, 3.0)]
    assert one_rank.run(_sum) == [(0, 1.0)]


def test_what_a_rank_raises_names_it_and_the_next_run_works(two_ranks: Ranks) -> None:
    with pytest.raises(RankError, match=r"(?s)rank 1:.*ValueError: no such layer"):
        two_ranks.run(_fail_on, 1)
    assert two_ranks.run(_sum) == [(0, 3.0), (1, 3.0)]


def test_a_rank_that_hangs_is_ended(two_ranks: Ranks) -> None:
    with pytest.raises(RankError, match="rank 1: no answer"):
        two_ranks.run(_hang_on, 1, deadline_seconds=0.5)
    assert two_ranks.run(_sum) == [(0, 3.0), (1, 3.0)]
