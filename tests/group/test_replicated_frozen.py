"""Trained replicated handles: the ranks of a machine share one host copy of the frozen parameters, as long as these are frozen."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.group import frozen_worker as worker
from tests.support.ranks import Ranks

_generations = itertools.count(2000)


@pytest.fixture
def generation() -> int:
    return next(_generations)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    started = Ranks(2)
    yield started
    started.close()


@pytest.mark.parametrize("settings", [{}, {"policy": "cyclic"}, {"policy": "resident"}], ids=["colocated", "cyclic", "resident"])
def test_training_with_one_host_copy_of_what_is_frozen(ranks: Ranks, generation: int, settings: dict[str, Any]) -> None:
    seen = ranks.run(worker.trains, generation, settings)
    frozen, everything = seen[0]["frozen"], seen[0]["all"]
    assert frozen > 0.8 * everything
    slack = 64 * worker.CHUNK // 12  # whole pages of each chunk
    assert abs(sum(each["host"] for each in seen) - (frozen + 2 * (everything - frozen))) < slack
    if not settings:
        for each in seen:
            assert abs(each["to_device"] - (frozen / 2 + everything - frozen)) < slack
            assert each["to_host"] == 0


@pytest.mark.parametrize("on", [[0], [1], [0, 1]])
def test_frozen_weights_that_change_are_kept_by_the_ranks_that_changed_them(ranks: Ranks, generation: int, on: list[int]) -> None:
    for rank, (alone, is_shared) in enumerate(ranks.run(worker.merges, generation, on)):
        assert is_shared == (rank not in on)
        assert alone is not None
        assert ("its frozen parameters changed on this rank" in alone) == (rank in on)


def test_a_frozen_layer_may_be_trained_later(ranks: Ranks, generation: int) -> None:
    assert ranks.run(worker.unfreezes, generation) == [False, False]


def test_a_frozen_tensor_in_other_memory_keeps_its_values(ranks: Ranks, generation: int) -> None:
    for told, is_shared in ranks.run(worker.moves_away, generation):
        assert "with the values that they had" in told
        assert is_shared, "what was moved lies in a host copy of this rank's own now, and the others go on sharing"


def test_checkpoints(ranks: Ranks, generation: int, tmp_path: Path) -> None:
    assert ranks.run(worker.saves_and_restores, generation, str(tmp_path / "a")) == [True, True]


@pytest.mark.parametrize("on", [[1], [0, 1]])
def test_a_checkpoint_of_changed_weights_that_are_on_the_device(ranks: Ranks, generation: int, tmp_path: Path, on: list[int]) -> None:
    assert ranks.run(worker.mirrors, generation, str(tmp_path / "a"), on) == [rank not in on for rank in range(2)]


@pytest.mark.parametrize("failing", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_each_device_call_may_fail_while_ranks_stop_sharing(
    ranks: Ranks, generation: int, failing: int, counted: Callable[[str], None]
) -> None:
    cases = ranks.run(worker.faults, generation, failing, deadline_seconds=120.0)
    assert min(cases) > 20
    counted(f"replicated frozen weights that change: every device call of rank {failing} fails once: {cases[0]} cases")


def test_an_offload_that_breaks_off_where_no_memory_can_be_had_back(ranks: Ranks, generation: int) -> None:
    assert ranks.run(worker.stranded, generation) == [False, False]


@pytest.mark.timeout(600)
def test_a_rank_is_interrupted_while_ranks_stop_sharing(ranks: Ranks, generation: int, counted: Callable[[str], None]) -> None:
    """With SWEEP=all at every bytecode."""
    cases = ranks.run(worker.interrupted, generation, 1 if os.environ.get("SWEEP") == "all" else 48, deadline_seconds=500.0)
    counted(f"replicated frozen weights that change: one rank interrupted: {cases[0]} cases")
