"""What the processes in the tests of suspensions do."""

from __future__ import annotations

import http.client
import json
from typing import Any

import torch
import torch.distributed as dist

from placement import Manager
from placement.group import StoreGroup
from placement.testing import SimulatedDevice
from tests.support.threads import until
from tests.support.trainer import CHUNK, Trainer

TOKEN = "a-token-of-the-tests"
CHUNKS = 16
"""The capacity of the shared device. Training takes nine of them."""


def post(port: int, path: str, **body: Any) -> tuple[int, Any]:
    """The status of the answer, and its body: JSON, or a text of a refusal."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        connection.request("POST", path, json.dumps(body), headers)
        answer = connection.getresponse()
        told = answer.read().decode()
        return answer.status, json.loads(told) if answer.status == 200 else told
    finally:
        connection.close()


class Service:
    """What a job does that a client may suspend over HTTP."""

    manager: Manager
    server: Any

    def port(self) -> int:
        return int(self.server.port)

    def until_asked(self) -> None:
        """Return once a client waits for the suspension."""
        until(lambda: self.manager._stack.suspension.asked)

    def enter(self) -> float:
        """Begin to train. Returns the loss of the step."""
        raise NotImplementedError

    def leave(self) -> None:
        self.manager.leave()

    def leave_and_enter(self) -> float:
        self.leave()
        return self.enter()


class Job(Service, Trainer):
    """A job that trains step by step, and may be suspended over HTTP; a rank of a group where the
    port of a store is given."""

    def __init__(self, shared: str, store: int = 0, rank: int = 0, world: int = 1) -> None:
        torch.manual_seed(rank)
        group = None
        if store:
            served = dist.TCPStore("127.0.0.1", store, None, False, wait_for_workers=False)
            group = StoreGroup(served, rank, world, 4.0)

        def manager_on(_: Any) -> Manager:
            capacity = CHUNKS * CHUNK
            device = SimulatedDevice(capacity, chunk_bytes=CHUNK, shared_with=shared)
            return Manager(device=device, group=group, budget_bytes=capacity)

        Trainer.__init__(self, manager_on)
        self.server = self.manager.serve(control=TOKEN)

    def enter(self) -> float:
        self.manager.enter("train")
        return self.learn(1.0)

    def state(self) -> tuple[bool, int]:
        """Whether it is suspended, and the bytes of its chunks."""
        device_bytes = self.manager.device.memory().chunk_bytes
        return self.manager.snapshot().suspended, device_bytes


class Other:
    """A process without a manager on the same device."""

    def __init__(self, shared: str) -> None:
        self.device = SimulatedDevice(CHUNKS * CHUNK, chunk_bytes=CHUNK, shared_with=shared)
        self.chunks: list[Any] = []

    def take_all(self) -> int:
        """Take all that is free, and return how many chunks that is."""
        while self.device.memory().free_bytes >= CHUNK:
            self.chunks.append(self.device.create(CHUNK))
        return len(self.chunks)

    def give_back(self) -> None:
        self.device.release(*self.chunks)
        self.chunks = []
