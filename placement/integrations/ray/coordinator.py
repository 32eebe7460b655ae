"""The coordinator of a fleet: an actor that knows every worker, and serves their metrics' addresses and status.

No phase depends on it: orders go from the driver straight to the workers, and decisions over a separate board. It learns everything
from the workers' periodic reports. So a restarted coordinator knows everything again a moment later, at the same address.
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
"""The shortest time between two reports of a worker."""
REPORTS_PER_SECOND = 100.0
"""Reports of all workers together: with a thousand workers, each reports every 10 s."""
GONE_SECONDS = 300.0
"""How long a killed worker stays listed, so that Prometheus sees that it does not answer; as with files, see `discovery`."""


class Coordinator:
    """The class of the coordinator's actor.

    Args:
        port, address: where the pages are served, see `DiscoveryServer`.

    Raises:
        PlacementError: the port is taken.
    """

    def __init__(self, port: int, address: str) -> None:
        self._known: dict[int, tuple[WorkerStatus, float]] = {}
        self._server = DiscoveryServer(self.targets, port=port, address=address)

    def report(self, message: bytes) -> bytes:
        """Record a worker's `WorkerStatus`. Returns a `NextReport`.

        Raises:
            ValueError: the message is not a valid status.
        """
        status = decode(WorkerStatus, message)
        now = time.monotonic()
        # Replaced as a whole, because the server's threads read it.
        self._known = {rank: each for rank, each in self._known.items() if now - each[1] < GONE_SECONDS} | {status.rank: (status, now)}
        return NextReport(seconds=max(LEAST_SECONDS, len(self._known) / REPORTS_PER_SECOND)).encode()

    def forget(self, rank: int) -> None:
        """Remove a worker that ends in order."""
        self._known = {each: known for each, known in self._known.items() if each != rank}

    def status(self) -> bytes:
        """An encoded `Fleetwide`: the last status of every worker, by rank."""
        now = time.monotonic()
        known = [status.model_copy(update={"age_seconds": now - heard}) for _, (status, heard) in sorted(self._known.items())]
        return Fleetwide(workers=tuple(known)).encode()

    def targets(self) -> list[Target]:
        """The workers' addresses and labels for Prometheus."""
        now = time.monotonic()
        known = sorted(self._known.items())
        return [Target(address=status.address, labels=status.labels) for _, (status, heard) in known if now - heard < GONE_SECONDS]


def start_coordinator(name: str, port: int, address: str) -> tuple[Any, str]:
    """Start the coordinator on the driver's node, because its address must not change once Prometheus has it.

    Returns:
        The actor's handle, and the URL of its pages.

    Raises:
        PlacementError: a fleet of this name exists already, or the port is taken.
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
        raise PlacementError(f"a fleet {name!r} exists already; close it, or choose another name") from error
    except ray.exceptions.RayError as error:
        raise PlacementError(f"the coordinator of fleet {name!r} cannot be started: {str(error).strip().splitlines()[-1]}") from error
    return actor, f"http://{address}:{port}"


def actor_name(fleet: str) -> str:
    return f"placement {fleet} coordinator"


def board_name(fleet: str) -> str:
    return f"placement {fleet} board"


def find(actor: str, fleet: str) -> Any:
    """Find an actor of a fleet from within a worker.

    Raises:
        PlacementError: there is no such fleet.
    """
    ray = import_ray()
    try:
        return ray.get_actor(actor)
    except ValueError as error:
        raise PlacementError(
            f"no fleet {fleet!r} in this job's namespace: make placement.ray.Fleet({fleet!r}) in the driver first"
        ) from error


def address_of(address: str) -> str:
    """Resolve an address: "node" means this node's address in the cluster; any other address is returned unchanged."""
    if address != "node":
        return address
    found: str = import_ray().util.get_node_ip_address()
    return found


def _free_port(address: str) -> int:
    # Chosen once here, because a restarted coordinator must serve on the same port.
    with socket.create_server((address, 0)) as listener:
        return int(listener.getsockname()[1])
