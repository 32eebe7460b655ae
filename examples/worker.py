"""A worker with two models and an optimizer under placement. It registers them once and declares
phases, nothing else.

Runs anywhere in a few seconds: without a GPU it uses the simulated device, which keeps the same
contract in host memory.

    python examples/worker.py
"""

from __future__ import annotations

import copy

import torch
from torch import nn

import placement
from placement.testing import SimulatedDevice, assert_nothing_resident


class Worker:
    """The worker that a training framework runs on each GPU."""

    def __init__(self, device: str | SimulatedDevice) -> None:
        self.manager = placement.Manager(device=device)
        self.actor = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8))
        self.ref = copy.deepcopy(self.actor).requires_grad_(False)
        self.optimizer = torch.optim.AdamW(self.actor.parameters(), lr=1e-3)

        self.manager.register("actor", self.actor, role="actor")
        self.manager.register("actor.optimizer", self.optimizer)
        self.manager.register("ref", self.ref, role="ref", readonly=True)

    def step(
        self,
        phase: placement.Phase,
        observations: torch.Tensor,
        actions: torch.Tensor,
        advantages: torch.Tensor,
    ) -> float:
        """One step: log-probabilities of both models, then one update. `phase` is the open one.
        Inputs are [samples, ...] on the device. Returns the loss."""
        phase.switch("log_prob")  # the actor stays from the step before, its optimizer leaves
        with torch.no_grad():
            old = self.actor(observations).log_softmax(-1).gather(1, actions)
            ref = self.ref(observations).log_softmax(-1).gather(1, actions)

        phase.switch("train")
        new = self.actor(observations).log_softmax(-1).gather(1, actions)
        ratio, distance = torch.exp(new - old), ref - new
        loss = -(ratio * advantages).mean() + 0.1 * (distance.exp() - distance - 1).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def main() -> list[float]:
    """Run three steps in one open phase. Returns their losses. Afterwards the device is empty."""
    torch.manual_seed(0)
    cuda = torch.cuda.is_available()
    worker = Worker("cuda:0" if cuda else SimulatedDevice(capacity_bytes=16 << 20))
    place = torch.device("cuda:0" if cuda else "cpu")
    losses = []
    with worker.manager.phase("log_prob") as phase:
        for number in range(3):
            observations = torch.randn(32, 64, device=place)
            advantages = torch.randn(32, 1, device=place)
            actions = torch.randint(8, (32, 1), device=place)
            losses.append(worker.step(phase, observations, actions, advantages))
            print(f"step {number}: loss {losses[-1]:+.4f}")
    assert_nothing_resident(worker.manager)
    print("0 bytes left on the device")
    for record in list(worker.manager.journal)[-4:]:
        print(
            f"  {record.phase:<9} {record.handle:<16} {record.trigger:<12} {record.source} -> "
            f"{record.target}"
        )
    worker.manager.close()
    return losses


if __name__ == "__main__":
    main()
