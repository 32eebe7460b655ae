"""The smallest job that ranks of a group train together: an actor with Adam, and a reference."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from placement import Manager
from placement.devices.base import Device
from placement.testing import Faults, SimulatedDevice

CHUNK = 4096
WIDTH = 48
"""A layer of this width takes three chunks."""


class Trainer:
    """An actor with Adam and a readonly reference, registered with a manager whose device can be
    made to fail.

    Args:
        manager_on: makes the manager for a device.
        chunks: capacity of the device, in chunks.
    """

    def __init__(self, manager_on: Callable[[Device], Manager], chunks: int = 64) -> None:
        self.faults = Faults(SimulatedDevice(chunks * CHUNK, chunk_bytes=CHUNK))
        self.manager = manager_on(self.faults)
        self.actor, self.ref = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.adam = torch.optim.Adam(self.actor.parameters())
        self.manager.register("actor", self.actor, role="actor")
        self.manager.register("adam", self.adam)
        self.manager.register("ref", self.ref, role="ref", readonly=True)

    def judge(self) -> torch.Tensor:
        """The reference's outputs, in the phase log_prob."""
        with torch.no_grad():
            outputs: torch.Tensor = self.ref(torch.ones(2, WIDTH))
        return outputs

    def learn(self, target: torch.Tensor | float = 0.0) -> float:
        """One optimizer step towards `target`, in the phase train. The gradients stay. Returns the
        loss."""
        loss = (self.actor(torch.ones(2, WIDTH)) - target).square().mean()
        self.adam.zero_grad()
        loss.backward()
        self.adam.step()
        return float(loss.detach())

    def states(self) -> dict[str, str]:
        return {name: handle.state.value for name, handle in self.manager.handles.items()}
