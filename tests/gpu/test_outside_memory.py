"""Device memory outside torch and placement on a real device: communicators, and tensors that
another process has opened."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import placement
from placement.testing import assert_nothing_resident
from tests.support.ranks import Ranks

pytestmark = pytest.mark.gpu

MIB = 1 << 20
COUNTS = (
    hasattr(torch._C._distributed_c10d.Backend, "memory_stats")
    and dist.is_nccl_available()
    and torch.cuda.nccl.version() >= (2, 29, 7)
)
"""Whether NCCL counts the memory of a communicator, and torch asks it."""


def consume(connection: Connection) -> None:
    """Hold what was sent last, and say what is in it. None drops it."""
    held: Any = None
    while True:
        try:
            received = connection.recv()
        except EOFError:
            return
        held = received
        del received
        total = sum(float(tensor.sum(dtype=torch.float64)) for tensor in held or ())
        torch.cuda.synchronize()
        connection.send(total)


class Consumer:
    def __init__(self) -> None:
        context = torch.multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=consume, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def hold(self, tensors: list[torch.Tensor] | None) -> float:
        """Let the process hold these tensors instead of the ones before. Returns the sum of their
        elements."""
        self._connection.send(tensors)
        return float(self._connection.recv())

    def close(self) -> None:
        self._connection.close()
        self._process.join(30)


@pytest.fixture
def consumer() -> Iterator[Consumer]:
    started = Consumer()
    yield started
    started.close()


def test_what_another_process_dropped_comes_back_at_the_next_phase_transition(
    manager: placement.Manager, consumer: Consumer
) -> None:
    net = nn.Linear(256, 256).cuda()
    manager.register("actor", net, role="actor")
    device = manager.device
    with manager.phase("log_prob"):
        pass
    device.trim()
    empty, reserved = device.torch_allocated_bytes(), device.memory().torch_reserved_bytes
    collected = device.ipc_collected_bytes
    shared = torch.ones(64 * MIB, dtype=torch.uint8, device="cuda")
    assert consumer.hold([shared]) == 64 * MIB
    del shared
    with manager.phase("log_prob"):
        pass
    assert device.torch_allocated_bytes() - empty == 64 * MIB, "the other process still has it"
    assert device.ipc_collected_bytes == collected
    consumer.hold(None)
    assert device.torch_allocated_bytes() - empty == 64 * MIB, "torch does not look by itself"
    with manager.phase("log_prob"):
        pass
    assert device.torch_allocated_bytes() == empty
    assert manager.snapshot().ipc_collected_bytes - collected == 64 * MIB
    device.trim()
    assert device.memory().torch_reserved_bytes == reserved


@pytest.fixture
def group() -> Iterator[None]:
    if not dist.is_nccl_available():
        pytest.skip("this build of torch has no NCCL")
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_communicator_is_named_once_it_is_made(manager: placement.Manager, group: None) -> None:
    net = nn.Linear(256, 256).cuda()
    manager.register("actor", net, role="actor")
    assert manager.snapshot().communicators == ()
    dist.all_reduce(torch.ones(1, device="cuda"))
    with manager.phase("log_prob"):
        pass
    (made,) = manager.snapshot().communicators
    assert made.ranks == (0,)
    assert (made.nbytes is not None) is COUNTS
    assert (made.unknown_because is None) is COUNTS
    audit = manager.audit()
    assert audit.ok
    assert audit.unaccounted_bytes > 0, "at least the driver's context"
    assert f"communicator {made.name!r} of rank 0" in audit.report


def growth() -> tuple[int, int | None, int, str]:
    """Unaccounted bytes that appeared with the communicator of all ranks, and what is said about
    it. For `Ranks.run`."""
    device = torch.device("cuda", torch.cuda.current_device())
    manager = placement.Manager(device=str(device))
    net = nn.Linear(256, 256).to(device)
    manager.register("actor", net, role="actor")
    with manager.phase("log_prob"):
        torch.ones(256, device=device).sum().item()
    before = manager.snapshot()
    dist.all_reduce(torch.ones(8 * MIB, device=device))
    torch.cuda.synchronize()
    with manager.phase("log_prob"):
        pass
    after = manager.snapshot()
    report = manager.audit().report
    assert_nothing_resident(manager)
    manager.close()
    made = {each.name for each in after.communicators} - {
        each.name for each in before.communicators
    }
    return (
        after.unaccounted_bytes - before.unaccounted_bytes,
        after.communicator_bytes,
        len(made),
        report,
    )


def test_the_communicator_of_two_gpus_is_what_unaccounted_memory_grew_by(two_gpus: Ranks) -> None:
    for grown, counted, num_made, report in two_gpus.run(growth):
        assert grown > 0
        assert num_made == 1, report
        if counted is None:
            assert "while communicators appeared, which hold at most that" in report
        else:
            assert 0 < counted <= grown + 64 * MIB
