"""Once in a job, at INFO: what the policy `cyclic` would have saved, and the line to change.

The step that the job repeats is replayed under both policies: their plans are carried out on views
alone, and the bytes are counted that a manager would copy. Bytes that would arrive early count like
all others, so what is promised is saved by moves that do not happen.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from placement.core.journal import Journal, PhaseSpan, logger
from placement.core.settings import Settings
from placement.core.snapshot import readable
from placement.core.states import IDLE, Plan, Policy, State, Trigger, View, bytes_under
from placement.planning import planner as planning
from placement.planning.planner import PhaseHistory, Planner
from placement.planning.policy_lookup import resolve_policy
from placement.registration.handle import Handle

_FIRST_LOOK = 8  # spans. Each look comes after twice as many as the one before
_LEAST_SECONDS, _LEAST_SHARE = 0.05, 0.05  # a saving of less, or of less of the step, is no news
_TOLERANCE = 0.02  # the share of the measured bytes by which the replay may miss them
_MOVES = (Trigger.LOAD, Trigger.OFFLOAD)
_COMPARED = ("colocated", "resident", "cyclic")
_DEFAULTS = ((), "", "train", False)  # of their options
_CYCLES = 4  # after so many every handle is where it will be again
_RARE = {IDLE, "restore", "checkpoint", "eval"}  # phases that a step need not have


class Advisor:
    """The manager calls `look` before a phase transition once its journal has `look_at` spans."""

    def __init__(
        self,
        policy: Any,
        settings: Settings,
        planner: Planner,
        handles: Mapping[str, Handle],
        journal: Journal,
    ) -> None:
        self._policy, self._planner = policy, planner
        self._handles, self._journal = handles, journal
        self._spec = cyclic_like(policy, has_turns=settings.turns is not None)
        self.look_at: float = _FIRST_LOOK if self._spec else math.inf

    def look(self) -> None:
        """Tell the advice, once, if the last steps are alike. Raises nothing."""
        self.look_at = 2 * self._journal.num_spans
        if not logger.isEnabledFor(logging.INFO):
            return
        try:
            spans = self._journal.phase_spans()
            if length := length_of_step(spans):
                self._tell(spans[-length:], before=spans[-length - 1])
        except Exception as error:  # a plan that does not fit, too
            logger.debug("no advice about policies: %s", str(error))

    def _tell(self, spans: Sequence[PhaseSpan], before: PhaseSpan) -> None:
        """Tell what would have been saved in the step of these spans, if that is worth a line."""
        copied: dict[tuple[str, Trigger], int] = {}
        copied_bytes = 0
        # by phase, because handles that move together have the same seconds
        seconds_of_copies: set[tuple[str, float]] = set()
        engine_seconds = 0.0
        for record in self._journal:
            if record.at_seconds < spans[0].begin_seconds or record.trigger not in _MOVES:
                continue
            if self._handles[record.handle].storage.tags:
                engine_seconds += record.seconds
            else:
                nbytes = record.nbytes + record.prefetched_bytes
                copied_bytes += nbytes
                seconds_of_copies.add((record.phase, record.seconds))
                move = record.handle, record.trigger
                copied[move] = max(nbytes, copied.get(move, 0))
        step = [(span.phase, planning.meant(span.only, self._handles)) for span in spans]
        own = Replay(self._policy, self._planner, copied).of_repeated(step)
        if abs(own.copied_bytes - copied_bytes) > _TOLERANCE * copied_bytes:
            return  # the user keeps or gives up handles, which no replay knows
        spec, total_bytes = self._spec, self._planner.memory.total_bytes
        other = Replay(resolve_policy(spec), self._planner, copied).of_repeated(step)
        step_seconds = spans[-1].end_seconds - spans[0].begin_seconds
        saved_bytes = own.copied_bytes - other.copied_bytes
        saved_engine_bytes = own.engine_bytes - other.engine_bytes
        copy_seconds = sum(seconds for _, seconds in seconds_of_copies)
        copy_seconds += spans[-1].arrival_seconds - before.arrival_seconds
        saved_seconds = copy_seconds * saved_bytes / max(1, own.copied_bytes)
        saved_seconds += engine_seconds * saved_engine_bytes / max(1, own.engine_bytes)
        least_seconds = max(_LEAST_SECONDS, _LEAST_SHARE * step_seconds)
        if other.spare_bytes >= 0 and saved_seconds > least_seconds:
            self.look_at = math.inf
            logger.info(
                "policy %s would have saved %.2f s of %.2f s a step, and fits (peak %s of %s): "
                'Manager(policy="%s"), or PLACEMENT_POLICY="%s"',
                spec,
                saved_seconds,
                step_seconds,
                readable(total_bytes - other.spare_bytes),
                readable(total_bytes),
                spec,
                spec,
                extra={"placement": other},
            )


class Bytes(NamedTuple):
    """The bytes of one step."""

    copied_bytes: int  # by loads and offloads, without those of engines
    engine_bytes: int  # device bytes that engines take and give up
    spare_bytes: int  # left on the device at least, beside the handles and what others need


class Replay:
    """The handles of a planner as another policy would have them. `copied`: the bytes that moves
    were measured to copy. A handle without a measurement is copied whole."""

    def __init__(
        self, policy: Policy, planner: Planner, copied: Mapping[tuple[str, Trigger], int]
    ) -> None:
        self._policy, self._copied = policy, copied
        self._planner = copy.copy(planner)
        self._planner.history = PhaseHistory()
        self._planner.least = None  # that of the present phase
        handles = planner.view(IDLE, None, frozenset()).handles
        self._handles = {name: handle.at_rest() for name, handle in handles.items()}
        self._changed: set[str] = set()  # the handles that an offload has to copy

    def of_repeated(self, step: Sequence[tuple[str, set[str] | None]]) -> Bytes:
        """The bytes of a step that is repeated: phases, with the handles that each is for. Raises
        PolicyError, DeviceMemoryError: there is no plan, or it does not fit."""
        for _ in range(_CYCLES):
            copied_bytes = engine_bytes = 0
            spare_bytes = []
            for phase, only in step:
                view = self._view(phase)
                plan = planning.ask_policy(self._policy, view)
                if only is not None:
                    idle = planning.ask_policy(self._policy, self._view(IDLE))
                    plan = plan.limited_to(only, idle)
                planning.check_fits(view, plan)
                if phase != IDLE:
                    self._planner.history.began(phase)
                held_bytes = view.bytes_of(plan) + sum(plan.prefetch.values())
                room_bytes = self._planner.budget_bytes(phase, measured=True)
                # early bytes have no more room than the budget leaves
                spare_bytes.append(room_bytes - min(held_bytes, view.budget_bytes))
                for name, handle in view.handles.items():
                    nbytes = self._move(name, plan, phase)
                    copied_bytes += 0 if handle.tags else nbytes
                    engine_bytes += nbytes if handle.tags else 0
        return Bytes(copied_bytes, engine_bytes, min(spare_bytes))

    def _view(self, phase: str) -> View:
        view = self._planner.view(phase, None, frozenset())
        least_bytes = self._planner.least_bytes.get(phase, view.budget_bytes)
        budget_bytes = min(view.budget_bytes, least_bytes)
        return replace(view, handles=self._handles, budget_bytes=budget_bytes)

    def _move(self, name: str, plan: Plan, phase: str) -> int:
        """Have a handle where a plan wants it. Returns the bytes that this copies; of an engine,
        the device bytes that it takes or gives up."""
        handle, state, is_on = self._handles[name], plan[name], plan.on_device(name)
        was_on = handle.state is not State.CPU_OFFLOADED and not handle.streaming
        device_bytes = bytes_under(plan, handle)
        nbytes = 0
        if handle.tags:
            nbytes = abs(device_bytes - handle.resident_bytes)
        elif is_on and not was_on:
            nbytes = self._copied.get((name, Trigger.LOAD), device_bytes)
        elif was_on and not is_on and name in self._changed:
            nbytes = self._copied.get((name, Trigger.OFFLOAD), handle.resident_bytes)
        if not is_on:
            self._changed.discard(name)
        elif state is State.TRAINING or (
            phase == "weight_sync" and (handle.role == "rollout" or handle.kind == "engine")
        ):
            self._changed.add(name)
        self._handles[name] = replace(
            handle,
            state=state,
            streaming=state is not State.CPU_OFFLOADED and not is_on,
            resident_bytes=device_bytes,
            resident_tags=plan.parts.get(name, frozenset(handle.tags)) if is_on else frozenset(),
        )
        return nbytes


def length_of_step(spans: Sequence[PhaseSpan]) -> int:
    """How many spans make the step that has come three times at the end. 0 if there is none, or if
    a phase that has been is not in it: it may be a part of a longer step."""
    phases = [(span.phase, span.only) for span in spans]
    seen = {phase for phase, _ in phases} - _RARE
    for length in range(1, min(len(phases) // 3, 2 * planning.MOST_PHASES) + 1):
        step = phases[-length:]
        if phases[-3 * length :] == 3 * step and seen <= {phase for phase, _ in step}:
            return length
    return 0


def cyclic_like(policy: Any, *, has_turns: bool) -> str:
    """`cyclic` with the options of a policy that ships; empty for a policy of the user's own."""
    name, kind = policy.name, type(policy)
    if name not in _COMPARED or kind is not type(resolve_policy(name)):
        return ""
    options = {
        "cycle": getattr(policy, "cycle", ()),
        "idle": "empty" if has_turns else "keep" if name == "cyclic" else "",
        "optimizer_in": policy.optimizer_in,
        "drop_gradients": policy.drop_gradients,
    }
    words = [f"{option}={value!r}" for option, value in options.items() if value not in _DEFAULTS]
    return f"cyclic({', '.join(words)})" if words else "cyclic"
