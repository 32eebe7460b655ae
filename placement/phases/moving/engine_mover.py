"""Rollout engines in a phase transition: they are offloaded before all other handles, and loaded after these freed their memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from placement.core.errors import BrokenHandleError
from placement.core.journal import Journal
from placement.core.machine import Node, path
from placement.core.states import Plan, State, Trigger
from placement.storage.managed import MoveResult

if TYPE_CHECKING:
    from placement.engines.residency import Residency
    from placement.registration.handle import Handle

Record = Callable[["Handle", Trigger, State, State, float, MoveResult], None]
Target = Callable[["Handle", Plan], Node]


def residency_of(handle: Handle) -> Residency:
    assert handle.residency is not None
    return handle.residency


def wanted_tags(handle: Handle, plan: Plan) -> frozenset[str]:
    """The tags (parts of an engine's memory, such as "weights") that a plan wants on the device."""
    if not plan.on_device(handle.name):
        return frozenset()
    return plan.parts.get(handle.name, frozenset(handle.storage.tags))


class EngineMover:
    """Tells engines that manage their own device memory to load and offload it, for one reconciler."""

    def __init__(self, journal: Journal, fire: Callable[[Handle, Trigger], None], record: Record, target: Target) -> None:
        self._journal = journal
        self._fire = fire
        self._record = record
        self._target = target
        self._wanted: dict[str, frozenset[str]] = {}
        """The tags to load for each engine that is being loaded, by its name."""

    def move(self, handle: Handle, trigger: Trigger) -> MoveResult:
        """Do the work of `load` or `offload`. Called by the handle's state machine."""
        residency, began = residency_of(handle), time.monotonic()
        if trigger is Trigger.OFFLOAD:
            copied = residency.offload(residency.resident)
        else:
            copied = residency.load(self._wanted.get(handle.name, residency.resident))
        return MoveResult(seconds=time.monotonic() - began, copied_bytes=copied)

    def leave(self, handle: Handle, plan: Plan) -> bool:
        """Offload the tags that the plan does not want on the device. Returns whether there were any."""
        residency, stays = residency_of(handle), wanted_tags(handle, plan)
        if residency.resident <= stays:
            return False
        if residency.resident & stays:
            self._part(handle, Trigger.OFFLOAD, lambda: residency.offload(residency.resident - stays))
        else:
            self._run(handle, (State.CPU_OFFLOADED, False))
        return True

    def lacks(self, handle: Handle, plan: Plan) -> bool:
        """Whether the plan wants a tag on the device that is not there."""
        return not wanted_tags(handle, plan) <= residency_of(handle).resident

    def come(self, handle: Handle, plan: Plan) -> None:
        """Load the tags that the plan wants on the device, and bring the handle to its state."""
        wanted = self._wanted[handle.name] = wanted_tags(handle, plan)
        try:
            if self.lacks(handle, plan) and handle.state is not State.CPU_OFFLOADED:
                self._part(handle, Trigger.LOAD, lambda: residency_of(handle).load(wanted))
            self._run(handle, self._target(handle, plan))
            if wanted:
                residency_of(handle).reopen()
        finally:
            del self._wanted[handle.name]

    def make_consistent(self, handle: Handle) -> None:
        """Repair the handle after an interrupted move: set its state according to the tags that are on the device."""
        residency = residency_of(handle)
        handle.broken = residency.doubt
        if residency.doubt is None and bool(residency.resident) is (handle.state is State.CPU_OFFLOADED):
            self._run(handle, (State.GPU_RESIDENT, True) if residency.resident else (State.CPU_OFFLOADED, False))

    def as_far_as_it_goes(self, step: Callable[[Handle, Plan], object], engines: Iterable[Handle], plan: Plan) -> list[Exception]:
        """Do a step (`leave` or `come`) for every engine, even if it fails for some. Returns the errors."""
        errors: list[Exception] = []
        for handle in engines:
            try:
                self.make_consistent(handle)
                step(handle, plan)
            except Exception as error:
                errors.append(error)
        return errors

    def _run(self, handle: Handle, target: Node) -> None:
        state = handle.state  # not the state that the tags say: the path must begin where the state machine is
        for trigger in path((state, state is not State.CPU_OFFLOADED), target):
            self._fire(handle, trigger)

    def _part(self, handle: Handle, trigger: Trigger, work: Callable[[], int]) -> None:
        """Load or offload some tags of an engine. Its state does not change, but the move is recorded."""
        began = time.monotonic()
        try:
            if (doubt := residency_of(handle).doubt) is not None:
                raise BrokenHandleError(f"{handle.name!r} is broken and cannot {trigger}: {doubt}")
            copied = work()
        except BaseException as error:
            self._journal.failed(handle.counters, handle.name, trigger, error)
            raise
        self._record(handle, trigger, handle.state, handle.state, began, MoveResult(time.monotonic() - began, copied))
