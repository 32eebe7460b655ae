"""A worker as a cyclic policy counts it: its handles as units, its phases as steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from placement import HandleView, Plan, State, View

from .base import rollout_models
from .keeping import Step, Unit, bits

NEVER = 1 << 30
"""The distance to a phase that does not come."""
_MOST_COURSES = 64


class Place(NamedTuple):
    """The handle, or the part of one, that a unit stands for."""

    name: str
    """The handle's name."""
    tag: str | None
    """The tag of a part of an engine; None for the whole handle."""


class Course(NamedTuple):
    """One cycle of phases. The same cycle has the same steps, whichever of its phases is the present one."""

    steps: tuple[Step, ...]
    at: int
    """The index of the present phase."""
    next_use: tuple[int, ...]
    """For each unit the number of phase transitions until a phase needs it again; `NEVER` if none does."""

    def step(self, distance: int) -> int:
        """The index of the phase that is so many phase transitions away."""
        return (self.at + distance) % len(self.steps)


class Worker:
    """The handles of one worker: what is always the same, wherever they are now.

    Args:
        view: a view of the worker with every handle CPU_OFFLOADED.
        plan_of: the plan for what a phase needs.
    """

    def __init__(self, view: View, plan_of: Callable[[View], Plan]) -> None:
        self._view = view
        self._plan_of = plan_of
        self._steps: dict[str, Step] = {}
        self._courses: dict[tuple[str, ...], Course] = {}
        self.places: list[Place] = []
        units: list[Unit] = []
        for handle in view.handles.values():
            if handle.built and not handle.external and handle.num_bytes:
                for place, unit in _units_of(handle):
                    self.places.append(place)
                    units.append(unit)
        self.units = tuple(units)
        self.of_handle = {name: sum(1 << i for i, place in enumerate(self.places) if place.name == name) for name in view.handles}
        """The units of each handle."""

    def under(self, plan: Plan) -> int:
        """The units that are on the device under a plan."""
        whole = sum([units for name, units in self.of_handle.items() if units and plan.on_device(name)])
        for name, tags in plan.parts.items():
            whole &= ~sum([1 << i for i in bits(self.of_handle[name]) if (tag := self.places[i].tag) is not None and tag not in tags])
        return whole

    def present(self, view: View) -> int:
        """The units that are on the device now."""
        found = 0
        for handle in view.handles.values():
            if handle.state is not State.CPU_OFFLOADED and handle.resident_bytes:
                found |= self.of_handle[handle.name]
                if handle.resident_tags and handle.tags:
                    away = handle.tags.keys() - handle.resident_tags
                    found &= ~sum([1 << i for i in bits(self.of_handle[handle.name]) if self.places[i].tag in away])
        return found

    def early(self, view: View) -> dict[int, int]:
        """The units of which bytes are on the device early, with these bytes."""
        found = dict[int, int]()
        for handle in view.handles.values():
            if handle.prefetched_bytes:
                found |= dict.fromkeys(bits(self.of_handle[handle.name]), handle.prefetched_bytes)
        return found

    def size(self, mask: int) -> int:
        """Device bytes of these units."""
        return sum([self.units[i].nbytes for i in bits(mask)])

    def course(self, phases: tuple[str, ...]) -> Course:
        """The cycle that begins with the present phase.

        Raises:
            PolicyError: a phase is unknown.
        """
        found = self._courses.get(phases)
        if found is None:
            if len(self._courses) >= _MOST_COURSES:
                self._courses.clear()
            found = self._courses[phases] = self._new_course(phases)
        return found

    def _new_course(self, phases: tuple[str, ...]) -> Course:
        steps = [self.step(name) for name in phases]
        for _ in range(2):  # nothing leaves in a checkpoint, so the phase before it goes on; the first one may go on from the last
            for index, name in enumerate(phases):
                if name == "checkpoint":
                    before = steps[index - 1]
                    steps[index] = Step(self.step(name).needed | before.needed, before.trained, before.streamed)
        period = next(n for n in range(1, len(steps) + 1) if len(steps) % n == 0 and steps == steps[:n] * (len(steps) // n))
        shift = min(range(period), key=lambda i: steps[i:period] + steps[:i])
        next_use = [
            next((d for d in range(1, period + 1) if steps[d % period].needed >> unit & 1), NEVER) for unit in range(len(self.units))
        ]
        return Course((*steps[shift:period], *steps[:shift]), -shift % period, tuple(next_use))

    def step(self, phase: str) -> Step:
        """The step that a phase is: the units that it needs.

        Raises:
            PolicyError: the phase is unknown.
        """
        found = self._steps.get(phase)
        if found is None:
            plan = self._plan_of(replace(self._view, phase=phase))
            needed = self.under(plan)
            written = {name for name, state in plan.targets.items() if state is State.TRAINING}
            if phase == "weight_sync":
                written |= {h.name for h in rollout_models(self._view)}
            streamed = sum([self.of_handle[name] for name in plan.streamed])
            found = self._steps[phase] = Step(needed, needed & sum([self.of_handle[name] for name in written]), streamed)
        return found


def _units_of(handle: HandleView) -> list[tuple[Place, Unit]]:
    if handle.kind == "engine" and not handle.can_prefetch:
        # It places its own memory: copies its weights, changed or not, and drops the rest. Counted in parts where all sizes are known.
        if len(handle.tags) > 1 and sum(handle.tags.values()) == handle.num_bytes:
            sizes = {tag: nbytes for tag, nbytes in handle.tags.items() if nbytes}
            copied = {tag: nbytes if tag == "weights" else 0 for tag, nbytes in sizes.items()}
            return [(Place(handle.name, tag), Unit(nbytes, copied[tag], False, "always")) for tag, nbytes in sizes.items()]
        return [(Place(handle.name, None), Unit(handle.num_bytes, handle.tags.get("weights", handle.num_bytes), False, "always"))]
    unit = Unit(handle.num_bytes, handle.num_bytes, handle.can_prefetch, "never" if handle.readonly else "trained")
    return [(Place(handle.name, None), unit)]
