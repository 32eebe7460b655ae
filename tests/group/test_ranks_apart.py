"""Ranks whose handles or rollout engines are not where the others' are: all make a phase transition, or none, and they go on together."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from torch import nn

from placement import EngineError, Manager, Phase, PlacementError, State
from placement.core.states import Plan, View
from placement.engines import TaggedEngine
from placement.group import StoreGroup
from placement.policies import Colocated
from placement.testing import Faults, SimulatedDevice
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


TAGS = ("weights", "kv_cache")
_WEIGHTS, _KV_CACHE = 1 << 20, 4 << 20
_WIDTH = 512


Within = Callable[["Serving", Phase], None]


class Engine(TaggedEngine):
    """It counts its own bytes. `refuses`: the method that fails next, and with what."""

    def __init__(self, more_bytes: int = 0) -> None:
        super().__init__(tags=TAGS, weights="keep", tag_bytes={"weights": _WEIGHTS, "kv_cache": _KV_CACHE + more_bytes}, verify="answer")
        self.refuses: tuple[str, Exception] | None = None

    def _ask(self, method: str) -> None:
        if self.refuses is not None and self.refuses[0] == method:
            error, self.refuses = self.refuses[1], None
            raise error

    def drain(self) -> None:
        self._ask("drain")

    def offload(self, tags: Sequence[str]) -> None:
        self._ask("offload")

    def load(self, tags: Sequence[str]) -> None:
        self._ask("load")

    def admit(self) -> None:
        pass

    def receive(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> None:
        pass


class Serving:
    """An actor with SGD, and an engine of which this rank may have a larger one."""

    def __init__(self, store: dist.Store, rank: int, policy: str, budget_bytes: int | None = None, more_bytes: int = 0) -> None:
        torch.manual_seed(0)
        self.rank, self.group = rank, StoreGroup(store, rank, WORLD, deadline_seconds=20.0)
        self.device = Faults(SimulatedDevice(64 << 20))
        self.manager = Manager(device=self.device, policy=policy, budget_bytes=budget_bytes, group=self.group)
        self.actor, self.engine = nn.Linear(_WIDTH, _WIDTH), Engine(more_bytes * rank)
        self.sgd = torch.optim.SGD(self.actor.parameters())
        self.manager.register("actor", self.actor, role="actor")
        self.manager.register("sgd", self.sgd)
        self.manager.register("rollout", self.engine, role="rollout")
        self.bodies: list[str] = []
        """The bodies of phases that this rank has begun."""

    def publish(self) -> None:
        for bucket in self.manager.handles["actor"].weights():
            self.engine.update_weights(bucket)

    def sync(self) -> str:
        with self.manager.phase("weight_sync"):
            self.publish()
        return "done"

    def step(self, within: Within = lambda rank, phase: None) -> str:
        """A rollout, with `within` in it, then training and a sync. Returns what it raised, or "done"."""
        try:
            with self.manager.phase("rollout") as phase:
                self.bodies.append("rollout")
                within(self, phase)
                phase.switch("train")
                self.bodies.append("train")
                self.actor(torch.ones(2, _WIDTH)).sum().backward()
                self.sgd.step()
                self.sgd.zero_grad()
                phase.switch("weight_sync")
                self.publish()
        except PlacementError as error:
            return f"{type(error).__name__}: {error}"
        return "done"


def together(ranks: list[Serving], do: Callable[[Serving], str]) -> list[str]:
    answers = on_all(ranks, do)
    assert ranks[0].bodies == ranks[1].bodies, "a rank has begun a phase alone"
    return answers


def _happens(event: str, chance: random.Random) -> Callable[[Serving, Phase], None]:
    """What happens in the rollout of one rank. Faults come later, in one of the phase transitions of the step."""
    method, operation, at = chance.choice(["drain", "offload", "load"]), chance.choice(["create", "map", "copy"]), chance.randint(1, 6)

    def happens(rank: Serving, phase: Phase) -> None:
        if event == "gives up":
            phase.done_with("rollout")
        elif event == "has ended":
            rank.engine.assume(offloaded=TAGS)
        elif event == "refuses":
            rank.engine.refuses = method, EngineError("not now")
        elif event == "device fails":
            rank.device.fail(operation, at=at)

    return happens


def _mended(rank: Serving) -> str:
    """What a user does after an error: say where a lost engine is, and publish again."""
    rank.device.clear()
    rank.engine.refuses = None
    if rank.manager.handles["rollout"].broken:
        rank.engine.assume(offloaded=TAGS)
    return rank.sync()


@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(8, 16))])
def test_whatever_happens_on_one_rank_all_make_the_step_or_none(seed: int) -> None:
    chance = random.Random(seed)
    policy = chance.choice(["colocated", "cyclic", "resident", "colocated('streamed')", "resident(optimizer_in='streamed')"])
    settings = {"budget_bytes": chance.choice([None, 6_310_000, 8_500_000]), "more_bytes": chance.choice([0, 1 << 16, 1 << 19])}
    store = dist.HashStore()
    ranks = on_all(range(WORLD), lambda rank: Serving(store, rank, policy, **settings))
    for _ in range(8):
        unlucky, event = chance.randrange(WORLD), chance.choice(["nothing", "gives up", "has ended", "refuses", "device fails"])
        happens = _happens(event, chance)

        def within(rank: Serving, phase: Phase, unlucky: int = unlucky, happens: Within = happens) -> None:
            if rank.rank == unlucky:
                happens(rank, phase)

        answers = together(ranks, lambda rank, within=within: rank.step(within))  # type: ignore[misc]
        assert len({answer == "done" for answer in answers}) == 1, answers
        assert together(ranks, _mended) == ["done"] * WORLD
    for _ in range(3):
        assert together(ranks, Serving.step) == ["done"] * WORLD
    for rank in ranks:
        rank.manager.close()
        assert rank.device.memory().chunk_bytes == 0
