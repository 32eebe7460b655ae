"""Suspensions of one process: it leaves the device because another needs it, and comes back."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from placement import IntegrityError, Manager, PhaseError, PlacementError, PolicyError, State
from placement.core.snapshot import SuspensionStatus
from placement.phases import suspension
from placement.testing import assert_nothing_resident
from tests.group.turn_processes import Sharer
from tests.support.sweeps import few
from tests.support.threads import in_threads, until
from tests.support.trainer import Trainer


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    made = trainer_of()
    yield made
    made.manager.close()


def trainer_of(policy: str = "colocated") -> Trainer:
    torch.manual_seed(0)
    return Trainer(lambda device: Manager(device=device, policy=policy))


def begun(work: Callable[[], Any]) -> Future[Any]:
    return ThreadPoolExecutor(1).submit(work)


def asked(manager: Manager, **keywords: Any) -> Future[SuspensionStatus]:
    """Ask in another thread, and return once the request is there."""
    requests = manager._stack.suspension
    before = len(requests.asked)
    future = begun(lambda: manager.suspend(30.0, **keywords))
    until(lambda: len(requests.asked) > before or future.done())
    return future


def until_one_waits(manager: Manager) -> None:
    until(lambda: manager.snapshot().suspended_seconds > 0)


def losses_of(trainer: Trainer, steps: int = 4) -> list[float]:
    losses = []
    for _ in range(steps):
        with trainer.manager.phase("log_prob") as step:
            target = trainer.judge()
            step.switch("train")
            losses.append(trainer.learn(target))
    return losses


# --- when it takes effect


def test_it_takes_effect_at_the_end_of_the_outermost_phase(trainer: Trainer) -> None:
    manager = trainer.manager
    with manager.phase("train") as step:
        future = asked(manager)
        with manager.phase("checkpoint"):
            pass
        step.switch("log_prob")
        step.switch("train")
        trainer.learn()
        assert not future.done()
        assert not manager.snapshot().suspended
    status = future.result(30)
    assert (status.epoch, status.suspended, status.resident_bytes) == (1, True, 0)
    assert status.snapshot.suspended
    assert trainer.faults.memory().chunk_bytes == 0
    assert SuspensionStatus.model_validate_json(status.model_dump_json()) == status


@pytest.mark.parametrize("policy", ["resident", "cyclic"])
def test_what_a_policy_keeps_in_idle_leaves_and_returns_with_the_next_phase(policy: str) -> None:
    trainer = trainer_of(policy)
    losses_of(trainer)
    manager = trainer.manager
    assert manager.handles["actor"].state is State.GPU_RESIDENT
    status = manager.suspend()
    assert status.resident_bytes == trainer.faults.memory().chunk_bytes == 0
    assert manager.audit().ok
    assert_nothing_resident(manager)
    manager.resume()
    assert manager.handles["actor"].state is State.CPU_OFFLOADED
    losses_of(trainer, 1)
    assert manager.handles["actor"].state is State.GPU_RESIDENT
    manager.close()


def test_nothing_comes_to_the_device_while_suspended() -> None:
    trainer = trainer_of("resident")
    manager = trainer.manager
    manager.suspend()
    manager.unregister("ref")
    handle = manager.register("ref", trainer.ref, role="ref", readonly=True)
    assert handle.state is State.CPU_OFFLOADED
    with pytest.raises(PhaseError, match="suspended: nothing is loaded"):
        manager.unregister("ref", on_device=True)
    with pytest.raises(PhaseError, match="suspended: nothing is loaded"):
        manager.close(on_device=["actor"])
    assert_nothing_resident(manager)
    manager.close()


def test_a_kept_handle_leaves_too(trainer: Trainer) -> None:
    with trainer.manager.phase("log_prob") as phase:
        phase.keep("ref")
    trainer.manager.suspend()
    assert_nothing_resident(trainer.manager)
    assert trainer.manager.snapshot().expired_keeps == 1


def test_losses_are_those_of_a_run_without(trainer: Trainer) -> None:
    alone = losses_of(trainer_of(), 6)
    manager = trainer.manager
    work = begun(lambda: losses_of(trainer, 6))
    for _ in range(3):
        manager.suspend()
        assert trainer.faults.memory().chunk_bytes == 0
        manager.resume()
    assert work.result(60) == alone


def test_the_cache_of_torchs_allocator_is_emptied(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    trimmed: list[bool] = []
    monkeypatch.setattr(trainer.faults, "torch_allocated_bytes", lambda: -1)
    monkeypatch.setattr(trainer.faults, "trim", lambda: trimmed.append(True))
    trainer.manager.suspend()
    assert trimmed == [True]


def test_a_suspended_manager_has_no_turn(tmp_path: Path) -> None:
    sharer = Sharer(str(tmp_path))
    with sharer.manager.phase("log_prob") as phase:
        phase.keep("actor")
    assert sharer.has_turn
    sharer.manager.suspend()
    assert not sharer.has_turn
    sharer.manager.close()


# --- the phase that waits


def test_the_next_phase_waits_with_one_line_and_a_count(
    trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "placement")
    manager = trainer.manager
    manager.suspend()
    manager.suspend()
    work = begun(lambda: losses_of(trainer, 2))
    until(lambda: manager.snapshot().suspended_seconds > 0.1)
    assert not work.done()
    assert manager.snapshot().phases == ()
    assert manager.audit().ok  # the wait holds no lock
    manager.resume()
    work.result(30)
    lines = [record.getMessage() for record in caplog.records if "waits" in record.getMessage()]
    assert lines == ["suspended (epoch 1): the next phase waits"]
    snapshot = manager.snapshot()
    assert snapshot.suspended_seconds >= 0.1
    assert snapshot.phase_stall_seconds["log_prob"] < snapshot.suspended_seconds


def test_enter_and_hold_wait_too(trainer: Trainer) -> None:
    manager = trainer.manager

    def enter() -> None:
        manager.enter("log_prob")
        manager.leave()

    for opens in (enter, lambda: manager.hold("log_prob").release()):
        before = manager.snapshot().suspended_seconds
        manager.suspend()
        work = begun(opens)
        until(lambda before=before: manager.snapshot().suspended_seconds > before)
        assert not work.done()
        manager.resume()
        work.result(30)


def test_ctrl_c_ends_the_wait(trainer: Trainer) -> None:
    manager = trainer.manager
    manager.suspend()

    def interrupt() -> None:
        until_one_waits(manager)
        os.kill(os.getpid(), signal.SIGINT)

    interrupting = begun(interrupt)
    with pytest.raises(KeyboardInterrupt), manager.phase("train"):
        raise AssertionError("entered")
    interrupting.result(30)
    assert manager.phase_name == "idle"
    manager.resume()
    losses_of(trainer, 1)


def test_close_ends_the_wait() -> None:
    trainer = trainer_of()
    trainer.manager.suspend()
    work = begun(lambda: losses_of(trainer, 1))
    until_one_waits(trainer.manager)
    trainer.manager.close()
    with pytest.raises(PlacementError, match="this manager is closed") as caught:
        work.result(30)
    assert caught.value.__context__ is None  # what made the phase wait is no error


def test_a_suspension_ends_by_itself(trainer: Trainer) -> None:
    manager = trainer.manager
    manager.suspend(resume_after_seconds=1)
    assert manager.snapshot().suspended
    losses_of(trainer, 1)
    snapshot = manager.snapshot()
    assert not snapshot.suspended
    assert 0 < snapshot.suspended_seconds < 30
    with pytest.raises(PhaseError, match=r"epoch 1 cannot begin: the last one, 1, .* is over"):
        manager.suspend(epoch=1)


def test_a_phase_that_has_waited_and_fails_keeps_no_suspension_out(trainer: Trainer) -> None:
    manager = trainer.manager
    manager.suspend()
    work = begun(lambda: manager.phase("no such phase").__enter__())
    until_one_waits(manager)
    manager.resume()
    with pytest.raises(PolicyError):
        work.result(30)
    assert manager.suspend(1.0).epoch == 2


def test_code_inside_a_transition_does_not_wait_for_it(trainer: Trainer) -> None:
    """Not even while another thread asks: it would wait for itself."""
    manager, told = trainer.manager, []

    def opens_a_phase() -> Any:
        del trainer.faults.memory
        with pytest.raises(PhaseError, match="inside a phase transition") as caught:
            manager.phase("eval").__enter__()
        told.append(caught.value)
        return trainer.faults.memory()

    trainer.faults.memory = opens_a_phase  # type: ignore[method-assign]
    assert begun(lambda: manager.suspend(30.0)).result(30).suspended
    assert len(told) == 1


# --- refusals


def test_past_the_deadline_it_is_refused_and_forgotten(trainer: Trainer) -> None:
    manager = trainer.manager
    message = (
        r"not possible within 0.05 s \(open phases: train > log_prob; on the device: actor, ref"
    )
    with (
        manager.phase("train"),
        manager.phase("log_prob"),
        pytest.raises(PhaseError, match=message),
    ):
        begun(lambda: manager.suspend(0.05)).result(30)
    losses_of(trainer, 1)
    assert manager.resume().epoch == 0


def test_in_the_thread_of_the_open_phase_it_is_refused_at_once(trainer: Trainer) -> None:
    manager = trainer.manager
    with manager.phase("train"), pytest.raises(PhaseError, match="phase 'train' is open here"):
        manager.suspend(3600)

    async def in_a_task() -> None:
        with manager.phase("train"), pytest.raises(PhaseError, match="is open here"):
            manager.suspend(3600)

    asyncio.run(in_a_task())


def test_a_device_that_fails_refuses_it_and_loses_nothing() -> None:
    trainer = trainer_of("resident")
    alone = losses_of(trainer_of("resident"), 4)
    first = losses_of(trainer, 2)
    trainer.faults.fail("copy", forever=True)
    with pytest.raises(PhaseError, match="injected"):
        trainer.manager.suspend()
    assert not trainer.manager.snapshot().suspended
    trainer.faults.clear()
    assert first + losses_of(trainer, 2) == alone
    trainer.manager.close()


def test_a_device_that_cannot_be_measured_refuses_it(trainer: Trainer) -> None:
    def fails() -> Any:
        raise RuntimeError("the device is gone")

    trainer.faults.memory = fails  # type: ignore[method-assign]
    with pytest.raises(PhaseError, match="suspend: the device is gone"):
        trainer.manager.suspend(30.0)
    del trainer.faults.memory
    losses_of(trainer, 1)


def test_changes_to_offloaded_handles_are_raised_in_the_worker(trainer: Trainer) -> None:
    """They are no reason to refuse, and the one who asks is not told in the worker's place."""
    losses_of(trainer, 1)
    with torch.no_grad():
        trainer.actor.weight.fill_(1.0)
    assert begun(trainer.manager.suspend).result(30).suspended
    trainer.manager.resume()
    with pytest.raises(IntegrityError, match="weight of 'actor'"):
        losses_of(trainer, 1)
    losses_of(trainer, 1)


def test_a_forked_child_neither_asks_nor_resumes(trainer: Trainer) -> None:
    manager = trainer.manager
    manager.suspend()
    for ask in (manager.suspend, manager.resume):
        if (child := os.fork()) == 0:
            try:
                ask()
            except PlacementError as error:
                os._exit(7 if "belongs to process" in str(error) else 8)
            finally:
                os._exit(9)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert manager.snapshot().suspended


def test_after_close_it_is_refused() -> None:
    trainer = trainer_of()
    trainer.manager.close()
    for ask in (trainer.manager.suspend, trainer.manager.resume):
        with pytest.raises(PlacementError, match="this manager is closed"):
            ask()


class InterruptAt:
    """Ctrl-C at one line that this thread runs in a module, counted from 1; `again`: and at the
    next one."""

    def __init__(self, module: ModuleType, line: int, *, again: bool = False) -> None:
        self._file, self._left, self.was_sent = module.__file__, line, False
        self._times = 1 + again

    def __call__(self, frame: Any, event: str, _: Any) -> Any:
        if frame.f_code.co_filename != self._file:
            return None
        self._left -= event == "line"
        if self._left <= 0 and self._times:
            self._times -= 1
            self.was_sent = True
            os.kill(os.getpid(), signal.SIGINT)
        return self


@pytest.mark.parametrize("again", few([False, True], True))
def test_ctrl_c_at_any_line_of_asking_leaves_no_request(trainer: Trainer, again: bool) -> None:
    line, is_beyond = 0, False
    while not is_beyond:
        line += 1
        interrupt = InterruptAt(suspension, line, again=again)
        sys.settrace(interrupt)
        try:
            trainer.manager.suspend()
        except KeyboardInterrupt:
            assert interrupt.was_sent
        finally:
            sys.settrace(None)
        assert not trainer.manager._stack.suspension.asked
        trainer.manager.resume()
        with trainer.manager.phase("log_prob"):
            pass
        is_beyond = not interrupt.was_sent
    assert line > 50


def test_ctrl_c_at_any_line_of_waiting_leaves_no_phase(trainer: Trainer) -> None:
    manager = trainer.manager
    for line in range(1, 50):
        manager.suspend(resume_after_seconds=0.01)
        sys.settrace(InterruptAt(suspension, line))
        with suppress(KeyboardInterrupt):
            try:
                manager.enter("log_prob")
            finally:
                sys.settrace(None)
            manager.leave()
        manager.resume()
        assert manager.phase_name == "idle"


@pytest.mark.parametrize(
    ("keywords", "error"),
    [
        ({"deadline": 0}, ValueError),
        ({"deadline": float("nan")}, ValueError),
        ({"deadline": float("inf")}, ValueError),
        ({"deadline": "30"}, ValueError),
        ({"deadline": True}, ValueError),
        ({"resume_after_seconds": -1}, ValueError),
        ({"epoch": 0}, ValueError),
        ({"epoch": 1 << 63}, ValueError),
        ({"epoch": 1.5}, ValueError),
        ({"drop": "rollout"}, TypeError),
        ({"drop": [7]}, TypeError),
    ],
)
def test_bad_arguments(trainer: Trainer, keywords: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(keywords))):
        trainer.manager.suspend(**keywords)
    assert trainer.manager.resume().epoch == 0


# --- epochs


def test_one_that_is_over_as_it_is_answered_was_carried_out(trainer: Trainer) -> None:
    status = trainer.manager.suspend(epoch=5, resume_after_seconds=1e-9)
    assert (status.epoch, status.suspended) == (5, False)


def test_twice_is_once(trainer: Trainer) -> None:
    manager = trainer.manager
    with manager.phase("train"):
        futures = [asked(manager) for _ in range(3)]
    assert {future.result(30).epoch for future in futures} == {1}
    assert manager.suspend().epoch == manager.suspend(epoch=1).epoch == 1
    assert [manager.resume().suspended for _ in range(2)] == [False, False]
    assert manager.suspend().epoch == 2


def test_an_old_epoch_is_refused(trainer: Trainer) -> None:
    manager = trainer.manager
    assert manager.suspend(epoch=7).epoch == 7
    with pytest.raises(PhaseError, match=r"epoch 6 cannot begin: the last one, 7, .* is on"):
        manager.suspend(epoch=6)
    with pytest.raises(PhaseError, match=r"epoch 8 cannot begin: the last one, 7, .* is on"):
        manager.suspend(epoch=8)
    with pytest.raises(PhaseError, match="resume: epoch 6 is not the last one, 7"):
        manager.resume(epoch=6)
    assert manager.snapshot().suspended
    assert not manager.resume(epoch=7).suspended
    assert not manager.resume(epoch=7).suspended
    assert manager.suspend().epoch == 8


def test_of_two_that_ask_the_newer_one_gets_it(trainer: Trainer) -> None:
    manager = trainer.manager
    with manager.phase("train"):
        older, newer = asked(manager, epoch=3), asked(manager, epoch=4)
    assert newer.result(30).epoch == 4
    with pytest.raises(PhaseError, match=r"epoch 3 cannot begin: the last one, 4, .* is on"):
        older.result(30)


def test_resume_without_suspend_does_nothing(trainer: Trainer) -> None:
    status = trainer.manager.resume()
    assert (status.epoch, status.suspended) == (0, False)
    losses_of(trainer, 1)


def test_a_suspension_before_every_phase_changes_no_loss(trainer: Trainer) -> None:
    manager, steps = trainer.manager, 10
    alone, losses = losses_of(trainer_of(), steps), []

    def work() -> None:
        for _ in range(steps):
            losses.extend(losses_of(trainer, 1))

    def disturb() -> None:
        for number in range(steps):
            until(lambda number=number: len(losses) >= number)
            manager.suspend()
            assert trainer.faults.memory().chunk_bytes == 0
            manager.resume()

    assert in_threads(work, disturb) == [None] * 2
    assert losses == alone
