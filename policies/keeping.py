"""The schedule of a cycle of phases that repeats: which units are worth keeping on the device from one phase to the next.

Sets of units are bit masks: bit `i` stands for the i-th unit. A schedule has, for every phase of the cycle, the units that are on the
device in it. It is judged first by the bytes that move while somebody waits, then by all bytes that move, each summed over one cycle. What
is loaded in a phase transition can have arrived before, in the room that the phase before it leaves, and nobody waits for that part.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Literal, NamedTuple

MOST_UNITS = 10
"""More units than this are not scheduled exactly: the number of states doubles with each."""
MOST_LOOKS = 30_000
"""The exact search gives up when it has looked at so many phase transitions, and takes the best that it has found until then."""


class Unit(NamedTuple):
    """Bytes that are on the device together or not at all: a handle, or the part of an engine that has a tag."""

    nbytes: int
    """Device bytes."""
    copied_bytes: int
    """Bytes that a load copies, and an offload too unless the unit is clean. 0 for an engine's cache, which is dropped."""
    can_prefetch: bool = True
    is_copied_back: Literal["never", "trained", "always"] = "never"
    """When an offload has to copy: "trained" is only after a TRAINING since the last offload."""


class Step(NamedTuple):
    """One phase of the cycle."""

    needed: int
    """The units that the phase needs on the device."""
    trained: int = 0
    """Those of them that are TRAINING in it."""
    streamed: int = 0
    """Units whose state streams through the device in it. They can neither stay on the device in this phase nor arrive early."""


@functools.lru_cache(maxsize=256)
def schedule(units: tuple[Unit, ...], steps: tuple[Step, ...], budget_bytes: int) -> tuple[int, ...]:
    """The units to have on the device in each phase of the cycle: those that it needs, and those to keep.

    The best schedule that is the same in each cycle, for few units. For many, the shortest stays that fit. A phase that needs more than
    the budget has what it needs.
    """
    problem = _Problem(units, steps, budget_bytes)
    if problem.size(problem.in_use) <= budget_bytes:
        return tuple(problem.in_use & ~(problem.streamed & ~step.needed) for step in steps)
    found = _shortest_stays(problem)
    if problem.choices.bit_count() <= MOST_UNITS:
        found = _Search(problem).best(found)
    return tuple(found)


class _Problem:
    """A cycle of phases, with the sums that every solution needs."""

    def __init__(self, units: tuple[Unit, ...], steps: tuple[Step, ...], budget_bytes: int) -> None:
        self.units, self.steps = units, steps
        self.in_use = functools.reduce(lambda mask, step: mask | step.needed, steps, 0)
        self.streamed = functools.reduce(lambda mask, step: mask | step.streamed, steps, 0)
        always = functools.reduce(lambda mask, step: mask & step.needed, steps, -1)
        self.choices = self.in_use & ~always & ~self.streamed & _mask(i for i, unit in enumerate(units) if unit.copied_bytes)
        """The units for which there is something to decide: needed in some phases, not in all, never streamed, and not for nothing."""
        self._sizes: dict[int, tuple[int, int, int]] = {}
        self.rooms = [max(budget_bytes, self.size(step.needed)) for step in steps]
        self.trained = functools.reduce(lambda mask, step: mask | step.trained, steps, 0)
        self.trained &= self.choices & _mask(i for i, unit in enumerate(units) if unit.is_copied_back == "trained")
        self.always_dirty = self.choices & _mask(i for i, unit in enumerate(units) if unit.is_copied_back == "always")

    def size(self, mask: int) -> int:
        """Device bytes of these units."""
        return self.sums(mask)[0]

    def sums(self, mask: int) -> tuple[int, int, int]:
        """Device bytes of these units, bytes that loading them copies, and the part of those that can arrive early."""
        found = self._sizes.get(mask)
        if found is None:
            chosen = [self.units[i] for i in bits(mask)]
            early = sum(unit.copied_bytes for unit in chosen if unit.can_prefetch)
            found = self._sizes[mask] = sum(u.nbytes for u in chosen), sum(u.copied_bytes for u in chosen), early
        return found

    def dirty_after(self, dirty: int, on: int, step: Step) -> int:
        """The units on the device that an offload has to copy, once `step` has run."""
        return (dirty & on) | (step.trained & self.trained) | (self.always_dirty & on)

    def cost(self, index: int, on: int, dirty: int, following: int) -> tuple[int, int]:
        """Bytes that somebody waits for, and all bytes, of the phase transition after step `index`."""
        gone = self.sums(on & ~following & dirty)[1]
        loaded, early = self.sums(following & ~on)[1:]
        room = max(0, self.rooms[index] - self.size(on))
        return gone + loaded - min(early, room), gone + loaded

    def cost_of(self, found: list[int]) -> tuple[int, int]:
        """Bytes that somebody waits for, and all bytes, of one cycle."""
        count, dirty, stall, total = len(found), self.trained | self.always_dirty, 0, 0
        for index in range(2 * count):  # the first cycle only finds out what is dirty at the beginning of the second
            now, step = index % count, self.steps[index % count]
            dirty = self.dirty_after(dirty & found[now - 1], found[now], step)
            waited, moved = self.cost(now, found[now], dirty, found[(now + 1) % count])
            if index >= count:
                stall, total = stall + waited, total + moved
        return stall, total


def _shortest_stays(problem: _Problem) -> list[int]:
    """Keep units between two uses wherever that fits, those that are needed again soonest first, and the dirty ones among them."""
    found = [step.needed for step in problem.steps]
    count = len(found)
    stays: list[tuple[float, int, int, list[int]]] = []
    for unit in bits(problem.choices):
        for before in range(count):
            length = 0
            while not problem.steps[(before + 1 + length) % count].needed >> unit & 1:
                length += 1
            if length and problem.steps[before].needed >> unit & 1:
                is_dirty = (problem.steps[before].trained & problem.trained | problem.always_dirty) >> unit & 1
                between = [(before + 1 + i) % count for i in range(length)]
                stays.append((length / (1 + is_dirty), -problem.units[unit].copied_bytes, unit, between))
    for *_, unit, between in sorted(stays):
        if all(problem.size(found[index] | 1 << unit) <= problem.rooms[index] for index in between):
            for index in between:
                found[index] |= 1 << unit
    return found


class _TooMany(Exception):
    """The exact search has looked at `MOST_LOOKS` phase transitions."""


class _State(NamedTuple):
    on: int
    dirty: int


class _Search:
    """The best schedule of a cycle, by dynamic programming over the sets of units on the device.

    Whether to keep a unit is decided when a phase is the last one in a row that needs it. It is kept until it is needed again, or not at
    all: to evict it later moves as many bytes. The cycle begins where most units are needed, because few can then be kept over its end.
    """

    def __init__(self, problem: _Problem) -> None:
        count = len(problem.steps)
        self._problem = problem
        self._first = max(range(count), key=lambda i: problem.size(problem.steps[i].needed & problem.choices))
        self._order = [(self._first + i) % count for i in range(count)]
        self._weight = 1 + 2 * count * problem.sums(problem.in_use)[1]
        """More than all bytes of a cycle, so that one number compares both: waited bytes times this, plus all bytes."""
        self._to_go: dict[tuple[int, _State], int] = {}
        self._next: dict[tuple[int, _State], list[tuple[int, int, _State]]] = {}
        self._looks = 0

    def best(self, found: list[int]) -> list[int]:
        """A schedule that is better than `found`, or that one if there is none, or if there are too many to look at."""
        stall, total = self._problem.cost_of(found)
        least = stall * self._weight + total
        try:
            # The least cost of a cycle that may end in another state than it began in: no cycle from this start can cost less.
            starts = sorted((self._least_to_go(0, start), start) for start in self._starts())
            for bound, start in starts:
                if bound >= least:
                    break
                least, found = self._cheaper(start, least) or (least, found)
        except _TooMany:
            pass
        return found

    def _starts(self) -> Iterator[_State]:
        """The states in which the first step may begin: with each set of kept units that fits, whatever of it is dirty."""
        problem = self._problem
        step, room = problem.steps[self._first], problem.rooms[self._first]
        for kept in subsets(problem.choices & ~step.needed):
            on = step.needed | kept
            if problem.size(on) <= room:
                sure = problem.dirty_after(0, on, step)
                for dirty in subsets(on & problem.trained & ~sure & ~self._surely_dirty):
                    yield _State(on, sure | dirty | (on & self._surely_dirty))

    @functools.cached_property
    def _surely_dirty(self) -> int:
        """Units that are dirty if they are on the device at the beginning: not one phase has done without them since they were trained."""
        sure, open_units, has_been_needed = 0, self._problem.trained, self._problem.steps[self._first].needed
        for index in reversed(self._order):
            step = self._problem.steps[index]
            sure |= open_units & step.trained
            open_units &= ~step.trained & ~(has_been_needed & ~step.needed)
            has_been_needed |= step.needed
        return sure

    def _following(self, index: int, state: _State) -> list[tuple[int, int, _State]]:
        """The states after a phase transition, each with its cost and the units that it evicts."""
        known = self._next.get((index, state))
        if known is not None:
            return known
        problem, at, after = self._problem, self._order[index], self._order[(index + 1) % len(self._order)]
        step = problem.steps[after]
        found = []
        left = problem.steps[at].needed & ~step.needed
        for evicted in subsets(left & problem.choices):
            on = (state.on & ~evicted & ~(left & ~problem.choices)) | step.needed
            if problem.size(on) <= problem.rooms[after]:
                stall, total = problem.cost(at, state.on, state.dirty, on)
                found.append((stall * self._weight + total, evicted, _State(on, problem.dirty_after(state.dirty, on, step))))
        self._next[index, state] = found
        self._look(len(found))
        return found

    def _look(self, count: int) -> None:
        self._looks += count
        if self._looks > MOST_LOOKS:
            raise _TooMany

    def _least_to_go(self, index: int, state: _State) -> int:
        """The least cost from here to the end of the cycle, in whatever state that is."""
        if index == len(self._order):
            return 0
        known = self._to_go.get((index, state))
        if known is None:
            ways = [cost + self._least_to_go(index + 1, following) for cost, _, following in self._following(index, state)]
            known = self._to_go[index, state] = min(ways, default=1 << 200)
        return known

    def _cheaper(self, start: _State, least: int) -> tuple[int, list[int]] | None:
        """The cheapest cycle that ends in the state in which it begins, if it costs less than `least`."""
        layers: list[dict[_State, tuple[int, _State]]] = [{start: (0, start)}]
        for index in range(len(self._order)):
            layer: dict[_State, tuple[int, _State]] = {}
            over_the_end = self._needed_no_more(index)
            for state, (spent, _) in layers[-1].items():
                for cost, evicted, following in self._following(index, state):
                    if (evicted ^ ~start.on) & over_the_end:
                        continue  # it is kept over the end of the cycle if and only if it was there at the beginning
                    is_cheapest = following not in layer or spent + cost < layer[following][0]
                    if is_cheapest and spent + cost + self._least_to_go(index + 1, following) < least:
                        layer[following] = spent + cost, state
            layers.append(layer)
            self._look(len(layer))
        if start not in layers[-1]:
            return None
        found, state = [0] * len(self._order), start
        for index in range(len(self._order), 0, -1):
            state = layers[index][state][1]
            found[self._order[index - 1]] = state.on
        return layers[-1][start][0], found

    def _needed_no_more(self, index: int) -> int:
        """The units that leave after this step of the search, and are not needed before the first step has been."""
        later = functools.reduce(lambda mask, i: mask | self._problem.steps[i].needed, [*self._order[index + 1 :], self._first], 0)
        return self._problem.steps[self._order[index]].needed & ~later & self._problem.choices


def bits(mask: int) -> Iterator[int]:
    """The indices of the units in a mask, ascending."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def subsets(mask: int) -> Iterator[int]:
    """All subsets of a mask, the mask itself last."""
    part = 0
    while True:
        yield part
        if part == mask:
            return
        part = (part - mask) & mask


def _mask(indices: Iterator[int]) -> int:
    return functools.reduce(lambda mask, index: mask | 1 << index, indices, 0)
