"""Ctrl-C is noted inside `deferred()`, and raised by `check()`, by a second one, or at the end."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from placement.core.interrupts import check, deferred
from tests.support.threads import in_a_thread


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
