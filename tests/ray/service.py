"""The board of a Ray job for the sweeps of faults: see tests/group/services.py."""

from __future__ import annotations

import itertools
import os
import signal
from typing import Any

from placement.group import Group, RayGroup, start_board
from tests.group.services import wait_until_stopped

PATIENCE_SECONDS = 60.0
"""For one call to the board."""
_names = itertools.count(1)


def join_ray(address: tuple[str, str, str, float], rank: int, world_size: int, deadline_seconds: float, generation: int) -> Group:
    """In a process that was forked a moment ago, and is a driver of its own."""
    import ray

    cluster, namespace, board, patience_seconds = address
    if not ray.is_initialized():
        ray.init(address=cluster, namespace=namespace, log_to_driver=False, logging_level="error", configure_logging=False)
    # Connecting takes seconds when many do, and so does a call then: only the waits for other ranks are as short as the case wants.
    group = RayGroup(board, rank, world_size, patience_seconds, generation=generation)
    group.deadline_seconds = deadline_seconds
    return group


class RayService:
    """A board that is restarted when it dies."""

    join = staticmethod(join_ray)

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._name = f"faults{next(_names)}"
        self._board = start_board(self._name)

    @property
    def address(self) -> tuple[str, str, str, float]:
        context = self._ray.get_runtime_context()
        return context.gcs_address, context.namespace, self._name, PATIENCE_SECONDS

    def pid(self) -> int:
        """Of its process; waits for one that is being restarted."""
        return int(self._ray.get(self._board.__ray_call__.remote(lambda _: os.getpid())))

    def kill(self) -> None:
        os.kill(self.pid(), signal.SIGKILL)

    def stop(self) -> None:
        pid = self.pid()
        os.kill(pid, signal.SIGSTOP)
        wait_until_stopped(pid)

    def close(self) -> None:
        self._ray.kill(self._board, no_restart=True)
