"""Random programs with less host memory than their host copies take, or with early chunks: the same bits as on models that nobody moves."""

from __future__ import annotations

import copy
import gc
import os
import tempfile
import unittest.mock
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import placement
from placement import Plan, State, View
from placement.core.settings import HostCopies
from placement.planning.host_tier import UseHistory
from placement.policies import Colocated
from placement.testing import assert_nothing_resident
from tests.support.disk import settle
from tests.support.late_device import LateDevice
from tests.support.worker import Worker, assert_same, learn, net
from tests.unit.test_prefetch import ALL, CHUNK

IS_SWEEP = os.environ.get("SWEEP") == "all"
HANDLES = ("actor", "actor.optimizer", "ref", "critic", "critic.optimizer")
WANTED = st.dictionaries(st.sampled_from(HANDLES), st.sampled_from([ALL, 2 * CHUNK, CHUNK]))
MEMORY: list[tuple[int | None, HostCopies, int | None]] = [
    *((limit_bytes, "reserved", None) for limit_bytes in (82_000, 100_000, 130_000)),
    *((limit_bytes, "while_needed", None) for limit_bytes in (82_000, 130_000, None)),
    *((None, "reserved", chunks) for chunks in (42, 56, 200)),
]
"""Host memory: the least with which everything can be registered; about what trains at once; nearly everything; no limit, and no disk.
And a budget on the device that leaves room for little, for some, or for everything early."""
PHASES = ("rollout", "log_prob", "ref_log_prob", "values", "train", "train", "checkpoint")
ACTIONS = ("compute", "compute", "accumulate", "zero_grad", "read", "write", "hold a state dict", "checkpoint", "nested", "done", "leave")
STEPS = st.lists(st.tuples(st.sampled_from(PHASES), WANTED, st.sampled_from(ACTIONS), st.booleans()), min_size=1, max_size=12)
Step = tuple[str, dict[str, int], str, bool]


class Changing(Colocated):
    """Colocated, with what a test wants early at the moment."""

    name = "changing"

    def __init__(self, optimizer_in: Literal["train", "streamed"] = "train") -> None:
        super().__init__(optimizer_in)
        self.wanted: Mapping[str, int] = {}

    def plan(self, view: View) -> Plan:
        plan = super().plan(view)
        away = {n: b for n, b in self.wanted.items() if n in view.handles and plan[n] is State.CPU_OFFLOADED}
        return replace(plan, prefetch={} if view.phase == "idle" else away)


class Unplaced:
    """The models of a `Worker`, in the same order, without placement."""

    def __init__(self) -> None:
        self.net, self.ref_net, self.critic_net = net(), net(), net()
        self.adam = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        self.sgd = torch.optim.SGD(self.critic_net.parameters(), lr=1e-2, momentum=0.9)


class Program:
    """A placed worker and the same without placement."""

    def __init__(
        self,
        folder: str,
        optimizer_in: Literal["train", "streamed"],
        limit_bytes: int | None,
        host_copies: HostCopies,
        chunks: int | None,
    ) -> None:
        self.folder = folder
        self.policy = Changing(optimizer_in)
        device = LateDevice((chunks or 200) * CHUNK, chunk_bytes=CHUNK)
        self.budget_bytes = None if chunks is None else chunks * CHUNK
        torch.manual_seed(0)
        limit: dict[str, Any] = {} if limit_bytes is None else {"host_limit_bytes": limit_bytes, "disk_directory": folder}
        limit |= {"streamed_bucket_bytes": 2 * CHUNK, "host_copies": host_copies, "budget_bytes": self.budget_bytes}
        self.worker = Worker(policy=self.policy, device=device, **limit)
        torch.manual_seed(0)
        self.free = Unplaced()
        self.manager = self.worker.manager
        self.has_tier = limit_bytes is not None or host_copies == "while_needed"
        self.held: list[tuple[Any, Any]] = []
        self.phase = self.manager.phase("reward")
        self.step = self.phase.__enter__()

    def run(self, index: int, name: str, wanted: Mapping[str, int], action: str, waits: bool) -> None:
        self.policy.wanted = wanted
        self.step.switch(name)
        if waits and self.has_tier:
            settle(self.manager)
        if action in ("compute", "accumulate"):
            self.train(index, name, action)
        elif action == "zero_grad":
            for optimizer in (self.worker.adam, self.worker.sgd, self.free.adam, self.free.sgd):
                optimizer.zero_grad(set_to_none=bool(index % 2))
        elif action == "checkpoint":
            placement.checkpoint.save(self.manager, f"{self.folder}/saved-{index}", only=["actor"])
        elif action == "nested":
            with self.manager.phase("values", only=["critic"]):
                self.worker.critic_net(torch.ones(1, 64))
        elif action == "done" and name == "log_prob":
            self.step.done_with("ref")
        elif action == "leave":
            self.leave()
            self.phase = self.manager.phase("reward")
            self.step = self.phase.__enter__()
        else:
            self.use_state_dicts(index, action)
        for shown, values in self.held:
            assert_same(dict(shown), dict(values))
        self.manager.check_integrity()
        handles = self.manager.handles.values()
        assert self.budget_bytes is None or sum(h.resident_bytes - h.storage.unadopted_bytes for h in handles) <= self.budget_bytes

    def train(self, index: int, name: str, action: str) -> None:
        for one in (self.worker, self.free) if name == "train" else ():
            learn(one.critic_net, one.sgd, index)
            if action == "compute":
                learn(one.net, one.adam, index)
            else:
                one.net(torch.ones(2, 64)).square().mean().backward()

    def use_state_dicts(self, index: int, action: str) -> None:
        if action == "read":
            self.check()
        elif action == "write" and not self.worker.critic.resident_bytes:
            for net in (self.worker.critic_net, self.free.critic_net):
                net.state_dict()["0.bias"].fill_(float(index))
        elif action == "hold a state dict":
            self.held = [(self.worker.ref.state_dict(), copy.deepcopy(self.free.ref_net.state_dict()))]

    def leave(self) -> None:
        self.phase.__exit__(None, None, None)
        assert_nothing_resident(self.manager)

    def pairs(self) -> list[tuple[Any, Any]]:
        one, other = self.worker, self.free
        return [(one.net, other.net), (one.critic_net, other.critic_net), (one.adam, other.adam), (one.sgd, other.sgd)]

    def check(self) -> None:
        for placed, plain in self.pairs():
            assert_same(placed.state_dict(), plain.state_dict())


@pytest.mark.timeout(1500 if IS_SWEEP else 120)
@settings(max_examples=6000 if IS_SWEEP else 45, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@example(
    steps=[("train", {}, "compute", True), ("values", {"actor.optimizer": ALL}, "zero_grad", True), ("train", {}, "compute", False)],
    memory=(82_000, "reserved", None),
    optimizer_in="streamed",
)
@example(
    steps=[("train", {}, "compute", False), ("rollout", {"actor.optimizer": ALL}, "compute", False)],
    memory=(None, "reserved", 42),
    optimizer_in="train",
)
@given(steps=STEPS, memory=st.sampled_from(MEMORY), optimizer_in=st.sampled_from(["train", "streamed"]))
def test_random_programs_compute_the_same_bits(
    steps: list[Step], memory: tuple[int | None, HostCopies, int | None], optimizer_in: Literal["train", "streamed"]
) -> None:
    is_idle = unittest.mock.patch.object(UseHistory, "is_idle", return_value=True)  # host copies are given back: nobody may need any
    with tempfile.TemporaryDirectory() as folder, is_idle:
        program = Program(folder, optimizer_in, *memory)
        for index, step in enumerate(steps):
            program.run(index, *step)
        program.leave()
        program.check()
        program.held.clear()
        gc.collect(0)
        program.manager.close()
        program.check()
        assert not [name for name in os.listdir(folder) if not name.startswith("saved-")]
