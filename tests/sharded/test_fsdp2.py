"""FSDP2 (the real `fully_shard`) and torch's tensor parallelism, alone and together: steps with
everything offloaded between any two phases, and each way to get it silently wrong."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch._dynamo.testing import CompileCounter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

import placement
from placement import RegistrationError
from placement.devices import base
from placement.policies import Colocated
from placement.testing import assert_nothing_resident
from tests.sharded import fsdp2_worker as worker
from tests.sharded import training
from tests.sharded.fsdp2_worker import Model, loss_of, sharded
from tests.support.ranks import Ranks, on_ranks
from tests.support.sweeps import few
from tests.support.worker import batch

PROGRAMS = {
    "uneven, tied, adapters": worker.plain_fsdp2,
    "mixed precision, gradients not reduced": functools.partial(
        worker.accumulating_fsdp2, torch.bfloat16
    ),
    "gradients not reduced": functools.partial(worker.accumulating_fsdp2, None),
    "two dimensions": worker.hybrid_fsdp2,
    "parameters and gradients as state": worker.fsdp2_with_lent_state,
    "tensor parallel, foreach": functools.partial(
        worker.tensor_parallel_program, "AdamW", foreach=True
    ),
    "tensor parallel, fused": functools.partial(worker.tensor_parallel_program, "Adam", fused=True),
    "within tensor parallel": functools.partial(worker.both_program, 1, 2),
    "beside tensor parallel": functools.partial(worker.both_program, 2, 1),
}


@pytest.mark.parametrize(
    "name",
    few(PROGRAMS, "uneven, tied, adapters"),
)
def test_steps_on_two_ranks(two_ranks: Ranks, name: str) -> None:
    for outcome in two_ranks.run(training.compare, PROGRAMS[name]):
        assert all(outcome.resident_bytes.values())
        assert all(outcome.offloaded_bytes.values())


def test_steps_on_one_rank(one_rank: Ranks) -> None:
    (outcome,) = one_rank.run(training.compare, worker.plain_fsdp2)
    assert outcome.skipped_bytes["actor"] > 0, "frozen layers were copied at every phase transition"


@on_ranks("two_ranks")
def test_host_memory_is_reserved_for_what_a_rank_holds() -> None:
    model = worker.tensor_parallel(init_device_mesh("cpu", (2,)))
    stepped = [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]
    adam = torch.optim.AdamW(stepped)
    manager, _, handle = worker.worker(model, adam)
    reserved = handle.host_bytes
    with manager.phase("train"):
        worker.loss_of_numbers(model, 0).backward()
        adam.step()
    state = [
        value.to_local()
        for entry in adam.state.values()
        for value in entry.values()
        if isinstance(value, DTensor)
    ]
    local = sum(value.nbytes for value in state)
    assert handle.host_bytes == reserved, "state was born that had no host memory set aside"
    assert local <= reserved <= local + 64 * len(state) + 4096, (
        "more than this rank's shards was reserved"
    )
    assert_nothing_resident(manager)
    manager.close()
    assert local < sum(
        value.nbytes for entry in adam.state.values() for value in entry.values() if value.dim()
    )


# --- by rebinding, as on a torch that cannot swap storages: every tensor over a storage has to be
# known


@pytest.mark.sweep
@on_ranks("two_ranks")
def test_where_storages_cannot_be_swapped() -> None:
    can_swap = base.can_swap
    base.can_swap = lambda: False
    try:
        training.compare(worker.plain_fsdp2, steps=3)
    finally:
        base.can_swap = can_swap


# --- the root stays unsharded after a forward, and reshard() is not recursive


def _unsharded(model: torch.nn.Module) -> list[str]:
    return [
        name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)
    ]


@on_ranks("two_ranks")
def test_registered_while_unsharded() -> None:
    model = sharded(Model(blocks=1), reshard_after_forward=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = [id(parameter) for parameter in model.parameters()]
    loss_of(model, 0)
    assert len(_unsharded(model)) == len(ids)
    model.reshard()
    assert _unsharded(model), "the root alone was resharded"
    loss_of(model, 0)
    states = [part._get_fsdp_state() for part in model.modules() if isinstance(part, FSDPModule)]
    gathered = [
        each._unsharded_param
        for state in states
        for group in state._fsdp_param_groups
        for each in group.fsdp_params
    ]
    # of tensors that are gone at the next reshard
    stale = torch.optim.AdamW(model.parameters(), lr=1e-2)
    manager, actor, adam = worker.worker(model, optimizer)
    assert [id(parameter) for parameter in model.parameters()] == ids
    assert adam.owners == (actor,)
    assert all(each.untyped_storage().nbytes() == 0 for each in gathered), (
        "what was gathered was not given up"
    )
    with pytest.raises(RegistrationError, match="make the optimizer of the sharded parameters"):
        manager.register("stale", stale)
    with manager.phase("log_prob"), torch.no_grad():
        loss_of(model, 0)
        assert _unsharded(model)
        assert manager.audit().ok
        assert all(isinstance(parameter, DTensor) for parameter in actor.adapter.parameters())
    assert [id(parameter) for parameter in model.parameters()] == ids
    assert all(each.untyped_storage().nbytes() == 0 for each in gathered)
    assert_nothing_resident(manager)
    manager.close()


# --- who replaces a local tensor leaves the group with the old one


def _replace_local_tensors(model: torch.nn.Module, way: str) -> None:
    """What moving `model.embed` would do: its parameter belongs to the root's group, which is not
    told."""
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        if way == "assigned":
            parameter._local_tensor = parameter._local_tensor.detach().clone()
    if way == "child":
        for child in model.modules():
            if not isinstance(child, FSDPModule):
                child._apply(lambda tensor: tensor.clone(), recurse=False)


def _steps(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    numbers: range,
    manager: placement.Manager | None = None,
) -> list[bytes]:
    losses = []
    for number in numbers:
        with contextlib.nullcontext() if manager is None else manager.phase("train"):
            loss = loss_of(model, number % 2)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(training.as_bytes(loss))
    return losses


def _make() -> tuple[Model, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = sharded(Model(blocks=1))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


@pytest.mark.parametrize("way", few(["assigned", "child"], "assigned"))
@on_ranks("two_ranks")
def test_a_local_tensor_replaced_behind_the_group_is_named_and_healed(way: str) -> None:
    model, optimizer = _make()
    wanted = _steps(model, optimizer, range(4))
    model, optimizer = _make()
    manager, _, _ = worker.worker(model, optimizer)
    assert _steps(model, optimizer, range(2), manager) == wanted[:2]
    with manager.phase("train"):
        _replace_local_tensors(model, way)
        found = [finding for finding in manager.audit().findings if finding.what == "drift"]
        assert {finding.handle for finding in found} == {"actor"}
        assert any("blocks.0.outer.weight" in finding.detail for finding in found)
    assert_nothing_resident(manager)
    training.assert_off(manager)
    assert _steps(model, optimizer, range(2, 4), manager) == wanted[2:]
    assert_nothing_resident(manager)
    manager.close()


# --- compiled, whole or block by block


def _compile(model: Model, form: str) -> tuple[torch.nn.Module, CompileCounter]:
    counter = CompileCounter()
    if form == "blocks":
        for block in model.blocks:
            block.compile(backend=counter)
        return model, counter
    return torch.compile(model, backend=counter), counter  # type: ignore[return-value]


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("form", "called_before"),
    [("blocks", False), ("wrapper", True)],
)
@on_ranks("two_ranks")
def test_compiled_it_is_refused_before_anything_is_gathered_and_compiled_once(
    form: str, called_before: bool
) -> None:
    torch._dynamo.reset()
    model, optimizer = _make()
    call, counter = _compile(model, form)
    wanted, num_graphs = _steps(call, optimizer, range(4)), counter.frame_count

    torch._dynamo.reset()
    model, optimizer = _make()
    call, counter = _compile(model, form)
    begun = _steps(call, optimizer, range(2)) if called_before else []
    manager = placement.Manager(
        device=placement.testing.SimulatedDevice(
            training.CAPACITY, chunk_bytes=training.CHUNK_BYTES
        )
    )
    manager.register("actor", model, role="actor")
    manager.register("actor.optimizer", optimizer)
    for number in range(len(begun), 4):
        begun += _steps(call, optimizer, range(number, number + 1), manager)
        for refused, given in (
            (call, torch.zeros(1, 2, dtype=torch.int64)),
            (model.blocks[0], torch.zeros(1, worker.WIDTH)),
        ):
            with pytest.raises(placement.NotResidentError, match="'actor' is CPU_OFFLOADED"):
                refused(given)
        assert not _unsharded(model), "poison was gathered"
    assert begun == wanted
    assert counter.frame_count == num_graphs > 0
    manager.close()
    torch._dynamo.reset()


# --- gradients


@pytest.mark.parametrize("name", ["mixed precision, gradients not reduced", "two dimensions"])
@on_ranks("two_ranks")
def test_gradients_that_wait_for_a_reduction_are_dropped_with_the_others(name: str) -> None:
    program = PROGRAMS[name]()
    manager, actor, _ = worker.worker(
        program.model, program.optimizer, policy=Colocated(drop_gradients=True)
    )
    with manager.phase("train"):
        program.backward(0)
        assert any(owned.transient for owned in actor.adapter.owned())
    moved = actor.counters.offloaded_bytes
    assert not any(owned.transient for owned in actor.adapter.owned())
    assert_nothing_resident(manager)
    training.assert_off(manager)
    assert moved <= training.CHUNK_BYTES, (
        "more was copied to the host than the chunk with the counters: dead gradients"
    )
    manager.close()


def test_gradients_zeroed_while_offloaded_do_not_come_back(two_ranks: Ranks) -> None:
    assert two_ranks.run(training.compare_zeroing, worker.plain_fsdp2)


# --- what is refused


@on_ranks("two_ranks")
def test_offloaded_by_torch_in_part_is_refused() -> None:
    model = Model(blocks=1)
    fully_shard(model.blocks[0], offload_policy=CPUOffloadPolicy(pin_memory=False))
    fully_shard(model)
    manager = placement.Manager(device=placement.testing.SimulatedDevice(training.CAPACITY))
    with pytest.raises(
        RegistrationError,
        match=r"CPUOffloadPolicy at blocks\.0\) and others not \(the root\)",
    ):
        manager.register("actor", model, role="actor")
    assert not manager.handles
    manager.register("actor", model, role="actor", external=True)
    manager.close()


# --- an optimizer of a user's own: state in objects


@dataclass
class Mean:
    value: torch.Tensor


class Averaging(optim.AdamW):
    """Keeps a mean of the weights in an object."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault("mean", Mean(torch.zeros_like(p))).value.lerp_(p.detach(), 0.1)


class MeanProgram(training.Program):
    """The means are values, too."""

    def values(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from super().values()
        for index, entry in enumerate(self.optimizer.state.values()):
            if "mean" in entry:
                yield f"mean.{index}", entry["mean"].value


def averaging() -> MeanProgram:
    model = nn.Sequential(nn.Linear(8, 21), nn.Tanh(), nn.Linear(21, 3))
    for part in (model[0], model[2], model):
        fully_shard(part)

    def loss(number: int) -> torch.Tensor:
        found: torch.Tensor = model(batch(number, 8)).square().mean()
        return found

    phases = (("log_prob", "evaluate"), ("train", "learn"))
    return MeanProgram(model, Averaging(model.parameters()), loss, phases=phases)


def test_steps_are_those_without_placement(two_ranks: Ranks) -> None:
    for outcome in two_ranks.run(training.compare, averaging):
        assert outcome.offloaded_bytes["actor"]


@on_ranks("two_ranks")
def test_sharded_state_in_objects_cannot_be_saved(tmp_path: Path) -> None:
    program = averaging()
    manager = training.managed(program)
    with manager.phase("train"):
        program.learn(0)
    with pytest.raises(
        placement.CheckpointError,
        match=r"state of '0.weight' is sharded and has tensors in objects",
    ):
        placement.checkpoint.save(manager, tmp_path)
