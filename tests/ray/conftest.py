"""One Ray cluster of two nodes for all tests of this folder."""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

_names = itertools.count(1)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """A head and a second node on this machine, and this process connected to them."""
    ray = pytest.importorskip("ray", reason="ray is not installed here")
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "OMP_NUM_THREADS": "1"}
    # Ray's workers are nice to others by default: beside other tests they would get a thirtieth of a core, and miss every deadline.
    os.environ |= {"RAY_worker_niceness": "0", "RAY_prestart_worker_first_driver": "0"}
    from ray.cluster_utils import Cluster

    cluster = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 8, "include_dashboard": False})
            cluster.add_node(num_cpus=8)
            ray.init(address=cluster.address, namespace="tests", log_to_driver=False, logging_level="error")
        yield ray
    finally:
        ray.shutdown()
        if cluster is not None:
            cluster.shutdown()


@pytest.fixture
def ray(cluster: Any) -> Any:
    """Ray, connected."""
    return cluster


class Job:
    """A fleet and its workers."""

    def __init__(self, ray: Any, world_size: int, together: Sequence[int] | None, **options: Any) -> None:
        import placement.ray
        from tests.ray.workers import FleetTrainer

        self.ray = ray
        self.name = f"job{next(_names)}"
        self.fleet = placement.ray.Fleet(self.name, deadline_seconds=100.0)  # on a busy machine its workers import for long
        spread = {"num_cpus": 1, "scheduling_strategy": "SPREAD", **options}
        actor = ray.remote(FleetTrainer).options(**spread)
        self.workers = [actor.remote(self.name, rank, together) for rank in range(world_size)]
        self.fleet.join(self.workers)
        self.fleet.deadline_seconds = 20.0

    def all(self, method: str, *arguments: Any) -> list[Any]:
        results: list[Any] = self.ray.get([getattr(worker, method).remote(*arguments) for worker in self.workers])
        return results

    def pid_of(self, actor: Any) -> int:
        """Of an actor's process; waits for one that is being restarted."""
        return int(self.ray.get(actor.__ray_call__.remote(lambda _: __import__("os").getpid())))

    def close(self) -> None:
        for worker in self.workers:
            self.ray.kill(worker, no_restart=True)
        self.fleet.close()


@pytest.fixture(scope="session")
def start_job(cluster: Any) -> Callable[..., Job]:
    """Start a fleet and its workers: `start_job(world_size, together, **options of the actors)`. The caller closes it."""

    def start(world_size: int, together: Sequence[int] | None = None, **options: Any) -> Job:
        return Job(cluster, world_size, together, **options)

    return start
