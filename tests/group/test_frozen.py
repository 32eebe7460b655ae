"""Replicated handles of what is trained in part: one host copy of the frozen weights, beside adapters that each rank trains. Over gloo."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from placement import State, checkpoint
from placement.storage.shared import SharedRange
from placement.testing import assert_nothing_resident
from tests.group import trained_worker
from tests.group.replicated_worker import PAGE, as_bytes
from tests.support.ranks import Ranks, on_ranks

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
    size = _SIZE

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Adapted() for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)

    def merge(self, sign: int = 1) -> None:
        for layer in self.layers:
            layer.merge(sign)


class Rank(trained_worker.Rank):
    """An actor and its optimizer, of which the actor is replicated, and a twin of both that is not placed. Every rank trains alone."""

    def _made(self, size: int) -> tuple[Actor, torch.optim.Optimizer]:
        torch.manual_seed(3)
        actor = Actor()
        return actor, torch.optim.AdamW([each for each in actor.parameters() if each.requires_grad], lr=1e-2)

    def register(self, replicated: bool) -> None:
        self.manager.register("actor", self.actor, role="actor", replicated=True)
        self.manager.register("optimizer", self.optimizer)

    @property
    def frozen(self) -> SharedRange:
        """The range with the frozen parameters."""
        (found,) = (r for r in self.handle("actor").storage.ranges if isinstance(r, SharedRange) and r.is_frozen)
        return found

    def step(self, also: Any = None) -> None:
        batch = self.batch()
        self.learn(batch, placed=False, averages=False)
        with self.training():
            self.learn(batch, placed=True, averages=False)
        self.check_offloaded()

    def both(self, change: Callable[[Actor], Any]) -> None:
        """Change the actor in a phase, and its twin."""
        change(self.twin)
        with self.manager.phase("weight_sync"):
            change(self.actor)
        self.check_offloaded()

    def check_offloaded(self) -> None:
        """The actor has its twin's values, wherever it is."""
        assert as_bytes(self.actor) == as_bytes(self.twin)
        self.manager.check_integrity()
        if not self.stays:
            assert_nothing_resident(self.manager)

    def look(self) -> None:
        """Load it and compare."""
        with self.manager.phase("log_prob"):
            assert self.handle("actor").state is State.GPU_RESIDENT
            assert as_bytes(self.actor) == as_bytes(self.twin)
            self.manager.check_integrity()
        self.check_offloaded()


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
    seen |= {
        "host": rank.handle("actor").host_bytes,
        "all": sum(r.nbytes for r in rank.handle("actor").storage.ranges),
        "frozen": rank.frozen.nbytes,
    }
    rank.end()
    return seen


@pytest.mark.parametrize("settings", [{}, {"policy": "cyclic"}, {"policy": "resident"}], ids=["colocated", "cyclic", "resident"])
def test_training_with_one_host_copy_of_what_is_frozen(two_ranks: Ranks, generation: int, settings: dict[str, Any]) -> None:
    seen = two_ranks.run(trains, generation, settings)
    fixed, everything = seen[0]["frozen"], seen[0]["all"]
    assert fixed > 0.8 * everything
    slack = 16 * PAGE  # whole pages of each chunk
    assert abs(sum(each["host"] for each in seen) - (fixed + 2 * (everything - fixed))) < slack
    if not settings:
        for each in seen:
            assert abs(each["to_device"] - (fixed / 2 + everything - fixed)) < slack
            assert each["to_host"] == 0


@pytest.mark.parametrize("on", [[0], [1], [0, 1]])
@on_ranks("two_ranks")
def test_frozen_weights_that_change_are_kept_by_the_ranks_that_changed_them(generation: int, on: list[int]) -> None:
    """There and back. The other ranks have the values that they had, and the shared host copy still."""
    rank = Rank(generation)
    rank.step()
    for sign in (1, -1, 1):
        rank.both(lambda model, sign=sign: model.merge(sign) if rank.rank in on else None)
        rank.look()
    rank.step()
    rank.look()
    assert rank.frozen.is_shared == (rank.rank not in on)
    assert rank.frozen.alone is not None
    assert ("has other bytes on rank" in rank.frozen.alone) == (rank.rank in on)
    rank.end()


@on_ranks("two_ranks")
def test_a_frozen_layer_may_be_trained_later(generation: int) -> None:
    rank = Rank(generation)
    rank.step()
    for model, optimizer in ((rank.actor, rank.optimizer), (rank.twin, rank.twins_optimizer)):
        layer = model.layers[1].base.requires_grad_(True)
        optimizer.add_param_group({"params": [layer.weight, layer.bias]})
    for _ in range(3):
        rank.step()
        rank.look()
    assert not rank.frozen.is_shared
    rank.end()


@pytest.mark.parametrize("on", [[1], [0, 1]])
@on_ranks("two_ranks")
def test_a_checkpoint_of_changed_weights_that_are_on_the_device(generation: int, tmp_path: Path, on: list[int]) -> None:
    """Where all ranks have changed them alike, they share a host copy again."""
    rank = Rank(generation)
    rank.data.manual_seed(0)  # all train alike
    rank.step()
    if rank.rank in on:
        rank.twin.merge()
    with rank.manager.phase("weight_sync"):
        if rank.rank in on:
            rank.actor.merge()
        checkpoint.async_save(rank.manager, tmp_path / "a", only=["actor"]).result()
        dist.barrier()
    rank.look()
    if len(on) == rank.world_size:  # else the ranks have saved different values
        at_first = {name: value.clone() for name, value in rank.twin.state_dict().items()}
        rank.both(Actor.merge)
        checkpoint.load(rank.manager, tmp_path / "a", only=["actor"])
        rank.twin.load_state_dict(at_first)
        rank.look()
    assert rank.frozen.is_shared == (len(on) == rank.world_size or rank.rank not in on)
    rank.end()
