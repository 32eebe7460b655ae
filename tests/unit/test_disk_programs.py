"""Random programs with less host memory than their host copies take: the same bits as on models that nobody moves."""

from __future__ import annotations

import copy
import gc
import os
import tempfile
import unittest.mock
from collections.abc import Mapping
from typing import Any, Literal

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import placement
from placement.core.settings import HostCopies
from placement.planning.host_tier import UseHistory
from placement.testing import assert_nothing_resident
from tests.support.disk import settle
from tests.support.late_device import LateDevice
from tests.support.worker import Worker, assert_same, learn
from tests.unit.test_prefetch import ALL, CHUNK
from tests.unit.test_saving import WANTED, Changing, Unplaced

IS_SWEEP = os.environ.get("SWEEP") == "all"
LIMITS = (82_000, 100_000, 130_000, None)
"""The least with which everything can be registered; about what trains at once; nearly everything; no limit, and no disk."""
PHASES = ("rollout", "log_prob", "ref_log_prob", "values", "train", "train", "checkpoint")
ACTIONS = ("compute", "compute", "accumulate", "zero_grad", "read", "write", "hold a state dict", "checkpoint", "done", "leave")
STEPS = st.lists(st.tuples(st.sampled_from(PHASES), WANTED, st.sampled_from(ACTIONS), st.booleans()), min_size=1, max_size=12)
Step = tuple[str, dict[str, int], str, bool]


class Program:
    """A placed worker and the same without placement."""

    def __init__(
        self, folder: str, limit_bytes: int | None, optimizer_in: Literal["train", "streamed"], host_copies: HostCopies = "reserved"
    ) -> None:
        self.folder = folder
        self.policy = Changing(optimizer_in)
        device = LateDevice(200 * CHUNK, chunk_bytes=CHUNK)
        torch.manual_seed(0)
        limit = {} if limit_bytes is None else {"host_limit_bytes": limit_bytes, "disk_directory": folder}
        self.worker = Worker(policy=self.policy, device=device, streamed_bucket_bytes=2 * CHUNK, host_copies=host_copies, **limit)
        torch.manual_seed(0)
        self.free = Unplaced()
        self.manager = self.worker.manager
        self.held: list[tuple[Any, Any]] = []
        self.phase = self.manager.phase("reward")
        self.step = self.phase.__enter__()

    def run(self, index: int, name: str, wanted: Mapping[str, int], action: str, waits: bool) -> None:
        self.policy.wanted = wanted
        self.step.switch(name)
        if waits:
            settle(self.manager)
        if action in ("compute", "accumulate"):
            self.train(index, name, action)
        elif action == "zero_grad":
            for optimizer in (self.worker.adam, self.worker.sgd, self.free.adam, self.free.sgd):
                optimizer.zero_grad(set_to_none=bool(index % 2))
        elif action == "checkpoint":
            placement.checkpoint.save(self.manager, f"{self.folder}/saved-{index}", only=["actor"])
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
@settings(max_examples=2000 if IS_SWEEP else 25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@example(
    steps=[("train", {}, "compute", True), ("values", {"actor.optimizer": ALL}, "zero_grad", True), ("train", {}, "compute", False)],
    limit_bytes=82_000,
    optimizer_in="streamed",
)
@given(steps=STEPS, limit_bytes=st.sampled_from(LIMITS[:3]), optimizer_in=st.sampled_from(["train", "streamed"]))
def test_random_programs_on_a_disk_compute_the_same_bits(
    steps: list[Step], limit_bytes: int, optimizer_in: Literal["train", "streamed"]
) -> None:
    compute_the_same_bits(steps, limit_bytes, optimizer_in)


@pytest.mark.timeout(1500 if IS_SWEEP else 120)
@settings(max_examples=2000 if IS_SWEEP else 25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps=STEPS, limit_bytes=st.sampled_from(LIMITS), optimizer_in=st.sampled_from(["train", "streamed"]))
def test_random_programs_compute_the_same_bits_where_each_host_copy_is_given_back_while_the_device_has_the_bytes(
    steps: list[Step], limit_bytes: int | None, optimizer_in: Literal["train", "streamed"]
) -> None:
    with unittest.mock.patch.object(UseHistory, "is_idle", return_value=True):  # expects that nobody will need any
        compute_the_same_bits(steps, limit_bytes, optimizer_in, "while_needed")


def compute_the_same_bits(
    steps: list[Step], limit_bytes: int | None, optimizer_in: Literal["train", "streamed"], host_copies: HostCopies = "reserved"
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        program = Program(folder, limit_bytes, optimizer_in, host_copies)
        for index, step in enumerate(steps):
            program.run(index, *step)
        program.leave()
        program.check()
        program.held.clear()
        gc.collect(0)
        program.manager.close()
        program.check()
        assert not [name for name in os.listdir(folder) if not name.startswith("saved-")]
