"""Replicated handles: one host copy for the ranks of a machine, loaded by all of them together.
Real processes over gloo."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from placement import Manager, PlacementError, RegistrationError, State, checkpoint
from placement.group import StoreGroup
from placement.storage.shared import SharedRange
from placement.testing import SimulatedDevice, assert_nothing_resident
from tests.group import part_worker, trained_worker
from tests.group import replicated_worker as worker
from tests.group.conftest import beside
from tests.group.replicated_worker import Rank, as_bytes
from tests.support.ranks import Ranks, group_of_all, on_ranks


def check_shares(seen: list[dict[str, Any]], chunk_bytes: int = 0) -> None:
    """One host copy in all, and no rank brought more than its share of it. `chunk_bytes` where
    those do not divide among the ranks."""
    nbytes = seen[0]["bytes"]
    world_size = len(seen)
    num_uneven = nbytes // chunk_bytes + 1 if chunk_bytes else 1
    # whole pages, and what does not divide in a chunk
    slack = world_size * worker.PAGE * 2 * num_uneven
    assert nbytes <= sum(each["host"] for each in seen) < nbytes + worker.PAGE
    for each in seen:
        assert abs(each["host"] - nbytes / world_size) < slack
        assert all(abs(crossed - nbytes / world_size) < slack for crossed in each["crossed"])
    assert len({each["epoch"] for each in seen}) == 1


def test_values_host_memory_and_bytes_over_the_link(ranks: Ranks, generation: int) -> None:
    check_shares(ranks.run(worker.loads, generation, False))


@on_ranks("ranks")
def test_it_may_be_registered_inside_a_phase_and_stay_on_the_device(generation: int) -> None:
    """Of a phase that wants it, and then where a policy keeps it on the device when idle."""
    rank = Rank(generation, policy="resident")
    before = rank.device.crossed["to_device"]
    with rank.manager.phase("log_prob"):
        rank.register()
        assert rank.handle.state is State.GPU_RESIDENT
        assert rank.device.crossed["to_device"] - before < rank.handle.num_bytes
        rank.check_values()
    assert rank.handle.state is State.GPU_RESIDENT
    rank.check_values()
    rank.manager.unregister("ref")  # from the device
    rank.check_values()
    rank.manager.close()


@pytest.mark.parametrize(("other", "name"), [(0, "body.0.bias"), (1, "bytes")])
@on_ranks("ranks")
def test_unequal_weights_are_refused_on_every_rank_by_name(
    generation: int, other: int, name: str
) -> None:
    """One rank has another value; then all have the same ones."""
    rank = Rank(generation)
    changed = rank.ref.state_dict()[name].view(-1).view(torch.uint8)[-1:]
    wanted, addresses = rank.wanted, rank.addresses()
    if rank.rank == other:
        changed ^= 1
    rank.wanted = as_bytes(rank.ref)
    told = rank.fails(rank.register, RegistrationError)
    rank.check_unregistered(addresses)
    # Of two ranks nobody can say which is the odd one.
    odd = max(other, 1) if rank.world_size == 2 else other
    assert f"'ref' cannot be replicated: {name!r} has other bytes on rank {odd}" in told
    if rank.rank == other:
        changed ^= 1
    rank.wanted = wanted
    rank.register()
    assert rank.load()


def test_a_mistake_on_one_rank_is_told_to_all(three: Ranks, generation: int) -> None:
    first, second, third = three.run(worker.mistaken, generation)
    differ = ("not readonly", "an optimizer")
    assert {mistake: told for mistake, told in first.items() if mistake not in differ} == {
        mistake: told for mistake, told in third.items() if mistake not in differ
    }
    for mistake, words in (("a Lazy", "Lazy"), ("an engine", "engine"), ("external", "placement")):
        assert words in second[mistake]
        assert f"rank 1: {second[mistake]}" in first[mistake]
    for mistake in differ:
        # A rank that is late hears rank 1's own error before it has compared.
        words = ("rank 1 has other tensors than the rest", f"rank 1: {second[mistake]}")
        assert all(any(each in told[mistake] for each in words) for told in (first, third))
        assert "registers them in another way" in second[mistake]
    assert "rank 1: is about to enter log_prob" in first["something else"]


def test_an_fsdp2_actor_and_its_reference_train_on_after_one_rank_was_full(
    ranks: Ranks, generation: int
) -> None:
    for told in ranks.run(part_worker.full, generation, "cpu", 1):
        assert len(told) == 2
        assert all("rank 1: DeviceMemoryError" in each for each in told)


@pytest.mark.parametrize("failing", [0, 1])
def test_each_device_call_may_fail_in_a_registration_and_in_a_load(
    three: Ranks, generation: int, failing: int, counted: Callable[[str], None]
) -> None:
    cases = three.run(worker.faults, generation, failing)
    assert min(cases) > 20
    counted(
        f"replicated handles, 3 ranks: every device call of rank {failing} fails once: "
        f"{max(cases)} cases"
    )


@on_ranks("three")
def test_the_process_group_goes(generation: int) -> None:
    rank = Rank(generation)
    own = dist.new_group(backend="gloo")
    rank.register(replicated=own)
    together = rank.load()
    dist.destroy_process_group(own)
    assert together < rank.load() == rank.load()
    assert rank.alone == "the process group was destroyed"


@on_ranks("three")
def test_one_rank_leaves(generation: int) -> None:
    """Rank 0 makes the handle an ordinary one: nothing changes for the values of anybody."""
    rank = Rank(generation)
    rank.register()
    rank.load()
    if rank.rank == 0:
        rank.manager.unregister("ref")
        rank.check_values()
        rank.register(replicated=False)
    rank.load()
    if rank.rank > 0:
        assert rank.alone == "rank 0 has unregistered it"
    if rank.rank == 1:  # where everything of it is gone, the others still have the copy
        rank.manager.close()
        rank.check_values()
        rank.fails(rank.load, PlacementError)
    elif rank.rank > 1:
        rank.check_host_copy()


def test_a_rank_dies_while_all_load() -> None:
    entering = {
        (2, "before put vote"): False,
        (0, "after put vote"): False,
        (1, "after put vote"): True,
        (0, "after put at"): True,
    }
    for ((victim, _), enters), results in zip(
        entering.items(), beside(worker.killed_in_load, [*entering]), strict=True
    ):
        for entered, alone in results[:victim] + results[victim + 1 :]:
            assert entered == enters
            assert (alone or "").startswith("a collective failed") == enters


@pytest.mark.parametrize("together", [True, False])
@on_ranks("three")
def test_rejoin(generation: int, together: bool) -> None:
    """It is loaded by all ranks together as before; by each for itself where its new group has
    other ranks."""
    rank = Rank(generation)
    rank.register()
    storages = {
        each.data_ptr(): each.nbytes for each in [*rank.ref.parameters(), *rank.ref.buffers()]
    }
    most_bytes = 0.6 * sum(storages.values())
    assert rank.load() < most_bytes
    rank.manager.rejoin(
        group_of_all(generation + 10_000) if together else StoreGroup(dist.HashStore(), 0, 1, 20.0)
    )
    assert (rank.load() < most_bytes) == together
    assert rank.alone == (None if together else "the group was made anew with other ranks")


def test_one_rank_alone_has_an_ordinary_handle() -> None:
    manager = Manager(
        device=SimulatedDevice(1 << 20), group=StoreGroup(dist.HashStore(), 0, 1, 5.0)
    )
    model = torch.nn.Linear(8, 8)
    handle = manager.register("ref", model, role="ref", readonly=True, replicated=True)
    before = model.weight.data_ptr()
    with manager.phase("log_prob"):
        assert handle.resident_bytes
    assert model.weight.data_ptr() == before
    manager.close()


def test_it_needs_a_group() -> None:
    manager = Manager(device=SimulatedDevice(1 << 20))
    with pytest.raises(RegistrationError, match="group="):
        manager.register("ref", torch.nn.Linear(8, 8), role="ref", readonly=True, replicated=True)
    assert not manager.handles


# --- what is trained in part: one host copy of the frozen weights, beside adapters that each rank
# trains

_SIZE = 128


class Adapted(nn.Module):
    """A layer that is frozen, beside a trained one of low rank, and a buffer that every forward
    pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(_SIZE, _SIZE).requires_grad_(False)
        self.down = nn.Linear(_SIZE, 4, bias=False)
        self.up = nn.Linear(4, _SIZE, bias=False)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.base(x) + self.up(self.down(x))

    def merge(self, sign: int = 1) -> None:
        """Add the trained layer to the frozen one, or take it out again, which rounds."""
        with torch.no_grad():
            self.base.weight += sign * (self.up.weight @ self.down.weight)


class Actor(nn.Module):
    size = _SIZE

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Adapted() for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)

    def merge(self, sign: int = 1) -> None:
        for layer in self.layers:
            layer.merge(sign)


class Tuning(trained_worker.Rank):
    """An actor and its optimizer, of which the actor is replicated, and a twin of both that is not
    placed. Every rank trains alone."""

    def _made(self, size: int) -> tuple[Actor, torch.optim.Optimizer]:
        torch.manual_seed(3)
        actor = Actor()
        return actor, torch.optim.AdamW(
            [each for each in actor.parameters() if each.requires_grad], lr=1e-2
        )

    def register(self, replicated: bool) -> None:
        self.manager.register("actor", self.actor, role="actor", replicated=True)
        self.manager.register("optimizer", self.optimizer)

    @property
    def frozen(self) -> SharedRange:
        """The range with the frozen parameters."""
        (found,) = (
            r
            for r in self.handle("actor").storage.ranges
            if isinstance(r, SharedRange) and r.is_frozen
        )
        return found

    def step(self, also: Any = None) -> None:
        batch = self.batch()
        self.learn(batch, placed=False, averages=False)
        with self.training():
            self.learn(batch, placed=True, averages=False)
        self.check_offloaded()

    def both(self, change: Callable[[Actor], Any]) -> None:
        """Change the actor in a phase, and its twin."""
        change(self.twin)
        with self.manager.phase("weight_sync"):
            change(self.actor)
        self.check_offloaded()

    def check_offloaded(self) -> None:
        """The actor has its twin's values, wherever it is."""
        assert as_bytes(self.actor) == as_bytes(self.twin)
        self.manager.check_integrity()
        if not self.stays:
            assert_nothing_resident(self.manager)

    def look(self) -> None:
        """Load it and compare."""
        with self.manager.phase("log_prob"):
            assert self.handle("actor").state is State.GPU_RESIDENT
            assert as_bytes(self.actor) == as_bytes(self.twin)
            self.manager.check_integrity()
        self.check_offloaded()


def trains(generation: int, settings: dict[str, Any]) -> dict[str, int]:
    """Train, and look at it between the steps. Returns what crossed the link in one look, and the
    host memory."""
    rank = Tuning(generation, **settings)
    rank.step()
    rank.look()
    before = rank.device.crossed.copy()
    rank.look()
    seen = {
        direction: rank.device.crossed[direction] - count for direction, count in before.items()
    }
    for _ in range(3):
        rank.step()
        rank.look()
    assert rank.frozen.is_shared
    assert rank.frozen.alone is None
    seen |= {
        "host": rank.handle("actor").host_bytes,
        "all": sum(r.nbytes for r in rank.handle("actor").storage.ranges),
        "frozen": rank.frozen.nbytes,
    }
    rank.end()
    return seen


@pytest.mark.parametrize(
    "settings",
    [{}, {"policy": "cyclic"}, {"policy": "resident"}],
    ids=["colocated", "cyclic", "resident"],
)
def test_training_with_one_host_copy_of_what_is_frozen(
    two_ranks: Ranks, generation: int, settings: dict[str, Any]
) -> None:
    seen = two_ranks.run(trains, generation, settings)
    fixed, everything = seen[0]["frozen"], seen[0]["all"]
    assert fixed > 0.8 * everything
    slack = 16 * worker.PAGE  # whole pages of each chunk
    assert abs(sum(each["host"] for each in seen) - (fixed + 2 * (everything - fixed))) < slack
    if not settings:
        for each in seen:
            assert abs(each["to_device"] - (fixed / 2 + everything - fixed)) < slack
            assert each["to_host"] == 0


@pytest.mark.parametrize("on", [[0], [1], [0, 1]])
@on_ranks("two_ranks")
def test_frozen_weights_that_change_are_kept_by_the_ranks_that_changed_them(
    generation: int, on: list[int]
) -> None:
    """There and back. The other ranks have the values that they had, and the shared host copy
    still."""
    rank = Tuning(generation)
    rank.step()
    for sign in (1, -1, 1):
        rank.both(lambda model, sign=sign: model.merge(sign) if rank.rank in on else None)
        rank.look()
    rank.step()
    rank.look()
    assert rank.frozen.is_shared == (rank.rank not in on)
    assert rank.frozen.alone is not None
    assert ("has other bytes on rank" in rank.frozen.alone) == (rank.rank in on)
    rank.end()


@on_ranks("two_ranks")
def test_a_frozen_layer_may_be_trained_later(generation: int) -> None:
    rank = Tuning(generation)
    rank.step()
    for model, optimizer in ((rank.actor, rank.optimizer), (rank.twin, rank.twins_optimizer)):
        layer = model.layers[1].base.requires_grad_(True)
        optimizer.add_param_group({"params": [layer.weight, layer.bias]})
    for _ in range(3):
        rank.step()
        rank.look()
    assert not rank.frozen.is_shared
    rank.end()


@pytest.mark.parametrize("on", [[1], [0, 1]])
@on_ranks("two_ranks")
def test_a_checkpoint_of_changed_weights_that_are_on_the_device(
    generation: int, tmp_path: Path, on: list[int]
) -> None:
    """Where all ranks have changed them alike, they share a host copy again."""
    rank = Tuning(generation)
    rank.data.manual_seed(0)  # all train alike
    rank.step()
    if rank.rank in on:
        rank.twin.merge()
    with rank.manager.phase("weight_sync"):
        if rank.rank in on:
            rank.actor.merge()
        checkpoint.async_save(rank.manager, tmp_path / "a", only=["actor"]).result()
        dist.barrier()
    rank.look()
    if len(on) == rank.world_size:  # else the ranks have saved different values
        at_first = {name: value.clone() for name, value in rank.twin.state_dict().items()}
        rank.both(Actor.merge)
        checkpoint.load(rank.manager, tmp_path / "a", only=["actor"])
        rank.twin.load_state_dict(at_first)
        rank.look()
    assert rank.frozen.is_shared == (len(on) == rank.world_size or rank.rank not in on)
    rank.end()
