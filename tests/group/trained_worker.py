"""What each rank of the tests of trained replicas does: a model and its AdamW, alike on all ranks,
whose gradients are averaged."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from placement import Handle, Manager
from placement.core.errors import GroupError, PlacementError
from placement.storage import shared as shared_copy
from placement.storage.shared import SharedRange
from placement.testing import SimulatedDevice, assert_nothing_resident
from tests.group.replicated_worker import (
    CHUNK,
    CUDA_DEADLINE_SECONDS,
    Metered,
    _cuda_device,
    as_bytes,
    meet_again,
)
from tests.sharded.training import bytes_of
from tests.support.ranks import group_of_all

_SIZE = 64


class Actor(nn.Module):
    """Trained weights, a buffer of each rank's own, and what a rank needs to see both."""

    def __init__(self, size: int = _SIZE) -> None:
        super().__init__()
        self.size, self.number = size, dist.get_rank()
        self.body = nn.Sequential(
            nn.Linear(size, 2 * size),
            nn.GELU(),
            nn.Linear(2 * size, size),
            nn.Linear(size, size, bias=False),
        )
        self.odd = nn.Parameter(torch.zeros(3))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += self.number
        return self.body(x) * (1 + self.odd.sum())


class Rank:
    """An actor and its optimizer, placed, and a twin of both that is not."""

    def __init__(
        self,
        generation: int,
        *,
        cuda: bool = False,
        deadline_seconds: float = 20.0,
        replicated: bool = True,
        size: int = _SIZE,
        **settings: Any,
    ) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.group = group_of_all(generation, CUDA_DEADLINE_SECONDS if cuda else deadline_seconds)
        self.device = Metered(
            _cuda_device() if cuda else SimulatedDevice(400 * CHUNK, chunk_bytes=CHUNK)
        )
        self.manager = Manager(device=self.device, group=self.group, **settings)
        self.torch_device = self.device.torch_device
        self.actor, self.optimizer = self._made(1024 if cuda else size)
        self.twin, self.twins_optimizer = self._made(1024 if cuda else size)
        self.register(replicated)
        self.data = torch.Generator().manual_seed(self.rank)
        self.stays = "policy" in settings
        """Whether the policy may leave handles on the device between phases."""
        self.switches = False
        """Whether what is trained is offloaded by a switch to another phase."""

    def _made(self, size: int) -> tuple[Any, torch.optim.Optimizer]:
        torch.manual_seed(3)
        actor = Actor(size).to(self.torch_device)
        return actor, torch.optim.AdamW(actor.parameters(), lr=1e-2)

    def register(self, replicated: bool) -> None:
        self.manager.register("actor", self.actor, role="actor", replicated=replicated)
        self.manager.register("optimizer", self.optimizer, replicated=replicated)

    # --- what is shared

    def handle(self, name: str) -> Handle:
        return self.manager.handles[name]

    def ranges(self) -> list[SharedRange]:
        """The ranges of weights and of the optimizer's state, once there is any."""
        return [
            r
            for name in ("actor", "optimizer")
            for r in self.handle(name).storage.ranges
            if isinstance(r, SharedRange)
        ]

    @property
    def shares(self) -> list[bool]:
        return [r.is_shared for r in self.ranges()]

    @property
    def host_bytes(self) -> int:
        return sum(self.handle(name).host_bytes for name in ("actor", "optimizer"))

    @property
    def own_bytes(self) -> int:
        """Of host memory that no other rank has anything of: buffers."""
        holding = self.handle("actor").holding
        assert holding is not None
        return sum(r.nbytes for r in holding.ranges if not isinstance(r, SharedRange))

    def waits_at_most(self, seconds: float) -> None:
        """For the others' votes."""
        self.group.deadline_seconds = seconds
        for name in ("actor", "optimizer"):
            self.handle(name).holding._ranks.deadline_seconds = seconds  # type: ignore[union-attr]

    # --- training

    def learn(
        self,
        batch: torch.Tensor,
        *,
        placed: bool,
        also: Callable[[Actor], Any] | None = None,
        averages: bool = True,
    ) -> None:
        """One step of the placed model, or of its twin."""
        actor, optimizer = (
            (self.actor, self.optimizer) if placed else (self.twin, self.twins_optimizer)
        )
        actor(batch).square().mean().backward()
        for parameter in actor.parameters() if averages else ():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= self.world_size
        optimizer.step()
        optimizer.zero_grad()
        if also is not None:
            with torch.no_grad():
                also(actor)

    def batch(self) -> torch.Tensor:
        return torch.randn(3, self.actor.size, generator=self.data).to(self.torch_device)

    def step(self, also: Callable[[Actor], Any] | None = None) -> None:
        batch = self.batch()
        self.learn(batch, placed=False, also=also)
        with self.training():
            self.learn(batch, placed=True, also=also)

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        with self.manager.phase("values" if self.switches else "train") as phase:
            if self.switches:
                phase.switch("train")
            yield
            if self.switches:
                phase.switch("values")

    def check(self) -> None:
        """Load everything, and compare it with the twin. Its host copy is not shown to anybody, so
        it stays as it is."""
        with self.manager.phase("train"):
            self.check_loaded()
        if not self.stays:
            assert_nothing_resident(self.manager)

    def check_loaded(self) -> None:
        assert as_bytes(self.actor) == as_bytes(self.twin)
        assert bytes_of([*self.optimizer.state.values()]) == bytes_of(
            [*self.twins_optimizer.state.values()]
        )
        self.manager.check_integrity()

    def check_offloaded(self) -> None:
        """Compare what the host copies have."""
        assert bytes_of(self.handle("actor").state_dict()) == as_bytes(self.twin)
        assert bytes_of(self.handle("optimizer").state_dict()["state"]) == bytes_of(
            self.twins_optimizer.state_dict()["state"]
        )

    def end(self, *, together: bool = True) -> None:
        """Close the manager: the actor has its values in ordinary memory."""
        self.manager.close()
        assert as_bytes(self.actor) == as_bytes(self.twin)
        gc.collect()
        if together:
            dist.barrier()


def trains(
    generation: int,
    steps: int,
    cuda: bool,
    replicated: bool,
    settings: dict[str, Any],
    switches: bool = False,
) -> dict[str, Any]:
    """Train, and look at host memory and at what crosses the link to the host."""
    rank = Rank(generation, cuda=cuda, replicated=replicated, size=128, **settings)
    rank.switches = switches
    crossed = []
    for number in range(steps):
        before = rank.device.crossed["to_host"]
        rank.step()
        crossed.append(rank.device.crossed["to_host"] - before)
        if number % 10 == 0:
            rank.check()
    rank.check()
    seen = {
        "host": rank.host_bytes,
        "own": rank.own_bytes if replicated else 0,
        "to_host": crossed[-1],
        "first": crossed[0],
    }
    if replicated:
        # AdamW keeps two tensors of each parameter's size
        seen["shared"] = 3 * rank.ranges()[0].nbytes
        assert all(rank.shares)
        assert all(r.alone is None for r in rank.ranges())
    seen["values"] = as_bytes(rank.twin)
    rank.end()
    return seen


# --- what goes wrong


class Heard(logging.Handler):
    """What was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        logging.getLogger("placement").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def take(self) -> list[str]:
        found, self.texts = self.texts, []
        return found


def differs(generation: int, other: int, born: bool, cuda: bool = False) -> list[str]:
    """One rank has other values after a step: its first one, where its state is born, or a later
    one. Returns what this rank was told."""
    rank, heard = Rank(generation, cuda=cuda), Heard()
    if not born:
        rank.step()
        rank.check()
    assert not heard.take()

    def spoil(actor: Actor) -> None:
        if rank.rank == other:
            actor.body[2].bias[5] += 1
            optimizer = rank.optimizer if actor is rank.actor else rank.twins_optimizer
            optimizer.state[actor.body[2].bias]["exp_avg"][5] += 1

    rank.step(also=spoil)
    assert rank.shares == [False, False]
    told = heard.take()
    rank.check()
    for _ in range(3):
        rank.step()
        rank.check()
    assert rank.host_bytes > 0.99 * sum(r.nbytes for r in rank.ranges())
    assert not heard.take()
    rank.check_offloaded()
    rank.end()
    return told


def arm(method: str, when: str, do: Callable[[], Any]) -> None:
    """Do something at the next call of a method of any shared host copy."""
    plain = getattr(shared_copy.SharedCopy, method)

    @functools.wraps(plain)
    def called(*args: Any, **keywords: Any) -> Any:
        setattr(shared_copy.SharedCopy, method, plain)
        if when == "before":
            do()
        found = plain(*args, **keywords)
        if when == "after":
            do()
        return found

    setattr(shared_copy.SharedCopy, method, called)


STEPS = tuple(
    (method, when)
    for method in ("meet", "wait_for_all", "note_arrived", "wait_for_shares")
    for when in ("before", "after")
)
"""The steps of the shared write."""


def _hurries(rank: Rank, seconds: float) -> None:
    """Once all have met, or nobody can any more, this rank waits no longer than this."""
    arm("wait_for_all", "after", functools.partial(rank.waits_at_most, seconds))


def killed(
    generation: int,
    victim: int,
    method: str,
    when: str,
    born: bool,
    switches: bool,
    cuda: bool = False,
) -> tuple[list[bool], list[str]]:
    """A rank dies in the shared write. Returns what this one shares then, and what it was told."""
    rank, heard = Rank(generation, cuda=cuda), Heard()
    rank.switches = switches
    if not born:
        rank.step()
        rank.check()
    dist.barrier()
    if rank.rank == victim:
        arm(method, when, lambda: os.kill(os.getpid(), signal.SIGKILL))
    else:
        _hurries(rank, 10.0 if cuda else 1.0)
    try:
        rank.step()
        raise AssertionError("it left the phase without the rank that died")
    except GroupError:
        pass
    assert_nothing_resident(rank.manager)
    rank.manager.check_integrity()
    shares = rank.shares
    rank.check_offloaded()
    rank.end(together=False)
    return shares, heard.take()


def stopped(generation: int, victim: int, method: str, when: str) -> list[bool]:
    """A rank stops in the shared write, and goes on when the others have long gone on without it.
    Nobody's values suffer."""
    rank = Rank(generation, deadline_seconds=4.0)
    store = dist.distributed_c10d._get_default_store()
    rank.step()
    rank.check()
    pid = torch.tensor([os.getpid()])
    dist.broadcast(pid, victim)
    stops = rank.rank == victim
    if stops:
        arm(method, when, lambda: os.kill(os.getpid(), signal.SIGSTOP))
    else:
        _hurries(rank, 0.5)
    error = None
    with mock.patch.object(shared_copy, "_PATIENCE_SECONDS", 0.5):
        try:
            rank.step()
        except (GroupError, PlacementError) as found:
            error = found
    assert error is not None or stops
    shares = rank.shares
    rank.check_offloaded()
    if not stops:
        store.add(f"gone on {generation}", 1)
    if rank.rank == (victim + 1) % rank.world_size:
        while store.add(f"gone on {generation}", 0) < rank.world_size - 1:
            time.sleep(0.01)
        os.kill(int(pid), signal.SIGCONT)
    dist.barrier()
    rank.check_offloaded()
    rank.waits_at_most(20.0)
    meet_again(rank.check)
    rank.step()
    rank.check()
    assert rank.shares == [True, True]
    rank.end()
    return shares
