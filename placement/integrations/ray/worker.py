"""The worker's part: a mixin for the actor classes of a training framework."""

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
    """Mixin for an actor class: `join_fleet` in `__init__`, and the driver's phases reach its manager.

    Orders are carried out by the actor like any other call, so in the order in which the driver sends them. An actor with `async`
    methods is busy while its phase changes.
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
        """Make this worker's manager, serve its metrics, and report to the fleet's coordinator from now on.

        Args:
            fleet: the name of the driver's `Fleet`.
            rank: of this worker among all workers of the fleet.
            together: the ranks that change phase together, all or none, this one among them: those of one model. None: this worker
                changes alone, and the driver takes the others back when it cannot.
            deadline_seconds: see `Group`.
            address: for the metrics; "node" is this node's address in the cluster, which other machines reach.
            manager: keywords of `Manager`.

        Raises:
            PlacementError: there is no Ray, or no such fleet.
            ValueError: a keyword does not fit, or this worker has joined before.
        """
        if self._member is not None:
            raise ValueError("this worker has joined its fleet already")
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
        """An `Order` of the driver, answered with a `Reply`. `Fleet` calls this.

        Raises:
            ValueError: it is no order.
            PlacementError: this worker has not joined.
        """
        if self._member is None:
            raise PlacementError("this worker has not joined its fleet: its __init__ calls self.join_fleet(...)")
        return self._member.carry_out(decode(Order, message, max_bytes=MAX_MESSAGE_BYTES)).encode()

    def leave_fleet(self) -> None:
        """Report no more, and be listed no more. The manager stays as it is."""
        if self._reporter is not None:
            self._reporter.end()
            self._reporter = None


class Reporter(threading.Thread):
    """Tells the coordinator how its worker is, at once and then as often as it wants to know."""

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
        """Returns the seconds until the next one."""
        ray = import_ray()
        try:
            answer = ray.get(self._coordinator.report.remote(self._member.status().encode()), timeout=_ANSWER_SECONDS)
        except ray.exceptions.ActorDiedError:
            logger.info("the fleet is closed")
            self._ended.set()
        except ray.exceptions.RayError:  # it is being restarted
            pass
        except Exception:  # of asking the manager; whatever it is, the thread that dies of it would report nothing any more
            logger.exception("rank %d cannot say how it is", self._member.rank)
        else:
            return decode(NextReport, answer).seconds
        return _RETRY_SECONDS


def in_phase(
    name: str, *, only: Iterable[str] | None = None
) -> Callable[[Callable[Concatenate[_W, _P], _R]], Callable[Concatenate[_W, _P], _R]]:
    """For a method of a `Worker`: it runs in this phase, of its own unless the fleet is in it already."""
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
