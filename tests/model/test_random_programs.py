"""Random programs, with host copies in files, pages that arrive early, and
steps that stream their state or do not.

They compute and publish the same bits as on models that nobody moves.
"""

from __future__ import annotations

import copy
import gc
import itertools
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn

import placement
from placement import Plan, State, View
from placement.policies import Colocated
from placement.testing import assert_nothing_resident
from tests.planning.test_prefetch import ALL, CHUNK
from tests.publish.test_publish_changes import Receiver
from tests.support.buckets import set_bucket_bytes
from tests.support.late_device import LateDevice
from tests.support.worker import assert_same, learn, net

IS_SWEEP = os.environ.get("SWEEP") == "all"
WIDTH, LAYERS = 24, 8
LARGE = 0
"""The first layer, so that some of its chunks arrive early and others, between them, do not."""
HANDLES = ("actor", "actor.optimizer", "ref", "critic", "critic.optimizer")
WANTED = st.dictionaries(st.sampled_from(HANDLES), st.sampled_from([ALL, ALL, 3 * CHUNK, CHUNK]))
OptimizerIn = Literal["train", "streamed"]
Memory = tuple[int | None, int]
MEMORY: list[Memory] = [
    *((limit_bytes, 400) for limit_bytes in (1, 150_000, 300_000)),
    *((None, chunks) for chunks in (84, 110, 400)),
]
"""Host memory: nothing, so that all host copies are in files; about half of them; nearly all; no
limit. And chunks of the device that leave room for little, for some, or for everything early."""
PHASES = (
    *("rollout", "log_prob", "ref_log_prob", "values", "train", "train", "train", "optimizer_step"),
    *("weight_sync", "checkpoint", "restore"),
)
ACTIONS = (
    *(
        "step",
        "step",
        "step",
        "step of some",
        "accumulate",
        "zero_grad",
        "full device",
        "tight device",
        "read",
        "write",
        "write state",
    ),
    *(
        "show",
        "hold",
        "write what is held",
        "release",
        "save",
        "save and load",
        "begin anew",
        "nested",
        "done",
        "leave",
    ),
)
ACTION = st.tuples(st.sampled_from(ACTIONS), st.integers(0, 5))
STEPS = st.lists(
    st.tuples(st.sampled_from(PHASES), WANTED, st.lists(ACTION, max_size=4)),
    min_size=1,
    max_size=10,
)
Step = tuple[str, dict[str, int], list[tuple[str, int]]]


class Changing(Colocated):
    """Colocated, with what a test wants early at the moment."""

    name = "changing"

    def __init__(self, optimizer_in: OptimizerIn, *, stream_sync: bool) -> None:
        super().__init__(optimizer_in, stream_sync=stream_sync)
        self.wanted: Mapping[str, int] = {}

    def plan(self, view: View) -> Plan:
        plan = super().plan(view)
        away = {
            n: b
            for n, b in self.wanted.items()
            if n in view.handles and plan[n] is State.CPU_OFFLOADED
        }
        return replace(plan, prefetch={} if view.phase == "idle" else away)


class Net(nn.Module):
    """Layers of which a step may use some. The state of one is larger than a bucket, and stepped in
    slices."""

    def __init__(self) -> None:
        super().__init__()
        widths = [WIDTH * (8 if index == LARGE else 1 + index % 3) for index in range(LAYERS)]
        self.layers = nn.ModuleList(nn.Linear(WIDTH, width) for width in widths)

    def forward(self, used: Sequence[int], seed: int) -> torch.Tensor:
        batch = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(seed))
        return torch.stack([self.layers[index](batch).square().mean() for index in used]).sum()


class Models:
    """An actor with AdamW, a reference, and a critic with SGD: always the same ones."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net, self.ref_net, self.critic_net = Net(), Net(), net()
        self.adam = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        self.sgd = torch.optim.SGD(self.critic_net.parameters(), lr=1e-2, momentum=0.9)

    def all(self) -> tuple[Any, ...]:
        return self.net, self.critic_net, self.adam, self.sgd, self.ref_net


class Program:
    """Models that are placed, and the same ones without placement."""

    def __init__(
        self, folder: str, optimizer_in: OptimizerIn, memory: Memory, bucket_chunks: int
    ) -> None:
        limit_bytes, chunks = memory
        self.folder = folder
        self.placed, self.free = Models(), Models()
        self.both = (self.placed, self.free)
        self.policy = Changing(optimizer_in, stream_sync=bucket_chunks == 1)
        self.device = LateDevice(chunks * CHUNK, chunk_bytes=CHUNK)
        self.budget_bytes = chunks * CHUNK if limit_bytes is None else None
        limit: dict[str, Any] = (
            {}
            if limit_bytes is None
            else {"host_limit_bytes": limit_bytes, "disk_directory": folder}
        )
        set_bucket_bytes(bucket_chunks * CHUNK)
        self.manager = placement.Manager(
            device=self.device,
            policy=self.policy,
            budget_bytes=self.budget_bytes,
            verify="always" if bucket_chunks == 3 else "off",
            **limit,
        )
        register = self.manager.register
        self.actor = register("actor", self.placed.net, role="actor")
        self.receiver = Receiver(self.actor)
        self.adam = register("actor.optimizer", self.placed.adam)
        self.ref = register("ref", self.placed.ref_net, role="ref", readonly=True)
        self.critic = register("critic", self.placed.critic_net, role="critic")
        register("critic.optimizer", self.placed.sgd)
        self.shown: list[tuple[Any, Any]] = []
        """A state dict of the reference, and what it must show."""
        self.held: list[list[torch.Tensor]] = []
        """The same state of both optimizers, which somebody holds and writes."""
        self.count = 0
        self.begin()
        self.run("train", {}, [("step", 0)])
        self.run("log_prob", {}, [])

    def begin(self) -> None:
        self.phase = self.manager.phase("reward")
        self.step = self.phase.__enter__()

    def leave(self) -> None:
        self.phase.__exit__(None, None, None)
        assert_nothing_resident(self.manager)

    def run(self, name: str, wanted: Mapping[str, int], actions: Sequence[tuple[str, int]]) -> None:
        self.policy.wanted = wanted
        self.step.switch(name)
        if name == "weight_sync":
            self.receiver.take()
            assert_same(self.receiver.weights, dict(self.free.net.state_dict()))
        for action, number in actions:
            self.act(action, number)
            for shown, values in self.shown:
                assert_same(dict(shown), dict(values))
        self.manager.check_integrity()
        handles = self.manager.handles.values()
        assert (
            self.budget_bytes is None
            or sum(h.resident_bytes - h.storage.unadopted_bytes for h in handles)
            <= self.budget_bytes
        )

    def act(self, action: str, number: int) -> None:
        self.count += 1
        name = self.step.name
        if action in ("step", "step of some", "accumulate", "tight device"):
            if name in ("train", "optimizer_step"):
                self.train(action, number)
        elif action == "zero_grad":
            for each in self.both:
                for optimizer in (each.adam, each.sgd):
                    optimizer.zero_grad(set_to_none=bool(number % 2))
        elif action == "leave":
            self.leave()
            self.begin()
        elif action == "full device":
            self.device.run_out_of_memory()
        elif action == "nested":
            with self.manager.phase("values", only=["critic"]):
                self.placed.critic_net(torch.ones(1, 64))
        elif action == "done":
            if name == "log_prob":
                self.step.done_with("ref")
        elif action in ("save", "save and load", "begin anew"):
            self.save_or_replace(action, name)
        else:
            self.use_state_dicts(action, number)

    def train(self, action: str, number: int) -> None:
        used = range(LAYERS) if action != "step of some" else range(number, LAYERS, 2)
        for each in self.both:
            if number % 2:  # else gradients of before are added to
                each.adam.zero_grad()
            each.net(used, self.count).backward()
            learn(each.critic_net, each.sgd, self.count)
        if action != "accumulate":
            self.free.adam.step()
            if action == "tight device":
                self.device.outside_bytes = max(
                    0, self.device.memory().free_bytes - (10 + number) * CHUNK
                )
            self.placed.adam.step()
            self.device.outside_bytes = 0

    def save_or_replace(self, action: str, name: str) -> None:
        if action == "save":
            placement.checkpoint.save(
                self.manager, f"{self.folder}/saved-{self.count}", only=["actor"]
            )
        for each in self.both:
            if action == "begin anew":
                each.adam.state.clear()
            elif action == "save and load" and name == "restore":
                each.adam.load_state_dict(copy.deepcopy(each.adam.state_dict()))

    def use_state_dicts(self, action: str, number: int) -> None:
        if action == "read":
            self.check()
        elif action == "write" and self.critic.state is State.CPU_OFFLOADED:
            for each in self.both:
                each.critic_net.state_dict()["0.bias"].fill_(float(number))
        elif action == "show":
            self.shown = [(self.ref.state_dict(), copy.deepcopy(self.free.ref_net.state_dict()))]
        elif action == "release":
            self.held.clear()
        elif action == "write what is held":
            for part in itertools.chain.from_iterable(self.held):
                part.add_(0.02)
        elif action in ("hold", "write state"):
            states = [each.adam.state_dict()["state"] for each in self.both]
            parts = [state[number]["exp_avg"] for state in states if number in state]
            if action == "hold":
                self.held.append(parts)
            for part in parts if action == "write state" else ():
                part.mul_(2)

    def check(self) -> None:
        for placed, free in zip(self.placed.all(), self.free.all(), strict=True):
            assert_same(placed.state_dict(), free.state_dict())


drawn = given(
    steps=STEPS,
    optimizer_in=st.sampled_from(["train", "streamed"]),
    memory=st.sampled_from(MEMORY),
    bucket_chunks=st.sampled_from([1, 3]),
)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@example(
    steps=[
        ("train", {}, [("step", 0)]),
        ("values", {"actor.optimizer": ALL}, [("zero_grad", 0)]),
        ("train", {}, []),
    ],
    optimizer_in="streamed",
    memory=(1, 400),
    bucket_chunks=3,
)
@example(
    steps=[("rollout", {"actor.optimizer": ALL}, [])],
    optimizer_in="train",
    memory=(None, 84),
    bucket_chunks=3,
)
@example(
    steps=[("train", {}, [("begin anew", 0)]), ("restore", {}, [])],
    optimizer_in="streamed",
    memory=(None, 84),
    bucket_chunks=1,
)
@drawn
def test_random_programs_compute_the_same_bits(
    steps: list[Step], optimizer_in: OptimizerIn, memory: Memory, bucket_chunks: int
) -> None:
    run(steps, optimizer_in, memory, bucket_chunks)


@pytest.mark.sweep
@pytest.mark.timeout(3000 if IS_SWEEP else 600)
@settings(
    max_examples=8000 if IS_SWEEP else 25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@drawn
def test_further_random_programs_do(
    steps: list[Step], optimizer_in: OptimizerIn, memory: Memory, bucket_chunks: int
) -> None:
    run(steps, optimizer_in, memory, bucket_chunks)


def run(steps: list[Step], optimizer_in: OptimizerIn, memory: Memory, bucket_chunks: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        program = Program(folder, optimizer_in, memory, bucket_chunks)
        for step in steps:
            program.run(*step)
        program.leave()
        program.shown.clear()
        program.held.clear()
        gc.collect(0)
        program.check()
        program.manager.close()
        program.check()
        assert not [name for name in os.listdir(folder) if not name.startswith("saved-")]
