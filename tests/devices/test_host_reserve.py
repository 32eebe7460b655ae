"""Slabs that become ready in the background: order, refusal, what is promised, death and exit in
the middle."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from placement.core.errors import HostMemoryError
from placement.devices.host import slab as host
from placement.devices.host import threads
from placement.devices.host.slab import PAGE, Reservation, Slab, promised_bytes, wait_until_ready
from tests.devices.test_host import mapped
from tests.support.programs import Programs

LONG = 60
"""Seconds after which something that must happen has not happened."""


def wait_for_threads() -> None:
    for thread in threading.enumerate():
        if thread.name == "placement-host":
            thread.join(LONG)


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of a page, so that a few pages are a large slab."""
    monkeypatch.setattr(host, "PIECE_BYTES", PAGE)


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What registrations of a test wait for. Opened at the end, whatever the test did."""
    gate = threading.Event()
    yield gate
    gate.set()
    wait_for_threads()


class Driver:
    """Registers on paper. A registration waits for `gate` and fails at the addresses in
    `refused`."""

    def __init__(self, gate: threading.Event | None = None) -> None:
        self.gate = gate
        self.entered = threading.Event()
        self.registered: dict[int, int] = {}
        self.calls: list[int] = []
        self.problems: list[str] = []
        self.refused: Callable[[int], str | None] = lambda address: None

    def register(self, address: int, nbytes: int) -> str | None:
        self.calls.append(address)
        self.entered.set()
        if self.gate is not None:
            self.gate.wait(LONG)
        if not mapped(address):
            self.problems.append("registered what is not mapped")
        reason = self.refused(address)
        if reason is None:
            self.registered[address] = nbytes
        return reason

    def unregister(self, address: int) -> None:
        if not mapped(address):
            self.problems.append("unregistered after unmapping")
        if self.registered.pop(address, None) is None:
            self.problems.append("unregistered what was not")

    def slab(self, nbytes: int) -> Slab:
        return Slab(nbytes, self.register, self.unregister)


def test_a_slab_is_one_registration_whatever_its_size() -> None:
    """The driver refuses a copy across two, and anybody may copy any part of a slab."""
    driver = Driver()
    slab = driver.slab(23 * PAGE - 5)
    assert slab.ready.wait(LONG)
    assert driver.registered == {slab.address: 23 * PAGE}
    assert (slab.pinned, slab.pageable_bytes, slab.pageable_reason) == (True, 0, None)
    address = slab.address
    view = slab.view(0, 1)
    del slab
    assert driver.registered
    del view
    assert not driver.registered
    assert not driver.problems
    assert not mapped(address)


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch, gate: threading.Event) -> threading.Event:
    """Set when memory is about to be touched, which waits for the gate."""
    touch, reached = host._touch, threading.Event()

    def late(address: int, nbytes: int, progress: Callable[[int], bool]) -> str | None:
        reached.set()
        gate.wait(LONG)
        return touch(address, nbytes, progress)

    monkeypatch.setattr(host, "_touch", late)
    return reached


@pytest.mark.usefixtures("reached")
def test_touching_changes_no_byte_that_was_written_before(gate: threading.Event) -> None:
    slab = Driver().slab(9 * PAGE)
    assert (slab.ready.is_set(), slab.pinned, slab.pageable_bytes, slab.pageable_reason) == (
        False,
        False,
        0,
        None,
    )
    slab.view(0, 9 * PAGE).fill_(7)
    gate.set()
    assert slab.ready.wait(LONG)
    assert (slab.view(0, 9 * PAGE) == 7).all()


@pytest.mark.parametrize("raises", [False, True])
def test_a_slab_that_is_refused_stays_pageable_and_says_why(raises: bool) -> None:
    undone: list[int] = []

    def refused(address: int) -> str | None:
        if raises:
            raise RuntimeError("in the middle")
        return "over the limit of locked memory"

    driver = Driver()
    driver.refused = refused
    slab = Slab(24 * PAGE, driver.register, undone.append)
    assert slab.ready.wait(LONG)
    assert (slab.pinned, slab.pageable_bytes) == (False, slab.nbytes)
    assert slab.pageable_reason == (
        ("RuntimeError: in the middle") if raises else ("over the limit of locked memory")
    )
    slab.view(0, slab.nbytes).fill_(1)
    address = slab.address
    del slab
    assert undone == ([address] if raises else []), "one that raised may have happened"


def test_memory_that_others_took_meanwhile_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = iter([1 << 40])
    monkeypatch.setattr(host, "available_bytes", lambda: next(numbers, 100))
    driver = Driver()
    slab = driver.slab(8 * PAGE)
    assert slab.ready.wait(LONG)
    assert (slab.pageable_bytes, driver.calls) == (8 * PAGE, [])
    assert slab.pageable_reason == (
        f"{PAGE:,} bytes were not allocated: only 100 bytes of host memory are available"
    )
    slab.view(0, slab.nbytes).fill_(1)


def test_what_is_promised_and_not_touched_is_nobody_elses(
    monkeypatch: pytest.MonkeyPatch, gate: threading.Event, reached: threading.Event
) -> None:
    monkeypatch.setattr(host, "available_bytes", lambda: 20 * PAGE)
    before = set(host._alive)  # of slabs that earlier tests have not let go of
    slab = Driver().slab(15 * PAGE)
    assert promised_bytes() == 15 * PAGE
    assert reached.wait(LONG)
    with pytest.raises(
        HostMemoryError,
        match=rf"asked for {6 * PAGE:,} "
        r"bytes, "
        rf"{5 * PAGE:,} "
        r"available, "
        rf"{15 * PAGE:,} more promised",
    ):
        Slab(6 * PAGE)
    assert promised_bytes() == 15 * PAGE, "what is refused promises nothing"
    other = Slab(5 * PAGE)
    gate.set()
    assert slab.ready.wait(LONG)
    assert promised_bytes() == 0
    del other, slab
    assert set(host._alive) <= before


def test_death_in_the_middle_waits_for_the_thread_that_works_on_it(gate: threading.Event) -> None:
    driver = Driver(gate)
    slab = driver.slab(40 * PAGE)
    address = slab.address
    assert driver.entered.wait(LONG)
    del slab
    assert mapped(address)
    gate.set()
    wait_for_threads()
    assert not mapped(address)
    assert not driver.registered
    assert not driver.problems
    assert len(driver.calls) < 10, "what was not begun is not begun any more"


def test_whoever_copies_waits_for_its_slab_alone_and_gets_it_first(
    monkeypatch: pytest.MonkeyPatch, gate: threading.Event
) -> None:
    monkeypatch.setattr(threads, "_MOST_THREADS", 1)
    driver = Driver(gate)
    slabs = [driver.slab(8 * PAGE) for _ in range(3)]
    assert driver.entered.wait(LONG)
    wait_until_ready(1, PAGE)
    waiting = threading.Thread(target=wait_until_ready, args=(slabs[2].address + PAGE, 1))
    hurried = threading.Event()
    hurry = threads.POOL.hurry

    def and_tell(reservation: Reservation) -> None:
        hurry(reservation)
        hurried.set()

    monkeypatch.setattr(threads.POOL, "hurry", and_tell)
    waiting.start()
    assert hurried.wait(LONG)
    gate.set()
    waiting.join(LONG)
    assert all(slab.ready.wait(LONG) for slab in slabs)
    assert driver.calls == [slabs[0].address, slabs[2].address, slabs[1].address], (
        "the first was being registered already"
    )


@pytest.mark.parametrize(
    "ending",
    [pytest.param("", marks=pytest.mark.sweep), "signal.raise_signal(signal.SIGTERM)"],
)
def test_the_process_may_end_while_threads_are_at_work(programs: Programs, ending: str) -> None:
    program = f"""
import signal, sys, threading, time
from placement.devices.host import slab as host
host.PIECE_BYTES = 4096
host._TOUCH_STEP = 4096
signal.signal(signal.SIGTERM, lambda *a: sys.exit(0))
begun = threading.Event()
def register(address, nbytes):
    begun.set()
    time.sleep(0.001)  # a driver call that gives up the interpreter lock
def unregister(address):
    if not begun.is_set():
        print("driver call")
slab = host.Slab(4 << 20, register, unregister)
begun.wait()
{ending}
"""
    assert programs.run(program) == (0, "", "")
