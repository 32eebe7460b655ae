"""Asynchronous saves: the bytes of the call, whatever happens while they are written, and moves
that wait for what they would overwrite."""

from __future__ import annotations

import asyncio
import copy
import gc
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

import placement
from placement import checkpoint
from placement.checkpoint import files
from placement.testing import assert_nothing_resident
from tests.support.programs import Programs
from tests.support.sweeps import few
from tests.support.worker import GPU, OFF, TRAIN, Worker, assert_same, learn, trained

SECONDS = 30.0


class Busy:
    def __init__(self) -> None:
        self._free = threading.Event()
        self._blocked = files.writer(os.getpid()).submit(lambda: self._free.wait(SECONDS))

    def go(self) -> None:
        self._free.set()
        self._blocked.result(SECONDS)


@pytest.fixture
def busy() -> Iterator[Busy]:
    found = Busy()
    yield found
    found.go()
    files.writer(os.getpid()).submit(lambda: None).result()


def values(worker: Worker) -> dict[str, Any]:
    return copy.deepcopy(
        {
            name: handle.state_dict()
            for name, handle in worker.manager.handles.items()
            if name != "ref"
        }
    )


def in_a_thread(act: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread


def waits(thread: threading.Thread) -> bool:
    """Whether a thread has come to where it waits for a reader (it would be through long before
    otherwise)."""
    thread.join(0.1)
    return thread.is_alive()


def assert_saved(path: Path, wanted: Any) -> None:
    fresh = Worker()
    checkpoint.load(fresh.manager, path)
    assert_same(values(fresh), wanted)


def test_training_goes_on_while_a_checkpoint_of_the_host_copy_is_written(
    busy: Busy, tmp_path: Path
) -> None:
    worker = trained()
    wanted = values(worker)
    writing = checkpoint.async_save(worker.manager, tmp_path / "a")
    worker.manager.enter("train")  # a load does not wait
    learn(worker.net, worker.adam, 1)
    assert worker.actor.state is TRAIN
    leaving = in_a_thread(worker.manager.leave)
    assert waits(leaving)  # an offload would overwrite what is read
    assert not writing.done()
    assert worker.actor.holding is not None
    assert worker.actor.holding.on_device
    busy.go()
    leaving.join(SECONDS)
    assert not leaving.is_alive()
    writing.result(SECONDS)
    assert_nothing_resident(worker.manager)
    assert_saved(tmp_path / "a", wanted)
    after = values(worker)
    with worker.manager.phase("log_prob"):
        assert_same(dict(worker.net.state_dict()), dict(after["actor"]))


@pytest.mark.parametrize(
    ("phase", "make"),
    [
        pytest.param("train", Worker, marks=pytest.mark.sweep),
        ("train", trained),
        ("weight_sync", trained),
    ],
)
def test_a_save_on_the_device_has_the_values_of_the_call(
    phase: str, make: Callable[[], Worker], busy: Busy, tmp_path: Path
) -> None:
    """Also those of state that the step before has created, and of counters on the CPU."""
    worker = make()
    with worker.manager.phase("train") as step:
        learn(worker.net, worker.adam, 1)
        learn(worker.critic_net, worker.sgd, 1)
        if phase == "train":
            wanted = values(worker)
            writing = checkpoint.async_save(worker.manager, tmp_path / "a")
            learn(worker.net, worker.adam, 2)
            learn(worker.critic_net, worker.sgd, 2)
            busy.go()
        else:
            step.switch(phase)
            wanted = values(worker)
            writing = checkpoint.async_save(worker.manager, tmp_path / "a")
            busy.go()
    writing.result(SECONDS)
    assert_saved(tmp_path / "a", wanted)
    assert_nothing_resident(worker.manager)


def test_what_a_save_brought_to_the_host_is_not_copied_a_second_time(tmp_path: Path) -> None:
    worker = trained()
    with worker.manager.phase("train"):
        learn(worker.net, worker.adam, 1)
        before = worker.actor.counters.skipped_bytes
        checkpoint.async_save(worker.manager, tmp_path / "a").result(SECONDS)
    assert worker.actor.counters.skipped_bytes > before
    assert_saved(tmp_path / "a", values(worker))


@pytest.mark.parametrize("how", few(["unregister", "close", "load"], "unregister", "load"))
def test_what_would_overwrite_or_give_up_the_host_copy_waits(
    how: str, busy: Busy, tmp_path: Path
) -> None:
    worker = trained()
    checkpoint.save(worker.manager, tmp_path / "other")
    with worker.manager.phase("train"):
        learn(worker.net, worker.adam, 1)
    wanted = values(worker)
    writing = checkpoint.async_save(worker.manager, tmp_path / "a")
    act = {
        "unregister": lambda: worker.manager.unregister("actor.optimizer"),
        "close": worker.manager.close,
        "load": lambda: checkpoint.load(worker.manager, tmp_path / "other"),
    }[how]
    thread = in_a_thread(act)
    assert waits(thread)
    assert not writing.done()
    busy.go()
    thread.join(SECONDS)
    assert not thread.is_alive()
    writing.result(SECONDS)
    assert_saved(tmp_path / "a", wanted)


@pytest.mark.parametrize("phase", ["checkpoint", "train"])
def test_a_writer_that_fails_says_so_and_lets_go(
    phase: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    worker = trained()
    (tmp_path / "file").write_text("in the way")
    with worker.manager.phase(phase):
        writing = checkpoint.async_save(worker.manager, tmp_path / "file" / "below")
    with pytest.raises(placement.CheckpointError, match="below"):
        writing.result(SECONDS)
    assert "was not written" in caplog.text
    with worker.manager.phase("train"):  # nobody waits for what has failed
        learn(worker.net, worker.adam, 1)
    assert_nothing_resident(worker.manager)
    checkpoint.async_save(worker.manager, tmp_path / "fine").result(SECONDS)
    assert_saved(tmp_path / "fine", values(worker))


def test_a_save_that_cannot_begin_lends_nothing(tmp_path: Path) -> None:
    worker = trained()
    with pytest.raises(placement.PhaseError, match="no such"):
        checkpoint.async_save(worker.manager, tmp_path / "a", only=["actor", "no such"])
    assert worker.manager.handles["actor"].holding is not None
    worker.manager.handles["actor"].holding.wait_for_host_readers()
    with worker.manager.phase("log_prob"):
        assert worker.actor.state is GPU
    assert worker.actor.state is OFF


@pytest.mark.parametrize("phase", ["checkpoint", "train"])
def test_what_hooks_compute_is_saved_as_it_was_at_the_call(
    phase: str, busy: Busy, tmp_path: Path
) -> None:
    worker, other = trained(), Worker()
    for each in (worker, other):
        each.net._register_state_dict_hook(
            lambda _, found, *__: found.update({"0.weight": found["0.weight"].bfloat16()})
        )
    wanted = copy.deepcopy(dict(worker.actor.state_dict()))
    assert wanted["0.weight"].isfinite().all()
    with worker.manager.phase(phase):
        saved = checkpoint.async_save(worker.manager, tmp_path, only=["actor"])
        busy.go()  # here: the phase is left only once nobody reads the host copy any more
    saved.result(SECONDS)
    checkpoint.load(other.manager, tmp_path, only=["actor"])
    assert_same(dict(other.actor.state_dict()), wanted)


# --- the writing thread and the rest of the process


class Closing:
    """An object of a user that closes its manager when it is garbage-collected."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def __del__(self) -> None:
        self.worker.manager.close()


def in_a_phase(worker: Worker) -> Iterator[int]:
    with worker.manager.phase("log_prob"):
        yield 1


def begun(items: Iterator[Any]) -> Iterator[Any]:
    next(items)
    return items


def weights(worker: Worker) -> Any:
    worker.manager.enter("weight_sync")
    return begun(worker.actor.weights())


def engine(worker: Worker) -> Any:
    found = placement.TorchEngine(torch.nn.Linear(8, 8))
    worker.manager.register("rollout", found)
    return found, worker


DROPPED: dict[str, Callable[[Worker], Any]] = {
    "manager": lambda worker: worker,
    "handle": lambda worker: (worker.actor, worker.manager, worker.net),
    "engine": engine,
    "hold": lambda worker: worker.manager.hold("log_prob"),
    "hold around": lambda worker: begun(worker.manager.hold("log_prob").around(iter([1, 2]))),
    "phase": lambda worker: begun(in_a_phase(worker)),
    "weights": weights,
    "__del__": Closing,
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("what", few(DROPPED, "manager", "engine", "hold around", "__del__"))
def test_what_is_collected_on_the_writing_thread_does_not_wait_there(
    what: str, busy: Busy, tmp_path: Path
) -> None:
    worker: Worker | None = trained()
    assert worker is not None
    cycle: list[Any] = [DROPPED[what](worker)]
    cycle.append(cycle)
    wanted = values(worker) if what != "engine" else None
    collecting = files.writer(os.getpid()).submit(gc.collect)
    saving = checkpoint.async_save(worker.manager, tmp_path / "a")
    if what in ("manager", "handle", "engine", "__del__"):
        worker = None
    gc.disable()
    try:
        del cycle
        busy.go()
        collecting.result(SECONDS)
    finally:
        gc.enable()
    saving.result(SECONDS)
    if wanted is not None:
        assert_saved(tmp_path / "a", wanted)
    if worker is not None:
        while worker.manager.phase_name == "weight_sync":
            worker.manager.leave()
        with worker.manager.phase("train"):  # and what was open is left
            learn(worker.net, worker.adam)
        assert_nothing_resident(worker.manager)


def test_a_save_cannot_be_cancelled_and_training_goes_on(busy: Busy, tmp_path: Path) -> None:
    worker = trained()
    wanted = values(worker)
    saving = checkpoint.async_save(worker.manager, tmp_path / "a")
    assert not saving.cancel()

    async def impatient() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.wrap_future(saving), 0.01)

    asyncio.run(impatient())
    busy.go()
    with worker.manager.phase("train"):
        learn(worker.net, worker.adam)
    saving.result(SECONDS)
    assert_saved(tmp_path / "a", wanted)


class Slow:
    """A setting whose pickling waits."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()

    def __deepcopy__(self, _: Any) -> Slow:
        return self

    def __reduce__(self) -> Any:
        self.begun.set()
        assert self.go_on.wait(SECONDS)
        return Slow, ()


def test_a_running_save_whose_waiter_is_cancelled_is_finished(tmp_path: Path) -> None:
    worker, slow = trained(), Slow()
    worker.adam.param_groups[0]["slow"] = slow
    saving = checkpoint.async_save(worker.manager, tmp_path / "a", only=["actor.optimizer"])

    async def impatient() -> None:
        waiting = asyncio.ensure_future(asyncio.wrap_future(saving))
        await asyncio.get_running_loop().run_in_executor(None, slow.begun.wait, SECONDS)
        waiting.cancel()

    asyncio.run(impatient())
    assert not saving.done()
    slow.go_on.set()
    saving.result(SECONDS)
    with worker.manager.phase("train"):
        learn(worker.net, worker.adam)


def wait_for_another(worker: Worker, path: Path) -> None:
    checkpoint.async_save(worker.manager, path / "b").result(SECONDS)


def in_phase(worker: Worker, _: Path) -> None:
    with worker.manager.phase("log_prob"):
        worker.net(torch.zeros(1, 64))


CALLS: dict[str, Callable[[Worker, Path], Any]] = {
    "async_save": lambda worker, path: checkpoint.async_save(worker.manager, path / "b"),
    "another's result": wait_for_another,
    "save": lambda worker, path: checkpoint.save(worker.manager, path / "b"),
    "load": lambda worker, path: checkpoint.load(worker.manager, path / "a"),
    "phase": in_phase,
    "audit": lambda worker, _: worker.manager.audit(),
    "unregister": lambda worker, _: worker.manager.unregister("critic.optimizer"),
    "close": lambda worker, _: worker.manager.close(),
}


@pytest.mark.parametrize("call", few(CALLS, "another's result", "load"))
def test_a_callback_of_a_save_may_make_any_call_while_a_phase_ends(
    call: str, busy: Busy, tmp_path: Path
) -> None:
    worker = trained()
    called: Future[Any] = Future()
    leaving = threading.Event()

    def back(_: Future[None]) -> None:
        try:
            assert leaving.wait(SECONDS)
            called.set_result(CALLS[call](worker, tmp_path))
        except placement.PlacementError as error:  # a clear one
            called.set_result(error)
        except BaseException as error:
            called.set_exception(error)

    def train() -> None:
        with worker.manager.phase("train"):
            learn(worker.net, worker.adam)
            leaving.set()

    checkpoint.async_save(worker.manager, tmp_path / "a").add_done_callback(back)
    last = checkpoint.async_save(worker.manager, tmp_path / "last")
    training = in_a_thread(train)
    assert waits(training)
    busy.go()
    training.join(SECONDS)
    assert not training.is_alive()
    last.result(SECONDS)
    called.result(SECONDS)


def test_a_callback_that_raises_and_a_save_that_fails_hold_nobody_up(
    busy: Busy, tmp_path: Path
) -> None:
    worker = trained()
    wanted = values(worker)
    (tmp_path / "file").write_text("in the way")
    failing = checkpoint.async_save(worker.manager, tmp_path / "file" / "below")
    failing.add_done_callback(lambda _: 1 // 0)
    saving = checkpoint.async_save(worker.manager, tmp_path / "a")
    busy.go()
    with worker.manager.phase("train"):
        learn(worker.net, worker.adam)
    with pytest.raises(placement.CheckpointError, match="below"):
        failing.result(SECONDS)
    saving.result(SECONDS)
    assert_saved(tmp_path / "a", wanted)


EXITING = """
import atexit, os, threading, torch, placement, warnings
from placement.checkpoint import files
from placement.testing import SimulatedDevice

warnings.simplefilter("ignore")
manager = placement.Manager(device=SimulatedDevice(64 << 20))
model = torch.nn.Linear(8, 8)
manager.register("actor", model, role="actor")


@atexit.register
def late():
    try:
        placement.checkpoint.async_save(manager, folder + "/late")
    except placement.CheckpointError as error:
        print("refused:", error)
    placement.checkpoint.load(manager, folder + "/b")
    with manager.phase("log_prob"):
        print("went on")


go_on = threading.Event()
files.writer(os.getpid()).submit(lambda: go_on.wait(30))
threading.Thread(target=lambda: (threading.main_thread().join(), go_on.set())).start()
for name in "ab":
    saving = placement.checkpoint.async_save(manager, f"{folder}/{name}")
    # one write a line: two threads may call back at once
    saving.add_done_callback(lambda _: print(f"called back {manager.audit().ok}\\n", end=""))
"""


def test_a_process_that_exits_writes_what_is_queued(programs: Programs, tmp_path: Path) -> None:
    ended = programs.run(f"folder = {str(tmp_path)!r}\n{EXITING}")
    assert (ended.status, ended.errors) == (0, "")
    assert ended.output.splitlines() == [
        "called back True",
        "called back True",
        "refused: the process is exiting, so no other thread can write: use save()",
        "went on",
    ]
    assert all((tmp_path / name / ".metadata").exists() for name in "ab")
