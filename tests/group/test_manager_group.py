"""Managers of two ranks that change phase together, in real processes."""

from __future__ import annotations

import itertools

import pytest

from tests.group import manager_worker as worker
from tests.support.ranks import Ranks

_generations = itertools.count(1)


@pytest.fixture
def generation() -> int:
    """A membership of its own for each test: the ranks live on."""
    return next(_generations)


def test_steps_are_made_together(two_ranks: Ranks, generation: int) -> None:
    (first, epochs), (second, other) = two_ranks.run(worker.steps_together, generation)
    assert first == second
    assert epochs == other == 9  # enter, switch, leave: three steps


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("switched", [False, True])
def test_out_of_memory_on_one_rank_is_everybodys_and_the_next_step_succeeds(
    two_ranks: Ranks, generation: int, failing: int, switched: bool
) -> None:
    results = two_ranks.run(worker.out_of_memory_on, generation, failing, switched)
    for told, is_its_own, loss in results:
        assert list(told) == [failing]
        assert told[failing].startswith("DeviceMemoryError")
        assert is_its_own
        assert loss == results[0][2]


@pytest.mark.parametrize("failing", [0, 1])
def test_an_exception_of_the_user_on_one_rank(two_ranks: Ranks, generation: int, failing: int) -> None:
    results = two_ranks.run(worker.user_error_on, generation, failing)
    assert results[failing][0] == "ZeroDivisionError: in the user's code"
    assert f"rank {failing}: ZeroDivisionError: in the user's code" in results[1 - failing][0]
    assert results[0][1] == results[1][1]  # both are at the same epoch again
    assert results[0][2] == results[1][2]


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("switched", [False, True])
def test_numbers_that_became_nan_on_one_rank(two_ranks: Ranks, generation: int, failing: int, switched: bool) -> None:
    results = two_ranks.run(worker.nan_on, generation, failing, switched)
    for told, *_ in results:
        assert "of 'actor' were numbers at its last offload" in told
    assert results[0][1:] == results[1][1:]  # both are at the same epoch, and go on together


def test_a_plan_that_does_not_fit_one_rank_is_nobodys(two_ranks: Ranks, generation: int) -> None:
    for told in two_ranks.run(worker.budgets_differ, generation):
        assert "DeviceMemoryError" in told
        assert not told.startswith("alone")


def test_ranks_that_want_different_phases_are_named(two_ranks: Ranks, generation: int) -> None:
    for told in two_ranks.run(worker.other_action, generation):
        assert told == {0: "is about to enter log_prob", 1: "is about to enter train"}


@pytest.mark.parametrize("failing", [0, 1])
def test_an_exception_that_is_raised_again_in_a_later_step_is_told_again(two_ranks: Ranks, generation: int, failing: int) -> None:
    results = two_ranks.run(worker.one_error_in_two_steps, generation, failing)
    assert results[failing][0] == ["in a thread of the user's"] * 2
    assert results[1 - failing][0] == ["the ranks did not change phase together, so all went back"] * 2
    assert results[0][1:] == results[1][1:]


@pytest.mark.parametrize("failing", [0, 1])
def test_an_exception_is_told_to_each_group_whose_phase_it_passes_through(two_ranks: Ranks, generation: int, failing: int) -> None:
    results = two_ranks.run(worker.error_through_two_groups, generation, failing)
    assert results[failing][0] == ["in the user's code", "of some other group"]
    assert f"rank {failing}: ZeroDivisionError: in the user's code" in results[1 - failing][0][0]
    assert f"rank {failing}: GroupError: of some other group" in results[1 - failing][0][1]
    assert results[0][1:] == results[1][1:]


@pytest.mark.parametrize("failing", [0, 1])
def test_an_exception_that_takes_no_attribute_stays_what_it_is(two_ranks: Ranks, generation: int, failing: int) -> None:
    results = two_ranks.run(worker.frozen_error_on, generation, failing)
    assert results[failing][0] == "Frozen(code=7)"
    assert f"rank {failing}: Frozen: 7" in results[1 - failing][0]
    assert results[0][1:] == results[1][1:]


@pytest.mark.parametrize("failing", [0, 1])
def test_an_interrupt_while_one_rank_leaves_is_told(two_ranks: Ranks, generation: int, failing: int) -> None:
    results = two_ranks.run(worker.interrupted_while_leaving, generation, failing)
    assert results[failing][0] == "KeyboardInterrupt "
    assert f"rank {failing}: KeyboardInterrupt" in results[1 - failing][0]
    assert results[0][1:] == results[1][1:]
