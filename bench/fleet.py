"""How long does a phase transition of a whole fleet take, by its number of workers?

The benchmark makes real Ray calls to real managers. A thousand processes do not fit two cores, so a few actors hold many workers each.
Each worker has its own manager with one small module, which loads and offloads.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

import placement
from bench import _rig
from bench._results import Results
from bench._rig import Rig
from placement.group.messages import decode
from placement.group.ray import RayGroup, start_board
from placement.integrations.ray import Fleet
from placement.integrations.ray.member import Member
from placement.integrations.ray.messages import MAX_MESSAGE_BYTES, Order
from placement.observe.discovery import Target
from placement.testing import SimulatedDevice

HOSTS = 2


class Host:
    """An actor that holds many workers."""

    def __init__(self, ranks: Sequence[int]) -> None:
        torch.set_num_threads(1)
        self.models = [torch.nn.Linear(8, 8) for _ in ranks]  # held here, because a manager keeps nothing alive
        self.members = {rank: self._member(rank, model) for rank, model in zip(ranks, self.models, strict=True)}

    def _member(self, rank: int, model: torch.nn.Module) -> Member:
        manager = placement.Manager(device=SimulatedDevice(1 << 16, chunk_bytes=4096), budget_bytes=1 << 16)
        manager.register("actor", model, role="actor")
        labels = {"instance": f"node0/rank{rank}", "run": "bench", "node": "node0", "rank": str(rank)}
        return Member(manager, rank, Target(address=f"127.0.0.1:{rank + 1024}", labels=labels))

    def order(self, rank: int, message: bytes) -> bytes:
        return self.members[rank].carry_out(decode(Order, message, max_bytes=MAX_MESSAGE_BYTES)).encode()


class Simulated:
    """One of a host's workers, called as if it were an actor of its own."""

    def __init__(self, host: Any, rank: int) -> None:
        self.placement_order = self
        self._host, self._rank = host, rank

    def remote(self, message: bytes) -> Any:
        return self._host.order.remote(self._rank, message)


class Ranks:
    """An actor whose threads are ranks of one group. They change phase together, and do nothing else."""

    def __init__(self, board: str, ranks: Sequence[int], world_size: int) -> None:
        from concurrent.futures import ThreadPoolExecutor

        self._pool = ThreadPoolExecutor(len(ranks))
        self._groups = list(self._pool.map(lambda rank: RayGroup(board, rank, world_size, 120.0), ranks))

    def change(self) -> None:
        plan = placement.Plan({"actor": placement.State.GPU_RESIDENT})

        def one(group: RayGroup) -> None:
            group.propose("enter train", 1)
            group.agree(plan)

        list(self._pool.map(one, self._groups))


def _spread(count: int) -> list[range]:
    return [range(host, count, HOSTS) for host in range(HOSTS)]


@contextmanager
def cluster() -> Iterator[Any]:
    import ray

    ray.init(num_cpus=HOSTS + 1, namespace="bench", include_dashboard=False, log_to_driver=False, logging_level="error")
    try:
        yield ray
    finally:
        ray.shutdown()


def _fleet_change(ray: Any, count: int, repetitions: int) -> list[float]:
    """Seconds of each phase transition: switches back and forth that load and offload."""
    with Fleet(f"bench{count}") as fleet:
        hosts = [ray.remote(Host).options(num_cpus=0).remote(ranks) for ranks in _spread(count)]
        fleet.join([Simulated(hosts[rank % HOSTS], rank) for rank in range(count)])
        times = []
        with fleet.phase("log_prob") as phase:
            for _ in range(repetitions):
                for name in ("values", "log_prob"):
                    began = time.perf_counter()
                    phase.switch(name)
                    times.append(time.perf_counter() - began)
                    held = [status.resident_bytes > 0 for status in fleet.status()]
                    if held != [name == "log_prob"] * count:
                        raise RuntimeError(f"in {name} {sum(held)} of {count} workers hold bytes")
        for host in hosts:
            ray.kill(host)
    return times


def _group_change(ray: Any, count: int, repetitions: int) -> list[float]:
    board = start_board(f"board{count}")
    hosts = [ray.remote(Ranks).options(num_cpus=0).remote(f"board{count}", ranks, count) for ranks in _spread(count)]
    times = []
    for _ in range(repetitions):
        began = time.perf_counter()
        ray.get([host.change.remote() for host in hosts])
        times.append(time.perf_counter() - began)
    for actor in (*hosts, board):
        ray.kill(actor)
    return times


def measure(rig: Rig, results: Results) -> None:
    tiny = rig.size == "tiny"
    repetitions = 2 if tiny else 10
    with cluster() as ray:
        for count in (4, 8) if tiny else (125, 250, 500, 1000, 2000):
            with results.system(f"{count:,} workers", "placement"):
                times = _fleet_change(ray, count, repetitions)
                results.add(f"{count:,} workers", "placement", "fleet changes phase, median", statistics.median(times), "s")
                results.add(f"{count:,} workers", "placement", "fleet changes phase, slowest", max(times), "s")
                results.add(f"{count:,} workers", "placement", "a worker's share", statistics.median(times) / count * 1e6, "us")
        for count in (2, 4) if tiny else (8, 32, 128, 256):
            with results.system(f"{count:,} ranks, one group", "placement"):
                times = _group_change(ray, count, repetitions)
                results.add(f"{count:,} ranks, one group", "placement", "ranks agree, median", statistics.median(times), "s")


def main(arguments: Sequence[str] | None = None) -> None:
    _rig.run("fleet", __doc__, measure, arguments)


if __name__ == "__main__":
    main()
