"""A small worker with everything that is awkward to move, and what must hold of it after any fault.

The device is simulated and tight: no two neighbouring phases fit together, so that each switch has
to hand memory over.
"""

from __future__ import annotations

import gc
import hashlib
import os
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

import placement
from placement.engines.base import TorchEngine
from placement.tensors.plain import nested_tensors
from placement.testing import Faults, InjectedFault, SimulatedDevice
from tests.support.seeds import seed

PAGE = 4096
FAULTS = (placement.DeviceMemoryError, placement.HostMemoryError, InjectedFault)
"""What comes out where a call of the device fails."""
CAPACITY_BYTES = 104 * 1024
"""What the largest phase (train, with its gradients) needs, and not a page more."""


class Actor(nn.Module):
    """A tied weight, a BatchNorm's buffers, a view of a buffer, a buffer that no state dict shows,
    and a plain tensor attribute."""

    def __init__(self, width: int = 48, words: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.randn(8, width))
        self.register_buffer("window", self.table[2:5])
        self.register_buffer("mask", torch.rand(width), persistent=False)
        self.odd = torch.tensor([float("nan"), -0.0, 1.0])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.embed(tokens) + self.window.mean(0)) * self.mask
        out: torch.Tensor = self.head(hidden)
        return out


class FaultyWorker:
    """Models, optimizers and a manager over a faulty device. `steps` are those of one RL step."""

    def __init__(
        self, capacity_bytes: int = CAPACITY_BYTES, device: Faults | None = None, **settings: Any
    ) -> None:
        seed(7)
        self.device = device or Faults(
            SimulatedDevice(capacity_bytes, chunk_bytes=2 * PAGE, granularity=PAGE)
        )
        self.manager = placement.Manager(
            device=self.device, budget_bytes=capacity_bytes, **settings
        )
        self.actor = Actor()
        self.ref = Actor()
        self.ref.load_state_dict(self.actor.state_dict())
        self.critic = nn.Sequential(nn.Linear(48, 100), nn.Tanh(), nn.Linear(100, 1))
        self.engine = TorchEngine(Actor())
        self.optimizers = [
            torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (self.actor, self.critic)
        ]
        self.tokens = torch.randint(0, 64, (16,))
        self.states = torch.randn(16, 48)
        self.trainings = 0
        """Optimizer steps that ran to their end."""
        self.committed: dict[str, str] = {}
        """Digest of each handle's values as the last thing that changed them left it."""

    def register_few(self) -> FaultyWorker:
        """The actor, its optimizer and the rollout engine: enough for a move in each direction."""
        self.manager.register("rollout", self.engine, role="rollout")
        self.manager.register("actor", self.actor, role="actor")
        self.manager.register("actor.optimizer", self.optimizers[0])
        self.commit(*self.manager.handles)
        return self

    def register(self) -> FaultyWorker:
        """Register everything, the actor and its kind first, then what steps them."""
        register = self.manager.register
        register("rollout", self.engine, role="rollout")
        register("actor", self.actor, role="actor")
        register("ref", self.ref, role="ref", readonly=True)
        register("critic", self.critic, role="critic")
        register("actor.optimizer", self.optimizers[0])
        register("critic.optimizer", self.optimizers[1])
        register("reward", placement.Lazy(build_reward), role="reward")
        self.commit(*self.manager.handles)
        return self

    def commit(self, *names: str) -> None:
        """Note the values of these handles: from here on they must survive."""
        for name in names:
            if self.manager.handles[name].is_built:
                self.committed[name] = digest(self.manager.handles[name])

    def run_step(self) -> None:
        """One step as a user writes it, in one open phase."""
        with self.manager.phase("rollout") as step:
            self.steps(step)

    def steps(self, step: placement.Phase) -> None:
        """The bodies of a step's phases and the switches between them."""
        self.engine.module.eval()
        with torch.no_grad():
            self.engine.module(self.tokens)
        step.switch("log_prob", only=["actor", "ref"])
        with torch.no_grad():
            self.actor.eval()(self.tokens)
            self.ref.eval()(self.tokens)
        step.switch("values")
        with torch.no_grad():
            self.critic(self.states)
        step.switch("reward")
        self.commit("reward")
        step.switch("train")
        self.train()
        with self.manager.phase("checkpoint"):
            assert digest(self.manager.handles["actor"]) == self.committed["actor"]
        step.switch("weight_sync")
        for bucket in self.manager.handles["actor"].weights(bucket_bytes=4096):
            self.engine.update_weights(bucket)
        self.commit("rollout")

    def train_actor(self) -> None:
        """Forward, backward and step of the actor, and a second backward pass whose gradients
        stay."""
        nn.functional.cross_entropy(self.actor.train()(self.tokens), self.tokens).backward()
        self.optimizers[0].step()
        self.optimizers[0].zero_grad()
        nn.functional.cross_entropy(self.actor(self.tokens), self.tokens).backward()
        self.commit("actor", "actor.optimizer")

    def train(self) -> None:
        """Forward, backward and step of both models. The gradients are dropped, as a step does."""
        nn.functional.cross_entropy(self.actor.train()(self.tokens), self.tokens).backward()
        self.critic(self.states).square().mean().backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.trainings += 1
        self.commit("actor", "critic", "actor.optimizer", "critic.optimizer")

    def objects(self) -> list[Any]:
        return [self.actor, self.ref, self.critic, self.engine.module, *self.optimizers]

    def identity(self) -> tuple[Any, ...]:
        """What no move may change: parameter objects, optimizer keys, and which names share a
        storage."""
        models = [each for each in self.objects() if isinstance(each, nn.Module)]
        parameters = tuple(id(p) for model in models for p in model.parameters())
        keys = tuple(tuple(id(key) for key in optimizer.state) for optimizer in self.optimizers)
        return parameters, keys, tuple(partition(model) for model in models)


def build_reward() -> nn.Module:
    """The same values whenever it is called: a build that failed is tried again."""
    reward = nn.Linear(48, 64).requires_grad_(False)
    nn.init.constant_(reward.weight, 0.5)
    nn.init.constant_(reward.bias, -0.0)
    return reward


def partition(model: nn.Module) -> frozenset[frozenset[str]]:
    """The names of a module's tensors, grouped by the storage that they share."""
    groups: dict[int, set[str]] = {}
    for name, tensor in [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]:
        groups.setdefault(tensor.untyped_storage()._cdata, set()).add(name)
    return frozenset(frozenset(group) for group in groups.values())


def as_bytes(tensor: torch.Tensor) -> bytes:
    """The bytes of a whole storage: a value says nothing about NaN and -0.0."""
    storage = tensor.untyped_storage()
    return bytes(
        torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,)).numpy()
    )


def digest(handle: placement.Handle) -> str:
    """SHA-256 of every distinct storage, read through `state_dict()`, in whatever state the handle
    is."""
    found = hashlib.sha256()
    state = handle.object.module.state_dict() if handle.kind == "engine" else handle.state_dict()
    for name, tensor in nested_tensors(state, ""):
        found.update(name.encode() + as_bytes(tensor))
    return found.hexdigest()


def hidden_bytes(handle: placement.Handle) -> dict[str, bytes]:
    """What a state dict does not show (attributes, buffers that are not persistent), on the
    device."""
    assert handle.adapter is not None
    shown = handle.object.state_dict().keys()
    return {
        owned.name: as_bytes(owned.tensor)
        for owned in handle.adapter.owned()
        if owned.name not in shown and not owned.transient
    }


def check_sound(worker: FaultyWorker) -> None:
    """Nothing disagrees, and the ledger is what the handles hold."""
    worker.manager.check_integrity()
    holdings = [handle.holding for handle in worker.manager.handles.values() if handle.holding]
    held = sum(
        r.pages.own_bytes + r.pages.aside_bytes for holding in holdings for r in holding.ranges
    )
    assert worker.device.memory().chunk_bytes == held
    assert [name for name, handle in worker.manager.handles.items() if handle.broken] == []


def check_values(worker: FaultyWorker, except_for: Collection[str] = ()) -> None:
    """Every handle holds what was last committed, bit by bit."""
    names = [
        name
        for name in worker.committed
        if name in worker.manager.handles and name not in except_for
    ]
    found = {name: digest(worker.manager.handles[name]) for name in names}
    assert {name for name in found if found[name] != worker.committed[name]} == set()


@contextmanager
def many_cases() -> Iterator[None]:
    """For thousands of tiny cases: one thread for torch, and collections that look only at what was
    made inside."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    worker = FaultyWorker().register()  # what torch imports only now would be looked at each time
    worker.run_step()
    worker.manager.close()
    del worker
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def calls_to_fail(device: Faults, operation: str, run: Callable[[], object]) -> list[int]:
    """Which calls of an operation in `run`, from 1 on, are to be failed in turn: with SWEEP=all
    each of them.

    Otherwise the first, the middle and the last of those that come from the same lines, ours and
    the test's: calls from one place differ in how much was done before them.
    """
    places: dict[tuple[Any, ...], list[int]] = {}
    count, before = device._count, device.calls[operation]

    def noted(called: str) -> None:
        count(called)
        if called == operation:
            frame, place = sys._getframe(1), []
            while frame is not None:
                place.append((frame.f_code, frame.f_lineno))
                frame = frame.f_back  # type: ignore[assignment]
            places.setdefault(tuple(place), []).append(device.calls[operation] - before)

    device._count = noted  # type: ignore[method-assign]
    try:
        run()
    finally:
        del device._count
    if os.environ.get("SWEEP") == "all":
        return [*range(1, device.calls[operation] - before + 1)]
    return sorted(
        {at for calls in places.values() for at in (calls[0], calls[len(calls) // 2], calls[-1])}
    )


def check_left(worker: FaultyWorker) -> None:
    """Outside every phase: sound, the values of the last commit, and not a byte on the device."""
    gc.collect()
    assert worker.manager.snapshot().phases == ()
    check_sound(worker)
    check_values(worker)
    states = {name: handle.state for name, handle in worker.manager.handles.items()}
    assert {
        name: state for name, state in states.items() if state is not placement.State.CPU_OFFLOADED
    } == {}
    assert worker.device.memory().chunk_bytes == 0
