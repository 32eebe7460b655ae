"""The ranks that other tests run on."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import RankError, Ranks


def _fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("no such layer")
    dist.all_reduce(torch.ones(1))


def test_what_a_rank_raises_names_it_and_the_next_run_works(two_ranks: Ranks) -> None:
    with pytest.raises(RankError, match=r"(?s)rank 1:.*ValueError: no such layer"):
        two_ranks.run(_fail_on, 1)
    assert two_ranks.run(dist.get_rank) == [0, 1]
