"""A process killed at every line of what a lease does, and a program interrupted at its bytecodes: the others lose nothing by it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
import torch

from placement.group import Lease
from placement.testing import assert_nothing_resident
from tests.faults.tracing import Interrupter, Point
from tests.group.lease_processes import Processes
from tests.group.lease_worker import Doomed, GpuSharer, use
from tests.support.bytecodes import BytecodeTrace

# A file that is cut off before it has a name is closed by its death, and Python says so.
pytestmark = pytest.mark.filterwarnings("ignore:.*FileIO:pytest.PytestUnraisableExceptionWarning")
EVERY = 1 if os.environ.get("SWEEP") == "all" else 6
"""Of the bytecodes of a manager's phase transition, which ones are interrupted. With SWEEP=all a process is killed at every visit of a
line."""
_CODE = ("placement/group/lease", "placement/phases/lease_client.py")


def test_killed_at_every_line(processes: Processes, tmp_path: Path, counted: Callable[[str], None]) -> None:
    other = Lease("GPU-1", 100, folder=tmp_path)
    visits = "every" if EVERY == 1 else "first"
    lines = processes.start(Doomed, str(tmp_path), visits).call("die_at", -1)
    for line in range(1, lines + 1):
        doomed = processes.start(Doomed, str(tmp_path), visits)
        doomed.begin("die_at", line)
        with pytest.raises(EOFError):
            doomed.answer()
        doomed.kill()  # collect it
        assert other.grow(100), f"line {line}: {other.snapshot()}"
        assert [holder.is_mine for holder in other.snapshot().holders] == [True]
        other.settle(0)
    assert lines > 100
    counted(f"leases: killed at each of {lines} lines of taking and giving back, the bytes free at once")


def points_of(work: Callable[[], object]) -> list[Point]:
    """The bytecodes of a lease that `work` comes past, in order, each once."""
    seen: dict[Point, None] = {}

    def note(frame: FrameType) -> None:
        seen[frame.f_code, frame.f_lasti] = None

    with BytecodeTrace(lambda code: any(part in code.co_filename for part in _CODE), note):
        work()
    return list(seen)


def interrupted(work: Callable[[], object], point: Point) -> bool:
    interrupter = Interrupter(point, 1, KeyboardInterrupt)
    interrupter.on()
    try:
        work()
    except KeyboardInterrupt:
        pass
    finally:
        interrupter.off()
    return interrupter.fired


def test_a_lease_interrupted_at_every_bytecode(tmp_path: Path, counted: Callable[[str], None]) -> None:
    lease, other = Lease("GPU-1", 100, folder=tmp_path), Lease("GPU-1", 100, folder=tmp_path)
    points = points_of(lambda: use(lease))
    for point in points:
        assert interrupted(lambda: use(lease), point)
        lease.settle(0)
        assert other.grow(100), f"{point}: {other.snapshot()}"
        assert not lease.grow(1)
        other.settle(0)
        assert sum(holder.held_bytes for holder in other.snapshot().holders) == 0
    assert len(points) > 300
    counted(f"leases: interrupted at each of {len(points)} bytecodes, nothing kept from the others")


def test_a_manager_interrupted_in_its_lease(tmp_path: Path, counted: Callable[[str], None]) -> None:
    worker = GpuSharer("trainer", str(tmp_path))
    worker.work()
    other = Lease(f"simulated{tmp_path / 'capacity'}", worker.manager.snapshot().lease.capacity_bytes, folder=tmp_path / "leases")  # type: ignore[union-attr]

    def step() -> None:
        with worker.manager.phase("log_prob") as phase:
            phase.switch("train")
            with worker.manager.phase("away"):
                pass

    points = points_of(step)[::EVERY]
    for point in points:
        interrupted(step, point)
        step()
        assert_nothing_resident(worker.manager)
        assert other.grow(other.capacity_bytes), f"{point}: {other.snapshot()}"
        other.settle(0)
    with worker.manager.phase("log_prob"):
        assert torch.equal(worker.model.weight, worker.expected)
    assert len(points) > 1000 // EVERY
    counted(f"leases: a manager interrupted at {len(points)} bytecodes of its lease, nothing resident, nothing leased")
