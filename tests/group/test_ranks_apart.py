"""Ranks whose handles or rollout engines are not where the others' are: all make a phase
transition, or none, and they go on together.

And groups that are made anew: after a rank was restarted, and after a decision that could not be
read.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from placement import EngineError, Manager, Phase, PlacementError, State
from placement.core.errors import CoordinatorLost, GroupError, PhaseError
from placement.core.states import Plan, View
from placement.engines import TaggedEngine
from placement.group import BoardLost, StoreGroup
from placement.group.protocol import Decision
from placement.group.store import StoreBoard
from placement.policies import Colocated
from placement.testing import Faults, SimulatedDevice, assert_nothing_resident
from tests.group.fault_worker import join_store
from tests.group.manager_ranks import Rank, groups_of, ranks_of
from tests.group.processes import Processes, StoreService
from tests.support.buckets import set_bucket_bytes
from tests.support.sweeps import diagonal, few
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


@pytest.mark.parametrize(
    ("policy", "budget_bytes"), diagonal(KEEPING, {"room": None, "tight": TIGHT_BYTES})
)
def test_a_restarted_rank_goes_on_with_those_that_have_kept_handles(
    policy: str, budget_bytes: int | None
) -> None:
    """It has nothing on the device, and knows no cycle of phases."""
    store, settings = dist.HashStore(), {"policy": policy, "budget_bytes": budget_bytes}
    ranks = ranks_of(WORLD, store=store, **settings)
    for _ in range(3):
        assert on_all(ranks, step) == ["done"] * WORLD
    ranks[1].manager.close()
    groups = in_threads(
        *(
            lambda rank=rank: StoreGroup(store, rank, WORLD, 20.0, generation=1)
            for rank in range(WORLD)
        )
    )
    in_threads(
        lambda: ranks[0].manager.rejoin(groups[0]),
        lambda: ranks.__setitem__(1, Rank(groups[1], **settings)),
    )
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
        assert (
            on_all(ranks, lambda rank, gives_up=gives_up: step(rank, gives_up)) == ["done"] * WORLD
        )  # type: ignore[misc]
    assert [parameter.grad for rank in ranks for parameter in rank.actor.parameters()] == [None] * 4


@pytest.mark.parametrize(
    ("operation", "at"),
    [
        ("sync", 3),
        pytest.param("host", 1, marks=pytest.mark.sweep),
        pytest.param("map", 3, marks=pytest.mark.sweep),
    ],
)
def test_a_failed_change_leaves_no_cycle_that_holds_tensors(operation: str, at: int) -> None:
    """Else the gradients of the step before stay alive, and an audit finds references to them,
    until garbage is collected."""
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
        group, device = (
            StoreGroup(store, rank, WORLD, 20.0),
            SimulatedDevice(256 * CHUNK, chunk_bytes=CHUNK),
        )
        set_bucket_bytes(2 * CHUNK)
        self.manager = Manager(
            device=device,
            policy="resident(optimizer_in='streamed')",
            group=group,
            budget_bytes=60 * CHUNK,
        )
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
    groups = groups_of(WORLD)
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
        super().__init__(
            tags=TAGS,
            weights="keep",
            tag_bytes={"weights": _WEIGHTS, "kv_cache": _KV_CACHE + more_bytes},
            verify="answer",
        )
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

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        policy: str,
        budget_bytes: int | None = None,
        more_bytes: int = 0,
    ) -> None:
        torch.manual_seed(0)
        self.rank, self.group = rank, StoreGroup(store, rank, WORLD, deadline_seconds=20.0)
        self.device = Faults(SimulatedDevice(64 << 20))
        self.manager = Manager(
            device=self.device, policy=policy, budget_bytes=budget_bytes, group=self.group
        )
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
        """A rollout, with `within` in it, then training and a sync. Returns what it raised, or
        "done"."""
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
    """What happens in the rollout of one rank. Faults come later, in one of the phase transitions
    of the step."""
    method, operation, at = (
        chance.choice(["drain", "offload", "load"]),
        chance.choice(["create", "map", "copy"]),
        chance.randint(1, 6),
    )

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


@pytest.mark.parametrize("seed", few(range(16), 0))
def test_whatever_happens_on_one_rank_all_make_the_step_or_none(seed: int) -> None:
    chance = random.Random(seed)
    policy = chance.choice(
        [
            "colocated",
            "cyclic",
            "resident",
            "colocated('streamed')",
            "resident(optimizer_in='streamed')",
        ]
    )
    settings = {
        "budget_bytes": chance.choice([None, 6_310_000, 8_500_000]),
        "more_bytes": chance.choice([0, 1 << 16, 1 << 19]),
    }
    store = dist.HashStore()
    ranks = on_all(range(WORLD), lambda rank: Serving(store, rank, policy, **settings))
    for _ in range(8):
        unlucky, event = (
            chance.randrange(WORLD),
            chance.choice(["nothing", "gives up", "has ended", "refuses", "device fails"]),
        )
        happens = _happens(event, chance)

        def within(
            rank: Serving, phase: Phase, unlucky: int = unlucky, happens: Within = happens
        ) -> None:
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


# --- groups that are made anew

MEMBERS = 3


class Member:
    """A rank in a process of its own."""

    def __init__(self, port: int, number: int, generation: int) -> None:
        self._place = port, number, MEMBERS, 20.0
        self.rank = Rank(join_store(*self._place, generation))

    def rejoin(self, generation: int) -> int:
        self.rank.group = join_store(*self._place, generation)
        self.rank.manager.rejoin(self.rank.group)
        assert_nothing_resident(self.rank.manager)
        return self.rank.group.epoch

    def step(self) -> str:
        return self.rank.step()

    def enter(self) -> None:
        self.rank.manager.enter("train")

    def leave(self) -> str:
        try:
            self.rank.manager.leave()
        except PlacementError as error:
            return str(error)
        return "left"

    def weights(self) -> bytes:
        """Of the actor and its optimizer, wherever they are."""
        state = self.rank.manager.handles["adam"].state_dict()["state"]
        moments = b"".join(state[key]["exp_avg"].numpy().tobytes() for key in sorted(state))
        return self.rank.actor.weight.detach().numpy().tobytes() + moments


@pytest.fixture
def service() -> Iterator[StoreService]:
    made = StoreService()
    yield made
    made.kill()


@pytest.mark.parametrize("killed", few([0, 1], 0))
def test_a_rank_that_was_killed_and_restarted_goes_on_with_the_others(
    killed: int, service: StoreService, processes: Processes
) -> None:
    ranks = [processes.start(Member, service.port, rank, 0) for rank in range(MEMBERS)]

    def tell(ranks: list[Any], method: str, *arguments: Any) -> list[Any]:
        """All of them at once, and what each answers."""
        for rank in ranks:
            rank.begin(method, *arguments)
        return [rank.answer() for rank in ranks]

    assert tell(ranks, "step") == ["done"] * MEMBERS
    tell(ranks, "enter")
    ranks[killed].kill()
    others = [rank for number, rank in enumerate(ranks) if number != killed]
    for rank in others:
        rank.begin("leave")
    with pytest.raises(
        GroupError,
        match=rf"rank {killed} was restarted: its "
        r"place "
        r"is "
        r"taken.*pass "
        r"it to manager.rejoin\(group\)",
    ):
        processes.start(Member, service.port, killed, 0)
    for rank in others:
        told = rank.answer()
        assert f"rank {killed}: was restarted" in told
        assert "pass it to manager.rejoin(group)" in told
    trained = tell(others, "weights")
    for rank in others:
        rank.begin("rejoin", 1)
    ranks[killed] = processes.start(Member, service.port, killed, 1)
    assert [rank.answer() for rank in others] == [0, 0]
    assert tell(others, "weights") == trained
    for _ in range(2):
        assert tell(ranks, "step") == ["done"] * MEMBERS


class Cut(StoreBoard):
    """A board that one rank cannot reach for a while."""

    is_cut = False

    def look(self, keys: Any) -> Any:
        if self.is_cut:
            raise BoardLost("the cable is out")
        return super().look(keys)


class CutAtTheDecision(StoreGroup):
    """After its vote, or only after one for a plan that wants nothing on the device."""

    only_empty = False

    def agree(self, plan: Plan, *stage: Any) -> Decision:
        is_cut = not (self.only_empty and any(map(plan.on_device, plan.targets)))
        self._board.__class__, self._board.is_cut = Cut, is_cut  # type: ignore[attr-defined, assignment]
        return super().agree(plan, *stage)


@pytest.mark.parametrize("lost", few([0, 1], 0))
def test_a_rank_that_has_not_heard_a_decision_goes_on_in_a_new_group(lost: int) -> None:
    store = dist.HashStore()
    ranks = [
        Rank((CutAtTheDecision if rank == lost else StoreGroup)(store, rank, 2, 1.0))
        for rank in range(2)
    ]

    def body(rank: Rank) -> str:
        try:
            rank.steps()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "done"

    found = on_all(ranks, body)
    assert found[lost].startswith("CoordinatorLost")
    assert "the prepared move is kept" in found[lost]
    assert "pass it to manager.rejoin(group)" in found[lost]
    assert found[1 - lost].startswith("GroupError")
    # prepared, and not decided
    assert ranks[lost].manager.handles["actor"].state is State.GPU_RESIDENT
    assert "manager.rejoin" in body(ranks[lost])
    again = on_all(range(2), lambda rank: StoreGroup(store, rank, 2, 30.0, generation=1))
    for rank, group in zip(ranks, again, strict=True):
        rank.group = group
        rank.manager.rejoin(group)
        assert_nothing_resident(rank.manager)
        rank.manager.check_integrity()
    assert on_all(ranks, Rank.step) == ["done", "done"]


def test_what_is_kept_on_the_device_stays_there() -> None:
    rank = Rank(StoreGroup(dist.HashStore(), 0, 1, 5.0))
    with rank.manager.phase("log_prob") as phase:
        phase.keep("ref")
    rank.manager.rejoin(StoreGroup(dist.HashStore(), 0, 1, 5.0))
    assert rank.manager.handles["ref"].state is State.GPU_RESIDENT


def test_where_it_cannot_be_done_the_old_group_stays() -> None:
    store = dist.HashStore()
    rank = Rank(StoreGroup(store, 0, 1, 5.0))
    anew = StoreGroup(store, 0, 1, 5.0, generation=1)
    with (
        rank.manager.phase("train"),
        pytest.raises(PhaseError, match=r"phase 'train' is open; leave it before rejoin\(\)"),
    ):
        rank.manager.rejoin(anew)
    with pytest.raises(ValueError, match="group must be"):
        rank.manager.rejoin("ranks")  # type: ignore[arg-type]
    assert (rank.step(), anew.epoch) == ("done", 0)


def test_managers_that_were_alone_join_their_first_group() -> None:
    store = dist.HashStore()
    managers = [Manager(device=SimulatedDevice(1 << 20)) for _ in range(2)]
    for manager in managers:
        manager.register("actor", nn.Linear(4, 4), role="actor")
        with manager.phase("log_prob"):
            pass

    def begin(rank: int) -> str:
        managers[rank].rejoin(StoreGroup(store, rank, 2, 10.0))
        with managers[rank].phase("log_prob" if rank else "train"):
            return "entered"

    for error in in_threads(lambda: begin(0), lambda: begin(1)):
        assert isinstance(error, GroupError)
        assert "train" in str(error)


def test_a_rank_in_doubt_that_leaves_its_phase_keeps_nothing_on_the_device() -> None:
    """Everything was off the device when the decision was lost, and leaving had nothing to move."""
    rank = Rank(CutAtTheDecision(dist.HashStore(), 0, 1, 0.5))
    rank.group.only_empty = True  # type: ignore[attr-defined]
    with pytest.raises(CoordinatorLost), rank.manager.phase("log_prob") as phase:
        phase.switch("reward")
    assert_nothing_resident(rank.manager)
    assert rank.group.abort(ValueError("anything")) is None


def test_a_group_that_is_in_doubt_is_none_to_go_on_with() -> None:
    rank = Rank(CutAtTheDecision(dist.HashStore(), 0, 1, 0.5))
    with pytest.raises(CoordinatorLost):
        rank.manager.enter("train")
    with pytest.raises(ValueError, match="is unusable"):
        rank.manager.rejoin(rank.group)
