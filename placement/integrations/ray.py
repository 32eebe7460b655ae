"""placement on Ray: each worker has a manager, and the driver declares phases for all workers with
Ray's own calls (docs/ranks.md).

The workers of a fleet change phase together, all or none: each gets a `StoreGroup` over a
`TCPStore` that the driver serves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

from torch._C._distributed_c10d import TCPStore

from placement.core.errors import GroupError, PhaseError, PlacementError
from placement.group.protocol import DEADLINE_SECONDS
from placement.group.store import StoreGroup
from placement.manager import Manager
from placement.phases.phase import checked, names_of


class Worker:
    """Mixin for an actor class that sets `self.manager` in its `__init__`. `Fleet` calls the
    methods; they run like any other call.

    Example:
        ::

            @ray.remote(num_gpus=1)
            class Trainer(placement.ray.Worker):
                def __init__(self):
                    self.manager = placement.Manager()
    """

    manager: Manager
    _entered = 0  # how many of the manager's phases the fleet has opened

    def placement_join(
        self,
        address: tuple[str, int],
        rank: int,
        world_size: int,
        generation: int,
        deadline_seconds: float,
    ) -> None:
        """Change phase together with the other workers of the fleet from now on."""
        self.placement_leave(0)
        store = TCPStore(*address, is_master=False, timeout=timedelta(seconds=deadline_seconds))
        self.manager.rejoin(
            StoreGroup(store, rank, world_size, deadline_seconds, generation=generation)
        )

    def placement_enter(self, name: str, only: tuple[str, ...] | None) -> None:
        self.manager.enter(name, only=only)
        self._entered += 1

    def placement_switch(self, name: str, only: tuple[str, ...] | None) -> None:
        self.manager.switch(name, only=only)

    def placement_leave(self, depth: int) -> None:
        """Leave the fleet's phases until only `depth` of them are open. A worker that never entered
        them has none to leave."""
        while self._entered > depth:
            self._entered -= 1
            self.manager.leave()


class Fleet:
    """The workers of a job, which change phase together.

    Args:
        workers: handles of actors whose class has `Worker` among its bases. Waits until their
            constructors are done.
        address: the address at which the workers reach the driver's store; None: this node's
            address in the cluster.
        deadline_seconds: how long a worker waits for the others, see `StoreGroup`.

    Raises:
        PlacementError: ray is not available.
        TypeError: an actor is not a `Worker`.
        GroupError: a worker's constructor failed, or it could not join.

    Example:
        ::

            fleet = placement.ray.Fleet([Trainer.remote() for _ in range(8)])
            with fleet.phase("train"):
                ray.get([worker.step.remote() for worker in fleet.workers])
    """

    def __init__(
        self,
        workers: Sequence[Any],
        *,
        address: str | None = None,
        deadline_seconds: float = DEADLINE_SECONDS,
    ) -> None:
        try:
            import ray
        except ImportError as error:
            raise PlacementError("ray is not installed here: pip install ray") from error
        if not ray.is_initialized():
            raise PlacementError(
                "this process is not connected to a Ray cluster: call ray.init() first"
            )
        self._ray: Any = ray
        self.workers = tuple(workers)
        for worker in self.workers:
            if not hasattr(worker, "placement_enter"):
                raise TypeError(
                    f"{worker!r} is not an actor of a class that has placement.ray.Worker among "
                    "its bases"
                )
        host = self._ray.util.get_node_ip_address() if address is None else address
        self._store = TCPStore(
            host,
            0,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=deadline_seconds),
        )
        self._address = host, self._store.port
        self._deadline_seconds = deadline_seconds
        self._generation = 0
        self._open: list[FleetPhase] = []
        self.join()

    def join(self) -> None:
        """Have all workers begin anew together, outside every phase. Call it after Ray has
        restarted one, and outside every phase.

        Raises:
            PhaseError: a phase is open.
            GroupError: a worker could not join; the error has the reasons by rank.
        """
        if self._open:
            raise PhaseError("a phase is open; leave it before the workers join anew")
        self._generation += 1
        calls = []
        for rank, worker in enumerate(self.workers):
            # A worker that is being restarted answers once its constructor is done.
            join = worker.placement_join.options(max_task_retries=-1)
            arguments = rank, len(self.workers), self._generation, self._deadline_seconds
            calls.append(join.remote(self._address, *arguments))
        self._wait("join", calls)

    def phase(self, name: str, *, only: Iterable[str] | None = None) -> FleetPhase:
        """A phase of every worker, for a `with` statement. See `Manager.phase`.

        Raises (on entering):
            GroupError: a worker failed; the error has the reasons by rank. Every worker is where it
            was before.
        """
        return FleetPhase(self, checked(name), names_of(only))

    def _call_all(self, action: str, method: str, *arguments: Any) -> None:
        """Call a method on every worker, and wait. `action` is for the error."""
        calls = [getattr(worker, method).remote(*arguments) for worker in self.workers]
        self._wait(action, calls)

    def _wait(self, action: str, calls: Iterable[Any]) -> None:
        failures = {}
        for rank, call in enumerate(calls):
            try:
                self._ray.get(call)
            except self._ray.exceptions.RayError as error:
                cause = getattr(error, "cause", None) or error
                failures[rank] = f"{type(cause).__name__}: {str(cause).strip()}"
        if failures:
            reasons = "; ".join(f"rank {rank}: {reason}" for rank, reason in failures.items())
            raise GroupError(f"the workers cannot {action}: {reasons}", failures)


class FleetPhase:
    """An open phase of every worker; `Fleet.phase` makes it."""

    def __init__(
        self,
        fleet: Fleet,
        name: str,
        only: tuple[str, ...] | None,
    ) -> None:
        self._fleet = fleet
        self.name = name
        self._only = only

    def __enter__(self) -> Self:
        fleet = self._fleet
        depth = len(fleet._open)
        action = f"enter phase {self.name!r}"
        try:
            fleet._call_all(action, "placement_enter", self.name, self._only)
        except BaseException:  # an interrupt of the wait, too: no worker may stay behind in a phase
            with contextlib.suppress(GroupError):
                fleet._call_all("leave", "placement_leave", depth)
            raise
        fleet._open.append(self)
        return self

    def switch(self, name: str, *, only: Iterable[str] | None = None) -> None:
        """End this phase and begin the next in one phase transition of every worker.

        Raises:
            PhaseError: this is not the innermost open phase.
            GroupError: a worker failed; every worker is still in the earlier phase.
        """
        self._require_innermost()
        action = f"switch to phase {name!r}"
        self._fleet._call_all(action, "placement_switch", checked(name), names_of(only))
        self.name = name

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self._require_innermost()
        open_phases = self._fleet._open
        with contextlib.suppress(ValueError):
            del open_phases[open_phases.index(self) :]
        action = f"leave phase {self.name!r}"
        try:
            self._fleet._call_all(action, "placement_leave", len(open_phases))
        except GroupError as failed:
            if error is None:
                raise
            error.add_note(f"placement: {failed}")

    def _require_innermost(self) -> None:
        if not self._fleet._open or self._fleet._open[-1] is not self:
            raise PhaseError(f"phase {self.name!r} is not the fleet's innermost open phase")
