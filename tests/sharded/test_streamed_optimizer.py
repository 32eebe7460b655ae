"""Steps that stream their state, of sharded parameters: steps with everything offloaded between any
two phases."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import placement
from placement.policies import Colocated
from placement.registration.partial_step import sliceable_state
from placement.registration.streamed_optimizer import StreamedOptimizer
from placement.testing import SimulatedDevice
from tests.sharded import fsdp2_worker as worker
from tests.sharded import training
from tests.support.buckets import set_bucket_bytes
from tests.support.ranks import Ranks, on_ranks
from tests.support.sweeps import few


def compare_streamed(
    build: Callable[[], training.Program], bucket_bytes: int = 2 * training.CHUNK_BYTES
) -> training.Outcome:
    set_bucket_bytes(bucket_bytes)
    return training.compare(build, policy=Colocated("streamed"))


PROGRAMS = {
    "uneven, tied, adapters, foreach": worker.plain_fsdp2,
    "two dimensions, fused": worker.hybrid_fsdp2,
    "tensor parallel, two groups": functools.partial(
        worker.tensor_parallel_program, "Adam", amsgrad=True
    ),
}


@pytest.mark.parametrize("name", few(PROGRAMS, "uneven, tied, adapters, foreach"))
def test_steps_on_two_ranks(two_ranks: Ranks, name: str) -> None:
    for outcome in two_ranks.run(compare_streamed, PROGRAMS[name]):
        assert outcome.resident_bytes["actor.optimizer"] == 0, "its state was loaded as a whole"
        assert outcome.offloaded_bytes["actor.optimizer"] > 0


def wide_program(kind: str) -> training.Program:
    """Layers of which each rank's shard has moments of several chunks: sharded unevenly, or along
    either dimension."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    width = 301 if kind == "fsdp2" else 300  # tensor parallelism divides evenly
    model = nn.Sequential(nn.Linear(64, width), nn.Tanh(), nn.Linear(width, 64))
    if kind == "fsdp2":
        for part in model:
            fully_shard(part, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=kind == "fsdp2", amsgrad=True)
    return training.Program(
        model,
        optimizer,
        functools.partial(_loss, model),
        phases=(("train", "backward"), ("train", "learn")),
    )


def _loss(model: nn.Module, number: int) -> torch.Tensor:
    loss: torch.Tensor = (
        model(torch.randn(4, 64, generator=torch.Generator().manual_seed(number))).square().mean()
    )
    return loss


@on_ranks("two_ranks")
def test_parts_of_other_elements_are_not_sliced_together() -> None:
    """As many elements of a square weight, but others: along another dimension, of another mesh, or
    summands of a gradient."""
    mesh, other = (init_device_mesh("cpu", (2,), mesh_dim_names=(name,)) for name in ("one", "two"))
    weight = nn.Parameter(distribute_tensor(torch.ones(8, 8), mesh, [Shard(0)]))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = distribute_tensor(torch.ones(8, 8), mesh, [Shard(0)])
    optimizer.step()
    found = [len(sliceable_state(optimizer, weight))]
    for strange in (
        distribute_tensor(torch.ones(8, 8), mesh, [Shard(1)]),
        distribute_tensor(torch.ones(8, 8), other, [Shard(0)]),
    ):
        kept, optimizer.state[weight]["exp_avg"] = optimizer.state[weight]["exp_avg"], strange
        found.append(len(sliceable_state(optimizer, weight)))
        optimizer.state[weight]["exp_avg"] = kept
    weight.grad = DTensor.from_local(torch.ones(8, 8), mesh, [Partial()])
    assert [*found, len(sliceable_state(optimizer, weight))] == [2, 0, 0, 0]


def streamed_and_plain(
    values: torch.Tensor, cut: Placement
) -> tuple[Any, placement.Manager, list[Any], list[Any]]:
    """Mesh, manager, two nets of one parameter and their optimizers, of which the first streams its
    steps."""
    mesh = init_device_mesh("cpu", (2,))
    nets = [
        nn.ParameterList([nn.Parameter(distribute_tensor(values.clone(), mesh, [cut]))])
        for _ in range(2)
    ]
    optimizers = [torch.optim.AdamW(net.parameters(), foreach=True) for net in nets]
    manager = placement.Manager(
        device=SimulatedDevice(1 << 22, chunk_bytes=training.CHUNK_BYTES),
        policy=Colocated("streamed"),
    )
    manager.register("actor", nets[0], role="actor")
    manager.register("adam", optimizers[0])
    return mesh, manager, nets, optimizers


def assert_ends_alike(manager: placement.Manager, nets: list[Any]) -> None:
    ours, plain = (net.state_dict()["0"].to_local().clone() for net in nets)
    manager.close()
    assert ours.equal(plain)


@on_ranks("two_ranks")
def test_gradients_that_the_step_would_reduce_are_refused() -> None:
    """Each rank cuts buckets by its own bytes, so the collectives of one would meet others of the
    other rank."""
    mesh, manager, nets, optimizers = streamed_and_plain(torch.ones(64), Replicate())
    with manager.phase("train"):
        for net in nets:
            net[0].grad = DTensor.from_local(
                torch.full((64,), 1.0 + dist.get_rank()), mesh, [Partial()]
            )
        with pytest.raises(placement.PhaseError, match="redistribute them before the step"):
            optimizers[0].step()
        nets[0][0].grad = nets[0][0].grad.redistribute(placements=nets[0][0].placements)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_ends_alike(manager, nets)


@on_ranks("two_ranks")
def test_a_gradient_that_every_rank_has_whole_needs_no_other_rank() -> None:
    mesh, manager, nets, optimizers = streamed_and_plain(torch.ones(9, 64), Shard(0))
    for step in range(2):
        with manager.phase("train"):
            for net, optimizer in zip(nets, optimizers, strict=True):
                net[0].grad = DTensor.from_local(
                    torch.arange(576.0).view(9, 64) + step, mesh, [Replicate()]
                )
                optimizer.step()
                optimizer.zero_grad()
    assert_ends_alike(manager, nets)


@pytest.mark.parametrize("kind", few(["fsdp2", "tensor parallel"], "fsdp2"))
@on_ranks("two_ranks")
def test_slices_of_sharded_parameters(kind: str) -> None:
    """Of buckets that have one chunk."""
    parts: list[int] = []
    original = StreamedOptimizer.parts_of

    def parts_of(self: StreamedOptimizer, optimizer: Any, parameter: torch.Tensor) -> Any:
        found = original(self, optimizer, parameter)
        parts.append(len(found))
        return found

    with mock.patch.object(StreamedOptimizer, "parts_of", parts_of):
        compare_streamed(functools.partial(wide_program, kind), bucket_bytes=1)
    assert len(parts) - parts.count(1) >= 2 * training.STEPS
