"""The handles of one manager, as they come and go while phases may be open."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from placement.core import interrupts
from placement.core.errors import PhaseError
from placement.core.journal import Journal, logger
from placement.core.states import State
from placement.group.vote import Agree
from placement.phases.phase import OpenPhases
from placement.phases.reconciler import Reconciler
from placement.planning.planner import unknown_handle
from placement.registration.handle import Handle
from placement.registration.registry import Registry

_GONE = (
    "%r is no longer registered: its object (kind %s) was garbage-collected, because nothing "
    "referred to it. Keep a reference to registered objects; to drop one on purpose, call "
    "unregister() first"
)


class Members:
    """The registered handles of one manager. Called with the manager's lock held, except for
    `find`.

    `gone`: gets handles whose objects were garbage-collected, or that could not be handed back as a
    whole. `restored_by`: what `Handle.restore` calls.
    """

    def __init__(
        self,
        registry: Registry,
        phases: OpenPhases,
        reconciler: Reconciler,
        journal: Journal,
        gone: deque[Handle],
        restored_by: Callable[[Handle], None],
    ) -> None:
        self._registry = registry
        self._handles = registry.handles
        self._phases = phases
        self._reconciler = reconciler
        self._journal = journal
        self._gone = gone
        self._restored_by = restored_by
        self.is_closing = False
        """Whether the manager is being closed. Then no warning is logged about registered objects
        that were garbage-collected."""

    def find(self, handle_or_name: Handle | str) -> Handle:
        """The registered handle that a user names. Raises PhaseError: there is none."""
        name = str(getattr(handle_or_name, "name", handle_or_name))
        handle = self._handles.get(name)
        if handle is None:
            raise PhaseError(unknown_handle(name, self._handles))
        return handle

    def steppers_of(self, handle: Handle) -> list[Handle]:
        steppers = []
        for stepper in self._handles.values():
            if any(owner is handle for owner in stepper.owners):
                steppers.append(stepper)
        return steppers

    def join(self, handle: Handle, agree: Agree | None = None) -> None:
        """Move a newly registered handle where the open phase wants it. `agree` asks the ranks of a
        replicated handle. If the move fails, the plans of the open phases are as before."""
        handle.restored_by = self._restored_by
        phases = self._phases
        plans = [phase.plan for phase in phases.all]
        self._reconciler.take_in(handle)
        try:
            phases.extend(handle)
            plan = phases.base_plan()
            if not handle.is_built and plan.targets[handle.name] is not State.CPU_OFFLOADED:
                self._registry.build(handle)
            self._reconciler.carry_out_within(phases.name, plan, phases.kept, agree)
            interrupts.check()
        except BaseException:
            for phase, plan in zip(phases.all, plans, strict=True):
                phase.plan = plan
            raise

    def bring(self, names: tuple[str, ...]) -> None:
        """Bring handles to the device, beside what belongs there now. The caller forgets them, so
        that no plan has to know."""
        if self._phases.is_suspended:
            raise PhaseError("the manager is suspended: nothing is loaded; call resume() first")
        plan = self._phases.base_plan()
        named = {self.find(name).name for name in names}
        changes = self._reconciler.changes
        changes.look_everywhere(wait=True)  # gradients that were zeroed meanwhile stay zero
        changes.raise_found()
        for name in named:
            if (holding := self._handles[name].holding) is not None:
                holding.watch.require_whole()
        parts = {name: tags for name, tags in plan.parts.items() if name not in named}
        # whole, and not published from the host copy
        plan = replace(plan, streamed=plan.streamed - named, parts=parts)
        for name in named:
            plan = plan.also(name, State.GPU_RESIDENT)
        if self._reconciler.turn is not None:
            self._reconciler.turn.take(self._phases.name)
        self._reconciler.carry_out_within(self._phases.name, plan)

    def restore(self, handle: Handle) -> None:
        """Point the replaced tensors of an offloaded handle to their places again: see
        `Handle.restore`. Raises PhaseError: the handle is on the device."""
        holding = self.find(handle).holding
        if holding is None:
            return
        if holding.on_device:
            raise PhaseError(
                f"{handle.name!r} is {handle.state} in phase {self._phases.name!r} and cannot be "
                "restored: what its tensors hold on the device are its values. Restore it while it "
                "is offloaded"
            )
        self._reconciler.changes.look_at([handle])
        holding.restore()
        self._reconciler.changes.forget_replaced(handle.name)

    def forget(self, handle: Handle) -> None:
        """Remove a handle from the registry, from other handles' owners, and from the keeps and
        plans of all open phases."""
        self._look_for_changes(wait=False)
        self._registry.remove(handle)
        self._journal.forget(handle.counters)
        for other in self._handles.values():
            other.owners = tuple(owner for owner in other.owners if owner is not handle)
        self._phases.forget(handle.name)
        self._reconciler.measure(self._phases.name)

    def forget_all(self) -> list[Exception]:
        """Forget every handle, optimizers first, also after one could not be handed back. Returns
        the errors."""
        self._look_for_changes(wait=True)
        failures: list[Exception] = []
        for handle in sorted(self._handles.values(), key=lambda handle: handle.kind != "optimizer"):
            try:
                self.forget(handle)
            except Exception as error:
                failures.append(error)
        return failures

    def forget_collected(self) -> None:
        """Forget the handles whose objects were garbage-collected, and those that an error kept
        from being forgotten."""
        while self._gone:
            handle, is_gone = self._gone[0], self._gone[0].is_gone
            if self._handles.get(handle.name) is handle and (
                is_gone or (handle.holding is not None and handle.holding.is_handing_back)
            ):
                if is_gone and not self.is_closing:
                    logger.warning(_GONE, handle.name, handle.kind)
                self.forget(handle)
            # last, so that after a failure the next phase transition tries this handle again
            self._gone.popleft()

    def _look_for_changes(self, *, wait: bool) -> None:
        """Look at offloaded handles before one is forgotten. The next phase transition raises what
        is found."""
        # a broken device cannot answer, and values on the host can be handed back without it
        with suppress(Exception):
            self._reconciler.changes.look_everywhere(wait=wait)
