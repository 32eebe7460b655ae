"""Processes that are a rank of one case after the other, as long as they come out of each alive and well."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from placement.group import Group
from tests.group.fault_worker import Case, run_ranks
from tests.support.forked import processes

Join = Callable[..., Group]


class RankProcess:
    """One of them: a process, and the way to it."""

    def __init__(self) -> None:
        self.connection: Connection
        self.connection, theirs = processes.Pipe()
        self.process: Any = processes.Process(target=run_ranks, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def begin(self, case: Case, deadline_seconds: float, join: Join, *place: Any) -> None:
        self.connection.send((case, deadline_seconds, join, place))

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


class RankProcesses:
    """Those that wait for a case, by the way in which they join: one that has connected to a Ray cluster stays so."""

    def __init__(self) -> None:
        self._idle: dict[Join, list[RankProcess]] = defaultdict(list)
        self._lock = threading.Lock()

    def take(self, join: Join) -> RankProcess:
        with self._lock:
            if self._idle[join]:
                return self._idle[join].pop()
        return RankProcess()

    def give(self, join: Join, rank: RankProcess) -> None:
        with self._lock:
            self._idle[join].append(rank)

    def close(self) -> None:
        for ranks in self._idle.values():
            while ranks:
                ranks.pop().kill()
