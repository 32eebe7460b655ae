"""Replicated handles: one host copy of what is frozen for the ranks of a machine, loaded by all of
them together. Real processes over gloo."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from placement import HostMemoryError, Manager, PlacementError, RegistrationError, State, checkpoint
from placement.core.errors import GroupError, IntegrityError
from placement.devices.memory import Chunk
from placement.group import StoreGroup
from placement.registration import replication
from placement.testing import SimulatedDevice
from tests.group import part_worker, tuned_worker
from tests.group import replicated_worker as worker
from tests.group.conftest import beside
from tests.group.replicated_worker import Rank, as_bytes, meet_again
from tests.group.tuned_worker import Rank as Tuning
from tests.sharded.one_of_each import mesh, net
from tests.sharded.training import bytes_of, device_of
from tests.support.ranks import Ranks, group_of_all, on_ranks
from tests.support.sweeps import few


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
    differs = "another model"
    assert {mistake: told for mistake, told in first.items() if mistake != differs} == {
        mistake: told for mistake, told in third.items() if mistake != differs
    }
    for mistake, words in (
        ("a Lazy", "Lazy"),
        ("an engine", "engine"),
        ("an optimizer", "it is an optimizer"),
        ("external", "placement"),
        ("nothing frozen", "no frozen parameters"),
    ):
        assert words in second[mistake]
        assert f"rank 1: {second[mistake]}" in first[mistake]
    # A rank that is late hears rank 1's own error before it has compared.
    words = ("rank 1 has other frozen tensors than the rest", f"rank 1: {second[differs]}")
    assert all(any(each in told[differs] for each in words) for told in (first, third))
    assert "registers them in another way" in second[differs]
    assert "rank 1: is about to enter log_prob" in first["something else"]


@pytest.mark.sweep
def test_an_fsdp2_actor_and_its_reference_train_on_after_one_rank_was_full(
    two_ranks: Ranks, generation: int
) -> None:
    for told in two_ranks.run(part_worker.full, generation, "cpu", 1):
        assert len(told) == 2
        assert all("rank 1: DeviceMemoryError" in each for each in told)


@pytest.mark.sweep
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


@pytest.mark.sweep
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


@on_ranks("two_ranks")
def test_writing_a_readonly_one_is_an_error_on_that_rank_and_changes_nothing(
    generation: int,
) -> None:
    rank = Rank(generation)
    rank.register()
    rank.load()

    def write() -> None:
        with rank.manager.phase("log_prob"), torch.no_grad():
            if rank.rank == 1:
                rank.ref.body[0].weight.fill_(0.5)

    told = rank.fails(write, IntegrityError if rank.rank == 1 else GroupError)
    assert "'ref' is readonly" in told
    meet_again(rank.load)
    rank.check_host_copy()
    assert rank.alone is None
    rank.manager.close()


@on_ranks("two_ranks")
def test_what_one_rank_writes_into_a_state_dict_of_a_readonly_one_is_its_own(
    generation: int,
) -> None:
    rank = Rank(generation)
    rank.register()
    if rank.rank == 0:
        rank.handle.state_dict()["odd"].fill_(3.0)
        rank.wanted |= bytes_of({"odd": torch.full((3,), 3.0)})
    dist.barrier()
    rank.check_host_copy()
    rank.load()
    rank.load()
    dist.barrier()
    assert rank.alone == (
        "it has a host copy of its own"
        if rank.rank == 0
        else "rank 0 takes part no longer, and has logged why"
    )
    rank.manager.close()


# --- what is trained in part: one host copy of the frozen weights, beside adapters that each rank
# trains


@pytest.mark.parametrize(
    "settings",
    few(
        [{}, {"policy": "cyclic"}, {"policy": "resident"}, {"verify": "always"}],
        {"policy": "cyclic"},
    ),
    ids=["colocated", "cyclic", "resident", "verified"],
)
def test_training_with_one_host_copy_of_what_is_frozen(
    two_ranks: Ranks, generation: int, settings: dict[str, Any]
) -> None:
    seen = two_ranks.run(tuned_worker.trains, generation, settings)
    frozen, everything = seen[0]["frozen"], seen[0]["all"]
    assert frozen > 0.8 * everything
    slack = 16 * worker.PAGE  # whole pages of each chunk
    assert abs(sum(each["host"] for each in seen) - (frozen + 2 * (everything - frozen))) < slack
    if not settings:
        for each in seen:
            assert abs(each["to_device"] - (frozen / 2 + everything - frozen)) < slack
            assert each["to_host"] == 0


@pytest.mark.parametrize("on", few([[0], [1], [0, 1]], [0, 1]))
def test_frozen_weights_that_change_are_kept_by_the_ranks_that_changed_them(
    two_ranks: Ranks, generation: int, on: list[int]
) -> None:
    two_ranks.run(tuned_worker.merges, generation, on)


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
    (warning,) = rank.warnings()
    assert "layers.1.base." in warning
    rank.end()


@on_ranks("two_ranks")
def test_a_checkpoint_of_changed_weights_that_are_on_the_device(
    generation: int, tmp_path: Path
) -> None:
    rank = Tuning(generation)
    rank.data.manual_seed(0)  # all train alike
    rank.step()
    if rank.rank == 1:
        rank.twin.merge()
    with rank.manager.phase("weight_sync"):
        if rank.rank == 1:
            rank.actor.merge()
        checkpoint.async_save(rank.manager, tmp_path / str(rank.rank), only=["actor"]).result()
        dist.barrier()
    rank.look()
    assert rank.frozen.is_shared == (rank.rank == 0)
    rank.end()


@pytest.mark.parametrize("loaded", few(["on the device", "offloaded"], "offloaded"))
@on_ranks("two_ranks")
def test_a_checkpoint_is_loaded_for_this_rank_alone(
    generation: int, tmp_path: Path, loaded: str
) -> None:
    """On the device, equal values stay shared."""
    rank = Tuning(generation)
    rank.data.manual_seed(0)
    rank.step()
    checkpoint.save(rank.manager, tmp_path / "a", only=["actor"])
    at_first = {name: value.clone() for name, value in rank.twin.state_dict().items()}
    assert rank.frozen.is_shared
    rank.step()
    dist.barrier()
    if loaded == "offloaded":
        checkpoint.load(rank.manager, tmp_path / "a", only=["actor"])
    else:
        with rank.manager.phase("restore"):
            checkpoint.load(rank.manager, tmp_path / "a", only=["actor"])
    rank.twin.load_state_dict(at_first)
    rank.look()
    assert rank.frozen.is_shared == (loaded == "on the device")
    rank.end()


@pytest.mark.parametrize("taken", few(["on the device", "offloaded"], "offloaded"))
@on_ranks("two_ranks")
def test_what_one_rank_writes_into_a_state_dict_is_its_own(generation: int, taken: str) -> None:
    """Also where it was taken before the offload."""
    rank = Tuning(generation)
    rank.step()
    rank.look()
    held: dict[str, torch.Tensor] = {}
    if taken == "offloaded":
        held |= rank.actor.state_dict() if rank.rank == 0 else {}
    else:
        with rank.manager.phase("log_prob"):
            held |= rank.actor.state_dict() if rank.rank == 0 else {}
    if held:
        with torch.no_grad():
            for values in (held, rank.twin.state_dict()):
                values["layers.2.base.weight"].fill_(0.25)
    dist.barrier()
    rank.check_offloaded()
    rank.look()
    rank.step()
    rank.look()
    assert rank.frozen.is_shared == (rank.rank == 1)
    assert len(rank.warnings()) == (rank.rank == 0)
    rank.end()


@on_ranks("two_ranks")
def test_a_copy_of_its_own_is_in_a_file_where_host_memory_is_full(generation: int) -> None:
    with TemporaryDirectory() as folder:
        rank = Tuning(generation, host_limit_bytes=1, disk_directory=folder)
        rank.step()
        tuned_worker.change_frozen(rank)
        assert not rank.frozen.is_shared
        assert rank.frozen.host.file_bytes
        rank.step()
        rank.look()
        rank.end()


@on_ranks("two_ranks")
def test_a_rank_without_memory_for_a_copy_of_its_own_keeps_its_values(generation: int) -> None:
    rank = Tuning(generation)
    rank.step()
    lacks = rank.rank == 0
    if lacks:
        rank.device.fail("host", at=1, forever=True)
    with pytest.raises(HostMemoryError if lacks else GroupError, match="host"):
        tuned_worker.change_frozen(rank)
    assert bool(rank.handle.resident_bytes) == lacks
    if lacks:
        assert as_bytes(rank.actor) == as_bytes(rank.twin)
        with pytest.raises(HostMemoryError):
            rank.manager.handles["actor"].holding.make_host_copy_own(rank.frozen)
    dist.barrier()
    rank.device.clear()
    meet_again(rank.look)
    rank.look()
    assert not rank.frozen.is_shared
    rank.end()


@pytest.mark.sweep
def test_device_calls_may_fail_while_frozen_weights_change(
    two_ranks: Ranks, generation: int, counted: Callable[[str], None]
) -> None:
    cases = two_ranks.run(tuned_worker.faults, generation, 0, 2, deadline_seconds=240.0)
    assert min(cases) > 5
    counted(f"frozen weights change: device calls of rank 0 fail once: {cases[0]} cases")


@pytest.mark.parametrize("at", few([1, 2, 3], 1))
@on_ranks("two_ranks")
def test_what_cannot_come_back_is_offloaded_and_stays_shared(generation: int, at: int) -> None:
    """An exit fails after it has given memory back, and the driver has one chunk too few."""
    rank = Tuning(generation)
    rank.step()
    rank.look()
    plain, released = rank.device.release, list[int]()

    def release(*chunks: Chunk) -> None:
        plain(*chunks)
        released.append(len(chunks))
        if len(released) == at:
            rank.device.fail("create", at=sum(released), forever=True)
            raise RuntimeError("injected")

    with contextlib.suppress(PlacementError, RuntimeError), rank.manager.phase("log_prob"):
        if rank.rank == 0:
            rank.device.release = release  # type: ignore[method-assign]
    assert (rank.rank == 0) == bool(released)
    rank.device.release = plain  # type: ignore[method-assign]
    rank.device.clear()
    rank.check_offloaded()
    meet_again(rank.look)
    assert rank.frozen.is_shared
    assert not rank.warnings()
    rank.end()


# --- a part of the group


@pytest.mark.sweep
def test_ranks_of_a_mesh_that_replicates_share_their_shards(generation: int) -> None:
    four = Ranks(4)
    seen = four.run(part_worker.hybrid, generation, "cpu")
    four.close()
    for rank, (members, _) in enumerate(seen):
        assert members == [(rank % 2, rank % 2 + 2)]
    shares = [share for _, share in seen]
    # whole pages
    assert [shares[rank] + shares[rank + 2] for rank in (0, 1)] == pytest.approx([1, 1], rel=0.15)


@on_ranks("three")
def test_ranks_of_each_machine_share_a_copy(generation: int) -> None:
    """Rank 1 is on a machine of its own."""
    is_apart = dist.get_rank() == 1
    with (
        mock.patch.object(replication, "_machine", return_value="another")
        if is_apart
        else contextlib.nullcontext()
    ):
        manager = Manager(device=device_of("cpu"), group=group_of_all(generation, 60.0))
        for name in ("ref", "teacher"):
            torch.manual_seed(4)
            model = tuned_worker.Actor()
            wanted = as_bytes(model)
            handle = manager.register(name, model, role="ref", readonly=True, replicated=True)
            assert part_worker.shared_with(handle) == [(1,) if is_apart else (0, 2)]
            with manager.phase("ref_log_prob"):
                assert as_bytes(model) == wanted
        assert len(manager._replication._machine_groups) == 1
        manager.close()


@on_ranks("three")
def test_a_group_that_nobody_can_tell_is_refused(generation: int) -> None:
    """Nobody can know who holds the same; and rank 0 names another group than the others, who raise
    the reason of whoever failed first."""
    manager = Manager(device=device_of("cpu"), group=group_of_all(generation, 5.0))
    sharded = net("cpu")
    fully_shard(sharded, mesh=mesh("cpu"))
    pair = dist.new_group([0, 1], backend="gloo")
    unequal = "of the (2 ranks of its process group 1|3 ranks of its process group 2) register it"
    for model, group, said in (
        (sharded, True, "0 replicate all of them"),
        (net("cpu"), pair if dist.get_rank() == 0 else True, unequal),
    ):
        before = bytes_of([*model.parameters()])
        with pytest.raises(RegistrationError, match=said):
            manager.register("actor", model, role="actor", replicated=group)
        assert bytes_of([*model.parameters()]) == before
        assert all(parameter.device.type == "cpu" for parameter in model.parameters())
    assert not manager.handles
    manager.close()
