"""Processes for the tests of groups and turns, which hold an object each and call its methods."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.support.forked import processes

START_SECONDS = 90.0
CALL_SECONDS = 30.0


class Process:
    """One process that holds an object made by `make(*arguments)`, and calls its methods."""

    context: Any = processes

    def __init__(self, make: Callable[..., Any], *arguments: Any) -> None:
        self._connection, theirs = self.context.Pipe()
        self._process = self.context.Process(
            target=_serve, args=(theirs, make, arguments), daemon=True
        )
        self._process.start()
        theirs.close()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

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
        assert self.is_stopped()

    def is_stopped(self) -> bool:
        """Wait until each of its threads is stopped, because one that still runs may answer. False
        when the process ended first."""
        deadline = time.monotonic() + CALL_SECONDS
        tasks = Path(f"/proc/{self.pid}/task")
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            while any(
                b") T " not in task.joinpath("stat").read_bytes() for task in tasks.iterdir()
            ):
                assert time.monotonic() < deadline, f"process {self.pid} neither stopped nor ended"
                time.sleep(0.001)  # the system tells a process's state only when asked
            return True
        return False

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and wait until the kernel has taken back what the process had."""
        self._process.kill()
        self.end()

    @property
    def was_killed(self) -> bool:
        self._process.join(CALL_SECONDS)
        return self._process.exitcode == -signal.SIGKILL

    def end(self) -> None:
        """Let it come to its end in order."""
        self._connection.close()
        self._process.join(CALL_SECONDS)
        assert not self._process.is_alive(), f"process {self.pid} does not end"


class SpawnedProcess(Process):
    """With an interpreter of its own: CUDA cannot be used after a fork."""

    context = multiprocessing.get_context("spawn")


class StoreService(Process):
    """A TCPStore in a process of its own."""

    def __init__(self) -> None:
        super().__init__(_Store)
        self.answer(START_SECONDS)
        self.port: int = self.call("port")


class _Store:
    def __init__(self) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)

    def port(self) -> int:
        return self._store.port


class Processes:
    """Starts them, and kills at `clear` those that are left."""

    def __init__(self, kind: type[Process] = Process) -> None:
        self._kind = kind
        self._started: list[Process] = []

    def start(self, make: Callable[..., Any], *arguments: Any) -> Process:
        """Start a process that calls `make(*arguments)` first; returns once it has."""
        self._started.append(process := self._kind(make, *arguments))
        process.answer(START_SECONDS)
        return process

    def clear(self) -> None:
        for process in self._started:
            process.kill()


def _serve(connection: Connection, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    target: Any = None
    method = ""
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            try:
                if target is None:
                    target, answer = make(*arguments), (True, None)
                else:
                    answer = True, getattr(target, method)(*arguments)
            except BaseException as error:
                error.add_note(f"in process {os.getpid()}:\n{traceback.format_exc()}")
                answer = False, error  # type: ignore[assignment]
            connection.send(answer)
            method, arguments = connection.recv()
