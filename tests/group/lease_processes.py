"""Processes for the tests of leases: forked from one that has imported everything, so that a killed one is replaced in milliseconds.

The one that forks has a single thread and has used neither torch nor a lease. It also collects the dead: once `Process.kill` has
returned, the kernel has taken back what the process had.
"""

from __future__ import annotations

import gc
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

START_SECONDS = 90.0
CALL_SECONDS = 30.0


class Process:
    """One process that holds an object made by `make(*arguments)`, and calls its methods."""

    def __init__(self, pid: int, connection: Connection, collect: Callable[[int], None]) -> None:
        self.pid = pid
        self._connection = connection
        self._collect = collect

    def begin(self, method: str, *arguments: Any) -> None:
        """Call a method and do not wait for what it returns."""
        self._connection.send((method, arguments))

    def answer(self, seconds: float = CALL_SECONDS) -> Any:
        """What the method that was begun first returned, or raised."""
        assert self._connection.poll(seconds), f"process {self.pid} does not answer"
        is_fine, value = self._connection.recv()
        if not is_fine:
            raise value
        return value

    def call(self, method: str, *arguments: Any) -> Any:
        self.begin(method, *arguments)
        return self.answer()

    def is_busy(self, seconds: float = 0.1) -> bool:
        """Whether there is no answer yet after so long."""
        return not self._connection.poll(seconds)

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        self.until_stopped()

    def until_stopped(self) -> None:
        while b") T " not in Path(f"/proc/{self.pid}/stat").read_bytes():
            time.sleep(0.001)  # the system tells a process's state only when asked

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        os.kill(self.pid, signal.SIGKILL)
        self._collect(self.pid)
        self._connection.close()

    def end(self) -> None:
        """Let it come to its end in order."""
        self._connection.close()
        self._collect(self.pid)


class Processes:
    """Starts them, and kills at `close` or `clear` those that are left."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._address = f"{self._folder.name}/forks"
        self._listener = Listener(self._address, "AF_UNIX")
        code = f"from tests.group.lease_processes import fork_on_demand; fork_on_demand({self._address!r})"
        self._parent = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[2])
        self._control = self._listener.accept()
        self._running: dict[int, Process] = {}
        self._numbers = itertools.count()

    def start(self, make: Callable[..., Any], *arguments: Any) -> Process:
        """Fork a process that calls `make(*arguments)` first; returns once it has."""
        address = f"{self._folder.name}/{next(self._numbers)}"
        with Listener(address, "AF_UNIX") as listener:
            self._control.send((address, make, arguments))
            assert self._control.poll(START_SECONDS)
            pid = self._control.recv()
            process = Process(pid, listener.accept(), self._collect)
        self._running[pid] = process
        process.answer()
        return process

    def clear(self) -> None:
        for process in [*self._running.values()]:
            process.kill()

    def close(self) -> None:
        self.clear()
        self._control.close()
        self._parent.wait(10)
        self._listener.close()
        self._folder.cleanup()

    def _collect(self, pid: int) -> None:
        self._control.send(pid)
        assert self._control.poll(CALL_SECONDS), f"process {pid} does not end"
        self._control.recv()
        self._running.pop(pid, None)


def fork_on_demand(address: str) -> None:
    import torch
    import torch._dynamo  # an optimizer imports it, which takes a second

    import placement.group
    import placement.testing  # noqa: F401
    import tests.group.lease_worker  # noqa: F401

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # else the first collection in each child copies every page
    control = Client(address, "AF_UNIX")
    while True:
        try:
            order = control.recv()
        except EOFError:
            return
        if isinstance(order, int):
            os.waitpid(order, 0)
            control.send(order)
            continue
        pid = os.fork()
        if pid == 0:
            control.close()
            _serve(*order)
        control.send(pid)


def _serve(address: str, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    status = 1
    try:
        connection = Client(address, "AF_UNIX")
        target: Any = None
        try:
            target = make(*arguments)
            connection.send((True, None))
        except BaseException as error:
            connection.send((False, error))
            raise
        while True:
            try:
                method, given = connection.recv()
            except EOFError:
                break
            try:
                answer: tuple[bool, Any] = True, getattr(target, method)(*given)
            except BaseException as error:
                error.add_note(f"in process {os.getpid()}:\n{traceback.format_exc()}")
                answer = False, error
            connection.send(answer)
        status = 0
    except (BrokenPipeError, ConnectionError):
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)
