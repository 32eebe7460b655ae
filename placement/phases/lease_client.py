"""The lease of one manager, where processes on one GPU share its memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from placement.core.errors import DeviceMemoryError
from placement.core.states import IDLE, Plan, State, bytes_under
from placement.devices.base import Device
from placement.planning.planner import Planner, handle_view, wanted_tags
from placement.registration.handle import Handle

if TYPE_CHECKING:
    from placement.group.lease import Lease


class LeaseClient:
    """The lease of one manager: it grows before a byte is loaded, and shrinks to what is used when
    a phase transition is over.
    `give_way`: offloads everything, before this process waits for others: a process that waits
    holds nothing, so that two processes that swap places never wait for each other."""

    def __init__(
        self,
        lease: Lease,
        device: Device,
        handles: Mapping[str, Handle],
        planner: Planner,
        give_way: Callable[[], None],
    ) -> None:
        self._lease = lease
        self._device = device
        self._handles = handles
        self._planner = planner
        self._give_way = give_way
        self.settle(IDLE)

    def take(self, name: str, plan: Plan, room_bytes: int) -> int:
        """Lease the bytes that a phase's plan needs: at once, or else after offloading everything
        and waiting for other processes. Returns the part of `room_bytes` that a swap may use, which
        is never above the lease."""
        if name != IDLE or self._coming(plan):
            self._take(f"phase {name!r}", name, plan)
        return max(
            0,
            min(
                room_bytes,
                self._lease.held_bytes
                - self._held_bytes()
                - self._planner.memory.torch_reserved_bytes,
            ),
        )

    def take_back(self, name: str, plan: Plan, *, patiently: bool) -> tuple[Plan, list[Exception]]:
        """Lease the bytes of a plan to which the handles go back. Returns a plan that can be
        carried out: where the others have the memory and it is not to wait `patiently` for them, it
        has less, and the error says so."""
        if not (coming := self._coming(plan)):
            return plan, []
        try:
            if patiently:
                self._take(f"back to phase {name!r}", name, plan)
            elif not self._grow(name, plan):
                raise DeviceMemoryError(
                    f"back to phase {name!r}: other processes have the memory of "
                    f"{', '.join(coming)}"
                )
        except Exception as refused:
            for each in self._coming(plan):  # giving way has taken more off the device
                there = self._handles[each].storage.resident_tags & wanted_tags(
                    self._handles[each], plan
                )
                state = plan[each] if there else State.CPU_OFFLOADED
                plan = plan.without(each).also(each, state, there or None)
            return plan, [refused]
        return plan, []

    def settle(self, name: str) -> None:
        """End a phase transition: give back the leased bytes that this process does not use in the
        phase. Measure memory first."""
        self._lease.settle(self._held_bytes() + self._planner.working_bytes(name))

    def _take(self, what: str, name: str, plan: Plan) -> None:
        if not self._grow(name, plan):
            self._give_way()
            self.settle(IDLE)
            # asked again, because giving way has freed the handles' memory and torch's cache
            nbytes, is_free = self._needs(name, plan)
            self._lease.wait(nbytes, what=what, is_free=is_free)

    def _grow(self, name: str, plan: Plan) -> bool:
        nbytes, is_free = self._needs(name, plan)
        return self._lease.grow(nbytes, is_free=is_free)

    def _needs(self, name: str, plan: Plan) -> tuple[int, Callable[[], bool]]:
        """Bytes to lease in total, and whether the driver has what is lacking: a killed process's
        memory comes back after its lease."""
        built = [
            handle for handle in self._handles.values() if handle.is_built and not handle.external
        ]
        staying = [
            handle
            for handle in built
            if plan.on_device(handle.name) or handle.name in plan.streamed
        ]
        wanted = sum(
            bytes_under(plan, handle_view(h)) - h.storage.unadopted_bytes - h.storage.born_bytes
            for h in staying
        )
        more_bytes = wanted - self._held_bytes()
        return wanted + self._planner.working_bytes(
            name
        ), lambda: more_bytes <= 0 or self._device.memory().free_bytes >= more_bytes

    def _held_bytes(self) -> int:
        """Device bytes of the handles, with state still to be created and windows of streamed
        steps. Not counted: torch's own memory."""
        storages = [handle.storage for handle in self._handles.values() if not handle.external]
        still_unborn = sum(
            each.unborn_bytes - each.born_bytes for each in storages if each.on_device
        )
        # less what is aside
        windows = sum(
            max(0, h.window_bytes - h.prefetched_bytes)
            for h in self._handles.values()
            if h.is_streaming
        )
        return (
            sum(each.resident_bytes - each.unadopted_bytes for each in storages)
            + still_unborn
            + windows
        )

    def _coming(self, plan: Plan) -> list[str]:
        """The names of the handles of which the plan loads something."""
        wanted = [
            each
            for each in self._handles.values()
            if each.is_built and not each.external and plan.on_device(each.name)
        ]
        return [
            each.name
            for each in wanted
            if not each.is_on_device or not wanted_tags(each, plan) <= each.storage.resident_tags
        ]
