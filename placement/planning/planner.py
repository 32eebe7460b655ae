"""The planner asks the policy for plans. It provides the view: handles, expected phases and the budget."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from placement.core.settings import Settings
from placement.core.states import IDLE, HandleView, Plan, State, View
from placement.devices.memory import DeviceMemory
from placement.group.protocol import LeastBudget
from placement.planning import plan_checks
from placement.planning.host_tier import PhaseHistory
from placement.planning.plan_checks import Budget
from placement.planning.reasons import Reasons
from placement.registration.handle import Handle

_GENERATING: dict[str, tuple[str, ...]] = {
    "rollout": ("rollout",),
    "eval": ("rollout",),
    "log_prob": ("actor", "ref"),
    "ref_log_prob": ("ref",),
    "values": ("critic",),
    "reward": ("reward",),
}


class Planner:
    """Makes plans for one manager. Moves nothing.

    Args:
        handles: the manager's handles in registration order; read at each call.
        memory: the device's memory as measured now.
        leased_from_bytes: see `Budget`.
    """

    def __init__(
        self, policy: Any, settings: Settings, handles: Mapping[str, Handle], memory: DeviceMemory, leased_from_bytes: int | None = None
    ) -> None:
        self._policy = policy
        self._settings = settings
        self._handles = handles
        self._budget = Budget(settings.budget_bytes, settings.headroom, leased_from_bytes)
        self._is_leased = leased_from_bytes is not None
        self._history = PhaseHistory()
        self.reasons = Reasons(policy)
        self.memory = memory
        """The device's memory as measured last."""
        self._born_bytes = 0
        """Bytes of optimizer state that was created since the optimizers were last looked through. The handles hold them already."""
        self._state_bytes = 0
        """Bytes of all optimizer state in torch's own memory. They belong to handles, and move into a range at the next offload."""
        self.least: LeastBudget | None = None
        """The least budget of all ranks of the group, from the last phase transition. All ranks use it, so that they make the same plan."""

    def plan(self, phase: str, enclosing: str | None = None, kept: frozenset[str] = frozenset()) -> Plan:
        """The policy's plan for a phase.

        Raises:
            PolicyError: the policy gave no valid plan.
        """
        return self.ask(phase, enclosing, kept)[1]

    def ask(self, phase: str, enclosing: str | None, kept: frozenset[str]) -> tuple[View, Plan]:
        """The view that the policy was shown, and its plan for a phase.

        Raises:
            PolicyError: the policy gave no valid plan.
        """
        view = self.view(phase, enclosing, kept)
        plan = plan_checks.ask(self._policy, view)
        if _follow_groups(handle for name, handle in self._handles.items() if plan.targets[name] is not State.CPU_OFFLOADED):
            view = self.view(phase, enclosing, kept)
            plan = plan_checks.ask(self._policy, view)
        self.reasons.note(view)
        return view, plan

    def needed(self, phase: str, enclosing: str | None, kept: frozenset[str], *, at_rest: bool = False) -> Plan:
        """The policy's plan under a budget of 0 bytes. Handles that it still wants on the device are needed; others may be offloaded.

        Args:
            at_rest: as if nothing were on the device, so that what a checkpoint merely leaves there does not count as needed.

        Raises:
            PolicyError: the policy gave no valid plan.
        """
        view = replace(self.view(phase, enclosing, kept), budget_bytes=0)
        if at_rest:
            view = replace(view, handles={name: handle.at_rest() for name, handle in view.handles.items()})
        return plan_checks.ask(self._policy, view)

    def idle(self, kept: frozenset[str] = frozenset()) -> Plan:
        """The plan that applies outside every phase."""
        return self.plan(IDLE, None, kept)

    def view(self, phase: str, enclosing: str | None, kept: frozenset[str]) -> View:
        """The view for the policy: everything that it may base its plan on."""
        handles = {name: plan_checks.handle_view(handle, kept) for name, handle in self._handles.items()}
        return View(
            phase=phase,
            enclosing=enclosing,
            upcoming=self._history.upcoming(phase),
            handles=handles,
            budget_bytes=self._within_the_group(self._limit(phase, handles.values())),
            worker_role=self._settings.worker_role,
            phases=self._settings.phases,
        )

    def _within_the_group(self, budget_bytes: int) -> int:
        return budget_bytes if self.least is None else min(budget_bytes, self.least.nbytes)

    def other_rank(self, phase: str) -> int | None:
        """The rank of the group whose budget the plan for a phase must fit; None if it is this process's own budget."""
        return None if self.least is None or self.budget_bytes(phase) <= self.least.nbytes else self.least.rank

    def placing(self) -> dict[str, tuple[int, bool, list[str]]]:
        """Facts for policies: device bytes of each handle, whether they are on the device, and an engine's tags there."""
        _follow_groups(self._handles.values())  # else ranks that step other parameters from now on would not compare their plans
        views = {name: plan_checks.handle_view(handle) for name, handle in self._handles.items()}
        return {name: (each.num_bytes, self._handles[name].is_on_device, sorted(each.resident_tags)) for name, each in views.items()}

    def budget_bytes(self, phase: str) -> int:
        """Device bytes that all handles of this rank together may hold in a phase, as of now."""
        return self._limit(phase, list(self._handles.values()))

    def _limit(self, phase: str, handles: Iterable[Handle | HandleView]) -> int:
        return self._budget.limit(phase, self._others(), _held_bytes(handles) + self._born_bytes)

    def room_bytes(self, phase: str, plan: Plan) -> int:
        """Device bytes that the budget of a phase leaves beside its plan, for what arrives early. 0 under leases: others wait for it."""
        if self._is_leased:
            return 0
        view = self.view(phase, None, frozenset())
        return max(0, view.budget_bytes - view.bytes_of(plan))

    def growth_bytes(self, phase: str, memory: DeviceMemory) -> int:
        """Bytes that others may still take in a phase that has begun, as of this measurement."""
        return self._budget.growth_bytes(phase, memory)

    def measure_state(self) -> None:
        """Measure the optimizer state in torch's own memory. Call `Handle.measure` first."""
        storages = [handle.storage for handle in self._handles.values() if handle.kind == "optimizer"]
        self._born_bytes = sum(each.born_bytes for each in storages)
        self._state_bytes = self._born_bytes + sum(each.unadopted_bytes for each in storages)

    def working_bytes(self, phase: str) -> int:
        """Device bytes to lease for a phase in addition to the handles': for activations, and for the cache of torch's allocator."""
        return max(self._budget.working_bytes(phase), self._others().torch_reserved_bytes) + self._state_bytes

    def generating(self, phase: str) -> tuple[str, ...]:
        """The roles whose models a phase computes outputs with; none for a phase that only has them on the device."""
        return _GENERATING.get(phase, tuple(self._settings.phases.get(phase, ())))

    def began(self, phase: str) -> None:
        """Note that a phase is open now, to know the cycle of phases."""
        self._history.began(phase)

    def over(self, phase: str) -> None:
        """Note that a phase ends now, to remember how much memory others need in it."""
        self._budget.observe(phase, self._others())

    def _others(self) -> DeviceMemory:
        """The device's memory, without counting optimizer state as memory that torch has reserved for others."""
        if not self._state_bytes:
            return self.memory
        return replace(self.memory, torch_reserved_bytes=max(0, self.memory.torch_reserved_bytes - self._state_bytes))


def _held_bytes(handles: Iterable[Handle | HandleView]) -> int:
    """Bytes that can be offloaded to make room. External handles do not count, because placement cannot move them."""
    return sum(handle.resident_bytes for handle in handles if not handle.external)


def _follow_groups(handles: Iterable[Handle]) -> bool:
    """Measure the offloaded optimizers among these anew that step other parameters than before. Returns whether there are any.

    This looks at every parameter, so the optimizers that a phase does not use are not asked.
    """
    return True in [handle.holding.follow_groups() for handle in handles if handle.holding is not None]  # each is asked
