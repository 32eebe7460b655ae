"""Random programs whose steps stream their state, on a device with late copies: the same bits as without placement."""

from __future__ import annotations

import copy
import gc
import itertools
import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, event, example, given, settings
from hypothesis import strategies as st
from torch import nn

import placement
from tests.support.late_device import LateDevice
from tests.support.worker import assert_same
from tests.unit.test_disk_programs import Changing
from tests.unit.test_prefetch import ALL, CHUNK

IS_SWEEP = os.environ.get("SWEEP") == "all"
WIDTH, LAYERS = 24, 8
LARGE = 0
"""The first, so that some of its chunks arrive early and others, between them, do not."""
PHASES = ("train", "train", "train", "optimizer_step", "log_prob", "rollout", "checkpoint", "restore")
ACTIONS = (
    *("step", "step", "step", "step", "step of some", "full device", "tight device", "read", "write", "write", "write"),
    *("hold", "write what is held", "write what is held", "release", "save and load", "begin anew", "done"),
)
ACTION = st.tuples(st.sampled_from(ACTIONS), st.integers(0, 5))
WANTED = st.dictionaries(st.sampled_from(["actor", "adam", "ref"]), st.sampled_from([ALL, 3 * CHUNK]))
STEPS = st.lists(st.tuples(st.sampled_from(PHASES), WANTED, st.lists(ACTION, max_size=4)), min_size=1, max_size=8)
Step = tuple[str, dict[str, int], list[tuple[str, int]]]


class Net(nn.Module):
    """Layers of which a step may use some. The state of one is larger than a bucket, and stepped in slices."""

    def __init__(self) -> None:
        super().__init__()
        widths = [WIDTH * (8 if index == LARGE else 1 + index % 3) for index in range(LAYERS)]
        self.layers = nn.ModuleList(nn.Linear(WIDTH, width) for width in widths)

    def forward(self, used: Sequence[int], seed: int) -> torch.Tensor:
        batch = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(seed))
        return torch.stack([self.layers[index](batch).square().mean() for index in used]).sum()


class Program:
    """A placed model with AdamW and a readonly reference, and the same without placement."""

    def __init__(self, chunks: int, bucket_chunks: int) -> None:
        torch.manual_seed(0)
        self.net, self.reference = Net(), Net()
        self.plain, self.values = copy.deepcopy(self.net), copy.deepcopy(dict(self.reference.state_dict()))
        self.optimizer, self.other = (torch.optim.AdamW(net.parameters(), lr=1e-2) for net in (self.net, self.plain))
        self.policy = Changing("streamed")
        self.device = LateDevice(chunks * CHUNK, chunk_bytes=CHUNK)
        self.manager = placement.Manager(device=self.device, policy=self.policy, streamed_bucket_bytes=bucket_chunks * CHUNK)
        self.actor = self.manager.register("actor", self.net, role="actor")
        self.adam = self.manager.register("adam", self.optimizer)
        self.ref = self.manager.register("ref", self.reference, role="ref", readonly=True)
        self.held: list[list[torch.Tensor]] = []
        """The same state of both, which somebody holds."""
        self.count = 0
        self.phase = self.manager.phase("reward")
        self.step = self.phase.__enter__()
        self.run("train", {}, [("step", 0)])
        self.run("log_prob", {}, [])

    def both(self) -> list[tuple[Any, torch.optim.Optimizer]]:
        return [(self.net, self.optimizer), (self.plain, self.other)]

    def run(self, name: str, wanted: dict[str, int], actions: list[tuple[str, int]]) -> None:
        self.policy.wanted = wanted
        self.step.switch(name)
        for action, number in actions:
            if action in ("step", "step of some", "tight device"):
                self.make_step(name, action, number)
            elif action == "full device":
                self.device.run_out_of_memory()
            elif action == "done":
                if name == "log_prob":
                    self.step.done_with("ref")
            elif action == "begin anew" or (action == "save and load" and name == "restore"):
                self.replace_state(action)
            else:
                self.use_state_dicts(action, number)
        self.manager.check_integrity()

    def make_step(self, name: str, action: str, number: int) -> None:
        if name not in ("train", "optimizer_step"):
            return
        self.count += 1
        used = range(LAYERS) if action != "step of some" else range(number, LAYERS, 2)
        for net, optimizer in self.both():
            optimizer.zero_grad()
            net(used, self.count).backward()
        self.other.step()
        if action == "tight device":
            self.device.outside_bytes = max(0, self.device.memory().free_bytes - (10 + number) * CHUNK)
        self.optimizer.step()
        self.device.outside_bytes = 0

    def replace_state(self, action: str) -> None:
        for _, optimizer in self.both():
            if action == "begin anew":
                optimizer.state.clear()
            else:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    def use_state_dicts(self, action: str, number: int) -> None:
        if action == "read":
            self.check()
        elif action == "release":
            self.held.clear()
        elif action == "write what is held":
            for part in itertools.chain.from_iterable(self.held):
                part.add_(0.02)
        else:
            states = [optimizer.state_dict()["state"] for _, optimizer in self.both()]
            parts = [state[number]["exp_avg"] for state in states if number in state]
            if action == "write":
                for part in parts:
                    part.mul_(2)
            else:
                self.held.append(parts)

    def leave(self) -> None:
        self.phase.__exit__(None, None, None)
        assert not any(handle.resident_bytes for handle in self.manager.handles.values())

    def check(self) -> None:
        assert_same(self.adam.state_dict(), self.other.state_dict())
        assert_same(dict(self.actor.state_dict()), dict(self.plain.state_dict()))
        assert_same(dict(self.ref.state_dict()), self.values)


@pytest.mark.timeout(3000 if IS_SWEEP else 120)
@settings(max_examples=4000 if IS_SWEEP else 20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps=STEPS, chunks=st.sampled_from([84, 110, 400]), bucket_chunks=st.sampled_from([1, 3]))
@example(steps=[("train", {}, [("begin anew", 0)]), ("restore", {}, [])], chunks=84, bucket_chunks=1)
def test_random_programs_compute_the_same_bits(steps: list[Step], chunks: int, bucket_chunks: int) -> None:
    program = Program(chunks, bucket_chunks)
    for step in steps:
        program.run(*step)
    program.leave()
    assert program.adam.streamed is not None
    large = program.net.layers[LARGE].weight
    is_sliced = len(program.adam.streamed._parts.of(program.optimizer, large)) > 1
    event("one parameter is sliced" if is_sliced else "no parameter is sliced")
    program.held.clear()
    gc.collect(0)
    program.check()
    program.manager.close()
    program.check()
