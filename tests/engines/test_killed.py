"""Servers of engines as processes of their own, which are killed: nothing of the trainer is lost,
the memory is accounted for, and the next phase says what to do."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch

from placement import BrokenHandleError, EngineError, EngineLost, Handle, State
from placement.engines.sglang import SglangServer
from placement.engines.vllm import VllmServer
from placement.testing import assert_nothing_resident
from tests.engines.conftest import Job
from tests.engines.standin import CAPACITY, TAG_BYTES, Reply, Sglang0523, Vllm033
from tests.group.processes import Process, Processes
from tests.support.sweeps import diagonal
from tests.support.worker import assert_same

WHAT_TO_DO = (
    r"Restart the engine: the next phase takes a server back.* call engine\.assume\(offloaded="
)


class _Apart:
    """What a test asks of a stand-in that is in another process."""

    url: str
    accidents: list[str]

    def place(self) -> str:
        return self.url

    def hang(self, route: str) -> None:
        """Never answer this route."""
        self.asked = threading.Event()
        self.hanging.add(route)  # type: ignore[attr-defined]

    def wait_until_asked(self) -> bool:
        return self.asked.wait(20)

    def answer(self, method: str, target: str, body: Any) -> Reply:
        if urlsplit(target).path in self.hanging:  # type: ignore[attr-defined]
            self.asked.set()
        answer: Reply = super().answer(method, target, body)  # type: ignore[misc]
        return answer

    def lives_well(self) -> bool:
        return self.accidents == []


class Vllm(_Apart, Vllm033):
    tags = ("weights", "kv_cache")


class Sglang(_Apart, Sglang0523):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.settings["startup_time"] = {"total": os.getpid()}


WAKE = {Vllm: "/wake_up", Sglang: "/resume_memory_occupation"}
SLEEP = {Vllm: "/sleep", Sglang: "/release_memory_occupation"}


class Apart(Job):
    """A job beside a server in a process of its own."""

    def __init__(self, kind: Any, shared: Path, processes: Processes) -> None:
        self._kind, self._shared, self._processes = kind, shared, processes
        self.process: Process = processes.start(kind, shared)
        self.url: str = self.process.call("place")
        # what a restarted server holds would else lower the budget
        super().__init__(self, shared, manager={"budget_bytes": CAPACITY})  # type: ignore[arg-type]
        self.register_anew()
        self.train()
        self.values = self.trained()

    def send(self, bucket: Any) -> None:
        self.received += [name for name, _ in bucket]

    def register_anew(self) -> None:
        options: Any = {"tags": self._kind.tags, "send": self.send, "deadline_seconds": 10.0}
        self.engine = (VllmServer if self._kind is Vllm else SglangServer)(self.url, **options)
        self.register()

    def restart(self) -> None:
        """A new process at the same address. Everything of it is on the device."""
        port = urlsplit(self.url).port
        self.process = self._processes.start(self._kind, self._shared, port)

    def train(self) -> None:
        with self.manager.phase("train"):
            self.module(torch.ones(2, 64)).square().sum().backward()
            self.adam.step()
            self.adam.zero_grad()

    def trained(self) -> dict[str, torch.Tensor]:
        momentum = self.adam.state_dict()["state"]
        return {
            **{name: value.clone() for name, value in self.actor.state_dict().items()},
            **{
                f"momentum {key}": each["momentum_buffer"].clone() for key, each in momentum.items()
            },
        }

    @property
    def used_bytes(self) -> int:
        return CAPACITY - self.device.memory().free_bytes

    def expect_trainer_as_before(self) -> None:
        """Its values are those of before, and its next phases are as if no engine were there."""
        assert_same(self.trained(), self.values)
        with self.manager.phase("log_prob"):
            assert self.actor.state is State.GPU_RESIDENT
        self.train()
        self.values = self.trained()

    def expect_works(self) -> None:
        with self.rolling_out():
            assert self.handle.state is State.GPU_RESIDENT
        assert self.used_bytes == 0
        assert self.process.call("lives_well")
        self.expect_trainer_as_before()


@pytest.fixture
def begin(shared: Path) -> Iterator[Callable[[Any], Apart]]:
    with contextlib.closing(_Closing()) as processes:
        yield lambda kind: Apart(kind, shared, processes)


class _Closing(Processes):
    def close(self) -> None:
        self.clear()


every_kind = pytest.mark.parametrize("kind", [Vllm, Sglang], ids=["vllm", "sglang"])


@every_kind
def test_one_that_is_killed_asleep_and_comes_back_awake(kind: Any, begin: Any) -> None:
    job = begin(kind)
    job.process.kill()
    # A question that was never sent leaves the record as it is: everything of it is off the device.
    with pytest.raises(EngineError, match="nobody answers there"):
        job.manager.phase("weight_sync").__enter__()
    assert (job.handle.state, job.handle.broken, job.used_bytes) == (State.CPU_OFFLOADED, None, 0)
    job.expect_trainer_as_before()
    job.restart()
    held = sum(TAG_BYTES[tag] for tag in kind.tags)
    assert job.used_bytes == held
    with pytest.raises(EngineLost, match=r"it was restarted|was restarted since"):
        job.manager.phase("weight_sync").__enter__()
    # the next phase takes it back as it is found: awake, with weights of its own
    with pytest.raises(EngineError, match="mean nothing now"):
        job.manager.phase("rollout").__enter__()
    assert job.handle.broken is None
    job.expect_trainer_as_before()
    job.expect_works()


@pytest.mark.parametrize(
    ("moment", "kind"),
    diagonal(["waking", "falling asleep", "awake"], {"vllm": Vllm, "sglang": Sglang}),
)
def test_one_that_is_killed_while_it_has_memory(kind: Any, moment: str, begin: Any) -> None:
    job = begin(kind)
    if moment == "waking":
        killed_in(job, WAKE[kind], lambda: job.manager.phase("weight_sync").__enter__())
    else:
        with job.rolling_out() as step:
            if moment == "awake":
                job.process.kill()
                with pytest.raises(EngineLost, match="nobody answers there"):
                    step.switch("train")
            else:
                killed_in(job, SLEEP[kind], lambda: step.switch("train"))
            with pytest.raises(BrokenHandleError, match=WHAT_TO_DO):
                step.switch("train")
            job.engine.assume(offloaded=kind.tags)
    assert job.device.memory().free_bytes == CAPACITY
    if moment == "waking":
        with pytest.raises(BrokenHandleError, match=WHAT_TO_DO):
            job.manager.phase("rollout").__enter__()
        job.engine.assume(offloaded=kind.tags)
    assert (job.handle.state, job.handle.resident_bytes) == (State.CPU_OFFLOADED, 0)
    job.expect_trainer_as_before()
    assert_nothing_resident(job.manager)
    with pytest.raises(EngineError, match="nobody answers there"):
        job.manager.phase("weight_sync").__enter__()
    job.restart()
    job.manager.unregister("rollout")
    with pytest.raises(EngineError, match=r"is awake, but was made|was restarted since"):
        job.register()  # the engine of before, of which everything is said to be offloaded
    job.register_anew()  # which offloads it
    assert job.used_bytes == 0
    job.expect_works()


def killed_in(job: Apart, route: str, change: Callable[[], object]) -> None:
    """Kill the server in the request of a phase transition, which has begun."""
    job.process.call("hang", route)
    killer = threading.Thread(target=lambda: (job.process.answer(), job.process.kill()))
    job.process.begin("wait_until_asked")
    killer.start()
    with pytest.raises(EngineLost, match="the connection broke"):
        change()
    killer.join()


def test_a_handle_of_a_killed_engine_is_taken_out(begin: Any) -> None:
    job = begin(Vllm)
    killed_in(job, "/wake_up", lambda: job.manager.phase("weight_sync").__enter__())
    job.manager.unregister("rollout")
    handles: dict[str, Handle] = dict(job.manager.handles)
    assert "rollout" not in handles
    job.expect_trainer_as_before()
    assert job.manager.audit().ok
