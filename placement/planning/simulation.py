"""Simulate phase transitions: what a policy asks for phase after phase, and which bytes that moves. Touches no device and no tensor.

`placement explain` and the forecasts use it. It asks the policy as the manager does, with the same view and the same checks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from placement.core.errors import PhaseError
from placement.core.states import IDLE, OwnPhases, Plan, Policy, ReadOnly, State, View
from placement.planning import plan_checks
from placement.planning.budget import without_surplus
from placement.planning.early_room import Share, Wish, divide
from placement.planning.history import PhaseHistory
from placement.planning.simulated_handles import Moved, SimulatedHandle

NESTED = {"optimizer_step": "train"}
"""Phases that workers open inside another one."""


@dataclass(frozen=True, slots=True)
class SimulatedPhase:
    """One phase of a simulated run."""

    name: str
    only: tuple[str, ...] | None = None
    """The handles for which the phase is, as in `manager.phase(name, only=...)`; None: for all."""


@dataclass(frozen=True, slots=True)
class Step:
    """One phase transition and the phase that it leads to, or the reason why the manager would refuse it."""

    phase: SimulatedPhase
    plan: Plan | None
    """None if the policy gives no valid plan."""
    device_bytes: int
    """Bytes that the plan puts on the device; where it is refused, `held_bytes` are there instead."""
    over_bytes: int
    """Bytes by which the plan misses the budget; 0 if it fits."""
    problem: str
    """Why there is no plan; empty if there is one."""
    moved: Mapping[str, Moved]
    """Bytes that move, by handle; without handles that move none."""
    held: Mapping[str, int]
    """Device bytes that each handle holds in the phase, as the manager counts them."""
    states: Mapping[str, State]
    host_bytes: int
    """Host bytes of this process's host copies in the phase."""

    @property
    def held_bytes(self) -> int:
        return sum(self.held.values())

    @property
    def is_refused(self) -> bool:
        return bool(self.problem or self.over_bytes)


class Simulation:
    """The phase transitions of one simulated manager.

    Args:
        handles: in registration order; they are changed.
        arriving_bytes: how many bytes the link can copy each way while a phase, given by name, computes; None: nothing is known to arrive
            early.
    """

    def __init__(
        self,
        policy: Policy,
        handles: Sequence[SimulatedHandle],
        budget_bytes: int,
        worker_role: str = "hybrid",
        phases: OwnPhases | None = None,
        arriving_bytes: Callable[[str], int] | None = None,
    ) -> None:
        self._policy = policy
        self._handles = {handle.name: handle for handle in handles}
        self._budget_bytes = budget_bytes
        self._worker_role = worker_role
        self._phases = dict(phases or {})
        self._history = PhaseHistory()
        self._phase = SimulatedPhase(IDLE)
        self._arriving_bytes = arriving_bytes
        self._shares: dict[str, Share] = {}
        """The handles of which bytes are early while the present phase computes, in order."""

    @property
    def handles(self) -> tuple[SimulatedHandle, ...]:
        return tuple(self._handles.values())

    def register(self) -> Iterator[Step]:
        """Register the handles one after the other, outside every phase. Each goes where the idle plan wants it."""
        handles, self._handles = self._handles, {}
        for name, handle in handles.items():
            self._handles[name] = handle
            yield self.enter(SimulatedPhase(IDLE))

    def enter(self, phase: SimulatedPhase) -> Step:
        """End the present phase and begin another one; "idle" leaves it.

        A phase that the manager would refuse changes nothing: the next transition starts from the phase before.

        Raises:
            PhaseError: `only` names a handle that there is not.
        """
        self._work()
        view = self.view(phase)
        try:
            plan = self._plan(view, phase)
        except PhaseError:
            raise
        except Exception as error:  # the policy is user code: its exception belongs into the answer
            return self._step(phase, None, problem=f"{type(error).__name__}: {error}")
        wanted = view.bytes_of(plan)
        if wanted > view.budget_bytes:
            return self._step(phase, plan, wanted, over_bytes=wanted - view.budget_bytes)
        moved = self._move(plan, view.budget_bytes - wanted)
        self._prefetch()
        self._phase = phase
        if phase.name != IDLE:
            self._history.began(phase.name)
        return self._step(phase, plan, wanted, moved={name: each for name, each in moved.items() if each != Moved()})

    def _move(self, plan: Plan, room_bytes: int) -> dict[str, Moved]:
        handles = {name: self._handles[name] for name in plan.prefetch}
        wishes = [Wish(min(plan.prefetch[name], h.num_bytes), h.num_bytes if h.on_device else h.left_bytes) for name, h in handles.items()]
        self._shares = dict(zip(handles, divide(room_bytes, wishes), strict=True))
        waits = any(handle.leaves(plan) for handle in self._handles.values())
        return {
            name: handle.go(plan, self._shares[name].first_bytes if name in self._shares else 0, waits=waits)
            for name, handle in self._handles.items()
        }

    def _work(self) -> None:
        """End the present phase: its work has been done, and meanwhile bytes have arrived early."""
        for handle in self._handles.values():
            handle.used(self._phase.name)
        left = savable = 0 if self._arriving_bytes is None else self._arriving_bytes(self._phase.name)
        for handle in self._handles.values():
            savable -= handle.save(savable)
        for name in self._shares:
            left -= self._handles[name].arrive(left)
        for name, share in self._shares.items():
            self._handles[name].prefetch(share.last_bytes)
            left -= self._handles[name].arrive(left)

    def _prefetch(self) -> None:
        for name, handle in self._handles.items():
            handle.prefetch(self._shares[name].first_bytes if name in self._shares else 0)

    def view(self, phase: SimulatedPhase, budget_bytes: int | None = None) -> View:
        """The view that the policy is shown for a phase.

        Args:
            budget_bytes: the budget; None: the simulation's own.
        """
        return View(
            phase=phase.name,
            enclosing=NESTED.get(phase.name),
            upcoming=self._history.upcoming(phase.name),
            handles={name: handle.view() for name, handle in self._handles.items()},
            budget_bytes=self._budget_bytes if budget_bytes is None else budget_bytes,
            worker_role=self._worker_role,
            phases=self._phases,
        )

    def _plan(self, view: View, phase: SimulatedPhase) -> Plan:
        plan = plan_checks.ask(self._policy, view)
        if phase.only is None:
            return plan
        around = plan_checks.ask(self._policy, self.view(SimulatedPhase(IDLE)))
        chosen = self._meant(phase.only)
        plan = plan.limited_to(chosen, around)
        if view.fits(plan):
            return plan
        least = [plan_checks.ask(self._policy, self.view(each, budget_bytes=0)) for each in (phase, SimulatedPhase(IDLE))]
        return without_surplus(view, plan, least[0].limited_to(chosen, least[1]))

    def _meant(self, only: Sequence[str]) -> set[str]:
        for name in only:
            if name not in self._handles:
                raise PhaseError(f"only=: {plan_checks.unknown_handle(name, self._handles)}")
        return set(only) | {handle.name for handle in self._handles.values() if set(handle.facts.owners) & set(only)}

    def _step(
        self,
        phase: SimulatedPhase,
        plan: Plan | None,
        device_bytes: int = 0,
        *,
        over_bytes: int = 0,
        problem: str = "",
        moved: Mapping[str, Moved] = ReadOnly(),
    ) -> Step:
        return Step(
            phase,
            plan,
            device_bytes,
            over_bytes,
            problem,
            moved,
            held={
                name: 0 if handle.facts.external else handle.resident_bytes + handle.early_bytes for name, handle in self._handles.items()
            },
            states={name: handle.state for name, handle in self._handles.items()},
            host_bytes=sum(handle.host_bytes for handle in self._handles.values()),
        )
