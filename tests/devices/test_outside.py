"""Device memory that neither torch nor placement holds: measured, named with its likely owners, and
no finding."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing import reductions

from placement.devices.cuda import communicators
from placement.devices.cuda.device import CudaDevice
from placement.devices.memory import Communicator
from placement.testing import Faults, SimulatedDevice
from tests.support.worker import CAPACITY, Worker

CPU = torch.device("cpu")


class WithCommunicators(SimulatedDevice):
    """A device of whose memory communicators hold a part."""

    def __init__(self) -> None:
        super().__init__(CAPACITY)
        self.made: tuple[Communicator, ...] = ()

    def communicators(self) -> Sequence[Communicator]:
        return self.made


def lines(worker: Worker) -> list[str]:
    return [
        line for line in worker.manager.audit().report.splitlines() if line.startswith("outside: ")
    ]


def test_memory_outside_is_measured_and_is_no_finding() -> None:
    device = SimulatedDevice(CAPACITY)
    worker = Worker(device=Faults(device))
    device.outside_bytes = 12345
    audit = worker.manager.audit()
    assert (audit.ok, audit.unaccounted_bytes) == (True, 12345)
    assert "outside: 12,345 bytes are neither torch's nor placement's" in audit.report
    with worker.manager.phase("log_prob"):
        assert worker.manager.snapshot().unaccounted_bytes == 12345
    worker.manager.check_integrity()


def test_each_communicator_is_named_with_its_ranks_and_bytes() -> None:
    device = WithCommunicators()
    worker = Worker(device=device)
    device.made = (
        Communicator("world", tuple(range(8)), 5000, 4000),
        Communicator("tensor", (2, 3), 30, 0),
    )
    device.outside_bytes = 6000
    report = lines(worker)
    assert (
        "outside: communicator 'world' of ranks 0 to 7: 5,000 bytes, 4,000 of them could be "
        "suspended"
    ) in report
    assert "outside: communicator 'tensor' of ranks 2, 3: 30 bytes" in report
    assert len(report) == 3
    snapshot = worker.manager.snapshot()
    assert [each.name for each in snapshot.communicators] == ["world", "tensor"]
    # the second is of the last phase transition
    assert (snapshot.communicator_bytes, snapshot.unaccounted_bytes) == (5030, 0)
    with worker.manager.phase("log_prob"):
        assert worker.manager.snapshot().unaccounted_bytes == 6000


def test_communicators_that_say_nothing_hold_at_most_what_has_grown() -> None:
    device = WithCommunicators()
    device.outside_bytes = 100
    worker = Worker(device=device)
    with worker.manager.phase("log_prob"):
        device.outside_bytes = 150  # no communicator appears: something else
    device.outside_bytes = 1150
    device.made = (Communicator("world", (0,), None, 0, "the library is too old"),)
    with worker.manager.phase("log_prob"):
        device.outside_bytes = 5150  # and again something else
    first, *others = lines(worker)
    assert first.startswith(
        "outside: 5,150 bytes are neither torch's nor placement's: the driver's context and its "
        "kernels, "
    )
    assert first.endswith(", and other processes")
    assert others == [
        "outside: communicator 'world' of rank 0: size unknown (the library is too old)",
        "outside: grew by 1,000 bytes while communicators appeared, which hold at most that",
    ]
    assert worker.manager.snapshot().communicator_bytes is None


class Backend:
    """A backend of a process group of torch, as `communicators` sees it."""

    def __init__(self, name: str = "nccl", *, made: bool = True) -> None:
        self.backend_name, self.made = name, made

    def _get_backend_name(self) -> str:
        return self.backend_name

    def _is_initialized(self) -> bool:
        return self.made


class Counting(Backend):
    """A backend whose library counts its memory."""

    def __init__(self, stats: dict[str, int] | str) -> None:
        super().__init__()
        self.stats = stats

    def memory_stats(self) -> dict[str, int]:
        if isinstance(self.stats, str):
            raise RuntimeError(self.stats)  # noqa: TRY004 - torch's
        return self.stats


class Group:
    """A process group of torch, as `communicators` sees it."""

    def __init__(self, number: int, backend: Any) -> None:
        self.group_name, self.group_desc = str(number), "undefined" if number else "default_pg"
        self._backend = backend

    def _get_backend(self, device: torch.device) -> Any:
        if self._backend is None:
            raise RuntimeError(f"No backend type associated with device type {device.type}")
        return self._backend


def found(*backends: Any) -> list[Communicator]:
    return list(
        communicators._of_groups(
            CPU, [(Group(i, each), {5: 0, 3: 1}) for i, each in enumerate(backends)]
        )
    )


@pytest.fixture
def new_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loaded NCCL, if torch has one, can count."""
    monkeypatch.setattr(communicators, "_has_statistics", lambda: True)


@pytest.mark.usefixtures("new_nccl")
def test_a_library_that_counts_is_believed() -> None:
    active = Counting({"persist": 10, "suspend": 500, "suspended": 0, "total": 510})
    suspended = Counting({"persist": 20, "suspend": 500, "suspended": 1, "total": 520})
    assert found(active, SimpleNamespace(wrapped_pg=suspended)) == [
        Communicator("default_pg 0", (3, 5), 510, 500),
        Communicator("1", (3, 5), 20, 0),
    ]


@pytest.mark.usefixtures("new_nccl")
def test_a_library_that_does_not_count_is_named_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (by_torch, by_nccl) = found(
        Backend(),
        Counting("getMemoryStats() requires NCCL 2.29.7 or later\nException raised from ..."),
    )
    assert (by_torch.nbytes, by_nccl.nbytes) == (None, None)
    assert "torch 2.12" in str(by_torch.unknown_because)
    assert by_nccl.unknown_because == "getMemoryStats() requires NCCL 2.29.7 or later"
    monkeypatch.setattr(communicators, "_has_statistics", lambda: False)
    (refused,) = found(Counting({}))
    assert refused.nbytes is None  # an older one than torch expects is not called
    assert "NCCL 2.29.7 or later can" in str(refused.unknown_because)


def test_groups_without_a_communicator_of_nccl_are_left_out() -> None:
    assert found(None, Backend("gloo"), Backend(made=False), SimpleNamespace()) == []


def test_without_nccl_there_are_none() -> None:
    assert communicators.of_device(CPU) == []  # no groups
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert communicators.of_device(CPU) == []
        assert communicators.of_device(torch.device("cuda", 0)) == []
    finally:
        dist.destroy_process_group()


class Shared(CudaDevice):
    """A device of which there are only the tensors that other processes have dropped."""

    def __init__(self, **changes: Any) -> None:
        self.ipc_collected_bytes = self.calls = 0
        self.allocated, self.dropped, self.is_measured = 1000, 300, False
        self.captures, self.error = False, None
        vars(self).update(changes)

    def collect(self) -> None:
        self.calls += 1
        if self.error:
            raise self.error
        self.allocated, self.dropped = self.allocated - self.dropped, 0

    def is_capturing(self) -> bool:
        return self.captures

    def _torch_bytes(self, what: str) -> int:
        self.is_measured = True
        return self.allocated


@pytest.mark.parametrize(
    ("changes", "collected_bytes", "calls"),
    [
        ({}, 300, 2),
        ({"captures": True}, 0, 0),
        ({"error": RuntimeError("CUDA error: an illegal memory access was encountered")}, 0, 2),
    ],
    ids=["counted once", "not during a capture", "an error is left to others"],
)
@pytest.mark.parametrize("was_shared", [True, False])
def test_dropped_memory_is_taken_back(
    monkeypatch: pytest.MonkeyPatch,
    was_shared: bool,
    changes: dict[str, Any],
    collected_bytes: int,
    calls: int,
) -> None:
    device = Shared(**changes)
    monkeypatch.setattr(torch._C, "_cuda_ipc_collect", device.collect, raising=False)
    monkeypatch.setattr(reductions, "shared_cache", {"handle": None} if was_shared else {})
    for _ in range(2):
        device._collect_shared()
    assert (device.ipc_collected_bytes, device.calls) == (
        collected_bytes if was_shared else 0,
        calls,
    )
    assert device.allocated == 1000 - collected_bytes
    assert not device.is_measured or was_shared, "it costs more than the rest"
