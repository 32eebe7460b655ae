"""Rollout engines that manage their own memory, in a phase transition.

They are told to offload before the handles move, and to load after every rank has returned the
memory that they need to the driver. A failure does not bring engines back; the retreat that follows
does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from placement.core.errors import PhaseError
from placement.core.states import WEIGHTS, Plan, State, Trigger
from placement.engines.tagged import Residency, TaggedEngine
from placement.phases.moves import Mover
from placement.phases.transition import Participant, Transition
from placement.planning.planner import target_of, unknown_handle, wanted_tags
from placement.registration.handle import OFFLOADED, RESIDENT, Handle
from placement.storage.move import MoveResult


def _residency_of(engine: Handle) -> Residency:
    assert isinstance(engine.storage, Residency)
    return engine.storage


def _engines_of(handles: Mapping[str, Handle]) -> list[Handle]:
    return [handle for handle in handles.values() if isinstance(handle.storage, Residency)]


def _lacks(engine: Handle, plan: Plan) -> bool:
    return not wanted_tags(engine, plan) <= _residency_of(engine).resident_tags


def _has_surplus(engine: Handle, plan: Plan) -> bool:
    return not _residency_of(engine).resident_tags <= wanted_tags(engine, plan)


class Engines(Participant):
    """Offloads and loads the tags (parts of an engine's memory, such as "weights") that a plan
    names. `mover`: makes the engines' state transitions."""

    def __init__(self, mover: Mover) -> None:
        self._mover = mover

    def prepare(self, transition: Transition) -> None:
        plan = transition.plan
        if transition.is_exit:
            transition.errors += self._mover.each_repaired(
                _engines_of(transition.handles), lambda engine: self._offload_surplus(engine, plan)
            )
            return
        for engine in _engines_of(transition.handles):
            transition.engines_left |= self._offload_surplus(engine, plan)

    def moved(self, transition: Transition) -> None:
        for engine in _engines_of(transition.handles):
            transition.lacks_engines |= _lacks(engine, transition.plan)

    def finish(self, transition: Transition) -> None:
        plan = transition.plan
        engines = _engines_of(transition.handles)
        if not transition.is_exit:
            for engine in engines:
                self._come(engine, plan)
            return
        # An engine that could not leave is not asked again in this phase transition, because that
        # may mean waiting again.
        transition.errors += self._mover.each_repaired(
            [engine for engine in engines if not _has_surplus(engine, plan)],
            lambda engine: self._come(engine, plan),
        )

    def _offload_surplus(self, engine: Handle, plan: Plan) -> bool:
        """Offload the tags that the plan does not want on the device. Returns whether there were
        any. The engine has been repaired before: its state agrees with its tags. It keeps its state
        where some of its tags stay on the device."""
        if not _has_surplus(engine, plan):
            return False
        residency, stays = _residency_of(engine), wanted_tags(engine, plan)
        if residency.resident_tags & stays:
            leaving = residency.resident_tags - stays
            self._move_part(engine, Trigger.OFFLOAD, lambda: residency.offload(leaving))
        else:
            self._mover.take_engine_to(engine, OFFLOADED)
        return True

    def _come(self, engine: Handle, plan: Plan) -> None:
        """Load the tags that the plan wants on the device, and bring the engine to its state."""
        residency, tags = _residency_of(engine), wanted_tags(engine, plan)
        if _lacks(engine, plan) and engine.state is not State.CPU_OFFLOADED:
            self._move_part(engine, Trigger.LOAD, lambda: residency.load(tags))
        self._mover.take_engine_to(engine, target_of(engine, plan), tags)
        if tags:
            residency.reopen()

    def _move_part(self, engine: Handle, trigger: Trigger, work: Callable[[], int]) -> None:
        """Load or offload some tags of an engine. Its state does not change, but the move is
        recorded."""
        began = time.monotonic()
        with self._mover.failing([(engine, trigger)]):
            copied = work()
        moved = MoveResult(time.monotonic() - began, copied)
        self._mover.record(engine, trigger, engine.state, began, moved)


def droppable(handles: Mapping[str, Handle], names: Iterable[str]) -> list[Handle]:
    """The engines of these names. Raises PhaseError: one cannot give up its weights on the host."""
    engines = []
    for name in names:
        if name not in handles:
            raise PhaseError(f"drop: {unknown_handle(name, handles)}")
        handle, engine = handles[name], handles[name].object
        is_engine = isinstance(engine, TaggedEngine) and not handle.readonly
        if not is_engine or not (engine.can_discard or not engine.residency.keeps_weights):
            raise PhaseError(f"drop: {name!r} is no engine whose weights a sync brings again")
        engines.append(handle)
    return engines


def drop(engine: Handle, mover: Mover) -> None:
    """Have an engine that is off the device discard the weights that it has on the host: it wakes
    with them, and sleeps without them."""
    residency = _residency_of(engine)
    if residency.has_mirror and residency.keeps_weights:
        mover.take_engine_to(engine, RESIDENT, frozenset({WEIGHTS}))
        residency.keeps_weights = False
        try:
            mover.take_engine_to(engine, OFFLOADED)
        finally:
            residency.keeps_weights = True
