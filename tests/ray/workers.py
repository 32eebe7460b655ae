"""Workers of a fleet, for the tests: an actor with Adam and a reference, on a simulated device of
their own."""

from __future__ import annotations

import hashlib
import os
from typing import Any

import torch

import placement
import placement.ray
from tests.support.trainer import Trainer


class FleetTrainer(placement.ray.Worker):
    """A trainer whose phases the driver declares."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.trainer = Trainer(lambda device: placement.Manager(device=device))
        self.manager = self.trainer.manager

    def step(self) -> float:
        """In phase train."""
        loss = self.trainer.learn()
        self.trainer.adam.zero_grad()
        return loss

    def leave(self) -> None:
        self.manager.leave()

    def fail(self, operation: str, at: int) -> None:
        self.trainer.faults.fail(operation, at=at)

    def look(self) -> dict[str, Any]:
        digest = hashlib.sha256()
        for name in ("actor", "adam", "ref"):
            digest.update(repr(self.manager.handles[name].state_dict()).encode())
        self.manager.check_integrity()
        return {
            "pid": os.getpid(),
            "states": self.trainer.states(),
            "phase": self.manager.phase_name,
            "weights": digest.hexdigest(),
            "resident_bytes": sum(
                handle.resident_bytes for handle in self.manager.handles.values()
            ),
        }
