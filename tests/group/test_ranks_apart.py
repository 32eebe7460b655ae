"""Ranks whose handles are not where the others' are, under policies that keep what is there: they go on together all the same."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn

from placement import Manager, PlacementError, State
from placement.core.states import Plan, View
from placement.group import StoreGroup
from placement.policies import Colocated
from placement.testing import SimulatedDevice
from tests.group.manager_ranks import Rank, ranks_of
from tests.support.threads import in_threads, on_all
from tests.support.trainer import CHUNK, WIDTH

WORLD = 2
TIGHT_BYTES = 13 * CHUNK
"""For actor and optimizer, and not for the reference beside them."""
KEEPING = ("cyclic", "resident")
"""The policies that keep what is there."""


def step(rank: Rank) -> str:
    with rank.manager.phase("log_prob") as phase:
        phase.switch("train")
        rank.learn()
        phase.switch("weight_sync")
    return "done"


@pytest.mark.parametrize("budget_bytes", [None, TIGHT_BYTES], ids=["room", "tight"])
@pytest.mark.parametrize("policy", KEEPING)
def test_a_restarted_rank_goes_on_with_those_that_have_kept_handles(policy: str, budget_bytes: int | None) -> None:
    """It has nothing on the device, and knows no cycle of phases."""
    store, settings = dist.HashStore(), {"policy": policy, "budget_bytes": budget_bytes}
    ranks = ranks_of(WORLD, store=store, **settings)
    for _ in range(3):
        assert on_all(ranks, step) == ["done"] * WORLD
    ranks[1].manager.close()
    groups = in_threads(*(lambda rank=rank: StoreGroup(store, rank, WORLD, 20.0, generation=1) for rank in range(WORLD)))
    in_threads(lambda: ranks[0].manager.rejoin(groups[0]), lambda: ranks.__setitem__(1, Rank(groups[1], **settings)))
    for _ in range(4):
        assert on_all(ranks, step) == ["done"] * WORLD
    for rank in ranks:
        rank.manager.close()  # outside every phase the cyclic policy has handles arrive early


@pytest.mark.parametrize("policy", KEEPING)
def test_gradients_are_dropped_on_all_ranks_although_one_gave_the_model_up(policy: str) -> None:
    ranks = ranks_of(WORLD, policy=f"{policy}(drop_gradients=True)")

    def step(rank: Rank, gives_up: int | None) -> str:
        with rank.manager.phase("log_prob") as phase:
            if gives_up == rank.group.rank:
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
    (rank,) = ranks_of(1)

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
    groups = on_all(range(WORLD), lambda rank: StoreGroup(store, rank, WORLD, 20.0))
    ranks = [Rank(groups[0]), Rank(groups[1], policy=NeedsTheReference())]
    for _ in range(3):
        for error in on_all(ranks, Rank.steps):
            assert "rank 1: has another plan" in str(error)
            assert "the ranks' policies, settings or registrations differ" in str(error)
