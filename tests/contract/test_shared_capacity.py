"""Processes that share the capacity of one simulated device."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from placement.core.errors import DeviceMemoryError
from placement.devices.memory import Chunk
from placement.testing import SimulatedDevice

SIZE = 16384


def make(capacity: int = 8 * SIZE, *, shared_with: Path) -> SimulatedDevice:
    return SimulatedDevice(capacity, chunk_bytes=SIZE, shared_with=shared_with)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_processes_share_one_capacity_and_a_killed_one_leaves_nothing(tmp_path: Path) -> None:
    shared = tmp_path / "capacity"
    mine = make(shared_with=shared)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        theirs = make(shared_with=shared)
        held = [theirs.create(SIZE) for _ in range(5)]
        os.write(writer, bytes([len(held)]))
        signal.pause()
        os._exit(1)
    assert os.read(reader, 1) == b"\x05"
    assert mine.memory().free_bytes == 3 * SIZE
    chunks = [mine.create(SIZE) for _ in range(3)]
    with pytest.raises(DeviceMemoryError, match=rf"0 free of {8 * SIZE:,}, {5 * SIZE:,} held by other processes"):
        mine.create(SIZE)
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # dead, but still to be collected
    chunks += [mine.create(SIZE) for _ in range(5)]
    assert mine.memory().free_bytes == 0
    os.waitpid(pid, 0)
    os.close(reader)
    os.close(writer)


def test_devices_of_one_process_share_too_and_give_back(tmp_path: Path) -> None:
    shared = tmp_path / "capacity"
    first, second = make(shared_with=shared), make(shared_with=shared)
    chunk: Chunk | None = first.create(4 * SIZE)
    assert chunk is not None
    with pytest.raises(DeviceMemoryError, match="held by other processes"):
        second.create(5 * SIZE)
    first.release(chunk)
    kept = second.create(8 * SIZE)
    assert first.memory().free_bytes == 0
    del kept
    second.close()
    chunk = first.create(8 * SIZE)
    del chunk, first
    second.create(8 * SIZE)
    with pytest.raises(ValueError, match="used with a capacity of"):
        make(4 * SIZE, shared_with=shared)
    (tmp_path / "other").write_text("something else")
    with pytest.raises(ValueError, match="not a file of shared capacity"):
        make(shared_with=tmp_path / "other")
