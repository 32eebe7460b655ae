"""Every IO call of the disk tier failed, and its waits interrupted: no value is lost unnoticed."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import gc
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import placement
from placement.devices.host import disk_file
from placement.devices.host.slab import Slab
from placement.planning.host_tier import UseHistory
from placement.storage import disk
from tests.faults.harness import FaultyWorker, check_sound, check_values
from tests.support.disk import settle

pytestmark = pytest.mark.leaves_behind(
    "each of many cases is looked at by the harness when it ends"
)

CAPACITY_BYTES = 256 * 1024
LIMIT_BYTES = 42 * 1024
"""The actor and its optimizer, and not the rollout engine beside them."""


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_file, "BLOCK_BYTES", 4096)
    monkeypatch.setattr(disk_file, "DEPTH", 2)


def worker_in(folder: Path) -> FaultyWorker:
    worker = FaultyWorker(
        CAPACITY_BYTES, host_limit_bytes=LIMIT_BYTES, disk_directory=folder
    ).register_few()
    settle(worker.manager)
    return worker


def a_few_phases(worker: FaultyWorker) -> None:
    """Everything leaves host memory once, and comes back once."""
    with worker.manager.phase("log_prob") as step:
        settle(worker.manager)
        step.switch("train")
        worker.train_actor()
        worker.actor.zero_grad()
        worker.commit("actor")
    settle(worker.manager)
    with worker.manager.phase("rollout"):
        settle(worker.manager)
    settle(worker.manager)


def lost(worker: FaultyWorker) -> set[str]:
    return {
        name for name, handle in worker.manager.handles.items() if handle.storage.lost is not None
    }


_preadv = os.preadv


class Failing:
    """A function or a method that does something else at one of its calls, or from there on.
    Several threads call it."""

    def __init__(
        self, real: Callable[..., Any], at: int, forever: bool, fail: Callable[..., Any]
    ) -> None:
        self._real, self._at, self._forever, self._fail = real, at, forever, fail
        self._lock = threading.Lock()
        self.calls = 0
        self.fired = 0

    def __get__(self, owner: Any, _: Any) -> Callable[..., Any]:
        return functools.partial(self, owner)

    def __call__(self, *arguments: Any, **_: Any) -> Any:
        # the simulated device reads which pages it has
        if self._real is _preadv and isinstance(arguments[1][0], bytearray):
            return self._real(*arguments)
        with self._lock:
            self.calls += 1
            fails = self.calls == self._at or (self._forever and self.calls > self._at)
            self.fired += fails
        return (self._fail if fails else self._real)(*arguments)


def raises(number: int) -> Callable[..., Any]:
    def fail(*_: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


def has_no_room(*_: Any) -> bool:
    raise placement.HostMemoryError("no room")


def refuses(*_: Any) -> int:
    ctypes.set_errno(errno.ENOSPC)
    return -1


OPERATIONS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "write": (os, "pwritev", raises(errno.EIO)),
    "sync": (os, "fdatasync", raises(errno.EIO)),
    "allocate": (disk_file.libc, "fallocate", refuses),
    "open": (disk, "DiskFile", raises(errno.EMFILE)),
    "release": (Slab, "_drop", lambda _: False),
    "memory": (Slab, "renew", has_no_room),
    "read": (os, "preadv", raises(errno.EIO)),
}


def worker_that_gives_back(_: Path) -> FaultyWorker:
    """One that gives back whatever host copy the device has the bytes of, and so must take it again
    for each offload."""
    worker = FaultyWorker(CAPACITY_BYTES, host_copies="while_needed").register_few()
    settle(worker.manager)
    return worker


CALLS = [
    *((worker_in, each) for each in OPERATIONS),
    *((worker_that_gives_back, each) for each in ("release", "memory")),
]


@pytest.mark.parametrize(
    "forever", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["once", "forever"]
)
@pytest.mark.parametrize(("make", "operation"), CALLS)
def test_every_call_failed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[Path], FaultyWorker],
    operation: str,
    forever: bool,
) -> None:
    owner, name, fail = OPERATIONS[operation]
    # of no effect where nothing is given back
    monkeypatch.setattr(UseHistory, "is_idle", lambda *_: True)
    points = 0
    while True:
        worker = make(tmp_path)
        with monkeypatch.context() as patched:
            failing = Failing(getattr(owner, name), points + 1, forever, fail)
            patched.setattr(owner, name, failing)
            with contextlib.suppress(
                placement.IntegrityError, placement.BrokenHandleError, placement.HostMemoryError
            ):
                a_few_phases(worker)
            settle(worker.manager)
        if not failing.fired:
            worker.manager.close()
            break
        points += 1
        gone = lost(worker)
        assert not gone or operation == "read"
        assert len(gone) <= 1 or forever
        for each in gone:
            with contextlib.suppress(placement.IntegrityError):
                worker.manager.unregister(each)
        # an optimizer whose module was lost goes with it
        with contextlib.suppress(placement.PhaseError):
            worker.manager.check_integrity()
        check_values(worker, except_for=gone)
        if not gone:
            a_few_phases(worker)
            check_sound(worker)
            check_values(worker)
            worker.manager.close()
        del worker
    assert points >= {"open": 1, "allocate": 1}.get(operation, 2)
    gc.collect()
    assert [*tmp_path.iterdir()] == []


# --- Ctrl-C


@pytest.mark.parametrize("call", ["preadv", "fdatasync"])
def test_ctrl_c_while_somebody_waits_for_the_disk_leaves_values_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    worker = worker_in(tmp_path)
    a_few_phases(worker)
    interrupted, real = 0, getattr(os, call)

    def press(*arguments: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return real(*arguments)

    for point in range(1, 12):
        with worker.manager.phase("rollout"):
            settle(worker.manager)
        settle(worker.manager)
        with monkeypatch.context() as patched:
            patched.setattr(os, call, Failing(real, point, False, press))
            try:
                with worker.manager.phase("train"):
                    worker.manager.handles["rollout"].object.module.state_dict()
                worker.manager.handles["actor"].state_dict()
                settle(worker.manager)
            except KeyboardInterrupt:
                interrupted += 1
        gc.collect(0)
        with worker.manager.phase("log_prob"):
            pass
        assert lost(worker) == set()
        check_sound(worker)
        check_values(worker)
    assert interrupted
    a_few_phases(worker)
    check_values(worker)
    worker.manager.close()
