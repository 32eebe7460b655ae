"""Ranks that are apart, because one has skipped a phase transition or comes late to it, and how they find each other again."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection
from typing import Any

import pytest
import torch.distributed as dist

from placement.group import StoreGroup
from tests.group.manager_ranks import Join, Rank, joining, on_all, ranks_of
from tests.group.test_refused_transitions import capturing, enter

SHORT_SECONDS = 0.3
AMPLE_SECONDS = 30.0


@pytest.fixture
def join() -> Join:
    return joining()


def attempt(ranks: list[Rank], without: Collection[int] = (), name: str = "train") -> list[Any]:
    """Every rank enters a phase but those that skip it; the others find that out at a short deadline."""
    for rank in ranks:
        rank.group.deadline_seconds = SHORT_SECONDS if without else AMPLE_SECONDS
    return on_all(ranks, lambda rank: None if rank.group.rank in without else rank.tried(lambda: enter(rank, name)))


@pytest.mark.parametrize(
    ("world_size", "skips"),
    [
        pytest.param(2, [{1}], id="one rank"),
        pytest.param(2, [{0}], id="rank 0"),
        pytest.param(2, [{1}, {1}, {1}], id="three times"),
        pytest.param(2, [{0}, {1}, {0}], id="in turns"),
        pytest.param(3, [{1, 2}], id="two of three"),
        pytest.param(3, [{0, 1}, {2}], id="all, one after the other"),
        pytest.param(3, [{2}, {0, 2}], id="one twice, one once"),
    ],
)
def test_ranks_that_skipped_transitions_meet_in_the_next_attempt(
    world_size: int, skips: list[set[int]], join: Join, caplog: pytest.LogCaptureFixture
) -> None:
    ranks = ranks_of(join, world_size)
    assert on_all(ranks, Rank.step) == ["done"] * world_size
    for skipping in skips:
        for rank, told in enumerate(attempt(ranks, skipping)):
            assert (told is None) if rank in skipping else "no proposal within 0.3 s" in told
    with caplog.at_level(logging.WARNING, logger="placement"):
        assert attempt(ranks) == ["done"] * world_size
    assert "came too late for the other ranks' attempt to enter train, which they gave up" in caplog.text
    assert len({rank.group.epoch for rank in ranks}) == 1
    assert on_all(ranks, Rank.step) == ["done"] * world_size


def test_a_rank_that_skipped_a_transition_and_goes_on_to_another_phase(join: Join) -> None:
    ranks = ranks_of(join, 2)
    attempt(ranks, {1}, "log_prob")
    assert attempt(ranks, name="train") == ["done", "done"]


def test_ranks_that_are_about_something_else_by_then_are_named_and_meet_after_that(join: Join) -> None:
    ranks = ranks_of(join, 2)
    attempt(ranks, {1}, "log_prob")
    for rank in ranks:
        rank.group.deadline_seconds = AMPLE_SECONDS
    found = on_all(ranks, lambda rank: rank.failures(lambda: enter(rank, "log_prob" if rank.group.rank == 1 else "train")))
    assert found == [{0: "is about to enter train", 1: "is about to enter log_prob"}] * 2
    assert attempt(ranks) == ["done", "done"]


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_comes_late_to_an_entry_meets_those_who_try_it_again(late: int, join: Join) -> None:
    ranks = ranks_of(join, 2)
    given_up = threading.Event()

    def body(rank: Rank) -> list[str]:
        if rank.group.rank == late:
            assert given_up.wait(AMPLE_SECONDS)
            return [rank.tried(lambda: enter(rank))]
        rank.group.deadline_seconds = SHORT_SECONDS
        told = [rank.tried(lambda: enter(rank))]
        rank.group.deadline_seconds = AMPLE_SECONDS
        given_up.set()
        return [*told, rank.tried(lambda: enter(rank))]

    found = on_all(ranks, body)
    assert found[late] == ["done"]
    assert f"rank {late}: no proposal" in found[1 - late][0]
    assert found[1 - late][1] == "done"


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("transition", ["switch", "leave"])
def test_within_a_phase_a_rank_that_is_late_goes_the_way_of_the_others(transition: str, late: int, join: Join) -> None:
    """There is nothing that it can have skipped; so all of them are out of the phase, and at the same epoch."""
    ranks = ranks_of(join, 2)
    given_up = threading.Event()

    def body(rank: Rank) -> None:
        with rank.manager.phase("train") as step:
            if rank.group.rank == late:
                assert given_up.wait(AMPLE_SECONDS)
            else:
                rank.group.deadline_seconds = SHORT_SECONDS
            if transition == "switch":
                step.switch("eval")

    def out(rank: Rank) -> str:
        told = rank.tried(lambda: body(rank))
        given_up.set()
        return told

    for told in on_all(ranks, out):
        assert f"rank {late}: no proposal" in told
    assert len({rank.group.epoch for rank in ranks}) == 1
    assert attempt(ranks) == ["done", "done"]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_skipped_a_transition_and_is_refused_at_the_next_tells_the_others_at_once(failing: int, join: Join) -> None:
    ranks = ranks_of(join, 2)
    attempt(ranks, {failing})
    for rank in ranks:
        rank.group.deadline_seconds = AMPLE_SECONDS

    def body(rank: Rank) -> None:
        if rank.group.rank == failing:
            with capturing(rank):
                enter(rank)
        else:
            enter(rank)

    for failures in on_all(ranks, lambda rank: rank.failures(lambda: body(rank))):
        assert list(failures) == [failing]
        assert "a graph is being captured" in failures[failing]
    assert attempt(ranks) == ["done", "done"]


def test_what_another_rank_ended_by_failing_is_not_passed_over() -> None:
    """A rank that comes to enter hears that the phase failed on another one: nobody has waited for it."""
    store = dist.HashStore()
    first, second = (StoreGroup(store, rank, 2, AMPLE_SECONDS) for rank in range(2))
    told = first.abort(ZeroDivisionError("in the user's code"), waits=False)
    assert told is not None
    rank = Rank(second)
    assert rank.failures(lambda: enter(rank)) == {0: "ZeroDivisionError: in the user's code"}
    assert first.epoch == second.epoch == 1
