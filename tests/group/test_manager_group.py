"""Managers that change phase together: whatever one rank fails in, all hear of it at once, go back,
and meet in the next step."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from placement import Manager
from placement.core.errors import GroupError, PhaseError, PolicyError
from placement.group import Group, StoreGroup
from placement.testing import SimulatedDevice, assert_nothing_resident
from tests.group.manager_ranks import Rank, enter, groups_of, meet, ranks_of
from tests.support.sweeps import diagonal
from tests.support.threads import in_threads, on_all
from tests.support.trainer import CHUNK

SHORT_SECONDS = 0.3
AMPLE_SECONDS = 30.0


def raised(rank: Rank, do: Callable[[], Any]) -> str:
    """What it raises, with nothing left on the device."""
    try:
        do()
    except BaseException as error:
        assert_nothing_resident(rank.manager)
        return f"{type(error).__name__}: {error}"
    raise AssertionError("nothing failed")


# --- a rank fails in the middle


def test_three_ranks_whose_moves_fail_differently() -> None:
    """Past the proposals: no memory from the driver, a policy that fails, and a copy that fails."""
    ranks = ranks_of(3)
    ranks[0].faults.fail("create")
    ranks[1].policy.fails_in = "train"
    ranks[2].faults.fail("copy")
    found = on_all(ranks, lambda rank: rank.failures(lambda: rank.manager.enter("train")))
    first = set.intersection(*(set(failures) for failures in found))
    assert first, "all have the reason of the rank that failed first"
    for own, (failures, kind) in enumerate(
        zip(found, ("DeviceMemoryError", "PolicyError", "InjectedFault"), strict=True)
    ):
        assert {*failures} == {own, *first}
        assert failures[own].startswith(kind)
    meet(ranks)


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    """Takes no attribute, and no note."""

    code: int


@pytest.mark.parametrize(
    ("error", "failing"),
    diagonal(
        {
            repr(error): error
            for error in (
                ZeroDivisionError("the user's"),
                Frozen(7),
                GroupError("of another group", {0: "x"}),
            )
        },
        [0, 1],
    ),
)
def test_an_exception_of_the_user_on_one_rank(failing: int, error: Exception) -> None:
    """Through two of its phases, and through one of a manager with a group of its own."""
    ranks = ranks_of(2)
    alone = StoreGroup(dist.HashStore(), 0, 1, 10.0)
    inner = Manager(device=SimulatedDevice(64 * CHUNK, chunk_bytes=CHUNK), group=alone)

    def body(rank: Rank) -> None:
        with rank.manager.phase("log_prob"), rank.manager.phase("checkpoint"):
            if rank.group.rank == failing:
                with inner.phase("log_prob"):
                    raise error

    found = on_all(ranks, lambda rank: raised(rank, lambda: body(rank)))
    assert found[failing] == f"{type(error).__name__}: {error}"
    assert f"rank {failing}: {found[failing]}" in found[1 - failing]
    meet(ranks)


def test_an_exception_that_is_raised_again_in_a_later_step_is_told_again() -> None:
    """One object, as of a future that is asked again."""
    ranks = ranks_of(2)
    broken: Future[None] = Future()
    broken.set_exception(ZeroDivisionError("in a thread"))

    def body(rank: Rank) -> None:
        with rank.manager.phase("log_prob"):
            if rank.group.rank == 0:
                broken.result()

    for _ in range(2):
        found = on_all(ranks, lambda rank: raised(rank, lambda: body(rank)))
        assert found[0] == "ZeroDivisionError: in a thread"
        assert "rank 0: ZeroDivisionError: in a thread" in found[1]
    meet(ranks)


@pytest.mark.parametrize("failing", [0, 1])
def test_an_interrupt_while_one_rank_leaves_is_told(failing: int) -> None:
    ranks = ranks_of(2)
    offload = ranks[failing].faults.copy

    def interrupted(*_: Any) -> None:
        ranks[failing].faults.copy = offload  # type: ignore[method-assign]
        raise KeyboardInterrupt

    def body(rank: Rank) -> None:
        with rank.manager.phase("train"):
            with torch.no_grad():
                rank.actor.weight.add_(1)  # so that there is something to copy
            if rank.group.rank == failing:
                rank.faults.copy = interrupted  # type: ignore[method-assign]

    found = on_all(ranks, lambda rank: raised(rank, lambda: body(rank)))
    assert found[failing] == "KeyboardInterrupt: "
    assert f"rank {failing}: KeyboardInterrupt" in found[1 - failing]
    meet(ranks)


# --- budgets


class Small:
    """A rank of three with a budget or a device of its own."""

    def __init__(self, group: Group, how: str, nbytes: int | None, rows: int) -> None:
        capacity = nbytes if how == "device" and nbytes is not None else 1 << 28
        self.manager = Manager(
            device=SimulatedDevice(capacity),
            budget_bytes=nbytes if how == "budget" else None,
            group=group,
        )
        self.models = {name: nn.Linear(1024, rows, bias=False) for name in ("actor", "ref")}
        for name, model in self.models.items():
            self.manager.register(name, model, role=name)

    def enter(self) -> None:
        with self.manager.phase("log_prob"):
            pass

    def told(self) -> GroupError:
        with pytest.raises(GroupError) as caught:
            self.enter()
        assert_nothing_resident(self.manager)
        return caught.value


@pytest.mark.parametrize("how", ["budget", "device", "enough for what it needs itself"])
@pytest.mark.parametrize("small", [0, 2])
def test_the_rank_whose_memory_is_short_is_named_with_its_number(how: str, small: int) -> None:
    rows = 256 if "enough" in how else 1024
    how = "device" if how == "device" else "budget"
    ranks = [
        Small(group, how, 6 << 20, rows) if group.rank == small else Small(group, how, None, 1024)
        for group in groups_of(3)
    ]
    for told in in_threads(*(rank.told for rank in ranks)):
        assert list(told.failures) == [small]
        # its own number, or what the other ranks heard of it: a device's before the first phase
        numbers = {6 << 20} if how == "budget" else {6 << 20, (6 << 20) - 1, int((6 << 20) * 0.8)}
        assert any(f"{number:,} bytes" in told.failures[small] for number in numbers)
        assert "needs 8.0 MiB" in told.failures[small]
        assert "raise budget_bytes" in told.failures[small]


def test_a_restarted_rank_leaves_no_headroom_in_a_phase_that_needs_it() -> None:
    def make(group: Group) -> Small:
        return Small(group, "device", 9 << 20, 1024)  # the phase needs 8 MiB

    ranks = [make(group) for group in groups_of(2)]
    assert on_all(ranks, Small.enter) == [None, None]
    groups = groups_of(2)
    ranks[0].manager.rejoin(groups[0])
    ranks[1] = make(groups[1])
    assert on_all(ranks, Small.enter) == [None, None]


# --- refused before it begins


def policy_fails(rank: Rank, phase: str) -> None:
    rank.policy.fails_in = phase
    enter(rank)


def a_graph_is_captured(rank: Rank) -> None:
    with rank.capturing():
        enter(rank)


def interrupted(rank: Rank) -> None:
    with contextlib.suppress(KeyboardInterrupt), rank.capturing(KeyboardInterrupt()):
        enter(rank)
    raise GroupError("as the others", {rank.group.rank: "KeyboardInterrupt: "})


def memory_cannot_be_asked(rank: Rank) -> None:
    def fails() -> Any:
        del rank.faults.memory
        raise RuntimeError("the driver does not answer")

    rank.faults.memory = fails  # type: ignore[method-assign]
    enter(rank)


def entered_twice(rank: Rank) -> None:
    phase = rank.manager.phase("train")
    phase._was_entered = True
    phase.__enter__()


ENTRIES: dict[str, tuple[Callable[[Rank], object], str]] = {
    "policy, train": (
        lambda rank: policy_fails(rank, "train"),
        ("PolicyError: policy 'colocated' failed on phase 'train'"),
    ),
    "graph": (
        a_graph_is_captured,
        ("PhaseError: phases cannot change while a graph is being captured"),
    ),
    "interrupt": (interrupted, "KeyboardInterrupt: "),
    "driver": (memory_cannot_be_asked, "RuntimeError: the driver does not answer"),
    "entered twice": (entered_twice, "PhaseError: phase 'train' was entered before"),
    "no name": (lambda rank: enter(rank, 3), "TypeError: a phase has a string for a name, not 3"),
    "one string": (
        lambda rank: enter(rank, only="actor"),
        ("TypeError: only= takes a list of names"),
    ),
    "unknown phase": (lambda rank: enter(rank, "no such phase"), "is about to enter no such phase"),
    "unknown handle": (
        lambda rank: enter(rank, only=["critic"]),
        ("is about to enter train only=critic"),
    ),
}


@pytest.mark.parametrize(
    ("failing", "how"), [(number % 2, how) for number, how in enumerate(ENTRIES)]
)
def test_an_entry(how: str, failing: int) -> None:
    refuse, reason = ENTRIES[how]
    ranks = ranks_of(2)
    meet(ranks)
    before = ranks[0].group.epoch
    found = on_all(
        ranks,
        lambda rank: rank.failures(
            lambda: refuse(rank) if rank.group.rank == failing else enter(rank)
        ),
    )
    for failures in found:
        assert failures[failing].startswith(reason)
    assert [rank.group.epoch for rank in ranks] == [before + 1] * 2
    meet(ranks)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_policy_that_has_no_plan_after_the_phase(failing: int) -> None:
    """It is asked as the phase is left. Everything leaves the device."""
    ranks = ranks_of(2)
    meet(ranks)
    found = on_all(
        ranks,
        lambda rank: failures_or_own(
            rank,
            lambda: policy_fails(rank, "idle") if rank.group.rank == failing else enter(rank),
        ),
    )
    for failures in found:
        assert failures[failing].startswith("PolicyError: policy 'colocated' failed on phase")
    for rank in ranks:
        assert_nothing_resident(rank.manager)
    meet(ranks)


def test_a_closed_manager_tells_the_others() -> None:
    ranks = ranks_of(2)
    ranks[1].manager.close()
    for _ in range(2):
        for failures in on_all(ranks, lambda rank: rank.failures(lambda: enter(rank))):
            assert failures == {1: "PlacementError: this manager is closed"}


def switch_with_one_open_inside(rank: Rank, step: Any) -> None:
    with rank.manager.phase("checkpoint"):
        step.switch("eval")


def switch_to_what_has_no_plan(rank: Rank, step: Any) -> None:
    rank.policy.fails_in = "eval"
    step.switch("eval")


SWITCHES: dict[str, tuple[Callable[[Rank, Any], None], str]] = {
    "one open inside": (
        switch_with_one_open_inside,
        ("PhaseError: cannot switch to 'eval': phase 'checkpoint' is open inside"),
    ),
    "no name": (
        lambda rank, step: step.switch(5),
        ("TypeError: a phase has a string for a name, not 5"),
    ),
    "policy": (
        switch_to_what_has_no_plan,
        ("PolicyError: policy 'colocated' failed on phase 'eval'"),
    ),
}


@pytest.mark.parametrize("how", SWITCHES)
@pytest.mark.parametrize("failing", [0, 1])
def test_a_switch(how: str, failing: int) -> None:
    refuse, reason = SWITCHES[how]
    ranks = ranks_of(2)

    def body(rank: Rank) -> None:
        with rank.manager.phase("train") as step:
            if rank.group.rank == failing:
                refuse(rank, step)
            elif how == "one open inside":
                enter(rank, "checkpoint")
            else:
                step.switch("eval")

    found = on_all(ranks, lambda rank: failures_or_own(rank, lambda: body(rank)))
    assert found[1 - failing][failing].startswith(reason)
    assert found[failing][failing].startswith(reason)
    meet(ranks)


def failures_or_own(rank: Rank, do: Callable[[], Any]) -> dict[int, str]:
    """A rank that cannot leave raises its own error; the others `GroupError`."""
    try:
        return rank.failures(do)
    except (PhaseError, PolicyError, TypeError, KeyboardInterrupt) as error:
        return {rank.group.rank: f"{type(error).__name__}: {error}"}


@pytest.mark.parametrize("failing", [0, 1])
def test_a_leave(failing: int) -> None:
    """Of the outer phase, with one open inside. The others leave the inner one in the meantime; all
    of them come out, and meet again."""
    ranks = ranks_of(2)

    def body(rank: Rank) -> tuple[dict[int, str], bool]:
        outer, inner = rank.manager.phase("train"), rank.manager.phase("checkpoint")
        outer.__enter__()
        inner.__enter__()
        refused = outer if rank.group.rank == failing else inner
        found = failures_or_own(rank, lambda: refused.__exit__(None, None, None))
        for phase in (inner, outer):
            if phase.is_open:
                rank.failures(lambda phase=phase: phase.__exit__(None, None, None))  # type: ignore[misc]
        return found, any(rank.step() == "done" for _ in range(3))

    for failures, is_done in on_all(ranks, body):
        assert failures[failing].startswith(
            "PhaseError: cannot leave: phase 'checkpoint' is open inside"
        )
        assert is_done
    assert len({rank.group.epoch for rank in ranks}) == 1


# --- a rank does not come, or comes late


def attempt(ranks: list[Rank], without: Collection[int] = (), name: str = "train") -> list[Any]:
    """Every rank enters a phase but those that skip it; the others find that out at a short
    deadline."""
    for rank in ranks:
        rank.group.deadline_seconds = SHORT_SECONDS if without else AMPLE_SECONDS
    return on_all(
        ranks,
        lambda rank: None if rank.group.rank in without else rank.tried(lambda: enter(rank, name)),
    )


@pytest.mark.parametrize(
    ("world_size", "skips"),
    [
        pytest.param(2, [{0}, {1}, {0}], id="in turns", marks=pytest.mark.sweep),
        pytest.param(3, [{1, 2}], id="two of three"),
        pytest.param(3, [{2}, {0, 2}], id="one twice, one once"),
    ],
)
def test_ranks_that_skipped_transitions_meet_in_the_next_attempt(
    world_size: int, skips: list[set[int]], caplog: pytest.LogCaptureFixture
) -> None:
    ranks = ranks_of(world_size)
    assert on_all(ranks, Rank.step) == ["done"] * world_size
    for skipping in skips:
        for rank, told in enumerate(attempt(ranks, skipping)):
            assert (told is None) if rank in skipping else "no proposal within 0.3 s" in told
    with caplog.at_level(logging.WARNING, logger="placement"):
        assert attempt(ranks) == ["done"] * world_size
    assert "came too late for a phase transition, which the others gave up" in caplog.text
    meet(ranks)


@pytest.mark.parametrize(("transition", "late"), [("switch", 0), ("leave", 1)])
def test_within_a_phase_a_rank_that_is_late_goes_the_way_of_the_others(
    transition: str, late: int
) -> None:
    """There is nothing that it can have skipped; so all of them are out of the phase, and at the
    same epoch."""
    ranks = ranks_of(2)
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
