"""Which units a cycle of phases keeps on the device from one phase to the next, and a worker's
handles and phases counted in units.

Sets of units are bit masks: bit `i` stands for the i-th unit. A schedule has, for every phase of
the cycle, the units that are on the device in it. It is judged first by the bytes that move while
the worker waits, then by all bytes that move, each summed over one cycle. Bytes that a phase
transition loads can have arrived before, in the room that the phase before it leaves; the worker
does not wait for that part.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from operator import and_, or_
from typing import Literal, NamedTuple

from placement import HandleView, Plan, State, View

from .colocated import rollout_models

MOST_LOOKS = 4_000
"""The search ends after so many choices, and takes the best schedule until then. 360 random cycles
of 5 to 8 units took at most 505."""

NEVER = 1 << 30  # the distance to a phase that does not come
_MOST_COURSES = 64


class Unit(NamedTuple):
    """Bytes that are on the device together or not at all: a handle, or the part of an engine that
    has a tag."""

    nbytes: int  # device bytes
    # bytes that a load copies, and an offload too unless the unit is clean. 0 for an engine's
    # cache, which is dropped.
    copied_bytes: int
    can_prefetch: bool = True
    is_copied_back: Literal["never", "trained", "always"] = "never"
    """When an offload has to copy: "trained" is only after a TRAINING since the last offload."""


class Step(NamedTuple):
    """One phase of the cycle."""

    needed: int
    """The units that the phase needs on the device."""
    trained: int = 0
    """The units among these that are TRAINING in the phase."""
    streamed: int = 0
    """The units whose state streams through the device in the phase. They can neither stay on the
    device in this phase nor arrive early."""

    def needs(self, unit: int) -> bool:
        return bool(self.needed >> unit & 1)


@functools.lru_cache(maxsize=256)
def schedule(
    units: tuple[Unit, ...], steps: tuple[Step, ...], budget_bytes: int
) -> tuple[int, ...]:
    """The units to have on the device in each phase of the cycle: those that it needs, and those to
    keep.

    It is the best schedule that is the same in each cycle, among the first `MOST_LOOKS` choices. A
    phase that needs more than the budget has the units that it needs.
    """
    problem = _Problem(units, steps, budget_bytes)
    if problem.size(problem.in_use) <= budget_bytes:
        return tuple(problem.in_use & ~(problem.streamed & ~step.needed) for step in steps)
    search = _Search(problem)
    search.go_on(0)
    _, on_device = search.best
    return on_device


class _Search:
    """A depth-first search that takes each stay before it leaves it out. Its first leaf takes the
    shortest stays that fit."""

    def __init__(self, problem: _Problem) -> None:
        self._problem = problem
        self._stays = _stays(problem)
        self._on_device = [step.needed for step in problem.steps]
        self._looks = 0
        self.best = problem.cost_of(self._on_device), tuple(self._on_device)

    def go_on(self, number: int) -> None:
        """Choose the stays from this number on."""
        problem = self._problem
        on_device = self._on_device
        self._looks += 1
        if number == len(self._stays):
            self.best = min(self.best, (problem.cost_of(on_device), tuple(on_device)))
            return
        unit, between = self._stays[number]
        if all(problem.has_room(index, on_device[index] | unit) for index in between):
            for index in between:
                on_device[index] |= unit
            self.go_on(number + 1)
            for index in between:
                on_device[index] &= ~unit
        if self._looks < MOST_LOOKS:
            self.go_on(number + 1)


class _Problem:
    """A cycle of phases, with the sums that every solution needs."""

    def __init__(
        self,
        units: tuple[Unit, ...],
        steps: tuple[Step, ...],
        budget_bytes: int,
    ) -> None:
        self.units = units
        self.steps = steps
        self.in_use = functools.reduce(or_, (step.needed for step in steps), 0)
        self.streamed = functools.reduce(or_, (step.streamed for step in steps), 0)
        always_needed = functools.reduce(and_, (step.needed for step in steps), -1)
        copied = mask_of(index for index, unit in enumerate(units) if unit.copied_bytes)
        self.choices = self.in_use & ~always_needed & ~self.streamed & copied
        """The units that may stay or leave: needed in some phases, not in all, never streamed, and
        with bytes to copy."""
        self.sums = functools.cache(self._sums)
        self.rooms = [max(budget_bytes, self.size(step.needed)) for step in steps]
        trained = functools.reduce(or_, (step.trained for step in steps), 0)
        self.trained = trained & self.choices & self._copied_back("trained")
        self.always_dirty = self.choices & self._copied_back("always")

    def _copied_back(self, when: str) -> int:
        return mask_of(i for i, unit in enumerate(self.units) if unit.is_copied_back == when)

    def size(self, mask: int) -> int:
        return self.sums(mask)[0]

    def has_room(self, index: int, mask: int) -> bool:
        """Whether a phase has room for these units."""
        return self.size(mask) <= self.rooms[index]

    def _sums(self, mask: int) -> tuple[int, int, int]:
        """Device bytes of these units, bytes that loading them copies, and the part of those that
        can arrive early."""
        nbytes = copied_bytes = early_bytes = 0
        for index in bits(mask):
            unit = self.units[index]
            nbytes += unit.nbytes
            copied_bytes += unit.copied_bytes
            early_bytes += unit.copied_bytes if unit.can_prefetch else 0
        return nbytes, copied_bytes, early_bytes

    def cost_of(self, on_device: list[int]) -> tuple[int, int]:
        """Bytes that the worker waits for, and all bytes, of one cycle with these units on the
        device in each phase."""
        count = len(on_device)
        dirty = self.trained | self.always_dirty
        stall = total = 0
        # the first cycle only tells which units are dirty at the beginning of the second
        for index in range(2 * count):
            phase = index % count
            on = on_device[phase]
            following = on_device[(phase + 1) % count]
            dirty &= on_device[phase - 1] & on
            dirty |= self.steps[phase].trained & self.trained
            dirty |= self.always_dirty & on
            if index >= count:
                _, leaving, _ = self.sums(on & ~following & dirty)
                _, loaded, early = self.sums(following & ~on)
                room = max(0, self.rooms[phase] - self.size(on))
                stall += leaving + loaded - min(early, room)
                total += leaving + loaded
        return stall, total

    def is_dirty_after(self, index: int, unit: int) -> bool:
        """Whether a unit that leaves after a phase has to be copied."""
        dirty = self.steps[index].trained & self.trained | self.always_dirty
        return bool(dirty >> unit & 1)


_Stay = tuple[int, tuple[int, ...]]
"""A unit (as a mask) that may be kept on the device between two phases that need it, and the phases
that it is kept through."""


def _stays(problem: _Problem) -> list[_Stay]:
    """Every stay of the cycle: short ones first, dirty units before clean ones."""
    steps = problem.steps
    count = len(steps)
    stays: list[tuple[float, int, _Stay]] = []
    for unit in bits(problem.choices):
        for before in range(count):
            if not steps[before].needs(unit):
                continue
            between: list[int] = []
            index = (before + 1) % count
            while not steps[index].needs(unit):
                between.append(index)
                index = (index + 1) % count
            if between:
                rank = len(between) / (2 if problem.is_dirty_after(before, unit) else 1)
                stay = 1 << unit, tuple(between)
                stays.append((rank, -problem.units[unit].copied_bytes, stay))
    return [stay for *_, stay in sorted(stays)]


def bits(mask: int) -> Iterator[int]:
    """The indices of the units in a mask, ascending."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def mask_of(indices: Iterable[int]) -> int:
    return functools.reduce(or_, (1 << index for index in indices), 0)


class Place(NamedTuple):
    """The handle that a unit stands for, or with a tag the part of an engine."""

    name: str
    tag: str | None


class Course(NamedTuple):
    """One cycle of phases. The same cycle has the same steps in each of its phases."""

    steps: tuple[Step, ...]
    at: int  # the index of the present phase
    # for each unit the number of phase transitions until a phase needs it again; `NEVER` if none
    # does
    next_use: tuple[int, ...]


class Worker:
    """The handles of one worker: the facts that do not depend on where they are now.

    Args:
        view: a view of the worker with every handle CPU_OFFLOADED.
        plan_of: the plan for the needs of a phase.
    """

    def __init__(self, view: View, plan_of: Callable[[View], Plan]) -> None:
        self._view = view
        self._plan_of = plan_of
        self.step = functools.cache(self._step)
        self.course = functools.lru_cache(_MOST_COURSES)(self._course)
        self.places: list[Place] = []
        units: list[Unit] = []
        self.of_handle = dict.fromkeys(view.handles, 0)
        """The units of each handle."""
        for handle in view.handles.values():
            if not handle.built or handle.external or not handle.num_bytes:
                continue
            for place, unit in _units_of(handle):
                self.of_handle[handle.name] |= 1 << len(units)
                self.places.append(place)
                units.append(unit)
        self.units = tuple(units)

    def under(self, plan: Plan) -> int:
        """The units that a plan has on the device."""
        units = 0
        for name, of_handle in self.of_handle.items():
            if of_handle and plan.on_device(name):
                units |= of_handle
        for name, tags in plan.parts.items():
            units &= ~self._other_parts(name, tags)
        return units

    def present(self, view: View) -> int:
        """The units that are on the device now."""
        units = 0
        for handle in view.handles.values():
            if handle.state is not State.CPU_OFFLOADED and handle.resident_bytes:
                units |= self.of_handle[handle.name]
                if handle.resident_tags and handle.tags:
                    units &= ~self._other_parts(handle.name, handle.resident_tags)
        return units

    def _other_parts(self, name: str, tags: frozenset[str]) -> int:
        """The units of an engine's parts that have other tags than these."""
        units = 0
        for unit in bits(self.of_handle[name]):
            tag = self.places[unit].tag
            if tag is not None and tag not in tags:
                units |= 1 << unit
        return units

    def early(self, view: View) -> dict[int, int]:
        """The units of which bytes are on the device early, with these bytes."""
        early: dict[int, int] = {}
        for handle in view.handles.values():
            if handle.prefetched_bytes:
                for unit in bits(self.of_handle[handle.name]):
                    early[unit] = handle.prefetched_bytes
        return early

    def size(self, mask: int) -> int:
        return sum([self.units[i].nbytes for i in bits(mask)])

    def _course(self, phases: tuple[str, ...]) -> Course:
        """The cycle that begins with the present phase. Raises PolicyError where a phase is
        unknown."""
        steps = _shortest_period(self._steps_with_checkpoints(phases))
        # where the cycle begins, so that it is the same from each of its phases: schedules are
        # cached by it
        start = min(range(len(steps)), key=lambda index: _rotated(steps, index))
        cycle = tuple(_rotated(steps, start))
        next_use = [_next_use(steps, unit) for unit in range(len(self.units))]
        return Course(cycle, -start % len(steps), tuple(next_use))

    def _steps_with_checkpoints(self, phases: tuple[str, ...]) -> list[Step]:
        """The steps of these phases. Nothing leaves in a checkpoint, so the phase before it goes
        on."""
        steps = [self.step(name) for name in phases]
        for _ in range(2):  # the first phase may go on from the last
            for index, name in enumerate(phases):
                if name == "checkpoint":
                    before = steps[index - 1]
                    needed = self.step(name).needed | before.needed
                    steps[index] = Step(needed, before.trained, before.streamed)
        return steps

    def _step(self, phase: str) -> Step:
        """The units that a phase needs. Raises PolicyError where it is unknown."""
        plan = self._plan_of(replace(self._view, phase=phase))
        written = {name for name, state in plan.targets.items() if state is State.TRAINING}
        if phase == "weight_sync":
            written |= {handle.name for handle in rollout_models(self._view)}
        needed = self.under(plan)
        return Step(needed, needed & self._of_all(written), self._of_all(plan.streamed))

    def _of_all(self, names: Iterable[str]) -> int:
        return sum([self.of_handle[name] for name in names])


def _shortest_period(steps: list[Step]) -> list[Step]:
    """The shortest list that, repeated, gives these steps."""
    for length in range(1, len(steps)):
        repeats, remainder = divmod(len(steps), length)
        if remainder == 0 and steps == steps[:length] * repeats:
            return steps[:length]
    return steps


def _rotated(steps: list[Step], start: int) -> list[Step]:
    return steps[start:] + steps[:start]


def _next_use(steps: list[Step], unit: int) -> int:
    """After how many phases from the first one a phase needs a unit; `NEVER` if none does."""
    for distance in range(1, len(steps) + 1):
        if steps[distance % len(steps)].needs(unit):
            return distance
    return NEVER


def _units_of(handle: HandleView) -> list[tuple[Place, Unit]]:
    nbytes = handle.num_bytes
    if handle.kind != "engine" or handle.can_prefetch:
        is_copied_back: Literal["never", "trained"] = "never" if handle.readonly else "trained"
        unit = Unit(nbytes, nbytes, handle.can_prefetch, is_copied_back)
        return [(Place(handle.name, None), unit)]
    # It places its own memory: it copies its weights, changed or not, and drops the other parts.
    if len(handle.tags) < 2 or sum(handle.tags.values()) != nbytes:  # not all sizes are known
        unit = Unit(nbytes, handle.tags.get("weights", nbytes), False, "always")
        return [(Place(handle.name, None), unit)]
    parts = []
    for tag, tag_bytes in handle.tags.items():
        if tag_bytes:
            unit = Unit(tag_bytes, tag_bytes if tag == "weights" else 0, False, "always")
            parts.append((Place(handle.name, tag), unit))
    return parts
