"""What the processes in the tests of turns do."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from placement import Manager
from placement.group.turn import Turn
from placement.testing import Faults, SimulatedDevice, assert_nothing_resident

CHUNK = 4096
CAPACITY = 44 * CHUNK


def turn_of(manager: Manager) -> Turn:
    found = manager._stack.reconciler.turn
    assert found is not None
    return found


class Sharer:
    """A trainer on a simulated GPU of 44 chunks that others share. Its actor takes 33 of them: two
    of it do not fit."""

    def __init__(self, folder: str, **settings: Any) -> None:
        torch.manual_seed(0)
        shared = Path(folder) / "capacity"
        self.device = Faults(SimulatedDevice(CAPACITY, chunk_bytes=CHUNK, shared_with=shared))
        self.manager = Manager(
            device=self.device,
            **{"turns": f"{folder}/turns", "turn_deadline_seconds": 25.0} | settings,
        )
        self.actor = nn.Linear(256, 128)
        self.before = self.actor.weight.detach().clone()
        self.manager.register("actor", self.actor, role="actor")

    @property
    def has_turn(self) -> bool:
        return turn_of(self.manager).is_held

    def enter(self, name: str = "log_prob") -> None:
        self.manager.enter(name)
        assert self.has_turn

    def leave(self) -> None:
        self.manager.leave()
        assert_nothing_resident(self.manager)
        assert not self.has_turn

    def leave_and_enter(self) -> None:
        self.leave()
        self.enter()

    def work(self, times: int = 1) -> bool:
        """Go through phases. Returns whether the values are those of the beginning, as bytes."""
        for _ in range(times):
            self.enter()
            same = self.actor.weight.numpy(force=True).tobytes() == self.before.numpy().tobytes()
            self.leave()
        return same

    def enter_and_fork(self) -> int:
        """Returns the number of a child that lives on."""
        self.enter()
        child = os.fork()
        if child == 0:
            signal.pause()
            os._exit(0)
        return child


def print_into(file: Path, work: Callable[..., object], *arguments: Any) -> None:
    """Do the work of a process. What it prints goes into the file."""
    os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), 1)
    work(*arguments)
