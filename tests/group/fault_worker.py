"""One rank of the sweeps of faults: a manager in a group, two phases, and what it saw."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from placement import Manager, State
from placement.core.errors import CoordinatorLost, PlacementError
from placement.group import Board, BoardLost, Group, failpoints
from placement.testing import assert_nothing_resident
from tests.support.boards import ForwardingBoard
from tests.support.trainer import Trainer

START_SECONDS = 60.0
"""To meet for the first time, on a machine that is busy with other tests."""
ROLES = ("actor", "adam", "ref")


class Case(NamedTuple):
    """A fault, on one rank, at a step of the second of its phase transitions, the switch."""

    fault: str
    rank: int
    step: str
    """A failpoint, or the name of a message."""
    its_move_fails: bool = False
    """The device refuses memory to that rank in that phase transition: then it is the one that claims ABORT."""

    def __str__(self) -> str:
        return f"{self.fault} rank {self.rank} at {self.step}" + (", out of memory" if self.its_move_fails else "")


class Unreliable(ForwardingBoard):
    """A board that carries one message wrongly: twice, not at all, without an answer, or late.

    Attributes:
        has_happened: the fault.
    """

    def __init__(self, board: Board, case: Case) -> None:
        super().__init__(board)
        self._case = case
        self.is_armed = self.has_happened = False
        self._late: list[Callable[[], object]] = []
        self._calls_to_go = 0

    def put(self, key: str, value: bytes) -> None:
        self._carry(key, lambda: self._board.put(key, value), is_heard=False)

    def claim(self, key: str, value: bytes) -> bytes:
        stands: bytes = self._carry(key, lambda: self._board.claim(key, value), is_heard=True)
        return stands

    def look(self, keys: Sequence[str]) -> list[bytes] | None:
        self._deliver()
        return super().look(keys)

    def wait(self, key: str, seconds: float) -> bytes | None:
        self._deliver()
        return super().wait(key, seconds)

    def _carry(self, key: str, send: Callable[[], Any], *, is_heard: bool) -> Any:
        """`is_heard`: the caller learns that there was no answer."""
        self._deliver()
        names = key.split("/")
        if not self.is_armed or self.has_happened or self._case.step not in names:
            return send()
        self.has_happened = True
        fault = self._case.fault
        if fault == "twice":
            send()
            return send()
        if fault == "unanswered":
            send()
        if fault == "late":
            self._late.append(send)
            self._calls_to_go = 12
        if fault == "unanswered" or is_heard:
            raise BoardLost(f"{key}: no answer")
        return None

    def _deliver(self, at_once: bool = False) -> None:
        self._calls_to_go -= 1
        if self._late and (at_once or self._calls_to_go <= 0):
            self._late.pop()()

    def finish(self) -> None:
        with suppress(BoardLost):
            self._deliver(at_once=True)


class Rank(Trainer):
    """Trains, switches, leaves; with the values that every handle must have kept beside."""

    def __init__(self, group: Group, case: Case, deadline_seconds: float) -> None:
        torch.manual_seed(group.rank)
        self.group, self.case, self.deadline_seconds = group, case, deadline_seconds
        group.deadline_seconds = START_SECONDS
        self.board = group._board = Unreliable(group._board, case)
        super().__init__(lambda device: Manager(device=device, group=group))
        self.events: list[tuple[int, str]] = []
        self.problems: list[str] = []
        self.expected = self.values()

    def values(self) -> dict[str, bytes]:
        """Of every tensor, by name, in whatever state its handle is."""
        found = {}
        for name in ROLES:
            state = self.manager.handles[name].state_dict()
            if name == "adam":
                state = {f"{key}.{what}": value for key, each in state["state"].items() for what, value in each.items()}
            found |= {f"{name}.{key}": value.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for key, value in state.items()}
        return found

    def train(self) -> None:
        if self.manager.handles["actor"].state is State.TRAINING:
            self.learn()
            self.expected = self.values()

    def transition(self, move: Callable[[], Any], send: Callable[[Any], None]) -> Exception | None:
        """Make one phase transition, and say what became of every epoch on the way. Returns what it raised."""
        before, states = self.group.epoch, self.states()
        error: Exception | None = None
        try:
            move()
        except (PlacementError, RuntimeError) as raised:
            error = raised
            if not isinstance(raised, CoordinatorLost) and self.manager.snapshot().phases and (now := self.states()) != states:
                self.problems.append(f"{type(raised).__name__} in epoch {before}, but {states} is {now}")
        after = max(self.group.epoch, before + 1)
        self.events += [(epoch, "commit") for epoch in range(before, after - 1)]
        # Any other error than these is its own: it went back, and where the others could not be told, they find out at their deadline.
        verdict = "commit" if error is None else "doubt" if isinstance(error, CoordinatorLost) else "abort"
        self.events.append((after - 1, verdict))
        send(("transition", self.events, str(error)))
        return error

    def step(self, send: Callable[[Any], None], before_switch: Callable[[], None]) -> None:
        """Train and switch; an exception ends the phase on its way out, as in the user's `with`."""
        phase = self.manager.phase("train")
        if self.transition(phase.__enter__, send) is not None:
            return
        self.train()
        before_switch()
        error = self.transition(lambda: phase.switch("log_prob"), send)
        if error is None:
            self.transition(lambda: phase.__exit__(None, None, None), send)
        else:
            phase.__exit__(type(error), error, None)

    def run(self, send: Callable[[Any], None], meet: Callable[[], None]) -> None:
        def before_switch() -> None:
            self.group.deadline_seconds = self.deadline_seconds
            if self.group.rank == self.case.rank:
                self.arm()
            meet()

        self.step(send, before_switch)
        if len(self.events) < 2:
            self.problems.append("the ranks did not meet before the fault")
        elif self.case.fault != "kill" and not self.group.is_in_doubt:
            self.step(send, lambda: None)
        self.board.finish()
        self.look_after()

    def arm(self) -> None:
        self.board.is_armed = True
        if self.case.its_move_fails:
            self.faults.fail("create")
        if self.case.step in failpoints.NAMES:
            failpoints.arm(f"{self.case.step}=1:{self.case.fault if self.case.fault in ('kill', 'raise') else 'stop'}")

    def look_after(self) -> None:
        if (values := self.values()) != self.expected:
            self.problems.append(f"other values: {[name for name in self.expected if values.get(name) != self.expected[name]]}")
        try:
            self.manager.check_integrity()
            if not self.group.is_in_doubt:  # one that is keeps what it prepared
                assert_nothing_resident(self.manager)
        except Exception as error:
            self.problems.append(f"{type(error).__name__}: {error}")


def run_rank(connection: Connection, case: Case, deadline_seconds: float, join: Callable[..., Group], place: Sequence[Any]) -> bool:
    """`join(*place)` makes the group, whose deadline becomes `deadline_seconds` once the ranks have met. Whether all is as before."""
    try:
        member = Rank(join(*place), case, deadline_seconds)
    except Exception as error:
        connection.send(("end", [], [f"did not join: {type(error).__name__}: {error}"], False))
        return False
    try:
        member.run(connection.send, connection.recv)
        if is_well := not (member.problems or member.group.is_in_doubt):
            member.manager.close()
    except Exception as error:
        member.problems.append(f"{type(error).__name__}: {error}")
        is_well = False
    failpoints.arm("")
    connection.send(("end", member.events, member.problems, member.board.has_happened))
    return is_well


def run_ranks(connection: Connection) -> None:
    """A rank of each case that comes, until one leaves something behind: nobody may be in doubt because of an earlier case."""
    with suppress(EOFError):  # the test needs no more of it
        while run_rank(connection, *connection.recv()):
            connection.send(("next",))
