"""The processes of the sweeps of faults: ranks with a manager each, two phases and what they saw,
and the store that they meet over."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from placement import Manager, State
from placement.core.errors import CoordinatorLost, PlacementError
from placement.group import Group, StoreGroup
from placement.testing import assert_nothing_resident
from tests.sharded.training import bytes_of
from tests.support.boards import FailingBoard
from tests.support.trainer import Trainer

START_SECONDS = 60.0
"""To meet for the first time, on a machine that is busy with other tests."""
ROLES = ("actor", "adam", "ref")


class Case(NamedTuple):
    """A fault, on one rank, at a step of the second of its phase transitions, the switch."""

    fault: str
    rank: int
    step: str
    """One of `STEPS`."""
    its_move_fails: bool = False
    """The device refuses memory to that rank in that phase transition: then it is the one that
    claims ABORT."""

    def __str__(self) -> str:
        return (f"{self.fault} rank {self.rank} at {self.step}") + (
            ", out of memory" if self.its_move_fails else ""
        )


class Rank(Trainer):
    """Trains, switches, leaves; with the values that every handle must have kept beside."""

    def __init__(self, group: Group, case: Case, deadline_seconds: float) -> None:
        torch.manual_seed(group.rank)
        self.group, self.case, self.deadline_seconds = group, case, deadline_seconds
        group.deadline_seconds = START_SECONDS
        self.board = group._board = FailingBoard(group._board)
        super().__init__(lambda device: Manager(device=device, group=group))
        self.events: list[tuple[int, str]] = []
        self.problems: list[str] = []
        self.expected = self.values()

    def values(self) -> dict[str, Any]:
        """Of every tensor, by name, in whatever state its handle is."""
        states = {name: self.manager.handles[name].state_dict() for name in ROLES}
        return bytes_of(states | {"adam": states["adam"]["state"]})

    def train(self) -> None:
        if self.manager.handles["actor"].state is State.TRAINING:
            self.learn()
            self.expected = self.values()

    def transition(self, move: Callable[[], Any]) -> Exception | None:
        """Make one phase transition, and note what became of every epoch on the way. Returns what
        it raised."""
        before, states = self.group.epoch, self.states()
        is_inside = bool(self.manager.snapshot().phases)
        error: Exception | None = None
        try:
            move()
        except (PlacementError, RuntimeError) as raised:
            error = raised
            if (
                not isinstance(raised, CoordinatorLost)
                and self.manager.snapshot().phases
                and (now := self.states()) != states
            ):
                self.problems.append(
                    f"{type(raised).__name__} in epoch {before}, but {states} is {now}"
                )
        after = max(self.group.epoch, before + 1)
        # In a phase its fault came after its vote, and the others have committed; outside it has
        # passed over what they gave up.
        self.events += [
            (epoch, "commit" if is_inside else "abort") for epoch in range(before, after - 1)
        ]
        # Any other error than these is its own: it went back, and where the others could not be
        # told, they find out at their deadline.
        verdict = (
            "commit"
            if error is None
            else "doubt"
            if isinstance(error, CoordinatorLost)
            else "abort"
        )
        self.events.append((after - 1, verdict))
        return error

    def step(self, before_switch: Callable[[], None] = lambda: None) -> None:
        """Train and switch; an exception ends the phase on its way out, as in the user's `with`."""
        phase = self.manager.phase("train")
        if self.transition(phase.__enter__) is not None:
            return
        self.train()
        before_switch()
        error = self.transition(lambda: phase.switch("log_prob"))
        if error is None:
            self.transition(lambda: phase.__exit__(None, None, None))
        else:
            phase.__exit__(type(error), error, None)

    def run(self) -> None:
        def before_switch() -> None:
            """Go into the phase transition of the fault together; the rank of the fault once all
            others know that they have met."""
            group = self.group
            group.exchange_texts("met", "")
            if group.rank == self.case.rank:
                group.exchange_texts("ready", "")
                self.arm()
            else:
                group._put("ready", b"-")
            group.deadline_seconds = self.deadline_seconds

        self.step(before_switch)
        if len(self.events) < 2:
            self.problems.append("the ranks did not meet before the fault")
        elif self.case.fault != "kill" and not self.group.is_in_doubt:
            self.step()
        self.look_after()

    def arm(self) -> None:
        if self.case.its_move_fails:
            self.faults.fail("create")
        self.board.arm(
            self.case.step, self.case.fault if self.case.fault in ("kill", "raise") else "stop"
        )

    def look_after(self) -> None:
        if (values := self.values()) != self.expected:
            self.problems.append(
                "other values: "
                f"{[name for name in self.expected if values.get(name) != self.expected[name]]}"
            )
        try:
            self.manager.check_integrity()
            if not self.group.is_in_doubt:  # one that is keeps what it prepared
                assert_nothing_resident(self.manager)
        except Exception as error:
            self.problems.append(f"{type(error).__name__}: {error}")


class Member:
    """A process that is a rank of one case after the other."""

    def run(
        self, case: Case, deadline_seconds: float, *place: Any
    ) -> tuple[list[tuple[int, str]], list[str], bool, bool]:
        """What became of each epoch; what went wrong; whether the fault has happened; whether the
        process may be in the next case.

        `join_store(*place)` makes the group, whose deadline becomes `deadline_seconds` once the
        ranks have met.
        """
        try:
            group = join_store(*place)
        except Exception as error:
            return [], [f"did not join: {type(error).__name__}: {error}"], False, False
        rank = Rank(group, case, deadline_seconds)
        try:
            rank.run()
            # nobody may be in doubt because of an earlier case
            if is_well := not (rank.problems or group.is_in_doubt):
                rank.manager.close()
        except Exception as error:
            rank.problems.append(f"{type(error).__name__}: {error}")
            is_well = False
        return rank.events, rank.problems, rank.board.has_happened, is_well


def join_store(
    port: int, rank: int, world_size: int, deadline_seconds: float, generation: int
) -> Group:
    store = dist.TCPStore("127.0.0.1", port, None, False, timeout=timedelta(seconds=30))
    return StoreGroup(store, rank, world_size, deadline_seconds, generation=generation)
