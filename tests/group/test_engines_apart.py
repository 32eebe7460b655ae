"""Ranks whose rollout engines are not where the others' are: each phase transition is made by all ranks, or by none."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from torch import nn

from placement import EngineError, Manager, Phase, PlacementError
from placement.engines import TaggedEngine
from placement.group import StoreGroup
from placement.testing import Faults, SimulatedDevice
from tests.support.threads import on_all

WORLD = 2
TAGS = ("weights", "kv_cache")
_WEIGHTS, _KV_CACHE = 1 << 20, 4 << 20
_WIDTH = 512


Within = Callable[["Rank", Phase], None]


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


class Rank:
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


def together(ranks: list[Rank], do: Callable[[Rank], str]) -> list[str]:
    answers = on_all(ranks, do)
    assert ranks[0].bodies == ranks[1].bodies, "a rank has begun a phase alone"
    return answers


def _happens(event: str, chance: random.Random) -> Callable[[Rank, Phase], None]:
    """What happens in the rollout of one rank. Faults come later, in one of the phase transitions of the step."""
    method, operation, at = chance.choice(["drain", "offload", "load"]), chance.choice(["create", "map", "copy"]), chance.randint(1, 6)

    def happens(rank: Rank, phase: Phase) -> None:
        if event == "gives up":
            phase.done_with("rollout")
        elif event == "has ended":
            rank.engine.assume(offloaded=TAGS)
        elif event == "refuses":
            rank.engine.refuses = method, EngineError("not now")
        elif event == "device fails":
            rank.device.fail(operation, at=at)

    return happens


def _mended(rank: Rank) -> str:
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
    ranks = on_all(range(WORLD), lambda rank: Rank(store, rank, policy, **settings))
    for _ in range(8):
        unlucky, event = chance.randrange(WORLD), chance.choice(["nothing", "gives up", "has ended", "refuses", "device fails"])
        happens = _happens(event, chance)

        def within(rank: Rank, phase: Phase, unlucky: int = unlucky, happens: Within = happens) -> None:
            if rank.rank == unlucky:
                happens(rank, phase)

        answers = together(ranks, lambda rank, within=within: rank.step(within))  # type: ignore[misc]
        assert len({answer == "done" for answer in answers}) == 1, answers
        assert together(ranks, _mended) == ["done"] * WORLD
    for _ in range(3):
        assert together(ranks, Rank.step) == ["done"] * WORLD
    for rank in ranks:
        rank.manager.close()
        assert rank.device.memory().chunk_bytes == 0
