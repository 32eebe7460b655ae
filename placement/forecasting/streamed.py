"""The cost of optimizers' steps in a phase that streams their state: see `optimizer_in="streamed"` of the policies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from placement.core.states import State
from placement.forecasting.link import Link
from placement.planning.simulated_handles import SimulatedHandle
from placement.planning.simulation import NESTED, Step


class StreamedSteps(NamedTuple):
    """The streamed steps of all optimizers in one phase."""

    to_device_bytes: int = 0
    to_host_bytes: int = 0
    seconds: float = 0.0
    """How long they keep the link busy; 0 without a link."""


class StepCounts:
    """How many steps the optimizers make in each phase.

    Args:
        given: by phase; other phases with an optimizer to step have one.
        cycle: the names of the phases.

    Raises:
        ValueError: the cycle does not have a phase, or a number is negative.
    """

    def __init__(self, given: Mapping[str, int] | None = None, cycle: Iterable[str] = ()) -> None:
        self._given, names = dict(given or {}), set(cycle)
        if unknown := [name for name in self._given if name not in names]:
            raise ValueError(f"steps are given for {', '.join(map(repr, unknown))}, which the cycle does not have")
        for phase, count in self._given.items():
            if count < 0:
                raise ValueError(f"the number of steps in phase {phase!r} must be 0 or more, not {count}")
        self._outer = {NESTED[name] for name in names if name in NESTED}

    def in_phase(self, phase: str) -> int:
        return self._given.get(phase, 0 if phase in self._outer else 1)


def streamed_steps(step: Step, handles: Iterable[SimulatedHandle], counts: StepCounts, link: Link | None) -> StreamedSteps:
    """The streamed steps of the phase that a phase transition leads to.

    Args:
        handles: as they are when the phase begins.
    """
    count = counts.in_phase(step.phase.name)
    streamed = frozenset[str]() if step.plan is None or step.is_refused else step.plan.streamed
    to_device_bytes = to_host_bytes = 0
    seconds = 0.0
    for handle in handles:
        if handle.name not in streamed or step.states[handle.name] is not State.TRAINING:
            continue
        nbytes, loads = handle.state_bytes, count if handle.is_born else max(0, count - 1)
        to_device_bytes += loads * nbytes
        to_host_bytes += count * nbytes
        if link is not None:
            seconds += loads * link.seconds(nbytes, nbytes) + (count - loads) * link.seconds(0, nbytes)
    return StreamedSteps(to_device_bytes, to_host_bytes, seconds)
