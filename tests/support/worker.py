"""What the tests of the core share: a small worker, one training step of it, and comparisons of
bytes."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch

import placement
from placement import Manager, State
from placement.storage.owners import RANGES
from placement.testing import SimulatedDevice

OFF, GPU, SYNC, TRAIN = State.CPU_OFFLOADED, State.GPU_RESIDENT, State.SYNCING, State.TRAINING
CAPACITY = 64 << 20


def make_manager(**keywords: Any) -> Manager:
    return Manager(**{"device": SimulatedDevice(CAPACITY), **keywords})


def net(width: int = 64) -> torch.nn.Sequential:
    return torch.nn.Sequential(
        torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, 8)
    )


def learn(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int = 0, width: int = 64
) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(batch(seed, width)).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def batch(seed: int = 0, width: int = 64) -> torch.Tensor:
    return torch.randn(4, width, generator=torch.Generator().manual_seed(seed))


class Worker:
    """Actor with AdamW, readonly reference, critic with SGD: registered, CPU_OFFLOADED.

    Attributes:
        values: the actor's state dict before registration, its own memory.
    """

    def __init__(self, **keywords: Any) -> None:
        self.net, self.ref_net, self.critic_net = net(), net(), net()
        self.values = copy.deepcopy(self.net.state_dict())
        self.ref_values = copy.deepcopy(self.ref_net.state_dict())
        self.adam = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        self.sgd = torch.optim.SGD(self.critic_net.parameters(), lr=1e-2, momentum=0.9)
        self.manager = make_manager(**keywords)
        register = self.manager.register
        self.actor = register("actor", self.net, role="actor")
        self.optimizer = register("actor.optimizer", self.adam)
        self.ref = register("ref", self.ref_net, role="ref", readonly=True)
        self.critic = register("critic", self.critic_net, role="critic")
        self.critic_optimizer = register("critic.optimizer", self.sgd)

    def states(self) -> dict[str, State]:
        return {name: handle.state for name, handle in self.manager.handles.items()}

    def on_device(self) -> set[str]:
        return {name for name, handle in self.manager.handles.items() if handle.resident_bytes}


def trained(**keywords: Any) -> Worker:
    """A worker whose models have learnt for a step, so that its optimizers have state."""
    worker = Worker(**keywords)
    with worker.manager.phase("train"):
        learn(worker.net, worker.adam)
        learn(worker.critic_net, worker.sgd)
    return worker


def everything(manager: Manager) -> dict[str, Any]:
    """A snapshot without what counts up by itself (times, decisions, failures) and the budget that
    is learnt."""
    seen = manager.snapshot().model_dump(
        exclude={
            "taken_timestamp_seconds",
            "phase_seconds",
            "phase_stall_seconds",
            "durations",
            "policy_decisions",
            "budget_bytes",
        }
    )
    for handle in seen["handles"]:
        for name in ("state_seconds", "failures", "last_transition_timestamp_seconds"):
            del handle[name]
    return seen


def assert_same(found: Any, wanted: Any) -> None:
    """Equal as bytes, through state dicts of any depth."""
    if isinstance(wanted, torch.Tensor):
        assert isinstance(found, torch.Tensor)
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
        assert (
            found.detach()
            .contiguous()
            .reshape(-1)
            .view(torch.uint8)
            .equal(wanted.detach().contiguous().reshape(-1).view(torch.uint8))
        )
    elif isinstance(wanted, dict):
        assert list(found) == list(wanted)
        for key, value in wanted.items():
            assert_same(found[key], value)
    elif isinstance(wanted, (list, tuple)):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_same(one, other)
    else:
        assert found == wanted or repr(found) == repr(wanted) == "nan"


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in mappings, lists and tuples of any depth. It asks nothing of placement."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(part)


def through_a_file(value: Any, **options: Any) -> Any:
    """What `torch.load` gives back of what `torch.save` has written."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, **options)


def in_a_range(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies in addresses that placement owns."""
    return RANGES.owner_of(tensor.untyped_storage().data_ptr()) is not None


class Scripted(placement.policies.Colocated):
    """Colocated, except where a test says otherwise."""

    def __init__(self, **answers: Any) -> None:
        super().__init__()
        self.answers = answers
        """By phase: a function of the view, or an exception to raise."""

    def plan(self, view: placement.View) -> placement.Plan:
        answer = self.answers.get(view.phase)
        if answer is None:
            return super().plan(view)
        if isinstance(answer, BaseException):
            raise answer
        plan: placement.Plan = answer(view)
        return plan


class Turns:
    """Who is on the device in which phase, and nobody in all others."""

    name = "turns"

    def __init__(self, state: State = GPU, **on: Collection[str] | Callable[[str], bool]) -> None:
        self.state = state
        self.on = on
        """By phase: the names of handles, or a function that says of a name whether it is one."""

    def plan(self, view: placement.View) -> placement.Plan:
        on = self.on.get(view.phase, ())
        return view.total_plan(
            {
                name: self.state
                for name in view.handles
                if (on(name) if callable(on) else name in on)
            }
        )
