"""Ranks whose handles are not where the others' are, under policies that keep what is there: they go on together all the same."""

from __future__ import annotations

import gc
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from placement import Manager, PlacementError, State
from placement.core.states import Plan, View
from placement.group import Group, StoreGroup
from placement.policies import Colocated
from placement.testing import SimulatedDevice
from tests.support.threads import in_threads, on_all
from tests.support.trainer import CHUNK, WIDTH, Trainer

WORLD = 2
TIGHT_BYTES = 13 * CHUNK
"""For actor and optimizer, and not for the reference beside them."""
KEEPING = ("cyclic", "resident")
"""The policies that keep what is there."""


class Rank(Trainer):
    """A rank that may be unlike the other. `place`: a store, or a group of its own kind."""

    def __init__(self, place: dist.Store | Group, rank: int, generation: int = 0, **settings: Any) -> None:
        torch.manual_seed(0)
        self.rank = rank
        self.group = place if isinstance(place, Group) else StoreGroup(place, rank, WORLD, 20.0, generation=generation)
        super().__init__(lambda device: Manager(device=device, group=self.group, **settings))

    def rejoin(self, store: dist.Store, generation: int) -> Rank:
        self.manager.rejoin(StoreGroup(store, self.rank, WORLD, 20.0, generation=generation))
        return self

    def step(self, *, fails: int | None = None, gives_up: int | None = None, inside: bool = False) -> str:
        """log_prob, train, weight_sync.

        Args:
            fails: this rank raises before its optimizer steps.
            gives_up: this rank is done with `ref`.
            inside: there is a phase inside two of them, and the rank that gives `ref` up is done with `adam` as well.
        """
        try:
            with self.manager.phase("log_prob") as step:
                if gives_up == self.rank:
                    step.done_with("ref")
                if inside:
                    with self.manager.phase("values", only=["critic"]):
                        pass
                step.switch("train")
                if fails == self.rank:
                    raise ArithmeticError("a bad batch")
                self.learn()
                if inside:
                    if gives_up == self.rank:
                        step.done_with("adam")
                    with self.manager.phase("checkpoint"):
                        pass
                step.switch("weight_sync")
        except (ArithmeticError, PlacementError) as error:
            return f"{type(error).__name__}: {error}"
        return "done"


def made(store: dist.Store, **settings: Any) -> list[Rank]:
    return on_all(range(WORLD), lambda rank: Rank(store, rank, **settings))


def go_on(ranks: list[Rank], steps: int) -> None:
    """Make steps without a failure, and close: outside every phase the cyclic policy has handles arrive early."""
    for _ in range(steps):
        assert on_all(ranks, Rank.step) == ["done"] * WORLD
    for rank in ranks:
        rank.manager.close()


@pytest.mark.parametrize("budget_bytes", [None, TIGHT_BYTES], ids=["room", "tight"])
@pytest.mark.parametrize("policy", KEEPING)
def test_a_restarted_rank_goes_on_with_those_that_have_kept_handles(policy: str, budget_bytes: int | None) -> None:
    """It has nothing on the device, and knows no cycle of phases."""
    store, settings = dist.HashStore(), {"policy": policy, "budget_bytes": budget_bytes}
    ranks = made(store, **settings)
    for _ in range(3):
        assert on_all(ranks, Rank.step) == ["done"] * WORLD
    ranks[1].manager.close()
    go_on(in_threads(lambda: ranks[0].rejoin(store, 1), lambda: Rank(store, 1, 1, **settings)), 4)


@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(8, 16))])
def test_whatever_sets_two_ranks_apart_they_go_on_together(seed: int) -> None:
    """A step that one optimizer has not made, a handle that one rank is done with, critics of different sizes as with pipeline stages."""
    chance = random.Random(seed)
    budget_bytes = chance.choice([None, TIGHT_BYTES, 20 * CHUNK])
    ranks = made(dist.HashStore(), policy=chance.choice([*KEEPING, "colocated"]), budget_bytes=budget_bytes)
    more = 2 * chance.randint(0, budget_bytes != TIGHT_BYTES)
    critics = [nn.Linear(WIDTH, WIDTH * (1 + more * rank.rank)) for rank in ranks]
    for rank, critic in zip(ranks, critics, strict=True):
        rank.manager.register("critic", critic, role="critic")

    def values(rank: Rank) -> None:
        with rank.manager.phase("values"):
            pass

    for _ in range(8):
        if budget_bytes != TIGHT_BYTES:
            assert on_all(ranks, values) == [None] * WORLD
        event = chance.choice(["fails", "gives_up", ""])
        how: dict[str, Any] = {event: chance.randrange(WORLD)} if event else {}
        answers = on_all(ranks, lambda rank, how=how: rank.step(inside=budget_bytes is None, **how))
        if event == "fails":
            assert answers[how["fails"]] == "ArithmeticError: a bad batch"
            assert f"rank {how['fails']}: ArithmeticError: a bad batch" in answers[1 - how["fails"]]
        else:
            assert answers == ["done"] * WORLD
    go_on(ranks, 2)


@pytest.mark.parametrize("policy", KEEPING)
def test_gradients_are_dropped_on_all_ranks_although_one_gave_the_model_up(policy: str) -> None:
    ranks = made(dist.HashStore(), policy=f"{policy}(drop_gradients=True)")

    def step(rank: Rank, gives_up: int | None) -> str:
        with rank.manager.phase("log_prob") as phase:
            if gives_up == rank.rank:
                phase.done_with("actor")
            phase.switch("ref_log_prob")
            phase.switch("train")
            rank.learn()
        return "done"

    for gives_up in (None, 1, None, 0, None):
        assert on_all(ranks, lambda rank, gives_up=gives_up: step(rank, gives_up)) == ["done"] * WORLD  # type: ignore[misc]
    assert [parameter.grad for rank in ranks for parameter in rank.actor.parameters()] == [None] * 4


@pytest.mark.parametrize(("operation", "at"), [("sync", 3), ("host", 1), ("map", 3)])
def test_a_failed_change_leaves_no_cycle_that_holds_tensors(operation: str, at: int) -> None:
    """Else the gradients of the step before stay alive, and an audit finds references to them, until garbage is collected."""
    rank = Rank(StoreGroup(dist.HashStore(), 0, 1, 5.0), 0)

    def step(*, fails: bool) -> str:
        try:
            with rank.manager.phase("weight_sync") as phase:
                with rank.manager.phase("train"):
                    rank.learn()
                if fails:
                    rank.faults.fail(operation, at=at)
                phase.switch("ref_log_prob")
        except PlacementError:
            return "failed"
        return "done"

    gc.disable()
    try:
        step(fails=True)
        rank.faults.clear()
        for _ in range(2):
            assert step(fails=False) == "done"
            assert rank.manager.audit().findings == ()
    finally:
        gc.enable()


class Shard:
    """An actor of three layers with Adam. The one of rank 1 is four times as large."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        width = WIDTH * (1 + rank)
        self.batch = torch.ones(2, width)
        self.actor = nn.Sequential(*(nn.Linear(width, width) for _ in range(3)))
        self.adam = torch.optim.Adam(self.actor.parameters())
        group, device = StoreGroup(store, rank, WORLD, 20.0), SimulatedDevice(256 * CHUNK, chunk_bytes=CHUNK)
        settings = {"budget_bytes": 60 * CHUNK, "streamed_bucket_bytes": 2 * CHUNK}
        self.manager = Manager(device=device, policy="resident(optimizer_in='streamed')", group=group, **settings)  # type: ignore[arg-type]
        self.manager.register("actor", self.actor, role="actor")
        self.manager.register("adam", self.adam)

    def step(self) -> bool:
        with self.manager.phase("train"):
            streams = self.manager.handles["adam"].is_streaming
            self.actor(self.batch).sum().backward()
            self.adam.step()
            self.adam.zero_grad()
        return streams


def test_an_optimizer_that_one_rank_has_to_stream_is_streamed_by_all() -> None:
    """On the other rank its state fits beside the actor."""
    store = dist.HashStore()
    shards = in_threads(lambda: Shard(store, 0), lambda: Shard(store, 1))
    for _ in range(3):
        assert in_threads(*(shard.step for shard in shards)) == [True] * WORLD


class NeedsTheReference(Colocated):
    """Unlike the policy of the other rank, in every phase."""

    def plan(self, view: View) -> Plan:
        plan = super().plan(view)
        return plan.also("ref", State.GPU_RESIDENT) if "ref" in view.handles else plan


def test_what_one_rank_needs_and_the_other_does_not_is_refused_for_good() -> None:
    """It never leaves the device of the rank that needs it."""
    store = dist.HashStore()
    ranks = in_threads(lambda: Rank(store, 0), lambda: Rank(store, 1, policy=NeedsTheReference()))
    for _ in range(3):
        for answer in on_all(ranks, Rank.step):
            assert "rank 1: has another plan" in answer
            assert "the ranks' policies, settings or registrations differ" in answer
