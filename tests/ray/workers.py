"""Workers of a fleet, for the tests: an actor with Adam and a reference, on a simulated device of their own."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from typing import Any

import ray
import torch

import placement.ray
from tests.support.trainer import Trainer


class FleetTrainer(placement.ray.Worker):
    """A trainer that is a rank of a fleet."""

    def __init__(self, fleet: str, rank: int, together: Sequence[int] | None, deadline_seconds: float = 20.0) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.trainer = Trainer(
            lambda device: self.join_fleet(fleet, rank=rank, together=together, deadline_seconds=deadline_seconds, device=device)
        )
        if ray.get_runtime_context().was_current_actor_reconstructed:
            time.sleep(1.5)  # as long as a model needs to be loaded: it is in the fleet, and answers nothing yet

    def step(self) -> float:
        """In phase train."""
        loss = self.trainer.learn()
        self.trainer.adam.zero_grad()
        return loss

    @placement.ray.in_phase("log_prob", only=["ref"])
    def judge(self) -> tuple[float, str]:
        return float(self.trainer.judge().mean()), self.manager.phase_name

    def enter(self, name: str) -> None:
        """As hooks of a framework do: without `with`."""
        self.manager.enter(name)

    def leave(self) -> None:
        self.manager.leave()

    def snapshot_fails_once(self) -> None:
        """As where the folder of leases cannot be read for a moment."""
        snapshot = self.manager.snapshot

        def fails() -> Any:
            del self.manager.snapshot
            raise OSError("the folder of leases is gone")

        assert snapshot()
        self.manager.snapshot = fails  # type: ignore[method-assign]

    def fail(self, operation: str, at: int) -> None:
        self.trainer.faults.fail(operation, at=at)

    def look(self) -> dict[str, Any]:
        digest = hashlib.sha256()
        for name in ("actor", "adam", "ref"):
            digest.update(repr(self.manager.handles[name].state_dict()).encode())
        self.manager.check_integrity()
        return {
            "pid": os.getpid(), "states": self.trainer.states(), "phase": self.manager.phase_name, "weights": digest.hexdigest(),
            "resident_bytes": sum(handle.resident_bytes for handle in self.manager.handles.values()),
        }  # fmt: skip


class Plain:
    """An actor that is no worker of a fleet."""

    def look(self) -> int:
        return os.getpid()


class Broken(placement.ray.Worker):
    """A worker whose construction fails."""

    def __init__(self) -> None:
        raise RuntimeError("no weights in this folder")
