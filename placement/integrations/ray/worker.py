"""The worker's side of a fleet: a mixin for the actor classes of a training framework."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from placement.core.errors import PlacementError
from placement.core.journal import logger
from placement.group.agreement import DEADLINE_SECONDS
from placement.group.messages import decode
from placement.group.ray import import_ray
from placement.integrations.ray.coordinator import actor_name, address_of, board_name, find
from placement.integrations.ray.member import FleetGroup, Member
from placement.integrations.ray.messages import MAX_MESSAGE_BYTES, NextReport, Order
from placement.manager import Manager
from placement.observe.discovery import Identity

_RETRY_SECONDS = 1.0
_ANSWER_SECONDS = 30.0

_W = TypeVar("_W", bound="Worker")
_P = ParamSpec("_P")
_R = TypeVar("_R")


class Worker:
    """Mixin for an actor class. Call `join_fleet` in `__init__`, and the driver's phases reach the worker's manager.

    The actor carries out orders like any other call, in the order in which the driver sends them. An actor with `async` methods is
    blocked during a phase transition.
    """

    manager: Manager
    _member: Member | None = None
    _reporter: Reporter | None = None

    def join_fleet(
        self,
        fleet: str,
        *,
        rank: int,
        together: Sequence[int] | None = None,
        deadline_seconds: float = DEADLINE_SECONDS,
        address: str = "127.0.0.1",
        **manager: Any,
    ) -> Manager:
        """Make this worker's manager, serve its metrics, and start reporting to the fleet's coordinator.

        Args:
            fleet: the name of the driver's `Fleet`.
            rank: the worker's rank among all workers of the fleet.
            together: the ranks that change phase together, all or none, including this one: usually the ranks of one model. None: this
                worker changes alone, and the driver takes the others back when it fails.
            deadline_seconds: see `Group`.
            address: the address of the metrics; "node" is this node's address in the cluster, which other machines reach.
            manager: keyword arguments of `Manager`.

        Raises:
            PlacementError: ray is not available, or there is no such fleet.
            ValueError: a keyword does not fit, or this worker has joined before.
        """
        if self._member is not None:
            raise ValueError("this worker has joined its fleet already; call join_fleet once")
        import_ray()
        coordinator = find(actor_name(fleet), fleet)
        group = None if together is None else FleetGroup(find(board_name(fleet), fleet), together, rank, deadline_seconds)
        self.manager = Manager(group=group, **manager)
        node = address_of("node")
        identity = Identity(run=fleet, node=node, rank=rank, gpu_uuid=self.manager.device.uuid)
        server = self.manager.serve(address=address_of(address), identity=identity)
        assert server.target is not None
        self._member = Member(self.manager, rank, server.target, group)
        self._reporter = Reporter(self._member, coordinator)
        self._reporter.start()
        return self.manager

    def placement_order(self, message: bytes) -> bytes:
        """Carry out an encoded `Order`, and return an encoded `Reply`. Only `Fleet` calls this.

        Raises:
            ValueError: the message is not a valid order.
            PlacementError: this worker has not joined.
        """
        if self._member is None:
            raise PlacementError("this worker has not joined its fleet: call self.join_fleet(...) in its __init__")
        return self._member.carry_out(decode(Order, message, max_bytes=MAX_MESSAGE_BYTES)).encode()

    def leave_fleet(self) -> None:
        """Stop reporting, and remove the worker from the coordinator's list. The manager stays as it is."""
        if self._reporter is not None:
            self._reporter.end()
            self._reporter = None


class Reporter(threading.Thread):
    """Reports the worker's status to the coordinator, at once and then as often as the coordinator asks."""

    def __init__(self, member: Member, coordinator: Any) -> None:
        super().__init__(name="placement-report", daemon=True)
        self._member, self._coordinator = member, coordinator
        self._ended = threading.Event()

    def run(self) -> None:
        seconds = 0.0
        while not self._ended.wait(seconds):
            seconds = self._report()

    def end(self) -> None:
        self._ended.set()
        if threading.current_thread() is not self:
            self.join(_ANSWER_SECONDS)
        ray = import_ray()
        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(self._coordinator.forget.remote(self._member.rank), timeout=_ANSWER_SECONDS)

    def _report(self) -> float:
        """Report once. Returns the seconds until the next report."""
        ray = import_ray()
        try:
            answer = ray.get(self._coordinator.report.remote(self._member.status().encode()), timeout=_ANSWER_SECONDS)
        except ray.exceptions.ActorDiedError:
            logger.info("the coordinator is gone, because the fleet is closed; no more reports")
            self._ended.set()
        except ray.exceptions.RayError:  # the coordinator is being restarted
            pass
        except Exception:  # the manager's status failed; the thread must survive, or it would never report again
            logger.exception("rank %d cannot report its status", self._member.rank)
        else:
            return decode(NextReport, answer).seconds
        return _RETRY_SECONDS


def in_phase(
    name: str, *, only: Iterable[str] | None = None
) -> Callable[[Callable[Concatenate[_W, _P], _R]], Callable[Concatenate[_W, _P], _R]]:
    """Decorate a method of a `Worker` to run in this phase: in the fleet's phase if that has the name, else in a phase of its own."""
    wanted = None if only is None else tuple(only)

    def decorate(method: Callable[Concatenate[_W, _P], _R]) -> Callable[Concatenate[_W, _P], _R]:
        @functools.wraps(method)
        def run(self: _W, /, *arguments: _P.args, **keywords: _P.kwargs) -> _R:
            if self.manager.phase_name == name:
                return method(self, *arguments, **keywords)
            with self.manager.phase(name, only=wanted):
                return method(self, *arguments, **keywords)

        return run

    return decorate
