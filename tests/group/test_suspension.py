"""Suspensions of several processes: a job beside another on one device, and ranks of a group."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from placement import CoordinatorLost, GroupError, PhaseError
from placement.core.snapshot import SuspensionRequest
from placement.core.states import Plan
from placement.group import StoreGroup
from placement.group.protocol import BoardLost
from placement.testing import assert_nothing_resident
from tests.group.manager_ranks import Rank, meet, ranks_of
from tests.group.processes import Process, Processes, StoreService
from tests.group.suspension_processes import CHUNKS, Job, Other, post
from tests.support.sweeps import few
from tests.support.threads import on_all, until

WORLD = 4


def begun(work: Callable[..., Any], *arguments: Any, **keywords: Any) -> Future[Any]:
    return ThreadPoolExecutor(1).submit(work, *arguments, **keywords)


def asked(rank: Rank, **keywords: Any) -> Future[Any]:
    """Ask one rank, and return once the request is there."""
    suspension = rank.manager._stack.suspension
    future = begun(rank.manager.suspend, 30.0, **keywords)
    until(lambda: suspension.asked or future.done())
    return future


def are_suspended(ranks: list[Rank]) -> set[bool]:
    return {rank.manager.snapshot().suspended for rank in ranks}


@pytest.fixture
def four() -> Iterator[list[Rank]]:
    made = ranks_of(WORLD)
    meet(made)
    yield made
    on_all(made, lambda rank: rank.manager.close())


# --- two processes on one device


def losses_alone(processes: Processes, shared: str, steps: int) -> list[float]:
    job = processes.start(Job, shared)
    losses = [job.call("enter"), *(job.call("leave_and_enter") for _ in range(steps - 1))]
    job.kill()
    return losses


def test_another_process_has_the_device_between_suspend_and_resume(
    processes: Processes, tmp_path: Path
) -> None:
    alone = losses_alone(processes, str(tmp_path / "alone"), 2)
    shared = str(tmp_path / "capacity")
    job, other = processes.start(Job, shared), processes.start(Other, shared)
    port = job.call("port")
    losses = [job.call("enter")]
    while_training = other.call("take_all")
    other.call("give_back")
    answer = begun(post, port, "/suspend", deadline_seconds=60)
    job.call("until_asked")
    assert not answer.done()  # the phase is open
    job.begin("leave_and_enter")
    assert answer.result(30)[0] == 200
    assert answer.result()[1]["resident_bytes"] == 0
    assert other.call("take_all") == CHUNKS
    assert while_training < CHUNKS
    assert job.is_busy()  # it waits
    other.call("give_back")
    assert post(port, "/resume", epoch=1)[0] == 200
    losses.append(job.answer())
    assert losses == alone


# --- ranks


@pytest.mark.parametrize("policy", ["colocated", "resident"])
def test_asked_of_one_rank_all_suspend_at_the_end_of_the_phase(policy: str) -> None:
    ranks, alone = ranks_of(WORLD, policy=policy), ranks_of(WORLD, policy=policy)
    on_all([*ranks], Rank.step)
    on_all([*alone], Rank.step)
    on_all(ranks, lambda rank: rank.manager.enter("train"))
    on_all(ranks, Rank.learn)
    future = asked(ranks[2])
    assert are_suspended(ranks) == {False}
    on_all(ranks, lambda rank: rank.manager.leave())
    assert future.result(30).epoch == 1
    assert are_suspended(ranks) == {True}
    for rank in ranks:
        assert_nothing_resident(rank.manager)
    work = begun(on_all, ranks, lambda rank: rank.manager.enter("train"))
    until(lambda: all(rank.manager.snapshot().suspended_seconds > 0 for rank in ranks))
    assert not work.done()
    ranks[0].manager.resume()
    work.result(30)
    assert are_suspended(ranks) == {False}
    losses = on_all(ranks, Rank.learn)
    on_all(alone, lambda rank: rank.manager.enter("train"))
    on_all(alone, Rank.learn)
    on_all(alone, lambda rank: rank.manager.leave())
    on_all(alone, lambda rank: rank.manager.enter("train"))
    assert losses == on_all(alone, Rank.learn)


def test_outside_a_phase_it_takes_effect_before_the_next(four: list[Rank]) -> None:
    future = asked(four[3], epoch=9)
    work = begun(on_all, four, Rank.step)
    assert future.result(30).epoch == 9
    until(lambda: are_suspended(four) == {True})
    for rank in four:
        assert_nothing_resident(rank.manager)
    assert not work.done()
    assert four[1].manager.suspend().epoch == 9
    four[1].manager.resume(9)
    assert work.result(60) == ["done"] * WORLD
    meet(four)


def test_it_ends_by_itself_on_all_ranks(four: list[Rank]) -> None:
    future = asked(four[0], resume_after_seconds=0.2)
    assert on_all(four, Rank.step) == ["done"] * WORLD
    assert future.result(30).epoch == 1
    assert are_suspended(four) == {False}
    assert all(rank.manager.snapshot().suspended_seconds > 0 for rank in four)


def test_of_two_ranks_that_are_asked_the_greater_epoch_counts(four: list[Rank]) -> None:
    older, newer = asked(four[1], epoch=3), asked(four[2], epoch=4)
    work = begun(on_all, four, Rank.step)
    assert newer.result(30).epoch == 4
    with pytest.raises(PhaseError, match="epoch 3 cannot begin: the last one, 4, dropped nothing"):
        older.result(30)
    four[2].manager.resume(4)  # which has answered; the others may still be leaving
    assert work.result(60) == ["done"] * WORLD


def test_if_one_rank_cannot_leave_the_device_none_suspends() -> None:
    ranks = ranks_of(WORLD, policy="resident")
    meet_all = on_all(ranks, lambda rank: rank.manager.enter("train"))
    assert meet_all == [None] * WORLD
    on_all(ranks, Rank.learn)
    future = asked(ranks[0])
    ranks[3].faults.fail("copy", forever=True)
    on_all(ranks, lambda rank: rank.manager.leave())
    with pytest.raises(PhaseError, match=r"rank 3: .*injected"):
        future.result(60)
    assert are_suspended(ranks) == {False}
    ranks[3].faults.clear()
    on_all(ranks, lambda rank: rank.manager.enter("train"))
    assert len(set(on_all(ranks, Rank.learn))) == 1
    on_all(ranks, lambda rank: rank.manager.leave())


def test_past_the_deadline_the_ranks_never_hear_of_it(four: list[Rank]) -> None:
    with pytest.raises(PhaseError, match=r"not possible within 0\.05 s"):
        four[0].manager.suspend(0.05)
    meet(four)
    assert are_suspended(four) == {False}


def test_a_rank_that_fails_as_it_leaves_the_phase_suspends_with_the_others(
    four: list[Rank],
) -> None:
    """All have agreed by then, and wait for it."""
    on_all(four, lambda rank: rank.manager.enter("train"))
    future = asked(four[0])
    failing = four[1]
    vote = failing.manager._stack.lock.vote
    measure = failing.faults.memory

    def measured() -> Any:
        if vote is not None and vote.agreed is not None:
            del failing.faults.memory
            raise RuntimeError("cannot be measured")
        return measure()

    failing.faults.memory = measured  # type: ignore[method-assign]
    errors = on_all(four, lambda rank: rank.manager.leave())
    assert [str(error or "") for error in errors] == ["", "cannot be measured", "", ""]
    assert future.result(60).epoch == 1
    assert are_suspended(four) == {True}
    four[1].manager.resume()
    meet(four)


def test_the_deadline_counts_while_another_rank_is_late(four: list[Rank]) -> None:
    """The ranks are told with the next proposal. Until then the request is this rank's own."""
    first, *others = four
    work = begun(first.manager.enter, "train")
    # it has proposed, and waits
    until(lambda: first.group._keys and first.group._keys[-1][0] == first.group.epoch)
    with pytest.raises(PhaseError, match=r"not possible within 0\.05 s"):
        first.manager.suspend(0.05)
    assert not work.done()
    on_all(others, lambda rank: rank.manager.enter("train"))
    work.result(30)
    on_all(four, lambda rank: rank.manager.leave())
    assert are_suspended(four) == {False}


def test_a_suspension_that_began_meanwhile_is_not_resumed(four: list[Rank]) -> None:
    """The one who resumes speaks of the one before."""
    rank = four[0]
    suspension = rank.manager._stack.suspension
    suspension._offload_all = lambda *_: None
    suspension._suspend(SuspensionRequest(epoch=7))
    note_resumed = rank.group.note_resumed
    begun_meanwhile = []

    def meanwhile(epoch: int) -> None:
        note_resumed(epoch)
        begun_meanwhile.append(begun(suspension._suspend, SuspensionRequest(epoch=8)))

    rank.group.note_resumed = meanwhile  # type: ignore[method-assign]
    rank.manager.resume(7)
    begun_meanwhile[0].result(30)
    assert rank.manager.snapshot().suspended
    rank.group.note_resumed = note_resumed  # type: ignore[method-assign]
    status = rank.manager.resume(8)
    assert (status.epoch, status.suspended) == (8, False)


def test_a_restarted_rank_counts_anew_and_the_others_with_it() -> None:
    """It knows of no suspension, as a restarted process without a group."""
    before = ranks_of(2)
    future = asked(before[0], epoch=7)
    work = begun(on_all, before, Rank.step)
    assert future.result(30).epoch == 7
    before[0].manager.resume(7)
    assert work.result(60) == ["done"] * 2
    store = dist.HashStore()
    groups = [StoreGroup(store, rank, 2, 30.0, generation=1) for rank in range(2)]
    restarted = Rank(groups[1])
    before[0].manager.rejoin(groups[0])
    ranks = [before[0], restarted]
    for rank, epoch in ((restarted, 1), (before[0], 2)):
        future = asked(rank)
        work = begun(on_all, ranks, Rank.step)
        assert future.result(30).epoch == epoch
        until(lambda: are_suspended(ranks) == {True})  # the other rank may be later
        restarted.manager.resume(epoch)
        assert work.result(60) == ["done"] * 2
        assert {rank.manager.resume().epoch for rank in ranks} == {epoch}


def test_a_request_for_an_old_epoch_does_not_hide_that_of_another_rank(four: list[Rank]) -> None:
    """The first rank was restarted, and does not know that the epoch is an old one."""
    for rank in four[1:]:
        rank.manager._stack.phases.suspension.epoch = 7
    old, new = asked(four[0], epoch=7), asked(four[1])
    work = begun(on_all, four, Rank.step)
    assert new.result(30).epoch == 8
    with pytest.raises(PhaseError, match="epoch 7 cannot begin: the last one, 8, dropped nothing"):
        old.result(30)
    four[1].manager.resume(8)
    assert work.result(60) == ["done"] * WORLD


def test_ctrl_c_after_the_ranks_have_agreed_refuses_it(four: list[Rank]) -> None:
    """The others carry it out, and hear that this one does something else."""
    first, *others = four
    future = asked(first)
    vote: Any = first.manager._stack.lock.vote
    agree = vote.agree

    def interrupted(plan: Plan) -> None:
        try:
            agree(plan)
        finally:
            vote.agree = agree
            os.kill(os.getpid(), signal.SIGINT)

    vote.agree = interrupted
    work = begun(on_all, others, lambda rank: rank.manager.enter("train"))
    with pytest.raises(KeyboardInterrupt):
        first.manager.enter("train")
    with pytest.raises(GroupError, match="is about to suspend"):
        first.manager.enter("train")
    with pytest.raises(PhaseError, match="the ranks have not agreed on it"):
        future.result(30)
    first.manager.enter("train")
    assert work.result(30) == [None] * (WORLD - 1)
    on_all(four, lambda rank: rank.manager.leave())
    assert are_suspended(four) == {False}
    meet(four)


def test_a_phase_does_not_wait_for_ranks_that_cannot_be_heard(four: list[Rank]) -> None:
    """The process with the group's store has died: no rank could resume this one."""
    future = asked(four[0])
    work = begun(on_all, four, Rank.step)
    assert future.result(30).suspended
    until(lambda: all(rank.manager.snapshot().suspended_seconds > 0 for rank in four))
    for rank in four:
        rank.group._board.look = lost  # type: ignore[method-assign]
        rank.group._board.claim = lost  # type: ignore[method-assign]
    with pytest.raises(CoordinatorLost, match="the other ranks cannot resume"):
        four[0].manager.resume()
    assert [told.partition(":")[0] for told in work.result(30)] == ["CoordinatorLost"] * WORLD


def test_a_resume_that_the_store_has_missed_is_made_again(four: list[Rank]) -> None:
    future = asked(four[0])
    work = begun(on_all, four, Rank.step)
    assert future.result(30).suspended
    until(lambda: all(rank.manager.snapshot().suspended_seconds > 0 for rank in four))
    board = four[0].group._board
    board.claim = lost  # type: ignore[method-assign]
    with pytest.raises(CoordinatorLost):
        four[0].manager.resume()
    del board.claim
    four[0].manager.resume()
    assert work.result(60) == ["done"] * WORLD


def lost(*_: Any) -> Any:
    raise BoardLost("the store does not answer")


# --- ranks as processes


@pytest.fixture
def store() -> Iterator[StoreService]:
    made = StoreService()
    yield made
    made.kill()


def started(processes: Processes, store: StoreService, folder: Path) -> list[Process]:
    with ThreadPoolExecutor(WORLD) as pool:
        return list(
            pool.map(
                lambda rank: processes.start(
                    Job, str(folder / f"gpu{rank}"), store.port, rank, WORLD
                ),
                range(WORLD),
            )
        )


def all_call(ranks: list[Process], method: str) -> list[Any]:
    for rank in ranks:
        rank.begin(method)
    return [rank.answer() for rank in ranks]


def test_four_processes_suspend_when_one_is_asked(
    processes: Processes, store: StoreService, tmp_path: Path
) -> None:
    ranks = started(processes, store, tmp_path)
    ports = all_call(ranks, "port")
    all_call(ranks, "enter")
    answer = begun(post, ports[1], "/suspend", epoch=7)
    ranks[1].call("until_asked")
    all_call(ranks, "leave")
    assert answer.result(30)[0] == 200
    assert all_call(ranks, "state") == [(True, 0)] * WORLD
    for rank in ranks:
        rank.begin("enter")
    assert all(rank.is_busy() for rank in ranks)
    assert post(ports[3], "/resume", epoch=7)[0] == 200
    assert len({rank.answer() for rank in ranks}) == WORLD


@pytest.mark.parametrize("is_suspended", few([False, True], True))
def test_a_killed_rank_stops_nobody(
    processes: Processes, store: StoreService, tmp_path: Path, is_suspended: bool
) -> None:
    """The others say so at the group's deadline, whether they leave the phase in which the
    suspension was asked for, or go on after it."""
    ranks = started(processes, store, tmp_path)
    ports = all_call(ranks, "port")
    all_call(ranks, "enter")
    answer = begun(post, ports[1], "/suspend", deadline_seconds=60 if is_suspended else 2)
    ranks[1].call("until_asked")
    if is_suspended:
        all_call(ranks, "leave")
        assert answer.result(30)[0] == 200
    doomed = ranks.pop(2)
    doomed.kill()
    for rank in ranks:
        rank.begin("enter" if is_suspended else "leave")
    if is_suspended:
        assert post(ports[0], "/resume")[0] == 200
    for rank in ranks:
        with pytest.raises(GroupError, match="rank 2: no proposal within 4 s"):
            rank.answer(30)
    if not is_suspended:
        code, told = answer.result(30)
        assert (code, "the ranks have not agreed on it" in told) == (409, True)
    assert {rank.call("state")[0] for rank in ranks} == {False}


@pytest.mark.sweep
def test_the_example_of_two_jobs(capfd: pytest.CaptureFixture[str]) -> None:
    from examples.time_slices import STEPS, main

    for result in main():
        assert result["losses"] == result["alone"]
        assert len(result["losses"]) == STEPS
        assert result["slices"] >= 2
        assert result["waited"] > 0
    lines = capfd.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["job 0", "job 1"]
    assert all(line.endswith("the same losses as alone") for line in lines)
