"""Managers of a group as threads of one process, over a store in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from placement import Manager, PlacementError
from placement.core.errors import GroupError
from placement.group import Group, StoreGroup
from placement.policies import Colocated
from placement.testing import assert_nothing_resident
from tests.support.threads import in_threads
from tests.support.trainer import Trainer

Join = Callable[[int, int, float, int], Group]
"""`join(rank, world_size, deadline_seconds, generation)`."""


def joining() -> Join:
    """How the ranks of one membership come together."""
    store = dist.HashStore()
    return lambda rank, world_size, deadline, generation: StoreGroup(store, rank, world_size, deadline, generation=generation)


class FailsOnce(Colocated):
    """When it is asked for a plan of the phase `fails_in`."""

    fails_in = ""

    def plan(self, view: Any) -> Any:
        if view.phase == self.fails_in:
            self.fails_in = ""
            raise RuntimeError("the policy's own")
        return super().plan(view)


class Rank(Trainer):
    """A rank whose policy can be made to fail."""

    def __init__(self, group: Group, **settings: Any) -> None:
        torch.manual_seed(0)
        self.group, self.policy = group, FailsOnce()
        super().__init__(lambda device: Manager(device=device, policy=self.policy, group=group, **settings))

    def step(self) -> str:
        """A step of the job: two phases, one after the other. "done", or what it raised."""
        return self.tried(self.steps)

    def steps(self) -> None:
        with self.manager.phase("log_prob") as step:
            step.switch("train")
            self.learn()

    def tried(self, do: Callable[[], Any]) -> str:
        try:
            do()
        except PlacementError as error:
            assert_nothing_resident(self.manager)
            return f"{type(error).__name__}: {error}"
        assert_nothing_resident(self.manager)
        return "done"

    def failures(self, do: Callable[[], Any]) -> dict[int, str]:
        """Of the `GroupError` that `do` raises."""
        try:
            do()
        except GroupError as error:
            return dict(error.failures)
        raise AssertionError("nothing failed")


def ranks_of(join: Join, world_size: int, deadline_seconds: float = 30.0, generation: int = 0, **settings: Any) -> list[Rank]:
    groups = in_threads(*(lambda rank=rank: join(rank, world_size, deadline_seconds, generation) for rank in range(world_size)))  # type: ignore[misc]
    return [Rank(group, **settings) for group in groups]


def on_all(ranks: list[Rank], do: Callable[[Rank], Any]) -> list[Any]:
    """At once; what each returned or raised, by rank."""
    return in_threads(*(lambda rank=rank: do(rank) for rank in ranks))  # type: ignore[misc]
