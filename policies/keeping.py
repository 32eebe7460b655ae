"""Which units a cycle of phases keeps on the device from one phase to the next, and a worker's
handles and phases counted in units.

Sets of units are bit masks: bit `i` stands for the i-th unit. A schedule has, for every phase of
the cycle, the units that are on the device in it. It is judged first by the bytes that move while
somebody waits, then by all bytes that move, each summed over one cycle. What is loaded in a phase
transition can have arrived before, in the room that the phase before it leaves, and nobody waits
for that part.
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
"""The search ends when it has looked at so many choices, and takes the best that it has found until
then. 360 random cycles of 5 to 8 units took at most 505."""

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


@functools.lru_cache(maxsize=256)
def schedule(
    units: tuple[Unit, ...], steps: tuple[Step, ...], budget_bytes: int
) -> tuple[int, ...]:
    """The units to have on the device in each phase of the cycle: those that it needs, and those to
    keep.

    The best schedule that is the same in each cycle, as far as `MOST_LOOKS` choices tell, by a
    depth-first search that takes each stay before it leaves it out: its first leaf takes the
    shortest stays that fit. A phase that needs more than the budget has what it needs.
    """
    problem = _Problem(units, steps, budget_bytes)
    if problem.size(problem.in_use) <= budget_bytes:
        return tuple(problem.in_use & ~(problem.streamed & ~step.needed) for step in steps)
    stays, on = _stays(problem), [step.needed for step in steps]
    best, looks = (problem.cost_of(on), tuple(on)), 0

    def go_on(number: int) -> None:
        nonlocal best, looks
        looks += 1
        if number == len(stays):
            best = min(best, (problem.cost_of(on), tuple(on)))
            return
        unit, between = stays[number]
        if all(problem.size(on[index] | unit) <= problem.rooms[index] for index in between):
            for index in between:
                on[index] |= unit
            go_on(number + 1)
            for index in between:
                on[index] &= ~unit
        if looks < MOST_LOOKS:
            go_on(number + 1)

    go_on(0)
    return best[1]


class _Problem:
    """A cycle of phases, with the sums that every solution needs."""

    def __init__(self, units: tuple[Unit, ...], steps: tuple[Step, ...], budget_bytes: int) -> None:
        self.units, self.steps = units, steps
        self.in_use = functools.reduce(or_, (step.needed for step in steps), 0)
        self.streamed = functools.reduce(or_, (step.streamed for step in steps), 0)
        always = functools.reduce(and_, (step.needed for step in steps), -1)
        self.choices = (
            self.in_use
            & ~always
            & ~self.streamed
            & mask_of(i for i, unit in enumerate(units) if unit.copied_bytes)
        )
        """The units for which there is something to decide: needed in some phases, not in all,
        never streamed, and not for nothing."""
        self.sums = functools.cache(self._sums)
        self.rooms = [max(budget_bytes, self.size(step.needed)) for step in steps]
        self.trained = functools.reduce(or_, (step.trained for step in steps), 0)
        self.trained &= self.choices & mask_of(
            i for i, unit in enumerate(units) if unit.is_copied_back == "trained"
        )
        self.always_dirty = self.choices & mask_of(
            i for i, unit in enumerate(units) if unit.is_copied_back == "always"
        )

    def size(self, mask: int) -> int:
        return self.sums(mask)[0]

    def _sums(self, mask: int) -> tuple[int, int, int]:
        """Device bytes of these units, bytes that loading them copies, and the part of those that
        can arrive early."""
        chosen = [self.units[i] for i in bits(mask)]
        early = sum(unit.copied_bytes for unit in chosen if unit.can_prefetch)
        return sum(unit.nbytes for unit in chosen), sum(unit.copied_bytes for unit in chosen), early

    def cost_of(self, found: list[int]) -> tuple[int, int]:
        """Bytes that somebody waits for, and all bytes, of one cycle with these units on the device
        in each phase."""
        count, dirty, stall, total = len(found), self.trained | self.always_dirty, 0, 0
        # the first cycle only finds out what is dirty at the beginning of the second
        for index in range(2 * count):
            now = index % count
            on, following = found[now], found[(now + 1) % count]
            dirty = (
                (dirty & found[now - 1] & on)
                | (self.steps[now].trained & self.trained)
                | (self.always_dirty & on)
            )
            if index >= count:
                gone = self.sums(on & ~following & dirty)[1]
                loaded, early = self.sums(following & ~on)[1:]
                stall += gone + loaded - min(early, max(0, self.rooms[now] - self.size(on)))
                total += gone + loaded
        return stall, total


_Stay = tuple[int, tuple[int, ...]]
"""A unit (as a mask) that may be kept on the device between two phases that need it, and the phases
that it is kept through."""


def _stays(problem: _Problem) -> list[_Stay]:
    """Every stay of the cycle: short ones first, dirty units before clean ones."""
    count = len(problem.steps)
    found: list[tuple[float, int, _Stay]] = []
    for unit in bits(problem.choices):
        for before in range(count):
            length = 0
            while not problem.steps[(before + 1 + length) % count].needed >> unit & 1:
                length += 1
            if length and problem.steps[before].needed >> unit & 1:
                is_dirty = (
                    problem.steps[before].trained & problem.trained | problem.always_dirty
                ) >> unit & 1
                between = tuple((before + 1 + i) % count for i in range(length))
                found.append(
                    (
                        length / (1 + is_dirty),
                        -problem.units[unit].copied_bytes,
                        (1 << unit, between),
                    )
                )
    return [stay for *_, stay in sorted(found)]


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
    """One cycle of phases. The same cycle has the same steps, whichever of its phases is the
    present one."""

    steps: tuple[Step, ...]
    at: int  # the index of the present phase
    # for each unit the number of phase transitions until a phase needs it again; `NEVER` if none
    # does
    next_use: tuple[int, ...]


class Worker:
    """The handles of one worker: what is always the same, wherever they are now.

    Args:
        view: a view of the worker with every handle CPU_OFFLOADED.
        plan_of: the plan for what a phase needs.
    """

    def __init__(self, view: View, plan_of: Callable[[View], Plan]) -> None:
        self._view = view
        self._plan_of = plan_of
        self.step = functools.cache(self._step)
        self.course = functools.lru_cache(_MOST_COURSES)(self._course)
        having = [
            handle
            for handle in view.handles.values()
            if handle.built and not handle.external and handle.num_bytes
        ]
        found = [each for handle in having for each in _units_of(handle)]
        self.places = [place for place, _ in found]
        self.units = tuple(unit for _, unit in found)
        self.of_handle = {
            name: sum(1 << i for i, place in enumerate(self.places) if place.name == name)
            for name in view.handles
        }
        """The units of each handle."""

    def under(self, plan: Plan) -> int:
        whole = sum(
            [units for name, units in self.of_handle.items() if units and plan.on_device(name)]
        )
        for name, tags in plan.parts.items():
            whole &= ~sum(
                [
                    1 << i
                    for i in bits(self.of_handle[name])
                    if (tag := self.places[i].tag) is not None and tag not in tags
                ]
            )
        return whole

    def present(self, view: View) -> int:
        found = 0
        for handle in view.handles.values():
            if handle.state is not State.CPU_OFFLOADED and handle.resident_bytes:
                found |= self.of_handle[handle.name]
                if handle.resident_tags and handle.tags:
                    away = handle.tags.keys() - handle.resident_tags
                    found &= ~sum(
                        [
                            1 << i
                            for i in bits(self.of_handle[handle.name])
                            if self.places[i].tag in away
                        ]
                    )
        return found

    def early(self, view: View) -> dict[int, int]:
        """The units of which bytes are on the device early, with these bytes."""
        found = dict[int, int]()
        for handle in view.handles.values():
            if handle.prefetched_bytes:
                found |= dict.fromkeys(bits(self.of_handle[handle.name]), handle.prefetched_bytes)
        return found

    def size(self, mask: int) -> int:
        return sum([self.units[i].nbytes for i in bits(mask)])

    def _course(self, phases: tuple[str, ...]) -> Course:
        """The cycle that begins with the present phase. Raises PolicyError where a phase is
        unknown."""
        steps = [self.step(name) for name in phases]
        # nothing leaves in a checkpoint, so the phase before it goes on; the first one may go on
        # from the last
        for _ in range(2):
            for index, name in enumerate(phases):
                if name == "checkpoint":
                    before = steps[index - 1]
                    steps[index] = Step(
                        self.step(name).needed | before.needed, before.trained, before.streamed
                    )
        period = next(
            n
            for n in range(1, len(steps) + 1)
            if len(steps) % n == 0 and steps == steps[:n] * (len(steps) // n)
        )
        shift = min(range(period), key=lambda i: steps[i:period] + steps[:i])
        next_use = [
            next((d for d in range(1, period + 1) if steps[d % period].needed >> unit & 1), NEVER)
            for unit in range(len(self.units))
        ]
        return Course((*steps[shift:period], *steps[:shift]), -shift % period, tuple(next_use))

    def _step(self, phase: str) -> Step:
        """The units that a phase needs. Raises PolicyError where it is unknown."""
        plan = self._plan_of(replace(self._view, phase=phase))
        needed = self.under(plan)
        written = {name for name, state in plan.targets.items() if state is State.TRAINING}
        if phase == "weight_sync":
            written |= {h.name for h in rollout_models(self._view)}
        streamed = sum([self.of_handle[name] for name in plan.streamed])
        return Step(needed, needed & sum([self.of_handle[name] for name in written]), streamed)


def _units_of(handle: HandleView) -> list[tuple[Place, Unit]]:
    if handle.kind == "engine" and not handle.can_prefetch:
        # It places its own memory: copies its weights, changed or not, and drops the rest. Counted
        # in parts where all sizes are known.
        if len(handle.tags) > 1 and sum(handle.tags.values()) == handle.num_bytes:
            sizes = {tag: nbytes for tag, nbytes in handle.tags.items() if nbytes}
            copied = {tag: nbytes if tag == "weights" else 0 for tag, nbytes in sizes.items()}
            return [
                (Place(handle.name, tag), Unit(nbytes, copied[tag], False, "always"))
                for tag, nbytes in sizes.items()
            ]
        return [
            (
                Place(handle.name, None),
                Unit(
                    handle.num_bytes, handle.tags.get("weights", handle.num_bytes), False, "always"
                ),
            )
        ]
    unit = Unit(
        handle.num_bytes,
        handle.num_bytes,
        handle.can_prefetch,
        "never" if handle.readonly else "trained",
    )
    return [(Place(handle.name, None), unit)]
