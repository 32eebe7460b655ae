"""What each rank of the tests of trained replicated handles does: an actor with frozen weights, and adapters that it trains."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from placement import Handle, Manager, State, checkpoint
from placement.group import StoreGroup
from placement.storage.replicated import ReplicatedStorage
from placement.storage.shared.ranges import SharedRange
from placement.testing import SimulatedDevice, assert_nothing_resident
from tests.group.replicated_worker import CHUNK, Metered, as_bytes, calls_to_fail, meet_again

_SIZE = 128


class Adapted(nn.Module):
    """A layer that is frozen, beside a trained one of low rank, and a buffer that every forward pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(_SIZE, _SIZE).requires_grad_(False)
        self.down = nn.Linear(_SIZE, 4, bias=False)
        self.up = nn.Linear(4, _SIZE, bias=False)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.base(x) + self.up(self.down(x))

    def merge(self, sign: int = 1) -> None:
        """Add the trained layer to the frozen one, or take it out again, which rounds."""
        with torch.no_grad():
            self.base.weight += sign * (self.up.weight @ self.down.weight)


class Actor(nn.Module):
    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Adapted() for _ in range(layers)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)

    def merge(self, sign: int = 1) -> None:
        for layer in self.layers:
            layer.merge(sign)


class Rank:
    """An actor and its optimizer, placed, and a twin of both that is not.

    Args:
        seed: of the data; None: every rank trains on other data.
    """

    def __init__(
        self,
        generation: int,
        *,
        deadline_seconds: float = 20.0,
        seed: int | None = None,
        device_bytes: int = 200 * CHUNK,
        chunk_bytes: int = CHUNK,
        **settings: Any,
    ) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        store = dist.distributed_c10d._get_default_store()
        self.group = StoreGroup(store, self.rank, self.world_size, deadline_seconds, generation=generation)
        self.device = Metered(SimulatedDevice(200 * CHUNK, chunk_bytes=CHUNK))
        self.manager = Manager(device=self.device, group=self.group, **settings)
        self.actor, self.twin = _actor(), _actor()
        self.optimizer, self.twins_optimizer = _adam(self.actor), _adam(self.twin)
        self.manager.register("actor", self.actor, role="actor", replicated=True)
        self.manager.register("optimizer", self.optimizer)
        self.stays = "policy" in settings
        """Whether the policy may leave handles on the device between phases."""
        self.data = torch.Generator().manual_seed(self.rank if seed is None else seed)

    @property
    def handle(self) -> Handle:
        return self.manager.handles["actor"]

    @property
    def storage(self) -> ReplicatedStorage:
        found = self.handle.holding
        assert isinstance(found, ReplicatedStorage)
        return found

    @property
    def frozen(self) -> SharedRange:
        """The range with the frozen parameters."""
        (found,) = (r for r in self.storage.ranges if isinstance(r, SharedRange) and r.is_frozen)
        return found

    def step(self) -> int:
        """Train one step, on the device and on the twin. Returns the bytes that came to the device for it."""
        x = torch.randn(3, _SIZE, generator=self.data)
        before = self.device.crossed["to_device"]
        with self.manager.phase("train"):
            came = self.device.crossed["to_device"] - before
            for model, optimizer in ((self.actor, self.optimizer), (self.twin, self.twins_optimizer)):
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        self.check()
        return came

    def both(self, change: Callable[[Actor], Any]) -> None:
        """Change the actor in a phase, and its twin."""
        change(self.twin)
        with self.manager.phase("weight_sync"):
            change(self.actor)
        self.check()

    def check(self) -> None:
        """The actor has its twin's values: in its host copy, and on the device."""
        assert as_bytes(self.actor) == as_bytes(self.twin)
        self.manager.check_integrity()
        if not self.stays:
            assert_nothing_resident(self.manager)

    def look(self) -> None:
        """Load it and compare."""
        with self.manager.phase("log_prob"):
            assert self.handle.state is State.GPU_RESIDENT
            assert as_bytes(self.actor) == as_bytes(self.twin)
            self.manager.check_integrity()
        self.check()


def _actor() -> Actor:
    torch.manual_seed(3)
    return Actor()


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)


def trains(generation: int, settings: dict[str, Any]) -> dict[str, int]:
    """Train, and look at it between the steps. Returns what crossed the link in one look, and the host memory."""
    rank = Rank(generation, **settings)
    rank.step()
    rank.look()
    before = rank.device.crossed.copy()
    rank.look()
    seen = {direction: rank.device.crossed[direction] - count for direction, count in before.items()}
    for _ in range(3):
        rank.step()
        rank.look()
    assert rank.frozen.is_shared
    assert rank.frozen.alone is None
    seen |= {"host": rank.handle.host_bytes, "all": sum(r.nbytes for r in rank.storage.ranges), "frozen": rank.frozen.nbytes}
    _end(rank)
    return seen


def merges(generation: int, on: list[int]) -> tuple[str | None, bool]:
    """Frozen weights change on these ranks, there and back: these have their new values from then on, the others those they had.

    Returns why this rank loads alone, and whether it has the shared host copy still.
    """
    rank = Rank(generation)
    rank.step()
    for sign in (1, -1, 1):
        rank.both(lambda model, sign=sign: model.merge(sign) if rank.rank in on else None)
        rank.look()
    rank.step()
    rank.look()
    seen = rank.frozen.alone, rank.frozen.is_shared
    _end(rank)
    return seen


def unfreezes(generation: int) -> bool:
    """A frozen layer is trained from the second step on. Returns whether the host copy is shared still."""
    rank = Rank(generation)
    rank.step()
    for model, optimizer in ((rank.actor, rank.optimizer), (rank.twin, rank.twins_optimizer)):
        layer = model.layers[1].base.requires_grad_(True)
        optimizer.add_param_group({"params": [layer.weight, layer.bias]})
    for _ in range(3):
        rank.step()
        rank.look()
    seen = rank.frozen.is_shared
    _end(rank)
    return seen


def saves_and_restores(generation: int, directory: str) -> bool:
    """A checkpoint of the state after one step is loaded after the second: both are as they were. Returns whether it is shared still."""
    rank = Rank(generation, seed=0)
    rank.step()
    at_first = {name: value.clone() for name, value in rank.twin.state_dict().items()}
    checkpoint.save(rank.manager, directory, only=["actor"])
    rank.step()
    checkpoint.load(rank.manager, directory, only=["actor"])
    rank.twin.load_state_dict(at_first)
    rank.check()
    rank.look()
    seen = rank.frozen.is_shared
    _end(rank)
    return seen


def mirrors(generation: int, directory: str, on: list[int]) -> bool:
    """Frozen weights change on these ranks in a phase, in which a checkpoint is taken. Returns whether the host copy is shared still."""
    rank = Rank(generation, seed=0)
    rank.step()
    if rank.rank in on:
        rank.twin.merge()
    with rank.manager.phase("weight_sync"):
        if rank.rank in on:
            rank.actor.merge()
        checkpoint.async_save(rank.manager, directory, only=["actor"]).result()
        dist.barrier()
    rank.look()
    if len(on) == rank.world_size:  # else the ranks have saved different values
        at_first = {name: value.clone() for name, value in rank.twin.state_dict().items()}
        rank.both(Actor.merge)
        checkpoint.load(rank.manager, directory, only=["actor"])
        rank.twin.load_state_dict(at_first)
        rank.look()
    seen = rank.frozen.is_shared
    _end(rank)
    return seen


def faults(generation: int, failing: int) -> int:
    """Device calls of a phase that changes frozen weights fail once on one rank: see `calls_to_fail`. Returns the cases."""
    rank = Rank(generation)
    rank.step()
    calls = rank.device.calls.copy()
    rank.both(Actor.merge)
    in_merge = {name: count - calls[name] for name, count in rank.device.calls.items()}
    cases = 0
    for operation, count in in_merge.items():
        for at in calls_to_fail(count):
            _end(rank)
            rank = Rank(generation + 100_000 * (cases + 1))
            rank.step()
            rank.twin.merge()
            if rank.rank == failing:
                rank.device.fail(operation, at=at)
            meet_again(lambda rank=rank: _merge(rank))
            rank.look()
            cases += 1
    _end(rank)
    return cases


def _merge(rank: Rank) -> None:
    """Merge once, as the twin did, in a phase that may fail."""
    try:
        with rank.manager.phase("weight_sync"):
            if as_bytes(rank.actor) != as_bytes(rank.twin):
                rank.actor.merge()
    finally:
        rank.device.clear()
    if as_bytes(rank.actor) != as_bytes(rank.twin):
        raise RuntimeError("it was not merged")


def _end(rank: Rank) -> None:
    """Close the manager: the actor has its values in ordinary memory."""
    rank.manager.close()
    assert as_bytes(rank.actor) == as_bytes(rank.twin)
    gc.collect()
    dist.barrier()
