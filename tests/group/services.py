"""What ranks in processes of their own meet over, as the sweeps of faults need it: it can be killed and stopped, and joined by address.

Another engine is one more class here, named in `SERVICES`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from placement.group import Group, StoreGroup
from tests.support.forked import processes


class Service(Protocol):
    """Holds the board of any number of memberships."""

    address: Any
    """For `join`, in another process."""
    join: Callable[[Any, int, int, float, int], Group]
    """`join(address, rank, world_size, deadline_seconds, generation)` in the rank's process. A function of a module."""

    def kill(self) -> None:
        """SIGKILL to what holds the values, and it stays dead."""

    def stop(self) -> None:
        """SIGSTOP to it."""

    def close(self) -> None:
        """End it, whatever became of it."""


def _serve(connection: Connection) -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    connection.send(store.port)
    with contextlib.suppress(EOFError):
        connection.recv()


def join_store(address: int, rank: int, world_size: int, deadline_seconds: float, generation: int) -> Group:
    store = dist.TCPStore("127.0.0.1", address, None, False, timeout=timedelta(seconds=30))
    return StoreGroup(store, rank, world_size, deadline_seconds, generation=generation)


class StoreService:
    """A TCPStore in a process of its own."""

    join = staticmethod(join_store)

    def __init__(self) -> None:
        self._connection, theirs = processes.Pipe()
        self._process = processes.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self.address: int = self._connection.recv()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def stop(self) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGSTOP)
        wait_until_stopped(self._process.pid)

    def close(self) -> None:
        self._connection.close()
        self._process.kill()
        self._process.join()


SERVICES: dict[str, Callable[[], Service]] = {"store": StoreService}


def is_stopped(pid: int) -> bool:
    """Whether each of its threads is: one that still runs may answer."""
    stats = [task.joinpath("stat").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)


def wait_until_stopped(pid: int, seconds: float = 30.0) -> bool:
    """Whether the process was stopped; False when it ended first."""
    deadline = time.monotonic() + seconds
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        while not is_stopped(pid):
            assert time.monotonic() < deadline, f"process {pid} neither stopped nor ended"
            time.sleep(0.01)  # the system tells a process's state only when asked
        return True
    return False
