"""A policy that knows which phases come next, and moves as little as possible while somebody
waits."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from placement import HandleView, Plan, State, View

from .colocated import Colocated, OptimizerIn
from .keeping import Course, Worker, bits, mask_of, schedule

Idle = Literal["keep", "empty"]
# schedules are made for budgets with so many binary digits, rounded down: a budget that wavers by
# less asks for no new one
_DIGITS = 10
_CRUMB = 256  # less than this part of a unit is not worth prefetching
# the number of different workers, or of states of one, for which the needs of phases are remembered
_MOST_WORKERS = 32


class Cyclic(Colocated):
    """Keeps on the device what is needed soonest, evicts what is needed last, and lets what is
    needed next arrive early.

    The cycle of phases is learned: `View.upcoming` has it once it has been seen. For the phase that
    begins, the handles that it needs are where `Colocated` wants them. Beside them stay the handles
    that are worth it: those of the schedule of the whole cycle in which the fewest bytes move while
    somebody waits, and then the fewest bytes at all. To evict a handle that was TRAINING since its
    last offload costs an offload and a load, any other module only a load. Of what the next phases
    need, as much arrives early as there is room for (`Plan.prefetch`), nearest first; in the room
    that is left then, what leaves is saved while the phase computes. Up to ten handles the schedule
    is the best one that is the same in every cycle; for more it is a good one.

    A phase transition loads nothing that its phase does not need, and no `Lazy` is built only
    because it would fit. So each handle moves at most as often as under `Colocated`. Until the
    cycle is known, and in a phase inside another one, everything stays that fits, and what is
    needed last leaves first.

    Args:
        cycle: the phases of one step in order, such as `("rollout", "log_prob", "train",
            "weight_sync")`, so that the policy need not learn them. A phase outside the cycle
            counts as put in between.
        idle: "keep": outside every phase, what is needed soonest stays, and what the next phase
            needs arrives early. "empty": nothing is on the device there.
        optimizer_in: as in `Colocated`.
        drop_gradients: as in `Colocated`.
    """

    name = "cyclic"

    def __init__(
        self,
        cycle: Sequence[str] = (),
        *,
        idle: Idle = "keep",
        optimizer_in: OptimizerIn = "train",
        drop_gradients: bool = False,
    ) -> None:
        # No streamed sync, as in Resident: the actor often is on the device, and streaming would
        # first have to offload it.
        super().__init__(optimizer_in, drop_gradients=drop_gradients)
        if isinstance(cycle, str) or not all(isinstance(name, str) for name in cycle):
            raise ValueError(
                "cycle must be the names of phases in order, such as ('rollout', 'train'), not "
                f"{cycle!r}"
            )
        if idle not in get_args(Idle):
            raise ValueError(f"idle must be one of {', '.join(get_args(Idle))}, not {idle!r}")
        self.cycle = tuple(cycle)
        self.idle = idle
        self._workers: dict[object, Worker] = {}

    def plan(self, view: View) -> Plan:
        """The handles that the phase needs, those that are worth keeping, and what arrives
        early."""
        base = super().plan(view)
        choice = self._choice(view, base)
        return base if choice is None else choice.plan(base)

    def _choice(self, view: View, base: Plan) -> _Choice | None:
        """The choice of what stays and arrives early beside what the phase needs; None where
        nothing shall."""
        room = view.budget_bytes - view.bytes_of(base)
        if view.budget_bytes <= 0 or room < 0 or (view.phase == "idle" and self.idle == "empty"):
            return None
        worker, phases = self._worker_of(view), self._from_here(view)
        course = worker.course(phases)
        kept = schedule(worker.units, course.steps, _rounded(view.budget_bytes))
        streamed = sum([worker.of_handle[name] for name in base.streamed])
        return _Choice(
            view,
            worker,
            len(phases) > 1,
            course,
            kept,
            worker.under(base),
            worker.present(view),
            streamed,
            room,
        )

    def _from_here(self, view: View) -> tuple[str, ...]:
        """The phases of one cycle, beginning with the view's."""
        if not self.cycle:
            return (view.phase, *view.upcoming)
        turns = [self.cycle[i:] + self.cycle[:i] for i in range(len(self.cycle))]
        here = [turn for turn in turns if turn[0] == view.phase] or [
            (view.phase, *turn) for turn in turns
        ]
        return max(here, key=lambda turn: _agreement(turn[1:], view.upcoming))

    def _worker_of(self, view: View) -> Worker:
        own = tuple([(name, *view.wanted_states(name).items()) for name in view.phases])
        facts = own, view.worker_role, tuple([_facts(h) for h in view.handles.values()])
        worker = self._workers.get(facts)
        if worker is None:
            if len(self._workers) >= _MOST_WORKERS:
                self._workers.clear()
            resting = {name: handle.at_rest() for name, handle in view.handles.items()}
            at_rest = replace(view, handles=resting, enclosing=None, upcoming=())
            worker = self._workers[facts] = Worker(at_rest, functools.partial(Colocated.plan, self))
        return worker


@dataclass(eq=False, slots=True)
class _Choice:
    """The units that stay and those that arrive early in one phase."""

    view: View
    worker: Worker
    is_known: bool  # whether the cycle of phases is known
    course: Course
    # for each step of the course the units that are worth having on the device
    scheduled: tuple[int, ...]
    needed: int  # units that the phase needs
    present: int  # units that are on the device before the phase transition
    # units whose state streams through the device in this phase. None of their bytes stay or arrive
    # early.
    streamed: int
    room: int  # device bytes that are left
    beside: int = 0  # device bytes beside what the phase needs and what is kept
    kept: int = 0  # units that stay until they are needed again
    left: int = 0  # units that stay until their room is needed
    # device bytes that arrive early, by unit, soonest needed first
    early: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._keep()
        self._bring()
        self._leave()

    def _keep(self) -> None:
        """Keep what is on the device and in the schedule. In a phase inside another one: what is on
        the device, as far as it fits."""
        is_inside = self.view.enclosing is not None
        wanted = (
            self.present
            & ~self.needed
            & ~self.streamed
            & (-1 if is_inside else self.scheduled[self.course.at])
        )
        around = (
            self.worker.step(self.view.enclosing).needed if self.view.enclosing is not None else 0
        )
        for unit in (*self._soonest(wanted & around), *self._soonest(wanted & ~around)):
            self.kept |= self._take(unit)

    def _bring(self) -> None:
        """Let arrive early what the coming phases load, nearest first, where there is room for it
        in every phase until then.

        What leaves the device only later on its way to that phase has its room reserved as well. So
        what has arrived is never given up.
        """
        self.beside = self.room
        units, on, gone, rooms = (
            self.worker.units,
            self.needed | self.kept,
            dict[int, int](),
            [self.room],
        )
        streamed = self.streamed
        for distance in range(1, len(self.course.steps) + 1):
            if not rooms[0]:
                break
            index = (self.course.at + distance) % len(self.course.steps)
            needed = self.course.steps[index].needed
            for unit in bits(needed & ~on & ~streamed):
                start = gone.get(unit, 0)
                nbytes = (
                    min(units[unit].nbytes, *rooms[start:distance])
                    if units[unit].can_prefetch
                    else 0
                )
                if nbytes > units[unit].nbytes // _CRUMB:
                    rooms[start:distance] = [room - nbytes for room in rooms[start:distance]]
                    if not start and unit not in self.early:
                        self.early[unit] = nbytes
            following = needed | (self.scheduled[index] & on)
            gone |= dict.fromkeys(bits(on & ~following), distance)
            on = following
            streamed |= self.course.steps[index].streamed
            rooms.append(max(0, self.view.budget_bytes - self.worker.size(on)))
        self.room = rooms[0]
        for unit in [
            unit
            for unit, nbytes in self.early.items()
            if self.present >> unit & 1 and nbytes == units[unit].nbytes
        ]:
            del self.early[unit]  # it is there, and there is room for the whole of it
            self.kept |= 1 << unit
            self.beside -= units[unit].nbytes

    def _leave(self) -> None:
        """Leave on the device what nobody needs the room of, what is needed soonest first.

        What may have been changed is evicted nevertheless, where its next use is known and too far:
        as much of it stays as early bytes as there is room for beside the phase, and is saved while
        the phase computes, so that nobody waits when its room is needed. What comes sooner is
        before it in the plan, and gets the room of what is saved.
        """
        early, units, is_known = (
            self.worker.early(self.view),
            self.worker.units,
            self.is_known and self.view.enclosing is None,
        )
        there = (
            (self.present | mask_of(early))
            & ~self.needed
            & ~self.streamed
            & ~self.kept
            & ~mask_of(self.early)
        )
        for unit in self._soonest(there):
            if unit in early or (
                is_known and units[unit].can_prefetch and units[unit].is_copied_back == "trained"
            ):
                nbytes = min(early.get(unit, units[unit].nbytes), self.beside)
                if nbytes > units[unit].nbytes // _CRUMB:
                    self.early[unit] = nbytes
                    self.room = max(0, self.room - nbytes)
            else:
                self.left |= self._take(unit)

    def plan(self, base: Plan) -> Plan:
        """The base plan with what stays, and what arrives early."""
        targets, parts, places = dict(base.targets), dict(base.parts), self.worker.places
        stays = self.kept | self.left
        for name in dict.fromkeys([places[unit].name for unit in bits(stays)]):
            if targets[name] is State.CPU_OFFLOADED:
                targets[name] = State.GPU_RESIDENT
            tags = self.view.handles[name].tags
            if places[next(bits(self.worker.of_handle[name]))].tag is not None:
                there = self.worker.of_handle[name] & (stays | self.needed)
                parts[name] = frozenset(
                    {tag for unit in bits(there) if (tag := places[unit].tag) is not None}
                )
                if parts[name] == tags.keys():
                    del parts[name]
        return self.view.total_plan(
            targets,
            base.streamed,
            base.dropped,
            parts,
            {places[unit].name: nbytes for unit, nbytes in self.early.items()},
        )

    def _take(self, unit: int) -> int:
        nbytes = self.worker.units[unit].nbytes
        if nbytes > self.room:
            return 0
        self.room -= nbytes
        return 1 << unit

    def _soonest(self, mask: int) -> list[int]:
        """Units in the order of their next use. Of several, what would be copied back comes first,
        then the larger."""
        units, next_use = self.worker.units, self.course.next_use
        return sorted(
            bits(mask),
            key=lambda i: (next_use[i], units[i].is_copied_back == "never", -units[i].nbytes),
        )


def _agreement(expected: Sequence[str], upcoming: Sequence[str]) -> int:
    pairs = enumerate(zip(expected, upcoming, strict=False))
    return next(
        (index for index, (one, other) in pairs if one != other), min(len(expected), len(upcoming))
    )


def _rounded(nbytes: int) -> int:
    digits = max(0, nbytes.bit_length() - _DIGITS)
    return nbytes >> digits << digits


def _facts(h: HandleView) -> tuple[object, ...]:
    """The facts about a handle that decide its units and the phases that need them, wherever it is
    now."""
    return (
        h.name,
        h.kind,
        h.role,
        h.num_bytes,
        h.can_prefetch,
        h.owners,
        h.readonly,
        h.external,
        h.gathers,
        h.built,
        tuple(h.tags.items()),
    )
