"""A manager with one offloaded model on a simulated device, and what a server answers: what most of these tests look at."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

from torch import nn

import placement
from placement.testing import SimulatedDevice


def managed(**settings: Any) -> tuple[placement.Manager, nn.Linear]:
    """The model is 4,224 bytes, two chunks of the device. It is registered as "actor"."""
    manager = placement.Manager(**{"device": SimulatedDevice(1 << 20, chunk_bytes=4096), **settings})
    model = nn.Linear(32, 32)
    manager.register("actor", model, role="actor")
    return manager, model


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.loads(answer.read())
