"""How many device bytes the handles may hold together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from placement.core.errors import DeviceMemoryError
from placement.core.states import IDLE, HandleView, Plan, State, View, bytes_under
from placement.devices.base import DeviceMemory
from placement.group.budgets import OtherBudgetError


class Budget:
    """A number that the user gave, or what is free.

    Without a number: what is free plus what the handles hold, minus what others (activations, the framework) have been seen to
    need in this phase beyond what they hold now. Before a phase has run once, a share of it is left free instead.

    Args:
        leased_from_bytes: where the device is shared under leases, what its processes may use together: what others hold now
            counts as free then, because a phase waits for it.
    """

    def __init__(self, given_bytes: int | None, headroom: float, leased_from_bytes: int | None = None) -> None:
        self._given_bytes = given_bytes
        self._headroom = headroom
        self._leased_from_bytes = leased_from_bytes
        self._others_bytes: dict[str, int] = {}

    def limit(self, phase: str, memory: DeviceMemory, held_bytes: int) -> int:
        """Device bytes for all handles in this phase."""
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

    def working_bytes(self, phase: str) -> int:
        """Bytes to lease for a phase beside the handles': what torch's allocator came to in it, else the headroom."""
        available = self._leased_from_bytes or 0
        guess = int(available * self._headroom) if self._given_bytes is None and phase != IDLE else 0
        return min(available, self._others_bytes.get(phase, guess))

    def observe(self, phase: str, memory: DeviceMemory) -> None:
        """A phase is over: remember what torch's allocator came to."""
        self._others_bytes[phase] = max(memory.torch_reserved_bytes, self._others_bytes.get(phase, 0))


def check_fits(view: View, plan: Plan, other_rank: int | None = None) -> int:
    """Refuse a plan that does not fit, before a byte moves.

    Args:
        other_rank: of the group, whose budget it is; None: this process's own.

    Returns:
        Bytes that the budget leaves beside what the handles hold now.

    Raises:
        DeviceMemoryError: with a table of who holds and who wants how much.
    """
    wanted = view.bytes_of(plan)
    if wanted <= view.budget_bytes:
        return max(0, view.budget_bytes - sum(h.resident_bytes for h in view.handles.values() if not h.external))
    if other_rank is not None:
        reason = f"has a budget of {mib(view.budget_bytes)}, and phase {view.phase!r} needs {mib(wanted)} on the device of each rank"
        advice = f"Name the handles that it needs together (only=[...]), or raise the budget of rank {other_rank}."
        raise OtherBudgetError(f"rank {other_rank} {reason}. {advice}", other_rank, reason)
    raise DeviceMemoryError(
        f"phase {view.phase!r} needs {mib(wanted)} on the device, the budget is {mib(view.budget_bytes)}.\n{table(view.handles, plan)}\n"
        'Name the handles that it needs together: manager.phase("' + view.phase + '", only=[...]), or raise budget_bytes.'
    )


def without_surplus(view: View, plan: Plan, needed: Plan) -> Plan:
    """A plan that does not fit, without the cheapest of what it has on the device and `needed` has not; only for the deficit."""
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
    """Who holds and who wants how much, largest first."""
    rows: Iterable[tuple[str, int, int]] = ((h.name, h.resident_bytes, bytes_under(plan, h)) for h in handles.values() if not h.external)
    lines = [f"  {'handle':<24} {'holds':>16} {'wants':>16}"]
    lines += [f"  {name:<24} {holds:>16,} {wants:>16,}" for name, holds, wants in sorted(rows, key=lambda row: -max(row[1], row[2]))]
    return "\n".join(lines)
