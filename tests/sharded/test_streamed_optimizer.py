"""Steps that stream their state, of sharded parameters: steps with everything offloaded between any two phases."""

from __future__ import annotations

import functools

import pytest

from placement.policies import Colocated
from tests.sharded import fsdp2_worker as worker
from tests.sharded import training
from tests.support.ranks import Ranks

STREAMED = functools.partial(training.compare, policy=Colocated("streamed"), streamed_bucket_bytes=2 * training.CHUNK_BYTES)
PROGRAMS = {
    "uneven, tied, adapters, foreach": worker.plain_fsdp2,
    "gradients not reduced, momentum": functools.partial(worker.accumulating_fsdp2, None),
    "two dimensions, fused": worker.hybrid_fsdp2,
    "tensor parallel, two groups": functools.partial(worker.tensor_parallel_program, "Adam", amsgrad=True),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_steps_on_two_ranks(two_ranks: Ranks, name: str) -> None:
    for outcome in two_ranks.run(STREAMED, PROGRAMS[name]):
        assert outcome.resident_bytes["actor.optimizer"] == 0, "its state was loaded as a whole"
        assert outcome.offloaded_bytes["actor.optimizer"] > 0


def test_steps_on_one_rank(one_rank: Ranks) -> None:
    (outcome,) = one_rank.run(STREAMED, worker.plain_fsdp2)
    assert outcome.resident_bytes["actor.optimizer"] == 0
