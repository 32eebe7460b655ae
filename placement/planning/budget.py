"""The budget: how many device bytes all handles together may hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from placement.core.errors import DeviceMemoryError
from placement.core.states import IDLE, HandleView, Plan, State, View, bytes_under
from placement.group.vote import OtherBudgetError

if TYPE_CHECKING:
    from placement.devices.memory import DeviceMemory


class Budget:
    """The budget of each phase: a number from the user, or derived from free memory.

    Without a number, the budget is the free memory plus the bytes that the handles hold, minus the additional bytes that others
    (activations, the framework) were seen to need in this phase. Before a phase has run once, a fraction `headroom` is left free instead.

    Args:
        given_bytes: the user's number; None: derive the budget.
        headroom: the fraction left free in a phase that has not run yet.
        leased_from_bytes: if the device is shared under leases, the bytes that all its processes may use together; else None. Memory
            that other processes hold now counts as free then, because a phase waits for it.
    """

    def __init__(self, given_bytes: int | None, headroom: float, leased_from_bytes: int | None = None) -> None:
        self._given_bytes = given_bytes
        self._headroom = headroom
        self._leased_from_bytes = leased_from_bytes
        self._others_bytes: dict[str, int] = {}

    def limit(self, phase: str, memory: DeviceMemory, held_bytes: int) -> int:
        """Device bytes that all handles together may hold in this phase."""
        if self._leased_from_bytes is not None:
            least = self._leased_from_bytes if self._given_bytes is None else self._given_bytes
            return min(least, self._leased_from_bytes - self.working_bytes(phase))
        if self._given_bytes is not None:
            return self._given_bytes
        available = memory.free_bytes + held_bytes
        seen = self._others_bytes.get(phase)
        if seen is None:
            return int(available * (1 - self._headroom))
        return max(0, available - max(0, seen - memory.torch_reserved_bytes))

    def growth_bytes(self, phase: str, memory: DeviceMemory) -> int:
        """Bytes that others may still take in a phase that has begun: up to the most that was seen in it, or the headroom."""
        seen = self._others_bytes.get(phase)
        return int(memory.free_bytes * self._headroom) if seen is None else max(0, seen - memory.torch_reserved_bytes)

    def working_bytes(self, phase: str) -> int:
        """Bytes to lease for a phase in addition to the handles' bytes: the most that torch's allocator reserved in it, or the headroom."""
        available = self._leased_from_bytes or 0
        guess = int(available * self._headroom) if self._given_bytes is None and phase != IDLE else 0
        return min(available, self._others_bytes.get(phase, guess))

    def observe(self, phase: str, memory: DeviceMemory) -> None:
        """Remember how much torch's allocator has reserved. Called when a phase ends."""
        self._others_bytes[phase] = max(memory.torch_reserved_bytes, self._others_bytes.get(phase, 0))


def check_fits(view: View, plan: Plan, other_rank: int | None = None) -> int:
    """Refuse a plan that does not fit, before a byte moves.

    Args:
        other_rank: the rank of the group whose budget applies; None: this process's own budget.

    Returns:
        Bytes that the budget leaves in addition to those that the handles hold now.

    Raises:
        DeviceMemoryError: the plan does not fit; the message has a table of the bytes that each handle holds and wants.
    """
    wanted = view.bytes_of(plan)
    if wanted <= view.budget_bytes:
        return max(0, view.budget_bytes - sum(h.resident_bytes for h in view.handles.values() if not h.external))
    if other_rank is not None:
        reason = (
            f"has a budget of {mib(view.budget_bytes)}, and phase {view.phase!r} needs {mib(wanted)} on the device of each rank: raise "
            "budget_bytes there, or name the handles that the phase needs together (only=[...])"
        )
        raise OtherBudgetError(f"rank {other_rank} {reason}", other_rank, reason)
    error = DeviceMemoryError(
        f"phase {view.phase!r} needs {mib(wanted)} on the device, the budget is {mib(view.budget_bytes)}.\n{table(view.handles, plan)}\n"
        'Name the handles that it needs together: manager.phase("' + view.phase + '", only=[...]), or raise budget_bytes.'
    )
    error.wanted_bytes = wanted
    raise error


def without_surplus(view: View, plan: Plan, needed: Plan) -> Plan:
    """Make a plan fit: offload the cheapest handles that `needed` does not have on the device, just enough for the missing bytes."""
    freed = {
        h.name: bytes_under(plan, h) - bytes_under(needed, h)
        for h in view.handles.values()
        if plan[h.name] is State.GPU_RESIDENT and needed[h.name] in (State.CPU_OFFLOADED, State.GPU_RESIDENT)
    }
    leaving = view.evicted({name: nbytes for name, nbytes in freed.items() if nbytes > 0}, view.bytes_of(plan) - view.budget_bytes)
    return needed.limited_to(leaving, plan)


def mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f} MiB ({nbytes:,} bytes)"


def table(handles: Mapping[str, HandleView], plan: Plan) -> str:
    """A table of the bytes that each handle holds now and wants under the plan, largest first."""
    rows: Iterable[tuple[str, int, int]] = ((h.name, h.resident_bytes, bytes_under(plan, h)) for h in handles.values() if not h.external)
    lines = [f"  {'handle':<24} {'holds':>16} {'wants':>16}"]
    lines += [f"  {name:<24} {holds:>16,} {wants:>16,}" for name, holds, wants in sorted(rows, key=lambda row: -max(row[1], row[2]))]
    return "\n".join(lines)
