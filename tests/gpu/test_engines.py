"""`TorchEngine` around modules of torch's own frameworks with NCCL: the cases of tests/engines/test_frameworks.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engines import matrix_worker as worker
from tests.gpu.on_gpus import gpus
from tests.sharded.one_of_each import needed
from tests.support.ranks import Ranks

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

DEADLINE_SECONDS = 120.0


@pytest.fixture(scope="module", params=[1, 2], ids=["one_gpu", "two_gpus"])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    yield from gpus(request.param)


@pytest.mark.parametrize("engine", worker.MADE)
def test_an_engine_of_each_framework_is_fed_by_an_actor_of_its_own(ranks: Ranks, engine: str) -> None:
    ranks.run(worker.roll_out, needed(engine), needed(engine), "cuda", deadline_seconds=DEADLINE_SECONDS)


@pytest.mark.parametrize("engine", ["plain", "fsdp2", "cpu_offload", "fsdp1_flat", "tensor_parallel"])
def test_and_by_an_actor_that_is_whole_on_each_rank(ranks: Ranks, engine: str) -> None:
    ranks.run(worker.roll_out, engine, "ddp_apart", "cuda", deadline_seconds=DEADLINE_SECONDS)
