"""What other processes hold. The library is a stand-in with pynvml's names: there is no driver
where these run."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from placement.devices import memory
from placement.observe import nvml
from placement.observe.nvml import OtherProcesses
from placement.testing import SimulatedDevice
from tests.observe.managed import managed
from tests.support.threads import until


@dataclass
class Process:
    pid: int
    usedGpuMemory: int | None  # noqa: N815 (pynvml's name)


class Named(SimulatedDevice):
    """A device that NVML knows."""

    uuid = "GPU-1"


class Library:
    """Two processes on one GPU."""

    class NVMLError(Exception):
        pass

    def __init__(self, *processes: Process, fails: str = "") -> None:
        self.processes = processes
        self.fails = fails
        self.calls: list[str] = []
        self.may_answer = threading.Event()
        self.may_answer.set()

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name == self.fails:
            raise self.NVMLError(name)

    def nvmlInit(self) -> None:
        self._call("init")

    def nvmlShutdown(self) -> None:
        self._call("shutdown")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self._call("handle")
        return uuid

    def nvmlDeviceGetComputeRunningProcesses(self, device: str) -> tuple[Process, ...]:
        assert self.may_answer.wait(10)
        self._call("processes")
        assert device == "GPU-1"
        return self.processes


def test_the_bytes_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library(Process(os.getpid(), 5), Process(7, 30), Process(8, 400))
    monkeypatch.setattr(nvml, "_library", lambda: library)
    others: Any = OtherProcesses("GPU-1")
    until(lambda: others.nbytes == 430)
    others = None
    until(lambda: library.calls[-1] == "shutdown")


@pytest.mark.parametrize(
    "library",
    [
        Library(Process(7, 30)),  # a container: our own id is not among them
        Library(Process(os.getpid(), 5), Process(7, None)),  # a driver that does not say how much
        Library(Process(os.getpid(), 5), Process(7, 30), fails="init"),
        Library(Process(os.getpid(), 5), Process(7, 30), fails="handle"),
    ],
)
def test_what_is_not_known_is_not_said(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "_library", lambda: library)
    others = OtherProcesses("GPU-1")
    until(lambda: library.calls and (library.fails or "processes") in library.calls)
    time.sleep(0.05)
    assert others.nbytes is None


def test_what_others_hold_is_not_shown_before_it_is_subtracted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread that measures may have its first number before anybody asks."""

    class Others:
        nbytes = 3000
        asked: ClassVar[list[Callable[[int | None], None]]] = []

        def ask(self, then: Callable[[int | None], None]) -> None:
            self.asked.append(then)

    device = SimulatedDevice(1 << 20, chunk_bytes=4096)
    monkeypatch.setattr(memory, "OtherProcesses", lambda uuid: Others())
    of_all = device.memory()
    outside = memory.Outside(device.communicators, of_all)
    outside.watch("GPU-1")
    assert outside.others_bytes is None
    assert outside.unaccounted_bytes(of_all) == of_all.unaccounted_bytes
    Others.asked[0](3000)
    assert outside.others_bytes == 3000
    assert outside.unaccounted_bytes(of_all) == of_all.unaccounted_bytes - 3000


def test_an_engine_of_another_process_is_not_unaccounted_while_it_goes_to_sleep_and_wakes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its bytes leave the device in a phase transition, and NVML tells of it a little later."""
    engine, context = 3000, 500
    library = Library(Process(os.getpid(), 5), Process(7, engine))
    monkeypatch.setattr(nvml, "_library", lambda: library)
    device = Named(1 << 20, chunk_bytes=4096)
    manager, _model = managed(device=device)
    device.outside_bytes = engine + context

    def others_come_to_hold(nbytes: int) -> None:
        """In a phase transition."""
        library.may_answer.clear()
        device.outside_bytes = nbytes + context
        library.processes = (library.processes[0], Process(7, nbytes))
        with manager.phase("log_prob"):
            assert manager.snapshot().unaccounted_bytes == context, "before NVML has told"
            library.may_answer.set()
            until(lambda: manager.snapshot().other_processes_bytes == nbytes)
            assert manager.snapshot().unaccounted_bytes == context

    with manager.serve():
        until(lambda: manager.snapshot().other_processes_bytes == engine)
        with manager.phase("log_prob"):
            until(lambda: manager.snapshot().unaccounted_bytes == context)
        for nbytes in (0, engine, 100):
            others_come_to_hold(nbytes)
        audit = manager.audit()
        assert audit.unaccounted_bytes == context
        assert "other processes (100 bytes)" in audit.report
        library.fails = "processes"  # what is not known any more is not subtracted
        with manager.phase("log_prob"):
            until(lambda: manager.snapshot().other_processes_bytes is None)
            assert manager.snapshot().unaccounted_bytes == 100 + context
        assert manager.audit().unaccounted_bytes == 100 + context
    manager.close()
