"""A rank in a process of its own that does what it is told: steps, and groups that are made anew."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from placement import PlacementError
from placement.core.errors import GroupError
from placement.group import Group
from placement.testing import assert_nothing_resident
from tests.group.manager_ranks import Rank

Join = Callable[[Any, int, int, float, int], Group]


class Commands:
    """What the test may ask of the rank."""

    def __init__(self, join: Join, address: Any, rank: int, world_size: int, deadline_seconds: float) -> None:
        self._place = lambda generation: join(address, rank, world_size, deadline_seconds, generation)
        self.rank: Rank | None = None

    def begin(self, generation: int) -> str:
        """Make the manager, in a group of this generation."""
        try:
            group = self._place(generation)
        except GroupError as error:
            return str(error)
        self.rank = Rank(group)
        return "joined"

    def rejoin(self, generation: int) -> int:
        assert self.rank is not None
        self.rank.group = self._place(generation)
        self.rank.manager.rejoin(self.rank.group)
        assert_nothing_resident(self.rank.manager)
        return self.rank.group.epoch

    def step(self) -> str:
        assert self.rank is not None
        return self.rank.step()

    def enter(self) -> str:
        assert self.rank is not None
        self.rank.manager.enter("train")
        return "entered"

    def leave(self) -> str:
        assert self.rank is not None
        try:
            self.rank.manager.leave()
        except PlacementError as error:
            return str(error)
        return "left"

    def weights(self) -> bytes:
        """Of the actor and its optimizer, wherever they are."""
        assert self.rank is not None
        state = self.rank.manager.handles["adam"].state_dict()["state"]
        moments = b"".join(state[key]["exp_avg"].numpy().tobytes() for key in sorted(state))
        return self.rank.actor.weight.detach().numpy().tobytes() + moments


def serve(connection: Connection, join: Join, *place: Any) -> None:
    """Carry out `(name, arguments)` until the test ends."""
    commands = Commands(join, *place)
    with suppress(EOFError):
        while True:
            name, arguments = connection.recv()
            connection.send(getattr(commands, name)(*arguments))
