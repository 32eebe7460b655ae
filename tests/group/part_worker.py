"""What each rank does where the ranks that hold the same are a part of the manager's group."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from placement import Handle, Manager
from placement.storage.shared import SharedRange
from placement.testing import assert_nothing_resident
from tests.sharded.one_of_each import net, program
from tests.sharded.training import Program, bytes_of, device_of
from tests.sharded.training import as_bytes as tensor_bytes
from tests.support.ranks import group_of_all


def shared_with(handle: Handle) -> list[tuple[int, ...]]:
    """The ranks that share each of its shared ranges now."""
    assert handle.holding is not None
    found = [r for r in handle.holding.ranges if isinstance(r, SharedRange)]
    assert found
    return [r.shares.members if r.is_shared else () for r in found]


def _trained(plain: Program, placed: Program, manager: Manager, steps: int) -> None:
    for step in range(steps):
        for phase, method in plain.phases:
            wanted = getattr(plain, method)(step)
            with manager.phase(phase):
                assert tensor_bytes(getattr(placed, method)(step)) == tensor_bytes(wanted)
        assert_nothing_resident(manager)


def hybrid(generation: int, device: str) -> tuple[list[tuple[int, ...]], float]:
    """HSDP on a mesh of two times so many ranks. The ranks that share each range, and this rank's share of the bytes of all."""

    def build() -> Program:
        ranks = init_device_mesh(device, (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
        model = net(device)
        for part in (*model.blocks, model):
            fully_shard(part, mesh=ranks)
        return program(model, device)

    plain, placed = build(), build()
    manager = Manager(device=device_of(device), group=group_of_all(generation, 60.0), budget_bytes=1 << 40)
    handles = [
        manager.register("actor", placed.model, role="actor", replicated=True),
        manager.register("optimizer", placed.optimizer, replicated=True),
    ]
    _trained(plain, placed, manager, 4)
    ranges = [r for each in handles for r in each.holding.ranges if isinstance(r, SharedRange)]  # type: ignore[union-attr]
    members = [each for handle in handles for each in shared_with(handle)]
    share = sum(r.held_host_bytes for r in ranges) / sum(r.nbytes for r in ranges)
    with manager.phase("train"):
        assert bytes_of(dict(placed.values())) == bytes_of(dict(plain.values()))
    manager.close()
    assert bytes_of(dict(placed.values())) == bytes_of(dict(plain.values()))
    return members, share
