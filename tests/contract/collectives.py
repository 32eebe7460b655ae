"""Two processes whose collectives write into a parameter that is on the device."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from placement import Manager
from placement.testing import SimulatedDevice

WORLD = 2
Collective = Callable[[torch.Tensor, torch.Tensor, int], object]
"""(where it writes, what this rank brings, the rank)"""


def _all_reduce(target: torch.Tensor, own: torch.Tensor, rank: int) -> None:
    dist.all_reduce(target)


def _broadcast(target: torch.Tensor, own: torch.Tensor, rank: int) -> None:
    if rank == 0:
        target.copy_(own)
    dist.broadcast(target, 0)


def _receive(target: torch.Tensor, own: torch.Tensor, rank: int) -> None:
    first, then = (dist.send, dist.recv) if rank == 0 else (dist.recv, dist.send)
    for call in (first, then):
        call(own.contiguous() if call is dist.send else target, 1 - rank)


def _asynchronous(target: torch.Tensor, own: torch.Tensor, rank: int) -> None:
    work = dist.all_reduce(target, async_op=True)
    assert work is not None
    work.wait()


COLLECTIVES: dict[str, Collective] = {
    "all_reduce": _all_reduce,
    "all_reduce, asynchronous": _asynchronous,
    "broadcast": _broadcast,
    "send and recv": _receive,
    "all_gather": lambda target, own, rank: dist.all_gather(list(target.chunk(WORLD)), own.chunk(WORLD)[rank].contiguous()),
    "all_gather_into_tensor": lambda target, own, rank: dist.all_gather_into_tensor(target, own.chunk(WORLD)[rank].contiguous()),
    "reduce_scatter_tensor": lambda target, own, rank: dist.reduce_scatter_tensor(target, torch.cat([own, own + 1])),
    "scatter": lambda target, own, rank: dist.scatter(target, [own, own + 1] if rank == 0 else None, 0),
    "all_to_all_single": lambda target, own, rank: dist.all_to_all_single(target, own),
}


def write_with_each(chunk: int, side: int) -> dict[str, tuple[bool, int]]:
    """By collective: whether the values are those of the same collective elsewhere, and the bytes that were copied. For `Ranks.run`."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = nn.ParameterList([nn.Parameter(torch.randn(side, side)) for _ in range(3)])
    manager = Manager(device=SimulatedDevice(64 * chunk, chunk_bytes=chunk))
    handle = manager.register("actor", model, role="actor")
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    manager.register("sgd", sgd)
    results = {}
    for name, collective in COLLECTIVES.items():
        own = torch.randn(side, side)
        wanted = model[1].detach().clone()
        before = handle.counters.offloaded_bytes
        with manager.phase("train"):
            wanted.copy_(model[1].detach())
            collective(wanted, own, rank)
            collective(model[1].data, own, rank)
        copied = handle.counters.offloaded_bytes - before
        same = handle.state_dict()["1"].equal(wanted)
        with manager.phase("train"):
            same = same and model[1].detach().equal(wanted)
        results[name] = (same, copied)
    del sgd  # it had to live so long: a module that no optimizer steps is not on the device in "train"
    return results
