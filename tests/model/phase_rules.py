"""Phases and holds, opened and left in every way that users have, and policies that Hypothesis
draws: rules for `test_manager_machine`."""

from __future__ import annotations

import functools
import gc
import weakref
from dataclasses import dataclass

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from placement import IntegrityError, PhaseError, Plan, State, View
from placement.phases.phase import PhaseContext
from tests.model.values import ANY, Values
from tests.model.world import Level
from tests.support.threads import in_a_thread

PHASES_USED = ("rollout", "weight_sync", "log_prob", "train", "restore", "checkpoint")
_SLOTS = 5
PHASES = st.sampled_from((*PHASES_USED, "train", "train"))
Fault = tuple[str, int] | None
FAULTS = (
    st.none()
    | st.none()
    | st.tuples(
        st.sampled_from(["host", "reserve", "create", "map", "copy", "sync"]),
        st.sampled_from([1, 1, 2, 4]),
    )
)
ONLY = st.none() | st.frozensets(ANY, max_size=2)


def leave_with_error(phase: PhaseContext) -> None:
    """Leave as an exception of the user does. It would go on its way; what went wrong is noted on
    it, and raised here."""
    error = ValueError("the user's")
    phase.__exit__(ValueError, error, None)
    notes = getattr(error, "__notes__", [])
    if notes:
        raise (IntegrityError if "IntegrityError" in notes[0] else RuntimeError)("; ".join(notes))


class Phases(Values):
    """See `World` for what holds after every rule."""

    def names(self, only: frozenset[int] | None) -> frozenset[str] | None:
        names = list(self.shadows)
        return None if only is None else frozenset(names[i % len(names)] for i in only if names)

    @precondition(lambda self: len(self.levels) < 4)
    @rule(name=PHASES, only=ONLY, fault=FAULTS)
    def enter_with(self, name: str, only: frozenset[int] | None, fault: Fault) -> None:
        self.armed = fault
        names = self.names(only)
        phase = self.manager.phase(name, only=names)
        self.open(name, names, phase, phase.__enter__)

    @precondition(lambda self: len(self.levels) < 4)
    @rule(name=PHASES, only=ONLY, holds=st.booleans(), elsewhere=st.booleans(), fault=FAULTS)
    def enter_plain(
        self, name: str, only: frozenset[int] | None, holds: bool, elsewhere: bool, fault: Fault
    ) -> None:
        names = self.names(only)
        call = functools.partial(
            self.manager.hold if holds else self.manager.enter, name, only=names
        )
        if elsewhere and any(level.belongs_to_a_thread for level in self.levels):
            self.armed = None
            with pytest.raises(PhaseError, match="holds phase"):
                in_a_thread(call)
        else:
            self.armed = fault
            self.open(
                name,
                names,
                None,
                functools.partial(in_a_thread, call) if elsewhere and not holds else call,
            )

    @precondition(lambda self: self.levels)
    @rule(name=PHASES, only=ONLY, fault=FAULTS)
    def switch(self, name: str, only: frozenset[int] | None, fault: Fault) -> None:
        level, names = self.levels[-1], self.names(only)
        self.armed = fault
        switch = self.manager.switch if level.phase is None else level.phase.switch
        switch = switch if level.hold is None else level.hold.switch
        kept = {name for name in level.kept if self.on_device(name)}
        if self.transition(lambda: switch(name, only=names)):
            self.levels.pop()
            self.carried |= kept
            plan = self.limited(name, names)
            self.carried = set()
            self.levels.append(type(level)(name, names, plan, level.phase, hold=level.hold))
            self.base = plan
        else:
            self.base = self.enclosing()

    @precondition(lambda self: self.levels)
    @rule(how=st.sampled_from(["return", "exception", "elsewhere"]), fault=FAULTS)
    def leave_innermost(self, how: str, fault: Fault) -> None:
        self.armed = fault
        level = self.levels[-1]
        run = in_a_thread if how == "elsewhere" else lambda call: call()
        if level.hold is not None:
            hold = level.hold
            self.leave(level, lambda: run(hold.release))
            assert not hold.is_open
            hold.release()  # again: nothing happens
        elif level.phase is None:
            self.leave(level, lambda: run(self.manager.leave))
        elif how == "exception":
            phase = level.phase
            self.leave(level, lambda: leave_with_error(phase))
        else:
            phase = level.phase
            self.leave(level, lambda: phase.__exit__(None, None, None))

    @precondition(lambda self: self.levels and self.levels[-1].phase is not None)
    @rule()
    def drop(self) -> None:
        """A generator that is never finished: its phase closes when it is dropped."""

        def drop() -> None:
            dropped = weakref.ref(self.levels[-1].phase)
            self.levels[-1].phase = None
            if dropped() is not None:
                gc.collect()  # the traceback of an earlier failure may hold it
            self.manager.check_integrity()

        self.armed, self.was_written = None, False  # a failure inside `__del__` can only be logged
        self.leave(self.levels[-1], drop, carries=False)

    @precondition(lambda self: any(level.hold is not None for level in self.levels))
    @rule(index=ANY, dropped=st.booleans(), fault=FAULTS)
    def release_in_any_order(self, index: int, dropped: bool, fault: Fault) -> None:
        holds = [level for level in self.levels if level.hold is not None]
        level = holds[index % len(holds)]
        if dropped:
            self.armed, self.was_written = None, False

            def drop() -> None:
                level.hold = None
                gc.collect()
                self.manager.check_integrity()

            self.leave(level, drop, carries=False)
        else:
            self.armed = fault
            assert level.hold is not None
            self.leave(level, level.hold.release)

    @precondition(lambda self: len(self.levels) > 1)
    @rule(index=ANY)
    def leave_out_of_order(self, index: int) -> None:
        level = self.levels[index % (len(self.levels) - 1)]
        if level.phase is not None:
            leave = functools.partial(level.phase.__exit__, None, None, None)
        elif level is self.entered():
            leave = self.manager.leave
        else:
            return
        if level.phase is not None:
            with pytest.raises(PhaseError, match="leave it first"):
                level.phase.switch("train")
        if self.is_blocked(level):
            with pytest.raises(PhaseError, match="leave it first"):
                leave()
        else:  # it has only holds inside
            self.leave(level, leave)

    def entered(self) -> Level | None:
        """The phase that `Manager.enter` opened last."""
        return next(
            (
                level
                for level in reversed(self.levels)
                if level.phase is None and level.hold is None
            ),
            None,
        )

    @precondition(lambda self: self.levels and self.levels[-1].phase is not None)
    @rule(index=ANY)
    def keep(self, index: int) -> None:
        shadows, level = list(self.shadows), self.levels[-1]
        if shadows and level.phase is not None:
            level.phase.keep(shadows[index % len(shadows)])
            level.kept.add(shadows[index % len(shadows)])


# --- a policy whose answers Hypothesis draws: any total plan of legal states


@dataclass(frozen=True)
class Drawn:
    """Handle `x7` belongs to slot 7 % 5; the table has a state for every phase and slot. Some
    phases want some slots early."""

    table: dict[str, tuple[tuple[State, bool], ...]]
    early: dict[str, tuple[int, ...]]
    """For every phase and slot the bytes that are wanted early."""
    name: str = "drawn"

    def plan(self, view: View) -> Plan:
        targets: dict[str, State] = {}
        streamed, prefetch = [], {}
        for handle in view.handles.values():
            state, streams = self.table[view.phase][int(handle.name[1:]) % _SLOTS]
            if handle.readonly and state is State.TRAINING:
                state = State.GPU_RESIDENT
            targets[handle.name] = state
            may_be_stepped = (
                handle.kind == "optimizer" and not handle.external and handle.unstreamable is None
            )
            if streams and (state is State.SYNCING or (state is State.TRAINING and may_be_stepped)):
                streamed.append(handle.name)
            if handle.can_prefetch and state is State.CPU_OFFLOADED and view.budget_bytes:
                prefetch[handle.name] = self.early[view.phase][int(handle.name[1:]) % _SLOTS]
        return Plan(targets, frozenset(streamed), prefetch=prefetch)


def drawn_policies() -> st.SearchStrategy[Drawn]:
    """Policies over the phases in use; TRAINING often, because only then may values change."""
    slot = st.tuples(st.sampled_from([*State, State.TRAINING]), st.booleans())
    slots = st.tuples(*[slot] * _SLOTS)
    early = st.tuples(*[st.sampled_from([1 << 30, 8192, 0])] * _SLOTS)
    nothing = st.just((0,) * _SLOTS)  # outside every phase nothing is left, which is checked
    wanted = st.fixed_dictionaries(dict.fromkeys(PHASES_USED, early) | {"idle": nothing})
    return st.builds(
        Drawn, st.fixed_dictionaries(dict.fromkeys((*PHASES_USED, "idle"), slots)), wanted
    )
