"""Run the steps of a job with the real manager on a simulated device, and measure each phase as a forecast tells it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import pytest
import torch

import placement
from placement.core.snapshot import Snapshot
from placement.devices.simulated import device as simulated
from placement.phases import reconciler


@dataclass(frozen=True)
class MeasuredPhase:
    """One phase and the phase transition at its beginning."""

    phase: str
    device_bytes: int
    handle_bytes: Mapping[str, int]
    loaded_bytes: int
    offloaded_bytes: int
    skipped_bytes: int
    host_bytes: int
    stall_seconds: float


class LinkClock:
    """A clock that only waiting moves on, so that a simulated link's seconds are measured without those of the processor."""

    def __init__(self) -> None:
        self.now = 1.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let the simulated device wait by this clock, and phase transitions measure by it."""
        for module in (simulated, reconciler):
            monkeypatch.setattr(module, "time", self)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, keeps_gradients: bool = False) -> None:
    optimizer.zero_grad()
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    if not keeps_gradients:
        optimizer.zero_grad()


def steps(
    manager: placement.Manager, cycle: Sequence[str], work: Mapping[str, Callable[[], object]], cycles: int = 3
) -> list[list[MeasuredPhase]]:
    """Run the cycle several times, each as one open phase that switches. Every cycle ends outside all phases.

    Args:
        cycle: "idle" between two phases leaves the one before it enters the next.
        work: what is done in a phase, by its name.
    """
    found = []
    for _ in range(cycles):
        rows = []
        for phase in (*cycle, "idle"):
            before = manager.snapshot()
            if phase == "idle":
                manager.leave()
            elif before.phases:
                manager.switch(phase)
            else:
                manager.enter(phase)
            rows.append(_row(phase, before, manager.snapshot()))
            work.get(phase, lambda: None)()
        found.append(rows)
    return found


def _row(phase: str, before: Snapshot, after: Snapshot) -> MeasuredPhase:
    def grown(field: str) -> int:
        now, then = (sum(int(getattr(handle, field)) for handle in each.handles) for each in (after, before))
        return now - then

    return MeasuredPhase(
        phase=phase,
        device_bytes=sum(handle.resident_bytes for handle in after.handles),
        handle_bytes={handle.name: handle.resident_bytes for handle in after.handles},
        loaded_bytes=grown("loaded_bytes"),
        offloaded_bytes=grown("offloaded_bytes"),
        skipped_bytes=grown("skipped_bytes"),
        host_bytes=sum(handle.host_bytes for handle in after.handles),
        stall_seconds=sum(after.phase_stall_seconds.values()) - sum(before.phase_stall_seconds.values()),
    )
