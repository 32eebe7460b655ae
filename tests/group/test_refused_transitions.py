"""A phase transition that one rank refuses before it begins: all ranks hear of it at once, and are at the same epoch afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from placement.core.errors import GroupError, PhaseError, RegistrationError
from tests.group.manager_ranks import Join, Rank, joining, on_all, ranks_of

Refuse = Callable[[Rank], object]


@pytest.fixture
def join() -> Join:
    return joining()


@contextlib.contextmanager
def capturing(rank: Rank, error: BaseException | None = None) -> Iterator[None]:
    """Its device captures a graph, or raises when it is asked whether it does."""

    def is_capturing() -> bool:
        if error is not None:
            raise error
        return True

    rank.faults.is_capturing = is_capturing  # type: ignore[method-assign]
    try:
        yield
    finally:
        del rank.faults.is_capturing


def enter(rank: Rank, name: Any = "train", only: Any = None) -> None:
    with rank.manager.phase(name, only=only):
        pass


def policy_fails(rank: Rank) -> None:
    rank.policy.fails_in = "idle"
    enter(rank)


def policy_fails_in_the_phase(rank: Rank) -> None:
    rank.policy.fails_in = "train"
    enter(rank)


def a_graph_is_captured(rank: Rank) -> None:
    with capturing(rank):
        enter(rank)


def interrupted(rank: Rank) -> None:
    with contextlib.suppress(KeyboardInterrupt), capturing(rank, KeyboardInterrupt()):
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


ENTRIES: dict[str, tuple[Refuse, str]] = {
    "policy, idle": (policy_fails, "PolicyError: policy 'colocated' failed on phase 'idle'"),
    "policy, train": (policy_fails_in_the_phase, "PolicyError: policy 'colocated' failed on phase 'train'"),
    "graph": (a_graph_is_captured, "PhaseError: phases cannot change while a graph is being captured"),
    "interrupt": (interrupted, "KeyboardInterrupt: "),
    "driver": (memory_cannot_be_asked, "RuntimeError: the driver does not answer"),
    "entered twice": (entered_twice, "PhaseError: phase 'train' was entered before"),
    "no name": (lambda rank: enter(rank, 3), "TypeError: a phase has a string for a name, not 3"),
    "one string": (lambda rank: enter(rank, only="actor"), "TypeError: only= takes a list of names"),
    "unknown phase": (lambda rank: enter(rank, "no such phase"), "is about to enter no such phase"),
    "unknown handle": (lambda rank: enter(rank, only=["critic"]), "is about to enter train only=critic"),
}


@pytest.mark.parametrize("how", ENTRIES)
@pytest.mark.parametrize("failing", [0, 1])
def test_an_entry(how: str, failing: int, join: Join) -> None:
    refuse, reason = ENTRIES[how]
    ranks = ranks_of(join, 2)
    assert on_all(ranks, Rank.step) == ["done", "done"]
    before = ranks[0].group.epoch
    found = on_all(ranks, lambda rank: rank.failures(lambda: refuse(rank) if rank.group.rank == failing else enter(rank)))
    for failures in found:
        assert failures[failing].startswith(reason)
    assert [rank.group.epoch for rank in ranks] == [before + 1] * 2
    assert on_all(ranks, Rank.step) == ["done", "done"]


def test_a_closed_manager_tells_the_others(join: Join) -> None:
    ranks = ranks_of(join, 2)
    ranks[1].manager.close()
    for _ in range(2):
        for failures in on_all(ranks, lambda rank: rank.failures(lambda: enter(rank))):
            assert failures == {1: "PlacementError: this manager is closed"}


def test_a_thread_that_holds_no_phase_is_refused_on_all_ranks(join: Join) -> None:
    """One rank's phase is held by a thread, and another thread wants one inside; on the other rank the right thread asks."""
    ranks = ranks_of(join, 2)

    def inside(rank: Rank) -> Any:
        with rank.manager.phase("train"):
            if rank.group.rank == 0:
                return rank.failures(lambda: enter(rank, "checkpoint"))
            (found,) = on_all([rank], lambda rank: rank.failures(lambda: enter(rank, "checkpoint")))
            return found

    for failures in on_all(ranks, inside):
        assert list(failures) == [1]
        assert "holds phase 'train'" in failures[1]
    assert len({rank.group.epoch for rank in ranks}) == 1
    assert on_all(ranks, Rank.step) == ["done", "done"]


def switch_with_one_open_inside(rank: Rank, step: Any) -> None:
    with rank.manager.phase("checkpoint"):
        step.switch("eval")


def switch_after_the_end(rank: Rank, step: Any) -> None:
    phase = rank.manager.phase("eval")
    phase.switch("eval")


def switch_to_a_number(rank: Rank, step: Any) -> None:
    step.switch(5)


def switch_where_idle_has_no_plan(rank: Rank, step: Any) -> None:
    rank.policy.fails_in = "idle"
    step.switch("eval")


def switch_of_what_was_never_entered(rank: Rank, step: Any) -> None:
    rank.manager.switch("eval")


SWITCHES: dict[str, tuple[Callable[[Rank, Any], None], str]] = {
    "one open inside": (switch_with_one_open_inside, "PhaseError: cannot switch to 'eval': phase 'checkpoint' is open inside"),
    "not open": (switch_after_the_end, "PhaseError: cannot switch to 'eval': phase 'eval' is not open"),
    "no name": (switch_to_a_number, "TypeError: a phase has a string for a name, not 5"),
    "policy": (switch_where_idle_has_no_plan, "PolicyError: policy 'colocated' failed on phase 'idle'"),
    "never entered": (switch_of_what_was_never_entered, "PhaseError: cannot switch to 'eval': no phase was entered with enter()"),
}


@pytest.mark.parametrize("how", SWITCHES)
@pytest.mark.parametrize("failing", [0, 1])
def test_a_switch(how: str, failing: int, join: Join) -> None:
    refuse, reason = SWITCHES[how]
    ranks = ranks_of(join, 2)

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
    assert len({rank.group.epoch for rank in ranks}) == 1
    assert on_all(ranks, Rank.step) == ["done", "done"]


def failures_or_own(rank: Rank, do: Callable[[], Any]) -> dict[int, str]:
    """A rank that cannot leave raises its own error; the others `GroupError`."""
    try:
        return rank.failures(do)
    except (PhaseError, TypeError, KeyboardInterrupt) as error:
        return {rank.group.rank: f"{type(error).__name__}: {error}"}


@pytest.mark.parametrize("failing", [0, 1])
def test_a_leave(failing: int, join: Join) -> None:
    """Of the outer phase, with one open inside. The others leave the inner one in the meantime; all of them come out, and meet again."""
    ranks = ranks_of(join, 2)

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
        assert failures[failing].startswith("PhaseError: cannot leave: phase 'checkpoint' is open inside")
        assert is_done
    assert len({rank.group.epoch for rank in ranks}) == 1


@pytest.mark.parametrize("what", ["leave", "switch"])
def test_what_was_never_entered_is_refused_on_all_ranks(what: str, join: Join) -> None:
    ranks = ranks_of(join, 2)

    def refused(rank: Rank) -> None:
        with pytest.raises((PhaseError, GroupError)):
            rank.manager.leave() if what == "leave" else rank.manager.switch("eval")

    on_all(ranks, refused)
    assert [rank.group.epoch for rank in ranks] == [1, 1]
    assert on_all(ranks, Rank.step) == ["done", "done"]


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("interrupted", [0, 1])
def test_an_attempt_ends_one_epoch_however_often_it_fails(failing: int, interrupted: int, join: Join) -> None:
    """A rank has no memory, so that all of them go back, and one of them is interrupted while it does."""
    ranks = ranks_of(join, 2)
    executor = ranks[interrupted].manager._stack.executor
    retreat = executor.retreat

    def interrupt(*arguments: Any, **keywords: Any) -> Any:
        executor.retreat = retreat  # type: ignore[method-assign]
        raise KeyboardInterrupt

    ranks[failing].faults.fail("create")
    executor.retreat = interrupt  # type: ignore[method-assign]

    def body(rank: Rank) -> str:
        try:
            enter(rank)
        except (GroupError, KeyboardInterrupt) as error:
            return type(error).__name__
        return "entered"

    found = on_all(ranks, body)
    assert (found[interrupted], found[1 - interrupted]) == ("KeyboardInterrupt", "GroupError")
    assert [rank.group.epoch for rank in ranks] == [1, 1]
    assert on_all(ranks, Rank.step) == ["done", "done"]


def test_a_phase_that_a_policy_changes_is_told_once(join: Join) -> None:
    """The policy asks for a phase inside the phase transition: that is refused within it, and ends no epoch of its own."""
    ranks = ranks_of(join, 2)

    def plan(view: Any) -> Any:
        del ranks[1].policy.plan
        ranks[1].manager.enter("eval")

    ranks[1].policy.plan = plan  # type: ignore[method-assign]
    for failures in on_all(ranks, lambda rank: rank.failures(lambda: enter(rank))):
        assert list(failures) == [1]
        assert "must not change phases" in failures[1]
    assert [rank.group.epoch for rank in ranks] == [1, 1]
    assert on_all(ranks, Rank.step) == ["done", "done"]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_shared_registration(failing: int, join: Join) -> None:
    ranks = ranks_of(join, 2)

    def body(rank: Rank) -> str:
        refusing = capturing(rank) if rank.group.rank == failing else contextlib.nullcontext()
        with refusing, pytest.raises((PhaseError, RegistrationError)) as told:
            rank.manager.register("teacher", rank.ref, role="teacher", readonly=True, replicated=True)
        return str(told.value)

    found = on_all(ranks, body)
    assert f"rank {failing}: PhaseError: phases cannot change while a graph" in found[1 - failing]
    assert [rank.group.epoch for rank in ranks] == [1, 1]
    assert on_all(ranks, Rank.step) == ["done", "done"]
