"""What the processes of the tests of leases do."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
from torch import nn

from placement import Manager
from placement.engines import TorchEngine
from placement.group import Lease
from placement.testing import SimulatedDevice, assert_nothing_resident

CHUNK = 4096
CAPACITY = 100 * CHUNK


class Holder:
    """A lease, and a call for each of its methods."""

    def __init__(self, folder: str, capacity_bytes: int = 100, **keywords: Any) -> None:
        self.lease = Lease("GPU-1", capacity_bytes, folder=folder, **keywords)

    def grow(self, nbytes: int) -> bool:
        return self.lease.grow(nbytes)

    def wait(self, nbytes: int) -> int:
        self.lease.wait(nbytes)
        return self.lease.held_bytes

    def settle(self, nbytes: int) -> None:
        self.lease.settle(nbytes)

    def swap(self, nbytes: int, times: int) -> int:
        """Take and give back, as often as said."""
        for _ in range(times):
            with self.lease.holding(nbytes):
                pass
        return times

    def close(self) -> None:
        self.lease.close()

    def waited_seconds(self) -> float:
        return self.lease.waited_seconds

    def die_in_turn(self) -> None:
        with self.lease._ledger.turn():
            os.kill(os.getpid(), signal.SIGKILL)

    def stop_in_turn(self) -> None:
        with self.lease._ledger.turn():
            os.kill(os.getpid(), signal.SIGSTOP)

    def die_while_writing(self) -> None:
        """Half a note, and the end."""
        ledger = self.lease._ledger
        os.pwrite(ledger._open(), b'00000000 {"token": "', 0)
        os.kill(os.getpid(), signal.SIGKILL)

    def fork_and_die(self) -> int:
        """Leave a child behind that lives on."""
        child = os.fork()
        if child == 0:
            signal.pause()
            os._exit(0)
        return child


def use(lease: Lease) -> None:
    """Every way to take and give back."""
    lease.grow(60)
    lease.settle(30)
    lease.wait(100)
    lease.settle(0)
    with lease.holding(50):
        lease.snapshot()


class Doomed:
    """Dies at a line of what a lease does.

    Args:
        visits: every: a line counts whenever it runs; first: only then.
    """

    def __init__(self, folder: str, visits: Literal["every", "first"]) -> None:
        self.folder = folder
        self.visits = visits

    def die_at(self, line: int) -> int:
        """Make, use and close a lease; SIGKILL when so many lines of its code have run. Returns how many there are."""
        passed = 0
        seen: set[tuple[str, int]] = set()

        def trace(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal passed
            if "group/lease" not in frame.f_code.co_filename:
                return None
            place = frame.f_code.co_filename, frame.f_lineno
            if event != "line" or (self.visits == "first" and place in seen):
                return trace
            seen.add(place)
            passed += 1
            if passed == line:
                os.kill(os.getpid(), signal.SIGKILL)
            return trace

        sys.settrace(trace)
        lease = Lease("GPU-1", 100, folder=self.folder)
        use(lease)
        lease.close()
        sys.settrace(None)
        return passed


class GpuSharer:
    """A trainer or an engine on one simulated GPU that both share; each needs more than half of it."""

    def __init__(self, role: str, folder: str, **settings: Any) -> None:
        torch.manual_seed(0)
        self.role, self.log = role, os.open(f"{folder}/swaps", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        device = SimulatedDevice(CAPACITY, chunk_bytes=8 * CHUNK, shared_with=Path(folder) / "capacity")
        self.manager = Manager(device=device, leases=f"{folder}/leases", worker_role=role, headroom=0.0, phases={"away": ()}, **settings)
        # Of 100 pages the engine takes 65; the trainer 33 at first, and 66 once its momentum is born.
        self.model = nn.Linear(256, 256) if role == "rollout" else nn.Linear(256, 128)
        self.expected = self.model.weight.detach().clone()
        if role == "rollout":
            self.engine = TorchEngine(self.model)
            self.manager.register("engine", self.engine, role="rollout")
        else:
            self.sgd = torch.optim.SGD(self.model.parameters(), lr=0.5, momentum=0.5)
            self.manager.register("actor", self.model, role="actor")
            self.manager.register("sgd", self.sgd)
        self.phases = 0

    def work(self) -> None:
        """A step: what it finds is what it left. The trainer's begins with a part of the memory, and wants more in the middle of it."""
        with self.manager.phase("rollout" if self.role == "rollout" else "log_prob") as step:
            assert torch.equal(self.model.weight, self.expected), "the values changed while they were offloaded"
            if self.role != "rollout":
                step.switch("train")
                self.model(torch.ones(1, 256)).sum().backward()
                self.sgd.step()
                self.sgd.zero_grad()
                self.expected = self.model.weight.detach().clone()
            os.write(self.log, self.role[0].encode())
        assert self.manager.device.memory().chunk_bytes == 0
        if self.phases % 8 == 0:
            assert_nothing_resident(self.manager)
        self.phases += 1

    def work_on(self, times: int) -> int:
        for _ in range(times):
            self.work()
        return self.phases

    def enter(self, phase: str) -> None:
        self.manager.enter(phase)

    def switch(self, phase: str) -> None:
        self.manager.switch(phase)

    def leave(self) -> None:
        self.manager.leave()

    def states(self) -> dict[str, str]:
        return {name: str(handle.state) for name, handle in self.manager.handles.items()}

    def held_bytes(self) -> tuple[int, int]:
        lease = self.manager.snapshot().lease
        assert lease is not None
        return lease.held_bytes, self.manager.device.memory().chunk_bytes

    def close(self) -> None:
        self.manager.close()
