"""What the processes of the tests of leases do."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from placement import Manager
from placement.core.snapshot import LeaseSnapshot
from placement.group import Lease
from placement.planning import planner
from placement.testing import SimulatedDevice, assert_nothing_resident

CHUNK = 4096
CAPACITY = 100 * CHUNK


def lease_of(manager: Manager) -> LeaseSnapshot:
    found = manager.snapshot().lease
    assert found is not None
    return found


class Holder:
    """A lease, whose methods are called here."""

    def __init__(self, folder: str, keywords: dict[str, Any] | None = None) -> None:
        self.lease = Lease("GPU-1", 100, folder=folder, **(keywords or {}))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.lease, name)

    def wait(self, nbytes: int) -> int:
        self.lease.wait(nbytes)
        return self.lease.held_bytes

    def stop_in_turn(self) -> None:
        with self.lease._ledger.turn():
            os.kill(os.getpid(), signal.SIGSTOP)


def use(lease: Lease) -> None:
    """Every way to take and give back."""
    lease.grow(60)
    lease.settle(30)
    lease.wait(100)
    lease.settle(0)
    with lease.holding(50):
        lease.snapshot()


class Doomed:
    """Dies at a line of what a lease does."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def die_at(self, line: int) -> int:
        """Make, use and close a lease; SIGKILL before the given one of the lines of its code.
        Returns how many there are."""
        seen: set[tuple[str, int]] = set()

        def trace(frame: FrameType, event: str, argument: Any) -> Any:
            if not frame.f_code.co_filename.endswith(("group/lease.py", "devices/ledger.py")):
                return None
            if event != "line":
                return trace
            seen.add((frame.f_code.co_filename, frame.f_lineno))
            if len(seen) == line:
                os.kill(os.getpid(), signal.SIGKILL)
            return trace

        sys.settrace(trace)
        lease = Lease("GPU-1", 100, folder=self.folder)
        use(lease)
        lease.close()
        sys.settrace(None)
        return len(seen)


class GpuSharer:
    """A trainer on a simulated GPU of 100 pages that others share. It needs 33 at first, and 66
    once its momentum is born."""

    def __init__(self, folder: str, **settings: Any) -> None:
        torch.manual_seed(0)
        device = SimulatedDevice(
            CAPACITY, chunk_bytes=8 * CHUNK, shared_with=Path(folder) / "capacity"
        )
        planner.HEADROOM = 0.0
        self.manager = Manager(
            device=device,
            leases=f"{folder}/leases",
            worker_role="trainer",
            phases={"away": ()},
            **settings,
        )
        self.model = nn.Linear(256, 128)
        self.expected = self.model.weight.detach().clone()
        self.sgd = torch.optim.SGD(self.model.parameters(), lr=0.5, momentum=0.5)
        self.manager.register("actor", self.model, role="actor")
        self.manager.register("sgd", self.sgd)

    def work(self) -> None:
        """A step: what it finds is what it left. It begins with a part of the memory, and wants
        more in the middle of it."""
        with self.manager.phase("log_prob") as step:
            assert torch.equal(self.model.weight, self.expected), (
                "the values changed while they were offloaded"
            )
            step.switch("train")
            self.model(torch.ones(1, 256)).sum().backward()
            self.sgd.step()
            self.sgd.zero_grad()
            self.expected = self.model.weight.detach().clone()
        assert_nothing_resident(self.manager)

    def held_bytes(self) -> tuple[int, int]:
        return lease_of(self.manager).held_bytes, self.manager.device.memory().chunk_bytes
