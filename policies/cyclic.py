"""A policy that knows which phases come next, and moves as little as possible while the worker
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
    """Keeps on the device the handles that are needed soonest, evicts those that are needed last,
    and lets those that are needed next arrive early.

    The cycle of phases is learned: `View.upcoming` has it once it has been seen. For the phase that
    begins, the handles that it needs are where `Colocated` wants them. Beside them stay the handles
    that are worth it: those of the schedule of the whole cycle in which the fewest bytes move while
    the worker waits, and then the fewest bytes at all. To evict a handle that was TRAINING since
    its last offload costs an offload and a load, any other module only a load.

    Handles of the next phases arrive early as far as there is room (`Plan.prefetch`), nearest
    first. In the room beside them, handles that leave are saved while the phase computes. Up to ten
    handles the schedule is the best one that is the same in every cycle; for more it is a good one.

    A phase transition loads nothing that its phase does not need, and no `Lazy` is built only
    because it would fit. So each handle moves at most as often as under `Colocated`. Until the
    cycle is known, and in a phase inside another one, everything stays that fits, and the handle
    that is needed last leaves first.

    Args:
        cycle: the phases of one step in order, such as `("rollout", "log_prob", "train",
            "weight_sync")`, so that the policy need not learn them. A phase outside the cycle
            counts as put in between.
        idle: "keep": outside every phase, the handles that are needed soonest stay, and those of
            the next phase arrive early. "empty": nothing is on the device there.
        optimizer_in: as in `Colocated`.
        drop_gradients: as in `Colocated`.

    Example:
        ::

            manager = placement.Manager(policy="cyclic")
            manager = placement.Manager(policy="cyclic(idle='empty', drop_gradients=True)")
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
        """The handles that the phase needs, those that are worth keeping, and those that arrive
        early."""
        base = super().plan(view)
        choice = self._choice(view, base)
        return base if choice is None else choice.plan(base)

    def _choice(self, view: View, base: Plan) -> _Choice | None:
        """The choice of the units that stay and arrive early beside the phase's own; None where
        none shall."""
        room = view.budget_bytes - view.bytes_of(base)
        if view.budget_bytes <= 0 or room < 0 or (view.phase == "idle" and self.idle == "empty"):
            return None
        worker = self._worker_of(view)
        phases = self._expected_cycle(view)
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

    def _expected_cycle(self, view: View) -> tuple[str, ...]:
        """The phases of one cycle, beginning with the view's."""
        if not self.cycle:
            return (view.phase, *view.upcoming)
        rotations = []
        for start in range(len(self.cycle)):
            rotations.append(self.cycle[start:] + self.cycle[:start])
        cycles = [cycle for cycle in rotations if cycle[0] == view.phase]
        if not cycles:  # the phase is put in between
            cycles = [(view.phase, *cycle) for cycle in rotations]
        return max(cycles, key=lambda cycle: _common_length(cycle[1:], view.upcoming))

    def _worker_of(self, view: View) -> Worker:
        own_phases = [(name, *view.wanted_states(name).items()) for name in view.phases]
        handles = [_facts(handle) for handle in view.handles.values()]
        facts = tuple(own_phases), view.worker_role, tuple(handles)
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
    beside: int = 0  # device bytes beside the units that the phase needs and those that are kept
    kept: int = 0  # units that stay until they are needed again
    left: int = 0  # units that stay until their room is needed
    # device bytes that arrive early, by unit, soonest needed first
    early: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._keep()
        self._bring()
        self._leave()

    def _keep(self) -> None:
        """Keep the units that are on the device and in the schedule. In a phase inside another one:
        those on the device, as far as they fit, the enclosing phase's first."""
        wanted = self.present & ~self.needed & ~self.streamed
        enclosing = self.view.enclosing
        if enclosing is None:
            in_order = self._soonest(wanted & self.scheduled[self.course.at])
        else:
            of_enclosing = self.worker.step(enclosing).needed
            in_order = self._soonest(wanted & of_enclosing)
            in_order += self._soonest(wanted & ~of_enclosing)
        for unit in in_order:
            self.kept |= self._take(unit)

    def _bring(self) -> None:
        """Let the units of the coming phases arrive early, nearest first, where there is room for
        them in every phase until then.

        A unit that leaves the device only later on its way to that phase has its room reserved as
        well. So bytes that have arrived are never given up.
        """
        self.beside = self.room
        units = self.worker.units
        steps = self.course.steps
        on_device = self.needed | self.kept
        streamed = self.streamed
        left_at: dict[int, int] = {}  # the distance at which each unit leaves the device
        rooms = [self.room]  # in each phase until then
        for distance in range(1, len(steps) + 1):
            if not rooms[0]:
                break
            index = (self.course.at + distance) % len(steps)
            needed = steps[index].needed
            for unit in bits(needed & ~on_device & ~streamed):
                if not units[unit].can_prefetch:
                    continue
                start = left_at.get(unit, 0)
                nbytes = min(units[unit].nbytes, *rooms[start:distance])
                if nbytes > units[unit].nbytes // _CRUMB:
                    rooms[start:distance] = [room - nbytes for room in rooms[start:distance]]
                    if not start and unit not in self.early:
                        self.early[unit] = nbytes
            following = needed | (self.scheduled[index] & on_device)
            left_at |= dict.fromkeys(bits(on_device & ~following), distance)
            on_device = following
            streamed |= steps[index].streamed
            rooms.append(max(0, self.view.budget_bytes - self.worker.size(on_device)))
        self.room = rooms[0]
        self._keep_whole()

    def _keep_whole(self) -> None:
        """Keep the units that are there, where there is room for the whole of them."""
        for unit, nbytes in [*self.early.items()]:
            is_whole = nbytes == self.worker.units[unit].nbytes
            if is_whole and self.present >> unit & 1:
                del self.early[unit]
                self.kept |= 1 << unit
                self.beside -= nbytes

    def _leave(self) -> None:
        """Leave units on the device whose room is not needed, those that are needed soonest first.

        A unit that may have been changed is evicted nevertheless, where its next use is known and
        too far. As much of it stays as early bytes as there is room for beside the phase. These
        bytes are saved while the phase computes, so that the worker does not wait when their room
        is needed. Units that come sooner are before it in the plan, and get the room of its saved
        bytes.
        """
        early = self.worker.early(self.view)
        is_known = self.is_known and self.view.enclosing is None
        there = self.present | mask_of(early)
        elsewhere = self.needed | self.streamed | self.kept | mask_of(self.early)
        for unit in self._soonest(there & ~elsewhere):
            nbytes, _, can_prefetch, is_copied_back = self.worker.units[unit]
            is_saved = is_known and can_prefetch and is_copied_back == "trained"
            if unit in early or is_saved:
                early_bytes = min(early.get(unit, nbytes), self.beside)
                if early_bytes > nbytes // _CRUMB:
                    self.early[unit] = early_bytes
                    self.room = max(0, self.room - early_bytes)
            else:
                self.left |= self._take(unit)

    def plan(self, base: Plan) -> Plan:
        """The base plan with the units that stay, and those that arrive early."""
        targets = dict(base.targets)
        parts = dict(base.parts)
        places = self.worker.places
        stays = self.kept | self.left
        for name in dict.fromkeys([places[unit].name for unit in bits(stays)]):
            if targets[name] is State.CPU_OFFLOADED:
                targets[name] = State.GPU_RESIDENT
            of_handle = self.worker.of_handle[name]
            tags = [places[unit].tag for unit in bits(of_handle & (stays | self.needed))]
            on_device = frozenset(tag for tag in tags if tag is not None)
            if on_device == self.view.handles[name].tags.keys():
                parts.pop(name, None)
            elif on_device:
                parts[name] = on_device
        early = {places[unit].name: nbytes for unit, nbytes in self.early.items()}
        return self.view.total_plan(targets, base.streamed, base.dropped, parts, early)

    def _take(self, unit: int) -> int:
        nbytes = self.worker.units[unit].nbytes
        if nbytes > self.room:
            return 0
        self.room -= nbytes
        return 1 << unit

    def _soonest(self, mask: int) -> list[int]:
        """Units in the order of their next use. Of several, those that would be copied back come
        first, then the larger."""

        def rank(index: int) -> tuple[int, bool, int]:
            unit = self.worker.units[index]
            return self.course.next_use[index], unit.is_copied_back == "never", -unit.nbytes

        return sorted(bits(mask), key=rank)


def _common_length(expected: Sequence[str], upcoming: Sequence[str]) -> int:
    """How many phases at the beginning are the same."""
    length = 0
    for phase, upcoming_phase in zip(expected, upcoming, strict=False):
        if phase != upcoming_phase:
            break
        length += 1
    return length


def _rounded(nbytes: int) -> int:
    digits = max(0, nbytes.bit_length() - _DIGITS)
    return nbytes >> digits << digits


def _facts(handle: HandleView) -> tuple[object, ...]:
    """The facts about a handle that decide its units and the phases that need them. They do not
    depend on where it is now."""
    return (
        handle.name,
        handle.kind,
        handle.role,
        handle.num_bytes,
        handle.can_prefetch,
        handle.owners,
        handle.readonly,
        handle.external,
        handle.gathers,
        handle.built,
        tuple(handle.tags.items()),
    )
