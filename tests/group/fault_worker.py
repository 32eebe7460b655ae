"""The processes of the sweeps of faults: ranks with a manager each, two phases and what they saw, and the store that they meet over."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from placement import Manager, State
from placement.core.errors import CoordinatorLost, PlacementError
from placement.group import Board, BoardLost, Group, StoreGroup
from placement.testing import assert_nothing_resident
from tests.support.boards import STEPS, FailingBoard
from tests.support.forked import processes
from tests.support.trainer import Trainer

START_SECONDS = 60.0
"""To meet for the first time, on a machine that is busy with other tests."""
ROLES = ("actor", "adam", "ref")


class Case(NamedTuple):
    """A fault, on one rank, at a step of the second of its phase transitions, the switch."""

    fault: str
    rank: int
    step: str
    """A step of `STEPS`, or the name of a message."""
    its_move_fails: bool = False
    """The device refuses memory to that rank in that phase transition: then it is the one that claims ABORT."""

    def __str__(self) -> str:
        return f"{self.fault} rank {self.rank} at {self.step}" + (", out of memory" if self.its_move_fails else "")


class Unreliable(FailingBoard):
    """A board that also carries one message wrongly: twice, or without an answer."""

    def __init__(self, board: Board, case: Case) -> None:
        super().__init__(board)
        self._case = case
        self.is_armed = False

    def put(self, key: str, value: bytes) -> None:
        self._carry(key, lambda: super(Unreliable, self).put(key, value))

    def claim(self, key: str, value: bytes) -> bytes:
        stands: bytes = self._carry(key, lambda: super(Unreliable, self).claim(key, value))
        return stands

    def _carry(self, key: str, send: Callable[[], Any]) -> Any:
        answer = send()
        if self.is_armed and not self.has_happened and self._case.step in key.split("/"):
            self.has_happened = True
            if self._case.fault == "unanswered":
                raise BoardLost(f"{key}: no answer")
            answer = send()
        return answer


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
        self.look_after()

    def arm(self) -> None:
        self.board.is_armed = True
        if self.case.its_move_fails:
            self.faults.fail("create")
        if self.case.step in STEPS:
            self.board.arm(self.case.step, self.case.fault if self.case.fault in ("kill", "raise") else "stop")

    def look_after(self) -> None:
        if (values := self.values()) != self.expected:
            self.problems.append(f"other values: {[name for name in self.expected if values.get(name) != self.expected[name]]}")
        try:
            self.manager.check_integrity()
            if not self.group.is_in_doubt:  # one that is keeps what it prepared
                assert_nothing_resident(self.manager)
        except Exception as error:
            self.problems.append(f"{type(error).__name__}: {error}")


def run_ranks(connection: Connection) -> None:
    """A rank of each case that comes, until one leaves something behind: nobody may be in doubt because of an earlier case."""
    with suppress(EOFError):  # the test needs no more of it
        while run_rank(connection, *connection.recv()):
            connection.send(("next",))


def run_rank(connection: Connection, case: Case, deadline_seconds: float, *place: Any) -> bool:
    """`join_store(*place)` makes the group, whose deadline becomes `deadline_seconds` once the ranks have met. Whether all is as before."""
    try:
        member = Rank(join_store(*place), case, deadline_seconds)
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
    connection.send(("end", member.events, member.problems, member.board.has_happened))
    return is_well


class RankProcess:
    """A process that is a rank of one case after the other, as long as it comes out of each alive and well; and the way to it."""

    def __init__(self) -> None:
        self.connection: Connection
        self.connection, theirs = processes.Pipe()
        self.process: Any = processes.Process(target=run_ranks, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


# --- the store


def join_store(port: int, rank: int, world_size: int, deadline_seconds: float, generation: int) -> Group:
    store = dist.TCPStore("127.0.0.1", port, None, False, timeout=timedelta(seconds=30))
    return StoreGroup(store, rank, world_size, deadline_seconds, generation=generation)


class StoreService:
    """A TCPStore in a process of its own."""

    def __init__(self) -> None:
        self._connection, theirs = processes.Pipe()
        self._process = processes.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self.port: int = self._connection.recv()

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


def _serve(connection: Connection) -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    connection.send(store.port)
    with suppress(EOFError):
        connection.recv()


def is_stopped(pid: int) -> bool:
    """Whether each of its threads is: one that still runs may answer."""
    stats = [task.joinpath("stat").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)


def wait_until_stopped(pid: int, seconds: float = 30.0) -> bool:
    """Whether the process was stopped; False when it ended first."""
    deadline = time.monotonic() + seconds
    with suppress(FileNotFoundError, ProcessLookupError):
        while not is_stopped(pid):
            assert time.monotonic() < deadline, f"process {pid} neither stopped nor ended"
            time.sleep(0.01)  # the system tells a process's state only when asked
        return True
    return False
