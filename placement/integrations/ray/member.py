"""The worker's side of a fleet: it follows the driver's orders, even when it missed some of them."""

from __future__ import annotations

import hashlib
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from placement.core.errors import GroupError, PhaseError, PlacementError
from placement.group.messages import shortened
from placement.group.ray import RayGroup
from placement.integrations.ray.messages import Order, Reply, WorkerStatus
from placement.observe.discovery import Target

if TYPE_CHECKING:
    from placement.manager import Manager


class FleetGroup(RayGroup):
    """The ranks that a worker changes phase with. It begins when the driver says so, and again after a restart of any rank.

    Args:
        board: the actor over which the ranks agree.
        together: the ranks of the group, numbered in the fleet; the same on all of them.
        rank: this worker's rank in the fleet.
        deadline_seconds: see `Group`.

    Raises:
        ValueError: `rank` is not among `together`, or `together` has a rank twice.
    """

    def __init__(self, board: Any, together: Sequence[int], rank: int, deadline_seconds: float) -> None:
        self.together = tuple(together)
        if self.together.count(rank) != 1 or len(set(self.together)) != len(self.together):
            raise ValueError(f"together={self.together} must contain rank {rank}, and no rank twice")
        self._actor = board
        self.rank, self.world_size, self.deadline_seconds = self.together.index(rank), len(self.together), deadline_seconds
        self.is_in_doubt = False
        self._has_begun = False
        self._memberships = 0
        """How often this worker has begun."""
        digest = hashlib.sha256(repr(self.together).encode()).hexdigest()
        self._of = f"ranks {digest[:16]}"

    def begin(self, generation: int) -> None:
        """Join the other ranks in a membership. Call it only outside every phase.

        Raises:
            GroupError: another process has begun it as this rank; the group has been told.
            CoordinatorLost: the board does not answer.
        """
        self._has_begun = False
        self._memberships += 1
        super().__init__(self._actor, self.rank, self.world_size, self.deadline_seconds, generation=generation, name=self._of)
        self.plans_may_differ = self._memberships > 1  # as after `Manager.rejoin`: one of the others may have been restarted
        self._has_begun = True

    def propose(self, action: str, budget_bytes: int, *, catches_up: bool = False) -> int:
        if not self._has_begun:
            raise GroupError("the driver has not begun this fleet: call fleet.join(workers) there first", {self.rank: "has not begun"})
        return super().propose(action, budget_bytes, catches_up=catches_up)

    def abort(
        self, error: BaseException, *, blames: Mapping[int, str] | None = None, catches_up: bool = False, waits: bool = True
    ) -> GroupError | None:
        return super().abort(error, blames=blames, catches_up=catches_up, waits=waits) if self._has_begun else None


class Member:
    """One worker of a fleet.

    Args:
        manager: the worker's manager, made with `group`.
        target: the address and labels under which the worker is scraped.
    """

    def __init__(self, manager: Manager, rank: int, target: Target, group: FleetGroup | None = None) -> None:
        self.manager, self.rank, self.target, self.group = manager, rank, target, group
        self._process = secrets.token_hex(8)
        self._generation = 0
        self._phases: tuple[str, ...] = ()
        """The phases that the fleet opened on this worker, outermost first."""
        self._below: tuple[int, ...] = ()
        """For each of these phases: how many phases of the manager were open below it."""
        self._lock = threading.Lock()

    def carry_out(self, order: Order) -> Reply:
        """Carry out an order. A failure is described in the reply, because exceptions of placement are not sent to other processes."""
        with self._lock:
            try:
                self._follow(order)
            except GroupError as error:
                together = () if self.group is None else self.group.together
                return self._failed(error, {together[rank]: why for rank, why in error.failures.items() if rank < len(together)})
            except Exception as error:
                return self._failed(error, {self.rank: shortened(f"{type(error).__name__}: {error}")})
            return Reply(status=self.status(), together=() if self.group is None or order.change != "begin" else self.group.together)

    def status(self) -> WorkerStatus:
        snapshot = self.manager.snapshot()
        return WorkerStatus(
            instance=self.target.name,
            rank=self.rank,
            address=self.target.address,
            labels=dict(self.target.labels),
            process=self._process,
            generation=self._generation,
            phases=snapshot.phases,
            resident_bytes=sum(handle.resident_bytes for handle in snapshot.handles),
            host_bytes=sum(handle.host_bytes for handle in snapshot.handles),
            budget_bytes=snapshot.budget_bytes,
            device_total_bytes=snapshot.device_total_bytes,
            unpaired_bytes=snapshot.unpaired_bytes,
            broken=tuple(handle.name for handle in snapshot.handles if handle.broken is not None),
            taken_timestamp_seconds=time.time(),
        )

    def _failed(self, error: Exception, failures: dict[int, str]) -> Reply:
        return Reply(status=self.status(), error=type(error).__name__, reason=shortened(str(error)), failures=failures)

    def _follow(self, order: Order) -> None:
        if order.change == "begin":
            self._give_up((), order.reason)
            self._begin(order.generation)
        elif order.change == "give_up":
            self._give_up(order.phases[:-1], order.reason)
        else:
            if order.generation != self._generation:
                self._begin(order.generation)
            self._stand_with(order)
            self._change(order)

    def _begin(self, generation: int) -> None:
        if self.group is not None:
            self.group.begin(generation)
        self._generation = generation

    def _stand_with(self, order: Order) -> None:
        """Bring this worker to the phases in which the driver believes it to be.

        Raises:
            PhaseError: the worker was in other phases. Its group has been told.
        """
        self._see_own_phases(order)
        if self._phases == order.phases:
            return
        was = " > ".join(self._phases) or "no phase"
        error = PhaseError(f"this worker was in {was} when the fleet was in {' > '.join(order.phases) or 'no phase'}")
        common = 0
        while common < min(len(self._phases), len(order.phases)) and self._phases[common] == order.phases[common]:
            common += 1
        had_more = common < len(self._phases)
        self._give_up(order.phases[:common], str(error))
        if had_more and common == len(order.phases) and self.group is None:
            return  # it only missed an exit, and no other rank waits for it
        if self.group is not None and not had_more:
            self.group.abort(error, catches_up=True, waits=False)
        raise error

    def _see_own_phases(self, order: Order) -> None:
        """Check that the worker's own code has left every phase that it entered, and none of the fleet's.

        Raises:
            PhaseError: it has not. The worker is then in the fleet's phases or further out, and its group has been told.
        """
        entered = len(self.manager._entered)
        if not self._phases or entered == self._below[-1] + 1:
            return
        if entered <= self._below[-1]:
            error = PhaseError(f"a method of this worker left phase {self._phases[-1]!r}, which only the fleet may leave")
            depth = sum(below < entered for below in self._below)
            self._phases, self._below = self._phases[:depth], self._below[:depth]
            if self.group is not None:
                self.group.abort(error, waits=False)
            raise error
        error = PhaseError(f"a method of this worker entered phase {self.manager.phase_name!r} and did not leave it; use a with statement")
        while len(self.manager._entered) > self._below[-1] + 1:
            self.manager.leave(error)
        if order.change == "leave":  # the other ranks leave too when they hear of it
            self._leave(error)
        raise error

    def _change(self, order: Order) -> None:
        if order.change == "enter":
            below = len(self.manager._entered)
            self.manager.enter(order.phase, only=order.only)
            self._phases, self._below = (*self._phases, order.phase), (*self._below, below)
        elif order.change == "switch":
            if not self._phases:
                raise PhaseError(f"cannot switch to {order.phase!r}: the fleet has opened no phase")
            self.manager.switch(order.phase, only=order.only)
            self._phases = (*self._phases[:-1], order.phase)
        else:
            self._leave(None)

    def _give_up(self, down_to: tuple[str, ...], reason: str) -> None:
        """Leave the phases beyond `down_to` as an exception would, without waiting for other workers."""
        while len(self._phases) > len(down_to):
            self._leave(PlacementError(reason or "the fleet gave this phase up"))

    def _leave(self, error: BaseException | None) -> None:
        below = self._below[-1]
        try:
            while len(self.manager._entered) > below:
                self.manager.leave(error)
        finally:
            if len(self.manager._entered) <= below:
                self._phases, self._below = self._phases[:-1], self._below[:-1]
