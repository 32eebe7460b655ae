"""What a phase transition has to do with other processes on the same GPU; nothing where it is not shared under leases."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from placement.core.errors import DeviceMemoryError
from placement.core.snapshot import LeaseSnapshot
from placement.core.states import IDLE, WEIGHTS, Plan, State, bytes_under
from placement.devices.base import Device
from placement.phases.engine_mover import wanted_tags
from placement.planning import plan_checks
from placement.planning.planner import Planner
from placement.registration.handle import Handle

if TYPE_CHECKING:
    from placement.group.lease import Lease


Retreat = tuple[Plan, list[Exception]]
"""A plan to go back to, and what was refused of another."""


class _Needs(NamedTuple):
    nbytes: int
    """To lease, in all."""
    more_bytes: int
    """That the driver has to give: what a process held that was killed may come back a moment later than its lease."""


class LeaseClient:
    """The lease of one manager: taken before a byte is loaded, given back when a phase transition is over.

    Args:
        lease: None where there is none.
        handles: the manager's; read at each call.
        give_way: carries out `giving_way`. Called before this process waits for others: who waits holds nothing, so that
            two processes that swap places never wait for each other.
    """

    def __init__(
        self, lease: Lease | None, device: Device, handles: Mapping[str, Handle], planner: Planner, give_way: Callable[[], None]
    ) -> None:
        self._lease = lease
        self._device = device
        self._handles = handles
        self._planner = planner
        self._give_way = give_way
        self.settle(IDLE)

    @property
    def is_shared(self) -> bool:
        """Whether there is a lease at all."""
        return self._lease is not None

    def within(self, budget_bytes: int) -> int:
        """A budget, never above the lease."""
        return budget_bytes if self._lease is None else min(budget_bytes, self._lease.held_bytes)

    def take(self, name: str, plan: Plan, room_bytes: int) -> int:
        """Lease what a phase's plan needs, at once or after giving way to others.

        Returns:
            By how much a swap may be ahead of what is on the device now: at most `room_bytes`, and never above the lease.

        Raises:
            DeviceMemoryError: the others did not leave enough in time; nothing of this process is on the device then.
            Exception: what stopped it from giving way.
        """
        if self._lease is None:
            return room_bytes
        if name != IDLE or self._coming(plan):
            self._take(self._lease, f"phase {name!r}", name, plan)
        return max(0, min(room_bytes, self._lease.held_bytes - self._held_bytes() - self._planner.memory.torch_reserved_bytes))

    def within_reach(self, name: str, plan: Plan) -> Retreat:
        """A plan to go back to as far as other processes leave the bytes for it now. Waits for nobody: something failed, or was stopped.

        Args:
            name: of the phase that is open then.
        """
        if self._lease is None or not (coming := self._coming(plan)) or self._take_at_once(self._lease, self._needs(name, plan)):
            return plan, []
        refused = f"back to phase {name!r}: other processes have the memory of {', '.join(coming)}"
        return self._without_coming(plan), [DeviceMemoryError(refused)]

    def within_deadline(self, name: str, plan: Plan) -> Retreat:
        """The same, but other processes are waited for."""
        if self._lease is None or not self._coming(plan):
            return plan, []
        try:
            self._take(self._lease, f"back to phase {name!r}", name, plan)
        except Exception as refused:
            return self._without_coming(plan), [refused]
        return plan, []

    def settle(self, name: str) -> None:
        """A phase transition is over: what this process does not use in the phase, others may have. After `Planner.memory` was measured."""
        if self._lease is not None:
            self._lease.settle(self._held_bytes() + self._planner.working_bytes(name))

    def trim(self) -> None:
        """Outside every phase, what torch's allocator has cached is the others' too."""
        if self._lease is None:
            return
        if self._device.memory().torch_reserved_bytes > self._device.torch_allocated_bytes():
            self._device.trim()

    def close(self) -> None:
        if self._lease is not None:
            self._lease.close()

    def snapshot(self) -> LeaseSnapshot | None:
        return None if self._lease is None else self._lease.snapshot()

    def _take(self, lease: Lease, what: str, name: str, plan: Plan) -> None:
        if self._take_at_once(lease, self._needs(name, plan)):
            return
        self._give_way()
        self.settle(IDLE)
        needs = self._needs(name, plan)  # torch's cache was trimmed, and nothing is held
        lease.wait(needs.nbytes, what=what, is_free=lambda: self._is_free(needs))

    def _take_at_once(self, lease: Lease, needs: _Needs) -> bool:
        return lease.grow(needs.nbytes, is_free=lambda: self._is_free(needs))

    def _is_free(self, needs: _Needs) -> bool:
        return needs.more_bytes <= 0 or self._device.memory().free_bytes >= needs.more_bytes

    def _needs(self, name: str, plan: Plan) -> _Needs:
        built = [handle for handle in self._handles.values() if handle.is_built and not handle.external]
        staying = [handle for handle in built if plan.on_device(handle.name)]
        wanted = sum(bytes_under(plan, plan_checks.handle_view(h)) - h.storage.unadopted_bytes - h.storage.born_bytes for h in staying)
        return _Needs(wanted + self._planner.working_bytes(name), wanted - self._held_bytes())

    def _held_bytes(self) -> int:
        """Device bytes that are the handles' alone, with what is to be born beside them: what they own in torch's memory counts there."""
        storages = [handle.storage for handle in self._handles.values() if not handle.external]
        still_unborn = sum(each.unborn_bytes - each.born_bytes for each in storages if each.on_device)
        return sum(each.resident_bytes - each.unadopted_bytes for each in storages) + still_unborn

    def _coming(self, plan: Plan) -> list[str]:
        return [handle.name for handle in self._handles.values() if _lacks(handle, plan)]

    def _without_coming(self, plan: Plan) -> Plan:
        for name in self._coming(plan):
            handle, state = self._handles[name], plan[name]
            there = handle.storage.resident_tags & wanted_tags(handle, plan)
            plan = plan.without(name)
            plan = plan.also(name, state, there) if there else plan.also(name, State.CPU_OFFLOADED)
        return plan


def giving_way(handles: Mapping[str, Handle]) -> Plan:
    """Everything off the device, but what cannot be had back: the weights of an engine that would discard them."""
    targets: dict[str, State] = {}
    parts: dict[str, frozenset[str]] = {}
    for name, handle in handles.items():
        if not handle.storage.keeps_weights and WEIGHTS in handle.storage.resident_tags:
            targets[name], parts[name] = handle.state, frozenset({WEIGHTS})
        else:
            targets[name] = handle.state if handle.external else State.CPU_OFFLOADED
    return Plan(targets, parts=parts)


def _lacks(handle: Handle, plan: Plan) -> bool:
    if not handle.is_built or handle.external or not plan.on_device(handle.name):
        return False
    return not handle.node[1] or not wanted_tags(handle, plan) <= handle.storage.resident_tags
