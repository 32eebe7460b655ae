"""slime's shape with and without placement, for this process or for ranks."""

from __future__ import annotations

import os
import socket
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from placement import Manager
from placement.integrations.rank import manager_of_this_rank
from placement.integrations.slime import PlacedTrainActor
from placement.testing import assert_nothing_resident
from tests.integrations import jobs, slime_standin
from tests.support.seeds import seed


class Placed(PlacedTrainActor, slime_standin.TrainActor):
    """The stand-in with placement. After each call nothing is left on the device; `phases` is where each value was seen."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.phases: list[str] = []

    def make_manager(self) -> Manager:
        return manager_of_this_rank(device=jobs.device())

    def _see(self, tensor: torch.Tensor) -> None:
        super()._see(tensor)
        self.phases.append(self.placement.phase_name if self.placement is not None else "none")

    def clear_memory(self) -> None:
        super().clear_memory()
        if self.placement is not None:
            assert_nothing_resident(self.placement, allow_foreign=True)


class RankActor(slime_standin.TrainActor):
    """One of several ranks, as slime starts them: its constructor says where the ranks meet, and `init` makes them meet."""

    def __init__(self, world_size: int, rank: int, master_addr: str | None, master_port: int | None) -> None:
        super().__init__(world_size, rank, master_addr, master_port)
        if master_addr is None:
            with socket.socket() as taken:
                taken.bind(("127.0.0.1", 0))
                master_addr, master_port = taken.getsockname()
        self._master = master_addr, master_port
        os.environ |= {"MASTER_ADDR": str(master_addr), "MASTER_PORT": str(master_port), "WORLD_SIZE": str(world_size), "RANK": str(rank)}
        os.environ["PLACEMENT_DEVICE"] = "simulated:64MiB"  # as from --train-env-vars

    def get_master_addr_and_port(self) -> tuple[str | None, int | None]:
        return self._master

    def init(self, args: Namespace, role: str, with_ref: bool = False, with_opd_teacher: bool = False) -> int | None:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        seed(0)
        return super().init(args, role, with_ref, with_opd_teacher)

    def get_seen(self) -> list[bytes]:
        return self.seen

    def get_moved(self) -> dict[str, int]:
        """How many bytes each handle of the placed actor moved to the host. Nothing is left on the device."""
        assert isinstance(self, PlacedTrainActor)
        assert self.placement is not None
        assert_nothing_resident(self.placement, allow_foreign=True)
        return {name: handle.counters.offloaded_bytes for name, handle in self.placement.handles.items()}


def plain_and_placed(args: Namespace, role: str = "actor", **models: bool) -> Placed:
    """slime's calls on both. Every bit that leaves them is the same."""
    seed(0)
    plain = slime_standin.run(slime_standin.TrainActor(1, 0, None, None), args, role, **models)
    seed(0)
    placed = Placed(1, 0, None, None)
    assert slime_standin.run(placed, args, role, **models) == plain
    assert plain
    return placed


def compare(build: Callable[[], jobs.Job], **options: Any) -> dict[str, int]:
    """The same on a rank. How many bytes each handle moved to the host."""
    with jobs.served_by_another():
        placed = plain_and_placed(slime_standin.arguments(build, **options), with_ref=True)
    assert placed.placement is not None
    assert_nothing_resident(placed.placement, allow_foreign=True)
    placed.placement.check_integrity()
    moved = {name: handle.counters.offloaded_bytes for name, handle in placed.placement.handles.items()}
    placed.placement.close()
    return moved
