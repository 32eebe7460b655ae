"""One engine over the devices of two ranks: it comes when every rank's actor is off, and every rank's actor comes when it is off."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.engines import rank_worker as worker
from tests.support.ranks import Ranks

_generations = itertools.count(1000)


@pytest.fixture
def generation() -> int:
    return next(_generations)


def test_no_rank_is_ahead_of_the_engine(two_ranks: Ranks, tmp_path: Path, generation: int) -> None:
    first, second = two_ranks.run(worker.steps_together, str(tmp_path), generation)
    assert first == second == 10  # it begins on the device, and comes and goes four times


def test_an_engine_that_cannot_be_loaded_is_everybodys(two_ranks: Ranks, tmp_path: Path, generation: int) -> None:
    for told, phase in two_ranks.run(worker.engine_fails_to_load, str(tmp_path), generation):
        assert list(told) == [0]
        assert told[0] == "EngineError: out of memory in rank 1's worker"
        assert phase == "weight_sync"
