"""Random cycles of phases, a small simulator of the bytes that a policy moves in them, and the best
that could have been done."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from placement import HandleView, Plan, State, View
from placement.planning.planner import PhaseHistory
from placement.planning.prefetcher import Share, Wish, divide
from placement.policies import Colocated, Cyclic, Policy

OFF, GPU, TRAIN = State.CPU_OFFLOADED, State.GPU_RESIDENT, State.TRAINING


@dataclass(frozen=True)
class Cycle:
    """Handles, the phases of one cycle in order, and what each of them needs."""

    handles: tuple[HandleView, ...]
    needs: dict[str, dict[str, State]]
    phases: tuple[str, ...]
    budget_bytes: int

    @classmethod
    def drawn(
        cls, rng: random.Random, most_handles: int = 8, most_phases: int = 8, most_gaps: int = 14
    ) -> Cycle:
        """Any cycle of which every plan can be looked at.

        Args:
            most_gaps: each gap between two uses of a handle doubles the number of plans.
        """
        while True:
            names = [f"h{i}" for i in range(rng.randint(2, most_handles))]
            readonly = {name: rng.random() < 0.4 for name in names}
            handles = tuple(
                HandleView(
                    name=name,
                    kind="module",
                    role=None,
                    state=OFF,
                    num_bytes=rng.randint(1, 100),
                    readonly=readonly[name],
                    can_prefetch=rng.random() < 0.85,
                )
                for name in names
            )
            share = rng.choice([0.2, 0.35, 0.5])
            phases = tuple(f"p{i}" for i in range(rng.randint(2, most_phases)))
            needs = {
                phase: {
                    n: TRAIN if not readonly[n] and rng.random() < 0.4 else GPU
                    for n in names
                    if rng.random() < share
                }
                for phase in phases
            }
            largest = max(
                sum(h.num_bytes for h in handles if h.name in need) for need in needs.values()
            )
            everything = sum(h.num_bytes for h in handles)
            cycle = cls(handles, needs, phases, rng.randint(largest, max(largest, everything)))
            if largest and len(list(cycle.gaps())) <= most_gaps:
                return cycle

    @property
    def sizes(self) -> dict[str, int]:
        return {h.name: h.num_bytes for h in self.handles}

    def gaps(self) -> Iterator[tuple[str, list[int]]]:
        """The handle and the phases in between, for each two uses of a handle that do not follow
        one another."""
        count = len(self.phases)
        for handle in self.handles:
            used = [handle.name in self.needs[phase] for phase in self.phases]
            for begin in range(count):
                following = [(begin + 1 + i) % count for i in range(count)]
                length = [used[index] for index in following].index(True) if used[begin] else 0
                if length:
                    yield handle.name, following[:length]

    def policies(self) -> tuple[Policy, Policy]:
        """Cyclic and Colocated with the needs of this cycle."""
        return _with_needs(Cyclic, self.needs), _with_needs(Colocated, self.needs)


def _with_needs(policy: type[Colocated], needs: dict[str, dict[str, State]]) -> Policy:
    class Drawn(policy):  # type: ignore[misc,valid-type]
        def needs(self, view: View) -> dict[str, State]:
            return {
                name: state
                for name, state in needs.get(view.phase, {}).items()
                if name in view.handles
            }

    return Drawn()  # type: ignore[no-any-return]


class Moved(NamedTuple):
    """Bytes moved in one or more phase transitions."""

    waited: int
    """Copied while somebody waits."""
    total: int
    """All that was copied, with what arrived early."""
    given_up: int = 0
    """The part of that which arrived early and was given up unused."""
    loaded: int = 0
    """The part of `waited` that loads copied."""
    offloaded: int = 0
    """The part of `total` that offloads copied, waited for or not."""

    def __add__(self, other: tuple[Any, ...]) -> Moved:
        return Moved(*(mine + theirs for mine, theirs in zip(self, Moved(*other), strict=True)))


class Simulator:
    """Counts what a policy moves, as a manager with a fast link would: all that may arrive early
    arrives before the next phase.

    What leaves the device while the plan wants it early keeps that part of its memory, and that
    part is saved while the phase computes. Then the first in the plan get that memory, as far as
    they want it.
    """

    def __init__(self, cycle: Cycle, policy: Policy) -> None:
        self.cycle = cycle
        self.policy = policy
        self.history = PhaseHistory()
        self.views = {h.name: h for h in cycle.handles}
        self.dirty: set[str] = set()
        self.brought = dict.fromkeys(self.views, 0)
        """The part of the early bytes that was copied to the device."""
        self.left = dict.fromkeys(self.views, 0)
        """The early bytes that an offload has left."""
        self.plan = Plan(dict.fromkeys(self.views, OFF))

    def view(self, phase: str, **fields: Any) -> View:
        return View(
            phase=phase,
            upcoming=self.history.upcoming(phase),
            handles=self.views,
            budget_bytes=self.cycle.budget_bytes,
            **fields,
        )

    def walk(self, phases: Iterable[str]) -> Moved:
        """Phase after phase, as in one open phase that is switched."""
        moved = Moved(0, 0)
        for phase in phases:
            moved += self.enter(phase)
        return moved

    def enter(self, phase: str) -> Moved:
        view = self.view(phase)
        plan = self.policy.plan(view)
        held = view.bytes_of(plan)
        assert held <= view.budget_bytes, f"{phase}: {held} bytes of {view.budget_bytes}"
        leaving = {name: h.num_bytes for name, h in self.views.items() if h.state is not OFF}
        wishes = [
            Wish(nbytes, leaving.get(name, self.left[name]))
            for name, nbytes in plan.prefetch.items()
        ]
        shares = dict(zip(plan.prefetch, divide(view.budget_bytes - held, wishes), strict=True))
        moved = Moved(0, 0)
        for handle in self.views.values():
            moved += self._move(handle, plan, shares.get(handle.name, Share(0, 0)))
        self.plan = plan
        if phase != "idle":
            self.history.began(phase)
        return moved

    def _move(self, handle: HandleView, plan: Plan, share: Share) -> Moved:
        name, nbytes = handle.name, handle.num_bytes
        was_on, is_on, early = (
            handle.state is not OFF,
            plan.on_device(handle.name),
            handle.prefetched_bytes,
        )
        assert 0 <= plan.prefetch.get(name, 0) <= nbytes
        arriving = share.last_bytes
        loaded = saved = offloaded = brought = given_up = 0
        if is_on and not was_on:
            loaded, self.brought[name] = nbytes - early, 0
        elif was_on and not is_on:
            offloaded, saved = (nbytes, share.first_bytes) if name in self.dirty else (0, 0)
            brought = max(0, arriving - share.first_bytes)
            self.dirty.discard(name)
            self.left[name], self.brought[name] = share.first_bytes, brought
        elif not is_on:
            brought, given_up = (
                max(0, arriving - early),
                min(self.brought[name], max(0, early - arriving)),
            )
            self.brought[name] += brought - given_up
        if plan[name] is TRAIN:
            self.dirty.add(name)
        self.left[name] = 0 if is_on else min(self.left[name], arriving)
        held = nbytes if is_on else arriving
        self.views[name] = replace(
            handle, state=plan[name], resident_bytes=held, prefetched_bytes=0 if is_on else arriving
        )
        return Moved(
            loaded + offloaded - saved, loaded + offloaded + brought, given_up, loaded, offloaded
        )


def steady(cycle: Cycle, policy: Policy, warm_up: int = 3) -> Moved:
    """What a policy moves in each cycle, once the cycle has been seen and every handle is where it
    will be again."""
    simulator = Simulator(cycle, policy)
    simulator.walk(cycle.phases * warm_up)
    return simulator.walk(cycle.phases)


def best(cycle: Cycle) -> Moved:
    """The least that any plan moves which is the same in every cycle: waited bytes first, then all
    bytes. Looks at each plan.

    Somebody waits for each offload here, so a policy that has some of them saved under the next
    phase's work may be better.

    A plan says for each gap between two uses whether the handle stays. All plans are looked at
    together, one element of an array each.
    """
    gaps, count, sizes = list(cycle.gaps()), len(cycle.phases), cycle.sizes
    plans = np.arange(1 << len(gaps), dtype=np.int64)
    on = {
        h.name: [np.full(plans.shape, h.name in cycle.needs[phase]) for phase in cycle.phases]
        for h in cycle.handles
    }
    for number, (name, between) in enumerate(gaps):
        for index in between:
            on[name][index] = (plans >> number & 1).astype(bool)
    held = [
        sum((on[name][i] * sizes[name] for name in on), np.zeros_like(plans)) for i in range(count)
    ]
    fits = np.all([nbytes <= cycle.budget_bytes for nbytes in held], axis=0)
    waited, total = np.zeros_like(plans), np.zeros_like(plans)
    for index in range(count):
        loads = {
            h: h.num_bytes * (on[h.name][index] & ~on[h.name][index - 1]) for h in cycle.handles
        }
        loaded = sum(loads.values(), np.zeros_like(plans))
        can_be_early = sum(
            (nbytes for h, nbytes in loads.items() if h.can_prefetch), np.zeros_like(plans)
        )
        waited += loaded - np.minimum(can_be_early, cycle.budget_bytes - held[index - 1])
        total += loaded
    for name, there in on.items():
        offloaded = (
            _offloads(there, [cycle.needs[phase].get(name) is TRAIN for phase in cycle.phases])
            * sizes[name]
        )
        waited += offloaded
        total += offloaded
    return Moved(*min(zip(waited[fits].tolist(), total[fits].tolist(), strict=True)))


def _offloads(on: Sequence[Any], trained: Sequence[bool]) -> Any:
    """How often in a cycle a handle leaves the device with values that are not on the host."""
    dirty, found = np.zeros(on[0].shape, dtype=bool), np.zeros(on[0].shape, dtype=np.int64)
    # what is dirty when the cycle begins, the first round finds out
    for index in range(2 * len(on)):
        now, following = index % len(on), (index + 1) % len(on)
        dirty = dirty | trained[now] if trained[now] else dirty
        if index >= len(on):
            found += dirty & on[now] & ~on[following]
        dirty = dirty & on[following]
    return found
