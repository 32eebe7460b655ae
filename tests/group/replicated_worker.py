"""What each rank of the tests of replicated handles does, on the simulated device or on its GPU."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import copy_context
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from placement import Handle, Lazy, Manager, State
from placement.core.errors import GroupError, PlacementError, RegistrationError
from placement.devices.base import Device
from placement.devices.memory import Copy, Direction
from placement.storage.owners import RANGES
from placement.storage.shared import SharedRange
from placement.storage.watch.state_dicts import are_only_read
from placement.testing import Faults, SimulatedDevice, assert_nothing_resident
from tests.group.test_ranks_apart import Engine
from tests.sharded.training import bytes_of
from tests.support.boards import FailingBoard
from tests.support.ranks import group_of_all

PAGE = 4096
CHUNK = 12 * PAGE
"""Divides among 2, 3 and 4 ranks."""
CUDA_CHUNK = 4 << 20
CUDA_DEADLINE_SECONDS = 60.0


class Metered(Faults):
    """Counts the bytes that cross the link."""

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self.crossed: dict[Direction, int] = {"to_device": 0, "to_host": 0}

    def copy(self, copies: Sequence[Copy], direction: Direction) -> None:
        super().copy(copies, direction)
        self.crossed[direction] += sum(each.nbytes for each in copies)


class Reference(nn.Module):
    """Tied weights, a half-precision layer, a buffer of an odd length, NaN and -0.0. `scale` makes
    it large enough for a GPU's chunks."""

    def __init__(self, scale: int = 1) -> None:
        super().__init__()
        self.embed = nn.Embedding(300 * scale, 128)
        self.body = nn.Sequential(nn.Linear(128, 256), nn.Linear(256, 128, dtype=torch.bfloat16))
        self.head = nn.Linear(128, 300 * scale, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("odd", torch.tensor([float("nan"), -0.0, 1.0]))
        self.register_buffer(
            "bytes",
            torch.arange(4099 * scale, dtype=torch.int64)
            .to(torch.uint8)[: 4099 * scale - 2]
            .clone(),
        )


def as_bytes(model: nn.Module) -> dict[str, bytes]:
    return bytes_of(model.state_dict())


def values_on_host(handle: Handle) -> dict[str, bytes]:
    """The values of an offloaded handle, read as a checkpoint reads them: the caller does not write
    there, so the host copy stays shared."""
    context = copy_context()
    context.run(are_only_read.set, True)
    return bytes_of(context.run(handle.state_dict))


class Rank:
    """A reference, and an actor that differs by rank, on a device of its own."""

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
            _cuda_device() if cuda else SimulatedDevice(40 * CHUNK, chunk_bytes=CHUNK)
        )
        self.manager = Manager(device=self.device, group=self.group, **settings)
        torch.manual_seed(5)
        self.ref = Reference(200 if cuda else 1)
        self.wanted = as_bytes(self.ref)
        torch.manual_seed(100 + self.rank)
        self.actor = nn.Linear(64, 64)
        if cuda:
            self.ref.to(self.device.torch_device)
            self.actor.to(self.device.torch_device)
        self.manager.register("actor", self.actor, role="actor")

    def register(self, **keywords: Any) -> Handle:
        keywords = {"role": "ref", "readonly": True, "replicated": True, **keywords}
        return self.manager.register("ref", self.ref, **keywords)

    @property
    def handle(self) -> Handle:
        return self.manager.handles["ref"]

    @property
    def alone(self) -> str | None:
        """Why it loads without the others; None while it does not."""
        return next(
            filter(
                None, (r.alone for r in self.handle.storage.ranges if isinstance(r, SharedRange))
            ),
            None,
        )

    def check_values(self) -> None:
        assert as_bytes(self.ref) == self.wanted

    def check_host_copy(self) -> None:
        assert values_on_host(self.handle) == self.wanted

    def load(self) -> int:
        """One phase with the reference on the device. Returns the bytes that crossed the link to
        get there."""
        before = self.device.crossed["to_device"]
        with self.manager.phase("log_prob", only=["ref"]):
            crossed = self.device.crossed["to_device"] - before
            assert self.handle.state is State.GPU_RESIDENT
            self.check_values()
            self.manager.check_integrity()
        assert_nothing_resident(self.manager)
        return crossed

    def fails(self, do: Callable[[], Any], *kinds: type[Exception]) -> str:
        """What it raised, which is one of these."""
        try:
            do()
        except kinds as error:
            return f"{type(error).__name__}: {error}"
        raise AssertionError("nothing failed")

    def check_unregistered(self, addresses: Sequence[int] = ()) -> None:
        """After a registration that failed: the object is as it was, and nothing of it is left.

        Args:
            addresses: where its parameters still are; empty where some rank failed so late that
                they had moved.
        """
        assert "ref" not in self.manager.handles
        assert self.addresses() == (addresses or self.addresses())
        assert all(RANGES.owner_of(address) is None for address in self.addresses())
        assert len(_shared_mappings()) == 0
        self.check_values()
        assert_nothing_resident(self.manager)

    def addresses(self) -> list[int]:
        return [each.data_ptr() for each in self.ref.parameters()]


def _cuda_device() -> Device:
    from placement.devices.cuda.device import CudaDevice

    return CudaDevice(torch.cuda.current_device(), chunk_bytes=CUDA_CHUNK)


def _shared_mappings() -> list[str]:
    """The memory files of shared copies that this process has mapped or open; one that is both is
    there twice."""
    gc.collect()
    with open("/proc/self/maps") as maps:
        found = [
            *{
                line.split()[5]
                for line in maps
                if "memfd:placement-" in line and "placement-device" not in line
            }
        ]
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue
        if "memfd:placement-" in target and "placement-device" not in target:
            found.append(target)
    return found


# --- what the ranks do together


def loads(generation: int, cuda: bool) -> dict[str, Any]:
    """Everything a handle goes through, with the values compared at each step."""
    rank = Rank(generation, cuda=cuda)
    rank.register()
    holding = rank.handle.holding
    assert holding is not None
    assert len(_shared_mappings()) == 1  # mapped, and not open any more
    rank.check_host_copy()
    crossed = [rank.load() for _ in range(3)]
    with rank.manager.phase("log_prob") as step:
        step.switch("train")
        step.keep("actor")
        step.switch("log_prob")
        rank.check_values()
        with rank.manager.phase("train", only=["ref"]):
            assert rank.handle.state is State.CPU_OFFLOADED
            rank.check_host_copy()
            before = rank.device.crossed["to_device"]
        assert rank.handle.state is State.GPU_RESIDENT
        crossed.append(rank.device.crossed["to_device"] - before)
        step.keep("ref")
        rank.check_values()
    with rank.manager.phase("log_prob"):
        rank.check_values()
    assert_nothing_resident(rank.manager)
    assert rank.alone is None
    seen = {
        "crossed": crossed,
        "host": rank.handle.host_bytes,
        "bytes": sum(r.nbytes for r in holding.ranges),
        "epoch": rank.group.epoch,
    }
    seen["to_host"] = rank.device.crossed["to_host"]
    rank.manager.unregister("ref")
    rank.check_values()
    rank.manager.close()
    del holding
    assert not _shared_mappings()
    return seen


MISTAKES: dict[str, Callable[[Rank], Any]] = {
    "nothing frozen": lambda rank: rank.register(readonly=False),
    "another model": lambda rank: rank.manager.register(
        "ref", nn.Linear(2, 2), role="ref", readonly=True, replicated=True
    ),
    "a Lazy": lambda rank: rank.manager.register(
        "ref", Lazy(lambda: rank.ref), role="ref", readonly=True, replicated=True
    ),
    "an optimizer": lambda rank: rank.manager.register(
        "ref",
        torch.optim.SGD(rank.actor.parameters(), momentum=0.9),
        readonly=True,
        replicated=True,
    ),
    "an engine": lambda rank: rank.manager.register(
        "ref", Engine(), role="rollout", replicated=True
    ),
    "external": lambda rank: rank.register(external=True),
    "no process group": lambda rank: rank.register(replicated="nccl"),
    "something else": lambda rank: rank.load(),
}


def mistaken(generation: int) -> dict[str, str]:
    """Rank 1 makes a mistake where the others register: all are told, and nothing is left."""
    rank = Rank(generation)
    told = {}
    for mistake, make in MISTAKES.items():
        addresses = rank.addresses()
        if rank.rank == 1:
            told[mistake] = rank.fails(
                lambda make=make: make(rank),
                RegistrationError,
                GroupError,
                KeyError,
                PlacementError,
            )
        else:
            told[mistake] = rank.fails(rank.register, RegistrationError)
        rank.check_unregistered(addresses)
    rank.register()
    rank.load()
    return told


def faults(generation: int, failing: int) -> int:
    """Each device call of a registration, and of a load, fails once on one rank. Returns the
    cases."""
    rank = Rank(generation)
    calls = rank.device.calls.copy()
    rank.register()
    in_registration = {name: count - calls[name] for name, count in rank.device.calls.items()}
    calls = rank.device.calls.copy()
    rank.load()
    in_load = {name: count - calls[name] for name, count in rank.device.calls.items()}
    rank.manager.unregister("ref")
    cases = 0
    for _ in faults_of(rank, failing, in_registration, 1):
        rank.fails(rank.register, RegistrationError, PlacementError, RuntimeError)
        rank.device.clear()
        rank.check_unregistered()
        cases += 1
    rank.register()
    for _ in faults_of(rank, failing, in_load, 1):
        try:
            rank.load()
        except (PlacementError, RuntimeError):
            cases += 1
        rank.device.clear()
        meet_again(rank.load)
        assert rank.handle.broken is None
    return cases


def faults_of(rank: Any, failing: int, calls: Mapping[str, int], every: int) -> Iterator[None]:
    """For each so many-th of a device's calls, and the last, with SWEEP=all for each: it fails
    next, on one rank."""
    for operation, count in calls.items():
        # by rank 0: a last call more or less must not make the ranks part
        said = torch.tensor([count])
        dist.broadcast(said, 0)
        last = int(said)
        for at in sorted(
            {*range(1, last + 1, 1 if os.environ.get("SWEEP") == "all" else every), last} - {0}
        ):
            if rank.rank == failing:
                rank.device.fail(operation, at=at)
            yield


def meet_again(do: Callable[[], Any]) -> None:
    """A fault on the way out of a phase is told to the others at their next phase transition: `do`
    it until all succeed."""
    for _ in range(6):
        try:
            do()
            is_fine = True
        except (PlacementError, RuntimeError):
            is_fine = False
        said = torch.tensor([is_fine])
        dist.all_reduce(said, dist.ReduceOp.MIN)
        if bool(said):
            return
    raise AssertionError("the ranks did not come together again")


def killed_in_load(generation: int, victim: int, step: str) -> tuple[bool, str | None]:
    """One rank dies in a load. Returns whether this one has entered, and why it loads alone from
    then on."""
    rank = Rank(generation, deadline_seconds=2.0)
    rank.register()
    rank.load()
    dist.barrier()
    if rank.rank == victim:
        rank.group._board = board = FailingBoard(rank.group._board)
        board.arm(step, "kill")
    phase = rank.manager.phase("log_prob", only=["ref"])
    try:
        phase.__enter__()
        entered = True
        rank.check_values()
    except GroupError:
        entered = False
    rank.manager.check_integrity()
    rank.group.deadline_seconds = 0.5
    if entered:
        rank.fails(lambda: phase.__exit__(None, None, None), GroupError)
    assert_nothing_resident(rank.manager)
    rank.fails(rank.load, GroupError)  # no phase without the rank that died
    rank.check_host_copy()
    alone = rank.alone
    rank.manager.unregister("ref")
    rank.check_values()
    return entered, alone


def loads_behind_work(generation: int) -> bool:
    """Whether a load returned while kernels that were queued before it were still running (on a
    GPU)."""
    rank = Rank(generation, cuda=True)
    rank.register()
    rank.load()
    torch.cuda.synchronize()
    torch.cuda._sleep(4_000_000_000)  # clock ticks: two seconds and more
    queued = torch.cuda.Event()
    queued.record()
    with rank.manager.phase("log_prob", only=["ref"]):
        was_running = not queued.query()
        rank.check_values()
    assert rank.alone is None
    rank.manager.close()
    return was_running
