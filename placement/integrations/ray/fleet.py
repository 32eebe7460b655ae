"""The driver's side of a fleet: a phase that all workers enter, or none."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from placement.core.errors import CoordinatorLost, GroupError, PhaseError, PlacementError
from placement.core.journal import logger
from placement.group.agreement import DEADLINE_SECONDS
from placement.group.messages import decode, shortened
from placement.group.ray import import_ray, start_board
from placement.integrations.ray.coordinator import address_of, board_name, start_coordinator
from placement.integrations.ray.member import FleetGroup
from placement.integrations.ray.messages import MAX_MESSAGE_BYTES, Fleetwide, Order, Reply, WorkerStatus
from placement.phases.phase import checked, names_of

_LOOK_SECONDS = 0.2
"""The longest delay until a dead worker's group learns of the death."""
_WARN_SECONDS = 30.0
_CHANGE_DEADLINES = 4
"""An order may take several waits of a group: for the other ranks, for the decision, for a board that is restarted."""


@dataclass(frozen=True)
class NoReply:
    """Takes the place of a worker's reply, with the reason why there is none."""

    reason: str
    is_restarting: bool = False


class Fleet:
    """The workers of a job, and the actors that serve them: a coordinator, and a board for the groups.

    Args:
        name: the job's name; the run's name in Prometheus.
        port: the port of the coordinator's pages; 0 takes a free one.
        address: the address of the pages; "node" is this node's address in the cluster, which other machines reach.
        deadline_seconds: how long to wait for a worker's answer, in addition to its moves.

    Raises:
        PlacementError: ray is not available, a fleet of this name exists already, or the port is taken.
    """

    def __init__(self, name: str, *, port: int = 0, address: str = "127.0.0.1", deadline_seconds: float = DEADLINE_SECONDS) -> None:
        self._ray = import_ray()
        self.name = name
        self.deadline_seconds = deadline_seconds
        self._coordinator, self.url = start_coordinator(name, port, address_of(address))
        try:
            self._board = start_board(board_name(name))
        except BaseException:
            self._ray.kill(self._coordinator, no_restart=True)
            raise
        self._workers: dict[int, Any] = {}
        self._together: dict[int, tuple[int, ...]] = {}
        self._last: dict[int, WorkerStatus] = {}
        self._generation = 0
        self._has_to_begin = True
        """Whether a worker runs in a new process, or missed a decision, so that all must begin a new membership."""
        self._open: tuple[tuple[str, tuple[str, ...] | None], ...] = ()

    def join(self, workers: Sequence[Any]) -> None:
        """Make these actors the fleet's workers, in place of earlier ones. Waits until their constructors are done.

        Raises:
            PhaseError: a phase is open.
            TypeError: an actor is not a `Worker`.
            GroupError: an actor's constructor failed (the error then has its index in place of its rank), or two have the same rank.
        """
        if self._open:
            raise PhaseError(f"phase {self._open[-1][0]!r} is open; leave it before workers join")
        for worker in workers:
            if not hasattr(worker, "placement_order"):
                raise TypeError(f"{worker!r} is not an actor of a class that has placement.ray.Worker among its bases")
        by_number = self._send(self._begin_order(), dict(enumerate(workers)))
        replies = [reply for reply in by_number.values() if isinstance(reply, Reply)]
        if twice := [rank for rank, count in Counter(reply.status.rank for reply in replies).items() if count > 1]:
            raise GroupError(f"two workers have rank {twice[0]}; give each its own", dict.fromkeys(twice, "is used twice"))
        self._raise_failures("be joined", by_number)
        by_rank = {reply.status.rank: worker for worker, reply in zip(workers, replies, strict=True)}
        self._workers = by_rank
        self._last = {reply.status.rank: reply.status for reply in replies}
        self._together = {reply.status.rank: reply.together for reply in replies}
        self._has_to_begin = False

    @property
    def phase_name(self) -> str:
        """The innermost phase that the fleet is in; "idle" outside every phase."""
        return self._open[-1][0] if self._open else "idle"

    def phase(self, name: str, *, only: Iterable[str] | None = None) -> FleetPhase:
        """A phase of every worker, for a `with` statement. See `Manager.phase`.

        Raises (on entering):
            GroupError: a worker failed; the error has the reasons by rank. Every worker is where it was before.
        """
        return FleetPhase(self, checked(name), names_of(only))

    def status(self) -> list[WorkerStatus]:
        """The last known status of every worker, by rank: the coordinator's or the driver's own, whichever is newer.

        Raises:
            CoordinatorLost: the coordinator does not answer.
        """
        try:
            message = self._ray.get(self._coordinator.status.remote(), timeout=self.deadline_seconds)
        except self._ray.exceptions.RayError as error:
            raise CoordinatorLost(f"the coordinator of fleet {self.name!r} does not answer: {type(error).__name__}") from error
        known = {each.rank: each for each in decode(Fleetwide, message, max_bytes=MAX_MESSAGE_BYTES).workers}
        now = time.time()
        for rank, last in self._last.items():
            if rank not in known or last.taken_timestamp_seconds > known[rank].taken_timestamp_seconds:
                known[rank] = last.model_copy(update={"age_seconds": max(now - last.taken_timestamp_seconds, 0.0)})
        return [known[rank] for rank in sorted(known)]

    def close(self) -> None:
        """End the coordinator and the board. The workers belong to the driver, and live on. Idempotent."""
        for actor in (self._coordinator, self._board):
            self._ray.kill(actor, no_restart=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # --- phase transitions of the fleet

    def enter(self, name: str, only: tuple[str, ...] | None) -> None:
        """Enter a phase on every worker, for `FleetPhase.__enter__`."""
        if not self._workers:
            raise PhaseError("the fleet has no workers: call fleet.join(workers)")
        is_retried = False
        while True:
            if self._has_to_begin and not self._open:
                self._begin()
            try:
                self._change("enter", name, only)
                break
            except GroupError:
                # A worker may have been restarted since the last phase. Then all begin a new membership and try once more.
                if is_retried or self._open or not self._has_to_begin:
                    raise
                is_retried = True
        self._open = (*self._open, (name, only))

    def switch(self, name: str, only: tuple[str, ...] | None) -> None:
        """Switch the innermost phase on every worker, for `FleetPhase.switch`."""
        self._change("switch", name, only)
        self._open = (*self._open[:-1], (name, only))

    def leave(self, error: BaseException | None) -> None:
        """Leave the innermost phase on every worker, for `FleetPhase.__exit__`."""
        name = self._open[-1][0]
        reason = "" if error is None else shortened(f"{type(error).__name__}: {error}")
        try:
            answers = self._send(self._order("leave" if error is None else "give_up", reason=reason))
        finally:
            self._open = self._open[:-1]
        try:
            self._raise_failures(f"leave phase {name!r}", answers)
        except GroupError as told:
            left_behind = self._send(self._order("give_up", (*self._phases(), name), reason=shortened(str(told))))
            self._note_lost(left_behind)
            if error is None:
                raise
            error.add_note(f"placement: {told}")

    def _change(self, change: str, name: str, only: tuple[str, ...] | None) -> None:
        answers = self._send(self._order(change, phase=name, only=only))
        try:
            self._raise_failures(f"{'enter' if change == 'enter' else 'switch to'} phase {name!r}", answers)
        except GroupError as told:
            self._take_back(change, name, [rank for rank, each in answers.items() if isinstance(each, Reply) and not each.error], told)
            raise

    def _take_back(self, change: str, name: str, changed: list[int], told: GroupError) -> None:
        """Bring back the workers that changed phase, because others could not."""
        if not changed:
            return
        before = self._phases()
        if change == "enter":
            order = self._order("give_up", (*before, name), reason=shortened(str(told)))
        else:
            was, only = self._open[-1]
            order = self._order("switch", (*before[:-1], name), phase=was, only=only)
        answers = self._send(order, {rank: self._workers[rank] for rank in changed})
        try:
            self._raise_failures(f"go back from {name!r}", answers)
        except GroupError as more:
            told.add_note(f"placement: {more}")

    # --- orders and answers

    def _begin(self) -> None:
        """Begin a new membership after a restart. Waits for workers that are being restarted.

        Raises:
            GroupError: a worker is missing.
        """
        self._wait_for_all()  # a restarted board answers nobody until every worker has reported to it
        answers = self._send(self._begin_order())
        self._raise_failures("begin a new membership", answers)
        self._last |= {rank: answer.status for rank, answer in answers.items() if isinstance(answer, Reply)}
        self._has_to_begin = False

    def _wait_for_all(self) -> None:
        """Wait until every worker's constructor is done, even after a restart. A worker that never comes back is left to the next order."""
        deadline = time.monotonic() + self.deadline_seconds
        missing = {rank: worker.__ray_ready__.remote() for rank, worker in self._workers.items()}
        while missing and time.monotonic() < deadline:
            ready, _ = self._ray.wait([*missing.values()], num_returns=len(missing), timeout=_LOOK_SECONDS)
            for rank in [rank for rank, ref in missing.items() if ref in ready]:
                try:
                    self._ray.get(missing[rank])
                except self._ray.exceptions.ActorUnavailableError:
                    missing[rank] = self._workers[rank].__ray_ready__.remote()
                    continue
                except self._ray.exceptions.RayError:
                    pass
                del missing[rank]
            if missing:
                time.sleep(_LOOK_SECONDS)

    def _begin_order(self) -> Order:
        # The time, so that a restarted driver does not use a number twice.
        self._generation = max(self._generation + 1, time.time_ns() // 1000)
        return Order(change="begin", generation=self._generation, reason="the fleet begins a new membership")

    def _phases(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self._open)

    def _order(self, change: Any, phases: tuple[str, ...] | None = None, **about: Any) -> Order:
        return Order(change=change, generation=self._generation, phases=self._phases() if phases is None else phases, **about)

    def _send(self, order: Order, workers: Mapping[int, Any] | None = None) -> dict[int, Reply | NoReply]:
        """Send an order to every worker at once. Returns by rank the reply, or the reason why there is none."""
        try:
            return self._ask(order, self._workers if workers is None else workers)
        except BaseException:
            self._interrupted(order)
            raise

    def _interrupted(self, order: Order) -> None:
        """Make every worker leave the phase that the driver regards as closed. It is unknown which workers heard the interrupted order."""
        self._has_to_begin = True
        if order.change not in ("begin", "switch"):  # in a switch the phase is still open, and its `with` statement leaves it
            phases = (*order.phases, order.phase) if order.change == "enter" else order.phases
            message = self._order("give_up", phases, reason="the driver was interrupted").encode()
            with contextlib.suppress(Exception):  # without Ray there are no workers any more
                for worker in self._workers.values():
                    worker.placement_order.remote(message)

    def _ask(self, order: Order, workers: Mapping[int, Any]) -> dict[int, Reply | NoReply]:
        message = order.encode()
        refs = {worker.placement_order.remote(message): rank for rank, worker in workers.items()}
        answers: dict[int, Reply | NoReply] = {}
        began = time.monotonic()
        patience = self.deadline_seconds * (1 if order.change == "begin" else _CHANGE_DEADLINES)
        pending, is_warned = list(refs), False
        while pending and time.monotonic() - began < patience:
            ready, pending = self._ray.wait(pending, num_returns=len(pending), timeout=_LOOK_SECONDS)
            if pending and not is_warned and time.monotonic() - began > _WARN_SECONDS:
                is_warned = True
                waited = ", ".join(str(refs[ref]) for ref in pending[:10])
                logger.warning("fleet %s waits for %d workers (%s): do they exist, and have they room?", self.name, len(pending), waited)
            for ref in ready:
                rank = refs[ref]
                answers[rank] = self._answer(ref)
                if order.change != "begin" and isinstance(answers[rank], NoReply):
                    self._end_change_for(rank)
        late = NoReply(f"does not answer within {patience:g} s")
        answers |= {refs[ref]: late for ref in pending}
        if order.change != "begin":
            self._note_lost(answers)
        return dict(sorted(answers.items()))

    def _answer(self, ref: Any) -> Reply | NoReply:
        errors = self._ray.exceptions
        try:
            return decode(Reply, self._ray.get(ref), max_bytes=MAX_MESSAGE_BYTES)
        except errors.ActorUnavailableError:
            return NoReply("its process died, and is being restarted", is_restarting=True)
        except errors.ActorDiedError as error:  # the last line has the constructor's exception
            return NoReply(shortened(f"its process died: {str(error).strip().splitlines()[-1].strip()}"))
        except (errors.RayError, ValueError) as error:
            return NoReply(shortened(f"{type(error).__name__}: {str(error).strip().splitlines()[-1].strip()}"))

    def _note_lost(self, answers: Mapping[int, Reply | NoReply]) -> None:
        for rank, answer in answers.items():
            # A worker whose phases differed from the fleet's may also differ from its group.
            if isinstance(answer, NoReply) or answer.error in (CoordinatorLost.__name__, PhaseError.__name__):
                self._has_to_begin = True
            if isinstance(answer, Reply):
                last = self._last.get(rank)
                self._has_to_begin |= last is not None and last.process != answer.status.process
                self._last[rank] = answer.status

    def _end_change_for(self, rank: int) -> None:
        """Tell the group of a dead worker now, so that it need not wait for the deadline. The driver speaks for the worker's successor."""
        together = self._together.get(rank, ())
        if len(together) < 2:
            return
        group = FleetGroup(self._board, together, rank, self.deadline_seconds)
        try:
            group.begin(self._generation)
            group.abort(PlacementError("its process died"), waits=False)
        except (GroupError, CoordinatorLost):
            pass  # the group has been told, or notices at its deadline

    def _raise_failures(self, what: str, answers: Mapping[int, Reply | NoReply]) -> None:
        failures: dict[int, str] = {}
        for rank, answer in answers.items():
            if isinstance(answer, Reply) and answer.error:
                for whose, reason in (answer.failures or {rank: answer.reason}).items():
                    failures.setdefault(whose, reason)
        failures |= {rank: answer.reason for rank, answer in answers.items() if isinstance(answer, NoReply)}
        if failures:
            reasons = "; ".join(f"rank {rank}: {reason}" for rank, reason in sorted(failures.items()))
            raise GroupError(f"fleet {self.name!r} could not {what}: {reasons}", failures)


class FleetPhase:
    """A phase of a fleet. Made by `Fleet.phase`."""

    def __init__(self, fleet: Fleet, name: str, only: tuple[str, ...] | None) -> None:
        self._fleet = fleet
        self._wanted = name, only
        self._depth = 0

    @property
    def name(self) -> str:
        """The name of the phase that is open now, after every switch."""
        return self._wanted[0]

    def __enter__(self) -> Self:
        if self._depth:
            raise PhaseError(f"phase {self.name!r} was entered before; make a new one with fleet.phase()")
        self._fleet.enter(*self._wanted)
        self._depth = len(self._fleet._open)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._require_innermost("leave")
        self._fleet.leave(error)

    def switch(self, name: str, *, only: Iterable[str] | None = None) -> None:
        """End this phase and begin `name` on every worker; see `Phase.switch`.

        Raises:
            GroupError: a worker failed; the error has the reasons by rank. Workers go back to their phase where they can.
        """
        self._require_innermost(f"switch to {name!r}")
        wanted = checked(name), names_of(only)
        self._fleet.switch(*wanted)
        self._wanted = wanted

    def _require_innermost(self, what: str) -> None:
        if not self._depth or self._depth != len(self._fleet._open):
            raise PhaseError(f"cannot {what}: phase {self.name!r} is not the fleet's innermost open phase; leave the inner ones first")
