"""A worker for the tests with a real Prometheus: a step of known shape, over and over, that costs
next to no processor time."""

from __future__ import annotations

import os
import time

import torch
from torch import nn

import placement
from placement.testing import SimulatedDevice


def main(folder: str, environment: dict[str, str]) -> None:
    """Work until it is killed. `folder`: for discovery. `environment`: what the launcher tells this
    worker."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    manager = placement.Manager(
        device=SimulatedDevice(4 << 20, chunk_bytes=65536), discovery=folder
    )
    actor, ref, critic = nn.Linear(128, 128), nn.Linear(128, 128), nn.Linear(128, 128)
    adam = torch.optim.Adam(actor.parameters())
    manager.register("actor", actor, role="actor")
    manager.register("actor.optimizer", adam)
    manager.register("ref", ref, role="ref", readonly=True)
    manager.register("critic", critic, role="critic")
    manager.serve()
    while True:
        with manager.phase("rollout") as step:
            time.sleep(0.6)
            step.switch("log_prob")
            time.sleep(0.11)
            step.switch("values")
            time.sleep(0.07)
            step.switch("train")
            actor(torch.randn(2, 128)).sum().backward()
            adam.step()
            adam.zero_grad()
            time.sleep(0.3)
            step.switch("weight_sync")
            time.sleep(0.05)  # shorter than a scrape ever sees
        time.sleep(0.1)
