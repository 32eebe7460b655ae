"""Processes for tests, forked from one that has imported what they need: torch alone costs a fresh
interpreter two seconds.

Not for what needs a GPU, nor for a test about a process's own beginning or end. A process gets the
environment with which the first one was started.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
from collections.abc import Callable

processes = multiprocessing.get_context("forkserver")
_FIRST = "tests.support.uncollected"
_IMPORTED = ("tests.support.warm", "tests.group.fault_worker", "tests.group.turn_processes")
processes.set_forkserver_preload([_FIRST, *_IMPORTED])


def import_before(*modules: str) -> None:
    """What the next tests import besides, each of their processes: once instead, where no process
    has been forked yet."""
    # before those, which freeze what there is for the collector
    processes.set_forkserver_preload([_FIRST, *modules, *_IMPORTED])


def exit_code(body: Callable[[], int]) -> int:
    """Run a function in a child that is forked from here. Returns its exit code, or minus the
    signal that killed it."""
    pid = os.fork()
    if pid == 0:
        code = 99
        faulthandler.disable()
        try:
            code = body()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
