"""What each rank does where the ranks that hold the same are a part of the manager's group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from placement import Handle, Manager
from placement.core.errors import RegistrationError
from placement.registration import replication
from placement.storage.shared.ranges import SharedRange
from placement.testing import assert_nothing_resident
from tests.group.replicated_worker import as_bytes
from tests.group.trained_worker import Actor, Heard
from tests.sharded.one_of_each import mesh, net, program
from tests.sharded.training import Program, bytes_of, device_of, here
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


def pairs(generation: int, different: int | None) -> list[str]:
    """Ranks 0 and 2 have one model, 1 and 3 another one, each pair with a process group. What a step logs after which one rank differs."""
    numbers = [[0, 2], [1, 3]]
    made = [dist.new_group(each, backend="gloo") for each in numbers]
    ours = dist.get_rank() % 2
    torch.manual_seed(ours)
    model, twin = Actor(), Actor()
    twin.load_state_dict(model.state_dict())
    manager, heard = Manager(device=device_of("cpu"), group=group_of_all(generation, 60.0)), Heard()
    handle = manager.register("actor", model, role="actor", replicated=made[ours])
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (twin, model)]
    manager.register("optimizer", optimizers[1])

    def step(actor: Actor, optimizer: torch.optim.Optimizer, number: int) -> None:
        actor(torch.full((2, actor.size), float(number)).to(actor.odd.device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if number == 3 and dist.get_rank() == different:
            with torch.no_grad():
                actor.odd += 1

    for number in range(1, 4):
        step(twin, optimizers[0], number)
        with manager.phase("train"):
            step(model, optimizers[1], number)
        shares = different is None or number < 3 or different not in numbers[ours]
        assert shared_with(handle) == [tuple(numbers[ours]) if shares else ()]
    assert bytes_of(handle.state_dict()) == bytes_of(twin.state_dict())
    manager.close()
    assert as_bytes(model) == as_bytes(twin)
    return heard.take()


def machines(generation: int, alone: int) -> list[Any]:
    """One rank is on a machine of its own. The ranks that share the reference, before and after a second one is registered."""
    if dist.get_rank() == alone:
        replication._machine = lambda: "another"
    try:
        manager = Manager(device=device_of("cpu"), group=group_of_all(generation, 60.0))
        found = []
        for name in ("ref", "teacher"):
            torch.manual_seed(4)
            model = Actor()
            wanted = as_bytes(model)
            found += shared_with(manager.register(name, model, role="ref", readonly=True, replicated=True))
            with manager.phase("ref_log_prob"):
                assert as_bytes(model) == wanted
        assert len(manager._replication._machine_groups) == 1
        manager.close()
    finally:
        replication._machine = _machine
    return found


_machine = replication._machine


def _locals(model: torch.nn.Module) -> list[bytes]:
    return [tensor_bytes(getattr(each, "_local_tensor", each)) for each in model.parameters()]


def refused(generation: int) -> list[str]:
    """What the ranks are told where nobody can know who holds the same, and where the ranks name other groups."""
    told = []
    manager = Manager(device=device_of("cpu"), group=group_of_all(generation, 5.0))
    sharded = net("cpu")
    fully_shard(sharded, mesh=mesh("cpu"))
    pair = dist.new_group([0, 1], backend="gloo")
    for model, group in ((sharded, True), (net("cpu"), pair if dist.get_rank() == 0 else True)):
        before = _locals(model)
        try:
            manager.register("actor", model, role="actor", replicated=group)
            raise AssertionError("it was registered")
        except RegistrationError as error:
            told.append(str(error))
        assert _locals(model) == before
        assert all(parameter.device == here("cpu") for parameter in model.parameters())
    assert not manager.handles
    manager.close()
    return told
