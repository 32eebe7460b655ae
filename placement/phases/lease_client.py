"""The lease of one manager, where processes on one GPU share its memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from placement.core.errors import DeviceMemoryError
from placement.core.states import IDLE, WEIGHTS, Plan, State, bytes_under
from placement.devices.base import Device
from placement.planning.planner import Planner, handle_view, wanted_tags
from placement.registration.handle import Handle

if TYPE_CHECKING:
    from placement.group.lease import Lease


class LeaseClient:
    """The lease of one manager: it grows before a byte is loaded, and shrinks to what is used when a phase transition is over.
    `give_way`: offloads everything (see `giving_way`), before this process waits for others: a process that waits holds nothing, so that
    two processes that swap places never wait for each other."""

    def __init__(
        self, lease: Lease, device: Device, handles: Mapping[str, Handle], planner: Planner, give_way: Callable[[LeaseClient], None]
    ) -> None:
        self._lease = lease
        self._device = device
        self._handles = handles
        self._planner = planner
        self._give_way = give_way
        self.settle(IDLE)

    def take(self, name: str, plan: Plan, room_bytes: int) -> int:
        """Lease the bytes that a phase's plan needs: at once, or else after offloading everything and waiting for other processes. Returns
        the part of `room_bytes` that a swap may use, which is never above the lease."""
        if name != IDLE or self._coming(plan):
            self._take(f"phase {name!r}", name, plan)
        return max(0, min(room_bytes, self._lease.held_bytes - self._held_bytes() - self._planner.memory.torch_reserved_bytes))

    def take_back(self, name: str, plan: Plan, *, patiently: bool) -> tuple[Plan, list[Exception]]:
        """Lease the bytes of a plan to which the handles go back. Returns a plan that can be carried out: where the others have the memory
        and it is not to wait `patiently` for them, it has less, and the error says so."""
        if not (coming := self._coming(plan)):
            return plan, []
        try:
            if patiently:
                self._take(f"back to phase {name!r}", name, plan)
            elif not self._grow(name, plan):
                raise DeviceMemoryError(f"back to phase {name!r}: other processes have the memory of {', '.join(coming)}")
        except Exception as refused:
            return self._without_coming(plan), [refused]
        return plan, []

    def settle(self, name: str) -> None:
        """End a phase transition: give back the leased bytes that this process does not use in the phase. Measure memory first."""
        self._lease.settle(self._held_bytes() + self._planner.working_bytes(name))

    def trim(self) -> None:
        """Return the memory that torch's allocator has cached to the driver, for other processes. Called outside every phase."""
        if self._device.memory().torch_reserved_bytes > self._device.torch_allocated_bytes():
            self._device.trim()

    def _take(self, what: str, name: str, plan: Plan) -> None:
        if not self._grow(name, plan):
            self._give_way(self)
            self.settle(IDLE)
            nbytes, is_free = self._needs(name, plan)  # asked again, because giving way has freed the handles' memory and torch's cache
            self._lease.wait(nbytes, what=what, is_free=is_free)

    def _grow(self, name: str, plan: Plan) -> bool:
        nbytes, is_free = self._needs(name, plan)
        return self._lease.grow(nbytes, is_free=is_free)

    def _needs(self, name: str, plan: Plan) -> tuple[int, Callable[[], bool]]:
        """Bytes to lease in total, and whether the driver has what is lacking: a killed process's memory comes back after its lease."""
        built = [handle for handle in self._handles.values() if handle.is_built and not handle.external]
        staying = [handle for handle in built if plan.on_device(handle.name) or handle.name in plan.streamed]
        wanted = sum(bytes_under(plan, handle_view(h)) - h.storage.unadopted_bytes - h.storage.born_bytes for h in staying)
        more_bytes = wanted - self._held_bytes()
        return wanted + self._planner.working_bytes(name), lambda: more_bytes <= 0 or self._device.memory().free_bytes >= more_bytes

    def _held_bytes(self) -> int:
        """Device bytes of the handles, with state still to be created and windows of streamed steps. Not counted: torch's own memory."""
        storages = [handle.storage for handle in self._handles.values() if not handle.external]
        still_unborn = sum(each.unborn_bytes - each.born_bytes for each in storages if each.on_device)
        windows = sum(
            max(0, each.streamed.window_bytes - each.prefetched_bytes)  # what is aside is a part of the window
            for each in self._handles.values()
            if each.is_streaming and each.streamed is not None
        )
        return sum(each.resident_bytes - each.unadopted_bytes for each in storages) + still_unborn + windows

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
    """The plan that offloads everything, except weights that an engine would discard, because they could not be loaded again."""
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
    return not handle.is_on_device or not wanted_tags(handle, plan) <= handle.storage.resident_tags
