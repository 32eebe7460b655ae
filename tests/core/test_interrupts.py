"""What comes in the middle: Ctrl-C, which is noted inside `deferred()`, and collections of
garbage."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from placement import Manager, State
from placement.core.interrupts import BackgroundThread, check, deferred
from placement.core.journal import Journal
from placement.core.weak import WeakIdSet
from placement.devices.host.slab import Reservation, promised_bytes
from placement.testing import SimulatedDevice, assert_nothing_resident
from tests.support.threads import in_a_thread, until
from tests.support.worker import CAPACITY, Worker, assert_same, net


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.fixture(autouse=True)
def _handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    left = signal.signal(signal.SIGINT, before)
    assert left is signal.default_int_handler


def test_raised_at_a_wait_and_only_once() -> None:
    with deferred():
        with deferred():  # an inner block changes nothing
            interrupt()
        with pytest.raises(KeyboardInterrupt):
            check()
        check()
    check()


@pytest.mark.parametrize("fails", [False, True])
def test_raised_at_the_end_also_of_a_block_that_failed(fails: bool) -> None:
    done = []

    def work() -> None:
        with deferred():
            interrupt()
            done.append(1)
            if fails:
                raise ValueError("no")

    with pytest.raises(KeyboardInterrupt) as caught:
        work()
    assert done
    assert isinstance(caught.value.__context__, ValueError) is fails


def test_another_thread_defers_and_raises_nothing() -> None:
    seen: list[Any] = []

    def work() -> None:
        with deferred():
            check()
            seen.append(signal.getsignal(signal.SIGINT))

    with deferred():
        interrupt()
        in_a_thread(work)
        with pytest.raises(KeyboardInterrupt):
            check()
    assert len(seen) == 1


def test_a_handler_of_the_users_own_is_called_once_and_may_defer() -> None:
    calls: list[int] = []

    def handler(signum: int, frame: Any) -> None:
        with deferred():
            calls.append(signum)

    signal.signal(signal.SIGINT, handler)
    with deferred():
        interrupt()
        assert not calls
        check()
        assert calls == [signal.SIGINT]
    assert signal.getsignal(signal.SIGINT) is handler
    with deferred():
        interrupt()
    assert calls == [signal.SIGINT] * 2
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_what_is_ignored_stays_ignored_and_what_is_installed_inside_stays() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with deferred():
        interrupt()
        check()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with deferred():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_a_child_that_another_thread_has_forked_defers_nothing() -> None:
    codes: list[int] = []

    def fork() -> None:
        if (pid := os.fork()) == 0:
            os._exit(int(signal.getsignal(signal.SIGINT) is signal.default_int_handler))
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

    with deferred():
        in_a_thread(fork)
        interrupt()
        with pytest.raises(KeyboardInterrupt):
            check()
    assert codes == [1]


# --- collections that may change while they are walked: a collection of garbage can come anywhere


class Thing:
    """Something that is added."""


class Loop:
    """Garbage that only a collection finds."""

    def __init__(self) -> None:
        self.me = self


def of_a_weak_set(kept: list[Any]) -> tuple[Callable[[], object], Callable[[], Iterable[object]]]:
    found: WeakIdSet[Thing] = WeakIdSet()

    def add() -> None:
        kept.append(Thing())
        found.add(kept[-1])

    return add, lambda: found


def of_a_journal(kept: list[Any]) -> tuple[Callable[[], object], Callable[[], Iterable[object]]]:
    journal = Journal()
    return lambda: journal._records.append(Thing()), lambda: journal  # type: ignore[arg-type]


def of_reservations(kept: list[Any]) -> tuple[Callable[[], object], Callable[[], Iterable[object]]]:
    return lambda: kept.append(Reservation(Loop(), 0)), lambda: [promised_bytes()]


@pytest.mark.parametrize(
    "make", [of_a_weak_set, of_a_journal, of_reservations], ids=lambda make: make.__name__
)
def test_a_collection_anywhere_in_a_walk_may_add_to_it(make: Callable[[list[Any]], Any]) -> None:
    add, walk = make([])
    thresholds = gc.get_threshold()
    added = []
    gc.collect()
    gc.freeze()  # what is there already need not be looked at a hundred times
    try:
        for number in range(1, 60):  # of containers made before the collection comes
            add()
            gc.set_threshold(0)
            weakref.finalize(Loop(), lambda: added.append(add()))
            gc.set_threshold(number)
            list(walk())
            gc.set_threshold(0)
            gc.collect()
    finally:
        gc.set_threshold(*thresholds)
    assert len(added) == 59


ROOT = Path(__file__).parents[2]
PROGRAM = """
import contextlib, gc, os, sys
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from placement import Manager, testing

class Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))

class Refusing:
    def find_spec(self, name, path=None, target=None):
        asked.append(name)
        raise ImportError(f"{name} is imported by the finalizer of a manager")

modes = {
    "no mode": contextlib.nullcontext,
    "dispatch mode": Operations,
}
asked, failed = [], []

def collected(mode, entered):
    model = nn.Linear(64, 64)
    before = model.weight.detach().clone()
    manager = Manager(device=testing.SimulatedDevice(1 << 24))
    manager.register("actor", model)
    phase = manager.phase("train")
    if entered:
        phase.__enter__()
    with modes[mode]():
        sys.meta_path.insert(0, Refusing())
        sys.unraisablehook = failed.append
        gc.disable()
        del manager, phase
        gc.collect()
        sys.meta_path.pop(0)
    assert not failed, [one.exc_value for one in failed]
    assert not asked, asked
    assert torch.equal(model.weight, before)

gc.collect()
gc.freeze()
for mode in modes:
    for entered in False, True:
        # Each in a process of its own, because an import that succeeds once is not made again.
        child = os.fork()
        if not child:
            collected(mode, entered)
            os._exit(0)  # without the end of an interpreter
        if os.waitpid(child, 0)[1]:
            sys.exit(f"{mode}, {'in a phase' if entered else 'offloaded'}: see above")
"""


def test_a_collected_manager_is_closed_without_an_import() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


# --- on a thread of placement's own, where no phase transition may begin


def test_a_manager_that_is_collected_on_such_a_thread_is_closed_beside_it() -> None:
    worker = Worker()
    reference, wanted = worker.ref_net, worker.ref_values
    cycle: list[Any] = [worker]
    cycle.append(cycle)
    del worker
    gc.disable()
    try:
        cycle = []
        thread = BackgroundThread("placement-test", gc.collect)
        thread.start()
        thread.join()
    finally:
        gc.enable()
    until(lambda: not any(each.name == "placement-close" for each in threading.enumerate()))
    assert_same(dict(reference.state_dict()), dict(wanted))


def test_an_abandoned_phase_is_left_later_where_it_is_collected_on_such_a_thread() -> None:
    manager = Manager(device=SimulatedDevice(CAPACITY))
    model = net()
    actor = manager.register("actor", model, role="actor")
    phases = [manager.phase("log_prob")]
    phases[0].__enter__()
    thread = BackgroundThread("placement-test", phases.clear)
    thread.start()
    thread.join()
    assert actor.state is State.GPU_RESIDENT
    with manager.phase("values"):
        assert actor.state is State.CPU_OFFLOADED
    assert_nothing_resident(manager)
