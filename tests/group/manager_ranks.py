"""Managers of a group as threads of one process, over a store in memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from placement import Manager, PlacementError
from placement.core.errors import GroupError
from placement.group import Group, StoreGroup
from placement.policies import Colocated
from placement.testing import assert_nothing_resident
from tests.support.threads import on_all
from tests.support.trainer import Trainer


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
        super().__init__(
            lambda device: Manager(
                device=device, group=group, **{"policy": self.policy, **settings}
            )
        )

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

    @contextlib.contextmanager
    def capturing(self, error: BaseException | None = None) -> Iterator[None]:
        """Its device captures a graph, or raises when it is asked whether it does."""

        def is_capturing() -> bool:
            if error is not None:
                raise error
            return True

        self.faults.is_capturing = is_capturing  # type: ignore[method-assign]
        try:
            yield
        finally:
            del self.faults.is_capturing


def enter(rank: Rank, name: Any = "train", only: Any = None) -> None:
    with rank.manager.phase(name, only=only):
        pass


def groups_of(
    world_size: int, deadline_seconds: float = 30.0, store: Any = None
) -> list[StoreGroup]:
    store = dist.HashStore() if store is None else store
    return [StoreGroup(store, rank, world_size, deadline_seconds) for rank in range(world_size)]


def ranks_of(world_size: int, store: Any = None, **settings: Any) -> list[Rank]:
    return [Rank(group, **settings) for group in groups_of(world_size, store=store)]


def meet(ranks: list[Rank]) -> None:
    """They are at the same epoch, and make a step together."""
    assert len({rank.group.epoch for rank in ranks}) == 1
    assert on_all(ranks, Rank.step) == ["done"] * len(ranks)
