"""What each rank of the tests of a frozen base does: it trains adapters of its own beside a base
that all ranks share."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from placement import Manager, State
from placement.core.errors import PlacementError
from placement.storage.shared import SharedRange
from placement.testing import SimulatedDevice, assert_nothing_resident
from tests.group.replicated_worker import (
    CHUNK,
    CUDA_DEADLINE_SECONDS,
    Metered,
    _cuda_device,
    as_bytes,
    meet_again,
    values_on_host,
)
from tests.support.ranks import group_of_all

_SIZE = 128
_CUDA_SIZE = 1024


class Adapted(nn.Module):
    """A layer that is frozen, beside a trained one of low rank, and a buffer that every forward
    pass changes."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.base = nn.Linear(size, size).requires_grad_(False)
        self.down = nn.Linear(size, 4, bias=False)
        self.up = nn.Linear(4, size, bias=False)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.base(x) + self.up(self.down(x))

    def merge(self, sign: int = 1) -> None:
        """Add the trained layer to the frozen one, or take it out again, which rounds."""
        with torch.no_grad():
            self.base.weight += sign * (self.up.weight @ self.down.weight)


class Actor(nn.Module):
    def __init__(self, size: int = _SIZE) -> None:
        super().__init__()
        self.size = size
        self.layers = nn.Sequential(*(Adapted(size) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)

    def merge(self, sign: int = 1) -> None:
        for layer in self.layers:
            layer.merge(sign)


class Heard(logging.Handler):
    """What was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        logging.getLogger("placement").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def take(self) -> list[str]:
        texts, self.texts = self.texts, []
        return texts


class Rank:
    """A replicated actor and its optimizer, and a twin of both that is not placed."""

    def __init__(
        self,
        generation: int,
        *,
        cuda: bool = False,
        deadline_seconds: float = 20.0,
        **settings: Any,
    ) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.group = group_of_all(generation, CUDA_DEADLINE_SECONDS if cuda else deadline_seconds)
        self.device = Metered(
            _cuda_device() if cuda else SimulatedDevice(400 * CHUNK, chunk_bytes=CHUNK)
        )
        self.manager = Manager(device=self.device, group=self.group, **settings)
        size = _CUDA_SIZE if cuda else _SIZE
        self.actor, self.optimizer = self._made(size)
        self.twin, self.twins_optimizer = self._made(size)
        self.handle = self.manager.register("actor", self.actor, role="actor", replicated=True)
        self.manager.register("optimizer", self.optimizer)
        self.data = torch.Generator().manual_seed(self.rank)
        self.stays = "policy" in settings
        """Whether the policy may leave handles on the device between phases."""
        self.heard = Heard()

    def _made(self, size: int) -> tuple[Actor, torch.optim.Optimizer]:
        torch.manual_seed(3)
        actor = Actor(size).to(self.device.torch_device)
        trained = [parameter for parameter in actor.parameters() if parameter.requires_grad]
        return actor, torch.optim.AdamW(trained, lr=1e-2)

    @property
    def frozen(self) -> SharedRange:
        """The range with the frozen parameters."""
        (found,) = (r for r in self.handle.storage.ranges if isinstance(r, SharedRange))
        return found

    def warnings(self) -> list[str]:
        """The warnings since the last call that this rank has a host copy of its own."""
        return [text for text in self.heard.take() if "on this rank alone" in text]

    # --- training

    def learn(self, batch: torch.Tensor, *, placed: bool) -> None:
        """One step of the placed model, or of its twin."""
        actor, optimizer = (
            (self.actor, self.optimizer) if placed else (self.twin, self.twins_optimizer)
        )
        actor(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def step(self) -> None:
        batch = torch.randn(3, self.actor.size, generator=self.data).to(self.device.torch_device)
        self.learn(batch, placed=False)
        with self.manager.phase("train"):
            self.learn(batch, placed=True)
        self.check_offloaded()

    def both(self, change: Callable[[Actor], Any]) -> None:
        """Change the actor in a phase, and its twin."""
        change(self.twin)
        with self.manager.phase("weight_sync"):
            change(self.actor)
        self.check_offloaded()

    # --- comparing

    def check_offloaded(self) -> None:
        """The host copies have the twin's values."""
        assert values_on_host(self.handle) == as_bytes(self.twin)
        self.manager.check_integrity()
        if not self.stays:
            assert_nothing_resident(self.manager)

    def look(self) -> None:
        """Load it and compare."""
        with self.manager.phase("log_prob"):
            assert self.handle.state is State.GPU_RESIDENT
            assert as_bytes(self.actor) == as_bytes(self.twin)
            self.manager.check_integrity()
        self.check_offloaded()

    def end(self) -> None:
        """Close the manager: the actor has its values in ordinary memory."""
        self.manager.close()
        assert as_bytes(self.actor) == as_bytes(self.twin)
        dist.barrier()


def trains(generation: int, settings: dict[str, Any]) -> dict[str, int]:
    """Train, and look at it between the steps. Returns what crossed the link in one look, and the
    host memory."""
    rank = Rank(generation, **settings)
    rank.step()
    rank.look()
    before = rank.device.crossed.copy()
    rank.look()
    seen = {
        direction: rank.device.crossed[direction] - count for direction, count in before.items()
    }
    for _ in range(3):
        rank.step()
        rank.look()
    assert rank.frozen.is_shared
    assert rank.frozen.alone is None
    assert not rank.warnings()
    seen |= {
        "host": rank.handle.host_bytes,
        "all": sum(r.nbytes for r in rank.handle.storage.ranges),
        "frozen": rank.frozen.nbytes,
    }
    rank.end()
    return seen


def merges(generation: int, on: list[int], cuda: bool = False) -> None:
    """Some ranks merge their adapters into the frozen weights, there and back. The other ranks have
    the values that they had, and the shared host copy still."""
    rank = Rank(generation, cuda=cuda)
    rank.step()
    merging = rank.rank in on
    for sign in (1, -1, 1):
        rank.both(lambda model, sign=sign: model.merge(sign) if merging else None)
        rank.look()
    rank.step()
    rank.look()
    assert rank.frozen.is_shared != merging
    assert rank.frozen.alone is not None
    warnings = rank.warnings()
    assert len(warnings) == merging
    if merging:
        assert "'actor' has" in warnings[0]
        assert "layers.0.base.weight" in warnings[0]
        assert "bias" not in warnings[0]
        assert rank.handle.host_bytes > rank.frozen.nbytes
    rank.end()


def faults(generation: int, failing: int, every: int) -> int:
    """Device calls of a phase that changes frozen weights, on each rank to other values, fail once
    on one rank. Returns the cases."""
    rank = Rank(generation)
    calls = rank.device.calls.copy()
    change_frozen(rank)
    counts = {name: count - calls[name] for name, count in rank.device.calls.items()}
    rank.end()
    cases = 0
    for operation, count in counts.items():
        # by rank 0: a last call more or less must not make the ranks part
        said = torch.tensor([count])
        dist.broadcast(said, 0)
        for at in range(1, int(said) + 1, every):
            cases += 1
            rank = Rank(generation + 10_000 * cases)
            if rank.rank == failing:
                rank.device.fail(operation, at=at)
            with contextlib.suppress(PlacementError, RuntimeError):
                change_frozen(rank)
            rank.device.clear()
            meet_again(rank.look)
            rank.end()
    return cases


def change_frozen(rank: Rank) -> None:
    """Change some frozen weights to values of this rank's own."""
    with rank.manager.phase("weight_sync"), torch.no_grad():
        for actor in (rank.actor, rank.twin):
            actor.layers[1].base.bias.fill_(rank.rank + 1)
