"""Handles that come and go while phases may be open: how they join, and how they are forgotten."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from dataclasses import replace

from placement.core import interrupts
from placement.core.errors import PhaseError
from placement.core.journal import logger
from placement.core.states import State
from placement.group.vote import Agree
from placement.phases.executor import PlanExecutor
from placement.phases.open_phases import OpenPhases
from placement.planning import plan_checks
from placement.registration.handle import Handle
from placement.registration.registry import Registry

_GONE = (
    "%r is no longer registered: its object (kind %s) was garbage-collected, because nothing referred to it. Keep a reference to "
    "registered objects; to drop one on purpose, call unregister() first"
)


class Members:
    """The handles of one manager, and what their coming and going does to its open phases. Called with the manager's lock held.

    Args:
        gone: gets the handles whose objects were garbage-collected.
    """

    def __init__(self, phases: OpenPhases, registry: Registry, executor: PlanExecutor, gone: deque[Handle]) -> None:
        self._phases = phases
        self._registry = registry
        self._handles = registry.handles
        self._executor = executor
        self._gone = gone
        self.is_closing = False
        """Whether the manager is being closed. Then no warning is logged about registered objects that were garbage-collected."""

    def known(self, name: str) -> Handle:
        """The handle of this name.

        Raises:
            PhaseError: there is none.
        """
        handle = self._handles.get(name)
        if handle is None:
            raise PhaseError(plan_checks.unknown_handle(name, self._handles))
        return handle

    def join(self, handle: Handle, agree: Agree | None = None) -> None:
        """Move a newly registered handle where the open phase wants it.

        Args:
            agree: asks the ranks of the group for agreement, for a replicated handle; None: this process decides alone.

        Raises:
            Exception: the error that stopped the move. The plans of the open phases are then as before, without the handle.
        """
        phases = self._phases
        plans = [each.plan for each in phases.all]
        try:
            phases.extend(handle)
            self._executor.join(handle, phases.base_plan(), phases.name, phases.kept, agree)
            interrupts.check()
        except BaseException:
            for each, plan in zip(phases.all, plans, strict=True):
                each.plan = plan
            raise

    def bring(self, names: tuple[str, ...]) -> None:
        """Bring handles to the device, beside what belongs there now. The caller forgets them, so that no plan has to know.

        Raises:
            IntegrityError: a handle was written while it was offloaded, in a way that is lost. Nothing has moved.
            DeviceMemoryError: they do not fit the budget.
        """
        self._executor.writes.look(wait=True)  # gradients that were zeroed meanwhile stay zero
        if (written := self._executor.writes.take()) is not None:
            raise written
        plan, named = self._phases.base_plan(), {self.known(name).name for name in names}
        parts = {name: tags for name, tags in plan.parts.items() if name not in named}
        plan = replace(plan, streamed=plan.streamed - named, parts=parts)  # whole, and not published from the host copy
        for name in named:
            plan = plan.also(name, State.GPU_RESIDENT)
        self._executor.carry_out(plan, self._phases.name)

    def forget(self, handle: Handle) -> None:
        """Remove a handle from the registry, from other handles' owners, and from the keeps and plans of all open phases."""
        self.look_for_writes(wait=False)
        self._registry.remove(handle)
        for other in self._handles.values():
            other.owners = tuple(owner for owner in other.owners if owner is not handle)
        self._phases.forget(handle.name)
        self._executor.measure()
        self._executor.lease_client.settle(self._phases.name)

    def forget_with_optimizers(self, handle: Handle) -> None:
        """Forget a handle, and first the optimizers that step it."""
        for other in [each for each in self._handles.values() if any(owner is handle for owner in each.owners)]:
            self.forget(other)
        self.forget(handle)

    def forget_all(self) -> list[Exception]:
        """Forget every handle that can be handed back, optimizers first. Returns the errors of the others."""
        failures: list[Exception] = []
        for handle in sorted(self._handles.values(), key=lambda h: h.kind != "optimizer"):
            try:
                self.forget(handle)
            except Exception as error:
                failures.append(error)
        return failures

    def forget_collected(self) -> None:
        """Forget the handles whose objects were garbage-collected, and those that an error kept from being forgotten."""
        while self._gone:
            handle = self._gone[0]
            if self._handles.get(handle.name) is handle:
                if not self.is_closing:
                    logger.warning(_GONE, handle.name, handle.kind)
                self.forget(handle)
            self._gone.popleft()  # last, so that after a failure the next phase transition does this again
        for handle in [each for each in self._handles.values() if each.storage.is_leaving]:
            self.forget(handle)

    def look_for_writes(self, *, wait: bool) -> None:
        """Look for writes into a handle's offloaded memory before it is forgotten. The next phase transition raises what is found."""
        with suppress(Exception):  # a broken device cannot answer, and values on the host can be handed back without it
            self._executor.writes.look(wait=wait)
