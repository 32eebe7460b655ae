"""Asynchronous saves: the bytes of the call, whatever happens while they are written, and moves
that wait for what they would overwrite."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import placement
from placement import checkpoint
from placement.checkpoint import files
from placement.testing import assert_nothing_resident
from tests.support.worker import GPU, OFF, TRAIN, Worker, assert_same, learn, trained

SECONDS = 30.0


class Busy:
    def __init__(self) -> None:
        self._free = threading.Event()
        self._blocked = files.writer(os.getpid()).submit(self._free.wait, SECONDS)

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
    ("phase", "make"), [("train", Worker), ("train", trained), ("weight_sync", trained)]
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


@pytest.mark.parametrize("how", ["unregister", "close", "load"])
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
