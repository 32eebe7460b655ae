"""Sharded models with NCCL, on one and on two GPUs: the programs of tests/sharded/one_of_each.py,
which run with gloo on a CPU too.

Each rank is a process of its own that this test starts. Where there is one GPU the cases of two are
skipped.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines import test_frameworks as engines
from tests.gpu.on_gpus import gpus, measure
from tests.sharded.one_of_each import (
    PROGRAMS,
    SAVED,
    check_moved,
    check_published,
    compare,
    needed,
    publish,
    save_and_load,
)
from tests.support.ranks import Ranks

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

DEADLINE_SECONDS = 120.0


@pytest.fixture(scope="module", params=[1, 2], ids=["one_gpu", "two_gpus"])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    yield from gpus(request.param)


@pytest.mark.parametrize("name", PROGRAMS)
def test_20_steps_are_bit_identical_with_everything_offloaded_between_any_two_phases(
    ranks: Ranks, name: str
) -> None:
    check_moved(ranks.run(compare, needed(name), "cuda", deadline_seconds=DEADLINE_SECONDS), name)


@pytest.mark.parametrize("name", PROGRAMS)
def test_offloads_give_the_driver_its_bytes_back_exactly(ranks: Ranks, name: str) -> None:
    for seen in ranks.run(
        measure,
        functools.partial(PROGRAMS[needed(name)], "cuda"),
        deadline_seconds=DEADLINE_SECONDS,
    ):
        assert all(declared == measured for _, declared, measured in seen), seen
        assert all((declared > 0) == (name != "cpu_offload") for _, declared, _ in seen), seen


@pytest.mark.parametrize("streamed", [False, True], ids=["resident", "streamed"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_published_weights_equal_the_full_state_dict(
    ranks: Ranks, name: str, streamed: bool
) -> None:
    for published in ranks.run(
        publish, needed(name), "cuda", streamed, deadline_seconds=DEADLINE_SECONDS
    ):
        check_published(published)


@pytest.mark.parametrize("name", SAVED)
def test_a_checkpoint_of_what_is_offloaded_takes_no_device_memory_and_resumes_exactly(
    ranks: Ranks, name: str, tmp_path: Path
) -> None:
    ranks.run(save_and_load, needed(name), "cuda", str(tmp_path), deadline_seconds=DEADLINE_SECONDS)


# --- `TorchEngine` around modules of torch's own frameworks: the cases of
# tests/engines/test_frameworks.py


@pytest.mark.parametrize("engine", engines.MADE)
def test_an_engine_of_each_framework_is_fed_by_an_actor_of_its_own(
    ranks: Ranks, engine: str
) -> None:
    ranks.run(
        engines.roll_out, needed(engine), needed(engine), "cuda", deadline_seconds=DEADLINE_SECONDS
    )


@pytest.mark.parametrize(
    "engine", ["plain", "fsdp2", "cpu_offload", "fsdp1_flat", "tensor_parallel"]
)
def test_and_by_an_actor_that_is_whole_on_each_rank(ranks: Ranks, engine: str) -> None:
    ranks.run(engines.roll_out, engine, "ddp_apart", "cuda", deadline_seconds=DEADLINE_SECONDS)
