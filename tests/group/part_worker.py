"""What each rank does with sharded programs under a group: the ranks that hold the same are a part
of it, or one of them is full."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from placement import Handle, Manager, State
from placement.core.errors import GroupError
from placement.devices.base import Device
from placement.storage.shared import SharedRange
from placement.testing import SimulatedDevice, assert_nothing_resident
from tests.group.replicated_worker import Reference, as_bytes
from tests.sharded.one_of_each import fsdp2, net, program
from tests.sharded.training import Program, bytes_of, device_of, here
from tests.sharded.training import as_bytes as tensor_bytes
from tests.support.ranks import group_of_all


def shared_with(handle: Handle) -> list[tuple[int, ...]]:
    """The ranks that share each of its shared ranges now."""
    assert handle.holding is not None
    found = [r for r in handle.holding.ranges if isinstance(r, SharedRange)]
    assert found
    return [r.shares.members if r.is_shared else () for r in found]


def _manager(generation: int, device: str) -> Manager:
    return Manager(
        device=device_of(device), group=group_of_all(generation, 60.0), budget_bytes=1 << 40
    )


def _train(
    plain: Program,
    placed: Program,
    manager: Manager,
    steps: range,
    look: Callable[[str], object] = id,
) -> None:
    """Steps of both, which compute the same. `look` is called in each phase, with its name."""
    for step in steps:
        for phase, method in plain.phases:
            wanted = getattr(plain, method)(step)
            with manager.phase(phase):
                assert tensor_bytes(getattr(placed, method)(step)) == tensor_bytes(wanted)
                look(phase)
        assert_nothing_resident(manager)


def hybrid(generation: int, device: str) -> tuple[list[tuple[int, ...]], float]:
    """HSDP on a mesh of two times so many ranks, with frozen blocks. The ranks that share these,
    and this rank's share of their bytes."""

    def build() -> Program:
        ranks = init_device_mesh(
            device, (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard")
        )
        model = net(device)
        model.blocks.requires_grad_(False)
        for part in (*model.blocks, model):
            fully_shard(part, mesh=ranks)
        return program(model, device)

    plain, placed = build(), build()
    manager = _manager(generation, device)
    actor = manager.register("actor", placed.model, role="actor", replicated=True)
    manager.register("optimizer", placed.optimizer)
    _train(plain, placed, manager, range(4))
    (shared,) = (r for r in actor.storage.ranges if isinstance(r, SharedRange))
    members, share = shared_with(actor), shared.host.held_bytes / shared.nbytes
    with manager.phase("train"):
        assert bytes_of(dict(placed.values())) == bytes_of(dict(plain.values()))
    manager.close()
    assert bytes_of(dict(placed.values())) == bytes_of(dict(plain.values()))
    return members, share


@contextmanager
def little_left(device: Device, nbytes: int) -> Iterator[None]:
    """Somebody else has all of the device's memory but `nbytes`."""
    if isinstance(device, SimulatedDevice):
        capacity, device.capacity_bytes = (
            device.capacity_bytes,
            device.memory().chunk_bytes + nbytes,
        )
        yield
        device.capacity_bytes = capacity
    else:
        device.trim()
        taken = torch.empty(
            device.memory().free_bytes - nbytes, dtype=torch.uint8, device=device.torch_device
        )
        yield
        del taken
        device.trim()


def full(generation: int, device: str, rank: int) -> list[str]:
    """An FSDP2 actor, its optimizer and a replicated reference: what each rank of a GRPO job holds.

    A step, an entry of each phase for which one rank has too little memory, another step. Returns
    what the entries raised.
    """
    plain, placed = fsdp2(device), fsdp2(device)
    manager = _manager(generation, device)
    placed.register(manager)
    torch.manual_seed(5)
    reference = Reference(200 if device == "cuda" else 1).to(here(device))
    wanted = as_bytes(reference)
    manager.register("ref", reference, role="ref", readonly=True, replicated=True)

    def look(phase: str) -> None:
        assert phase != "log_prob" or as_bytes(reference) == wanted

    _train(plain, placed, manager, range(1), look)
    told = []
    for phase in ("log_prob", "train"):
        needed = sum(
            h.num_bytes
            for h in manager.handles.values()
            if (h.role == "ref") == (phase == "log_prob")
        )
        with little_left(manager.device, needed // 2) if dist.get_rank() == rank else nullcontext():
            try:
                with manager.phase(phase):
                    raise AssertionError(f"phase {phase} was entered")
            except GroupError as error:
                told.append(str(error))
        assert all(handle.state is State.CPU_OFFLOADED for handle in manager.handles.values())
        assert_nothing_resident(manager)
        manager.check_integrity()
    _train(plain, placed, manager, range(1, 2), look)
    manager.close()
    return told
