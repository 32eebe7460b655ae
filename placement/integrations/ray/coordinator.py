"""The coordinator of a fleet: an actor that knows every worker, and shows them to Prometheus and to people.

It is in nobody's way: phases go from the driver straight to the workers, and decisions over a board of their own. What it knows it
has from the workers' reports, which come by themselves, so that a restarted one knows everything again a moment later, at the same address.
"""

from __future__ import annotations

import socket
import time
from typing import Any

from placement.core.errors import PlacementError
from placement.group.messages import decode
from placement.group.ray import import_ray
from placement.integrations.ray.messages import Fleetwide, NextReport, WorkerStatus
from placement.observe.discovery import Target
from placement.observe.fleet import DiscoveryServer

LEAST_SECONDS = 2.0
"""Between two reports of a worker."""
REPORTS_PER_SECOND = 100.0
"""Of all workers together: a thousand of them report every 10 s."""
GONE_SECONDS = 300.0
"""A worker that was killed is listed so long, so that Prometheus sees that it does not answer; as with files, see `discovery`."""


class Coordinator:
    """The actor's class.

    Args:
        port, address: of the pages, see `DiscoveryServer`.

    Raises:
        PlacementError: the port is taken.
    """

    def __init__(self, port: int, address: str) -> None:
        self._known: dict[int, tuple[WorkerStatus, float]] = {}
        self._server = DiscoveryServer(self.targets, port=port, address=address)

    def report(self, message: bytes) -> bytes:
        """A worker says how it is, and hears when to do so again.

        Raises:
            ValueError: it is no status.
        """
        status = decode(WorkerStatus, message)
        now = time.monotonic()
        # Replaced as a whole: the server's threads read it.
        self._known = {rank: each for rank, each in self._known.items() if now - each[1] < GONE_SECONDS} | {status.rank: (status, now)}
        return NextReport(seconds=max(LEAST_SECONDS, len(self._known) / REPORTS_PER_SECOND)).encode()

    def forget(self, rank: int) -> None:
        """A worker ends in order."""
        self._known = {each: known for each, known in self._known.items() if each != rank}

    def status(self) -> bytes:
        """A `Fleetwide`: what every worker last said, by rank."""
        now = time.monotonic()
        known = [status.model_copy(update={"age_seconds": now - heard}) for _, (status, heard) in sorted(self._known.items())]
        return Fleetwide(workers=tuple(known)).encode()

    def targets(self) -> list[Target]:
        """For Prometheus."""
        now = time.monotonic()
        known = sorted(self._known.items())
        return [Target(address=status.address, labels=status.labels) for _, (status, heard) in known if now - heard < GONE_SECONDS]


def start_coordinator(name: str, port: int, address: str) -> tuple[Any, str]:
    """Start it on the driver's node: Prometheus is told of one address, and that must not move.

    Returns:
        Its handle, and the URL of its pages.

    Raises:
        PlacementError: a fleet of this name is there already, or the port is taken.
    """
    ray = import_ray()
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    port = port or _free_port(address)
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options = {"name": actor_name(name), "num_cpus": 0, "max_restarts": -1, "scheduling_strategy": here}
    try:
        actor = ray.remote(Coordinator).options(**options).remote(port, address)
        ray.get(actor.__ray_ready__.remote())
    except ValueError as error:
        raise PlacementError(f"there is a fleet {name!r} already; close it, or take another name") from error
    except ray.exceptions.RayError as error:
        raise PlacementError(f"the coordinator of fleet {name!r} cannot be started: {str(error).strip().splitlines()[-1]}") from error
    return actor, f"http://{address}:{port}"


def actor_name(fleet: str) -> str:
    return f"placement {fleet} coordinator"


def board_name(fleet: str) -> str:
    return f"placement {fleet} board"


def find(actor: str, fleet: str) -> Any:
    """An actor of a fleet, from a worker.

    Raises:
        PlacementError: there is no such fleet.
    """
    ray = import_ray()
    try:
        return ray.get_actor(actor)
    except ValueError as error:
        raise PlacementError(
            f"no fleet {fleet!r} in this job's namespace: the driver makes placement.ray.Fleet({fleet!r}) first"
        ) from error


def address_of(address: str) -> str:
    """ "node" is this node's address in the cluster; anything else is what it says."""
    if address != "node":
        return address
    found: str = import_ray().util.get_node_ip_address()
    return found


def _free_port(address: str) -> int:
    # Chosen here and once: a restarted coordinator has to serve on the same one.
    with socket.create_server((address, 0)) as listener:
        return int(listener.getsockname()[1])
