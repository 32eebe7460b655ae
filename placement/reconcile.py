"""The only actuator: bring every handle to the state that a plan names.

Level-based and idempotent: it looks at where the handles are, not at how they came there. `advance` is all or nothing and
serves entries and switches; `retreat` takes every handle as far as it goes and serves exits, errors and recovery.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from placement.annotate import Annotate, marker
from placement.engines.moves import EngineMoves, residency_of, wanted_tags
from placement.errors import BrokenHandleError, CoordinatorLost, IntegrityError, PhaseError
from placement.handle import Handle
from placement.journal import Journal, Record
from placement.machine import Node, path
from placement.memory.base import Device
from placement.memory.exchange import Exchange
from placement.memory.holding import Holding
from placement.memory.moved import Moved
from placement.memory.stock import Stock
from placement.memory.verify import Verifier, Verify
from placement.states import Plan, State, Trigger

_MOVES = (Trigger.LOAD, Trigger.OFFLOAD)
_STEPS: tuple[tuple[Trigger, ...], ...] = (
    (Trigger.END_SYNC, Trigger.END_STREAM, Trigger.END_TRAIN),
    (Trigger.OFFLOAD,),
    (Trigger.LOAD,),
    tuple(Trigger),
)
"""The order of a border: what ends, what leaves, what comes, what begins. The bytes of the two in the middle move together."""


def target_of(handle: Handle, plan: Plan) -> Node:
    """The node that a plan wants a handle at.

    A `Lazy` is built when a phase begins; one that an exit would want on the device stays off it until then.
    """
    if not handle.is_built:
        return State.CPU_OFFLOADED, False
    state = plan.targets[handle.name]
    return state, state is not State.CPU_OFFLOADED if handle.external else plan.on_device(handle.name)


def _apart(handles: Mapping[str, Handle]) -> tuple[dict[str, Handle], list[Handle]]:
    """Those whose bytes we move, and the engines that do it themselves."""
    others = {name: handle for name, handle in handles.items() if handle.residency is None}
    return others, [handle for handle in handles.values() if handle.residency is not None]


def _nobody(_: Plan) -> None:
    """In place of a group's agreement, where there is none to be had."""


@dataclass(slots=True)
class _Attempt:
    """One transition in progress: what `after` needs to know of what `before` did."""

    began_seconds: float = 0.0
    moved: Moved = field(default_factory=Moved)


class HandleMoves:
    """What the machine of one handle calls around its transitions."""

    def __init__(self, handle: Handle, reconciler: Reconciler) -> None:
        self._handle = handle
        self._reconciler = reconciler
        self._attempt = _Attempt()

    def before(self, trigger: Trigger, source: State, target: State) -> None:
        self._attempt = _Attempt(time.monotonic())
        self._handle.require_sound(trigger)
        self._attempt.moved = self._reconciler.move(self._handle, trigger)

    def after(self, trigger: Trigger, source: State, target: State) -> None:
        self._reconciler.record(self._handle, trigger, source, target, self._attempt.began_seconds, self._attempt.moved)


class Reconciler:
    """Moves handles of one device. Called with the manager's lock held."""

    def __init__(self, device: Device, journal: Journal, *, strict: bool, verify: Verify = "off", annotate: Annotate = "off") -> None:
        self._device = device
        self._journal = journal
        self._strict = strict
        self._stock = Stock(device)
        self._verifier = Verifier(verify)
        self._mark = marker(annotate)
        self._dropping: tuple[Holding, ...] = ()
        """Whose gradients die at the present border."""
        self._moved: dict[Handle, Moved] = {}
        """What the present border's exchange has moved, until the handles' transitions take it over."""
        self._engines = EngineMoves(journal, self._fire, self.record, target_of)
        self._complaints: list[Exception] = []
        """What must be raised, but only once the border is complete: raising at once would leave the handle half-way."""

    def moves_of(self, handle: Handle) -> HandleMoves:
        return HandleMoves(handle, self)

    # --- one transition

    def move(self, handle: Handle, trigger: Trigger) -> Moved:
        """The work of one transition: bytes for `load` and `offload`, a check for the others."""
        holding = handle.holding
        if handle.is_streaming and trigger in (Trigger.END_SYNC, Trigger.SYNC_TO_TRAIN):
            raise PhaseError(f"{handle.name!r} publishes from its host copy; it cannot {trigger} before it is loaded")
        if trigger is Trigger.END_STREAM and not handle.is_streaming and not handle.external:
            raise PhaseError(f"{handle.name!r} is SYNCING on the device; it ends with {Trigger.END_SYNC}")
        if handle.residency is not None and trigger in _MOVES:
            return self._engines.move(handle, trigger)
        if holding is None or handle.external:
            return Moved()
        if trigger in (Trigger.END_TRAIN, Trigger.TRAIN_TO_SYNC):
            holding.adopted.look()  # state that its first step has born lies in torch's memory until the first offload, and has to count
        if trigger not in _MOVES:
            return Moved()
        moved = self._moved.pop(handle, None)
        if moved is None:  # not part of a border's exchange: recovery, or what the exchange could not do
            moved = self._exchange([handle] if trigger is Trigger.OFFLOAD else [], [handle] if trigger is Trigger.LOAD else [])[handle]
        self._complain(handle, moved)
        return moved

    def _exchange(
        self, leaving: Sequence[Handle], coming: Sequence[Handle], *, early_release: bool = False, together: bool = False
    ) -> dict[Handle, Moved]:
        """Move the bytes of several handles, both directions at once. Handles that are there already have moved nothing."""
        by_holding = {handle.holding: handle for handle in (*leaving, *coming) if handle.holding is not None}
        room_bytes = min(self._device.memory().free_bytes, self._stock.room_bytes) if leaving and coming else 0
        exchange = Exchange(
            self._device,
            self._stock,
            verifier=self._verifier,
            room_bytes=room_bytes,
            early_release=early_release,
            dropping=self._dropping,
            together=together,
        )
        texts = [f"{verb} {', '.join(h.name for h in those)}" for verb, those in (("offload", leaving), ("load", coming)) if those]
        with self._mark(f"placement: {'; '.join(texts)}"):
            moved = exchange.run([h.holding for h in leaving if h.holding], [h.holding for h in coming if h.holding])
        return dict.fromkeys((*leaving, *coming), Moved()) | {by_holding[holding]: each for holding, each in moved.items()}

    def _complain(self, handle: Handle, moved: Moved) -> None:
        """Note what must be raised once the border is complete."""
        handle.stray_references, handle.strays = moved.stray_references, moved.strays
        if moved.rewritten_chunks:
            self._complaints.append(
                IntegrityError(
                    f"{handle.name!r} is readonly, but {moved.rewritten_chunks} of its chunks changed on the device; the registered values "
                    "were kept. Register it without readonly=True if it is meant to be written."
                )
            )
        if moved.stray_references and self._strict and self._last(handle):
            self._complaints.append(
                IntegrityError(
                    f"{handle.stray_references} references to storages of {handle.name!r} were alive at its offload ({handle.strays}). "
                    "What they point to reads poison now. Drop them before the phase ends, or take handle.state_dict() instead."
                )
            )

    def _last(self, handle: Handle) -> bool:
        """Whether strays of an offload are there to stay."""
        handle.look_for_strays()
        return handle.stray_references > 0

    def record(self, handle: Handle, trigger: Trigger, source: State, target: State, began_seconds: float, moved: Moved) -> None:
        """Write one state change into the journal, with the time since `began_seconds`."""
        now = time.monotonic()
        record = Record(
            at_seconds=now,
            timestamp_seconds=time.time(),
            handle=handle.name,
            kind=handle.kind,
            trigger=trigger,
            source=source,
            target=target,
            phase=self._journal.phase,
            nbytes=moved.copied_bytes,
            skipped_bytes=moved.skipped_bytes,
            seconds=moved.seconds or now - began_seconds,
            resident_bytes=handle.resident_bytes,
        )
        self._journal.record(handle.counters, record)

    def _fire(self, handle: Handle, trigger: Trigger) -> None:
        try:
            handle.machine.fire(trigger)
        except BaseException as error:
            self._journal.failed(handle.counters, handle.name, trigger, error)
            raise

    def settle(self, handle: Handle) -> None:
        """Make what an interrupted move left behind consistent: bytes with the decision, state with the bytes, journal with the state.

        Raises:
            BrokenHandleError: the device fails in the middle of it. The next border tries again.
        """
        holding = handle.holding
        if handle.residency is not None:
            self._engines.settle(handle)
        try:
            if holding is not None:
                holding.settle(self._stock)
        except Exception as error:
            handle.broken = f"the device failed while a move was being completed: {error}"
            raise BrokenHandleError(f"{handle.name!r} is broken: {handle.broken}") from error
        # The device answers again: nothing was lost by the error, because the decision had been stored before.
        if handle.residency is None:
            handle.broken = None if holding is None else holding.lost
        state, recorded = handle.state, handle.counters.state
        if state is not recorded:
            trigger = path((recorded, recorded is not State.CPU_OFFLOADED), handle.node)[-1]
            self.record(handle, trigger, recorded, state, time.monotonic(), Moved())
        if holding is not None and not handle.external and not handle.is_streaming:
            if holding.on_device and handle.state is State.CPU_OFFLOADED:
                handle.machine.fire(Trigger.LOAD)
            elif not holding.on_device and handle.state is not State.CPU_OFFLOADED:
                handle.machine.fire(Trigger.OFFLOAD)

    # --- all handles

    def advance(
        self,
        handles: Mapping[str, Handle],
        plan: Plan,
        room_bytes: int,
        agree: Callable[[Plan], None] | None = None,
        begin: Callable[[str], object] = lambda _: None,
    ) -> None:
        """Bring every handle to its target, or leave every handle where it was.

        Engines that place their own memory go first and come last: the one when no other rank takes what they hold, the other
        when every rank has given to the driver what they need. What fails does not bring them back; the retreat after it does.

        Args:
            room_bytes: what the budget leaves beside what the handles hold now: a swap may be ahead by that much.
            agree: called when everything has moved and could still go back without asking anybody for memory; what it raises
                makes it go back, but for CoordinatorLost, which leaves everything as it is. Again for each step of engines. None:
                nobody is asked, and what ranks share is loaded by this one alone.
            begin: called before each further step, with what it is.

        Raises:
            Exception: what stopped it. Each handle is then in its source state or, where its memory could not be had back, in
                its target state; complete either way.
        """
        for error in self._settle_all(handles):
            if not isinstance(error, BrokenHandleError):  # a broken handle stops only who needs to move it
                raise error
        handles, engines = _apart(handles)
        together, agree = agree is not None, agree or _nobody
        self._stock.room_bytes = room_bytes
        sources = {handle.name: handle.node for handle in handles.values()}
        self._dropping = self._leaving_training(handles.values(), plan)
        try:
            if True in [self._engines.leave(engine, plan) for engine in engines]:
                agree(plan)
                begin("move what is left")
            self._march(handles.values(), lambda handle: target_of(handle, plan), together=together)
            for complaint in self._take_complaints():
                raise complaint
            agree(plan)
            self._complete(handles.values(), together=True)
            self._finish(handles.values())
        except CoordinatorLost as lost:  # what was given up stays ours, for whoever goes back later
            try:
                self._complete(handles.values(), together=False)
            except Exception as error:
                lost.add_note(f"placement: {error}")
            self._moved, self._dropping = {}, ()
            raise
        except BaseException as error:
            self._go_back(handles, sources, error)
            self._end()
            raise
        self._end()
        if any(self._engines.lacks(engine, plan) for engine in engines):
            begin("load engines")
            for engine in engines:
                self._engines.come(engine, plan)
            agree(plan)
        for engine in engines:  # and what changes state alone
            self._engines.come(engine, plan)

    def _complete(self, handles: Iterable[Handle], *, together: bool) -> None:
        """Decide the loads that waited for the decision of the group.

        Args:
            together: every rank does this now; else this one gets what is missing by itself.
        """
        for handle in handles:
            if handle.holding is not None and not handle.holding.is_complete:
                handle.holding.complete(together=together)
                self._verifier.check_device(handle.holding)
                handle.holding.commit_load()
                handle.holding.settle(self._stock)

    def _end(self) -> None:
        """The border is over: nothing is remembered of it, and no memory is kept back."""
        self._moved, self._dropping = {}, ()
        self._stock.release()

    def _leaving_training(self, handles: Iterable[Handle], plan: Plan) -> tuple[Holding, ...]:
        """Whose gradients the plan drops as it takes them out of TRAINING."""
        leaving = [h for h in handles if h.name in plan.dropped and h.state is State.TRAINING and not h.external]
        return tuple(h.holding for h in leaving if h.holding is not None and target_of(h, plan)[0] is not State.TRAINING)

    def _finish(self, handles: Iterable[Handle]) -> None:
        """The border is carried out: what it means for gradients that stay on the device, and for host copies that are new."""
        for handle in handles:
            if handle.holding in self._dropping and handle.state is not State.TRAINING and handle.holding.on_device:
                handle.holding.gradients.drop(zero_buffers=True)
                handle.holding.adopted.look()
        self._verifier.note(handle.holding for handle in handles if handle.holding is not None)

    def retreat(self, handles: Mapping[str, Handle], plan: Plan, *, together: bool = False) -> list[Exception]:
        """Bring every handle as far towards its target as it goes.

        Args:
            together: the ranks of the group will be asked whether all of them came so far, and `complete` called with the answer.

        Returns:
            What went wrong; empty when every handle is at its target.
        """
        others, engines = _apart(handles)
        errors = self._engines.as_far_as_it_goes(self._engines.leave, engines, plan)
        errors += self._retreat_others(others, plan, together)
        # One that could not leave is not asked again, and waited for again, at the same border.
        engines = [engine for engine in engines if residency_of(engine).resident <= wanted_tags(engine, plan)]
        return errors + self._engines.as_far_as_it_goes(self._engines.come, engines, plan)

    def complete(self, handles: Mapping[str, Handle], *, together: bool) -> list[Exception]:
        """After a retreat of ranks together: decide the loads that waited for the others. Returns what went wrong.

        Args:
            together: all of them came so far; else this rank gets what is missing by itself.
        """
        try:
            self._complete(handles.values(), together=together)
        except Exception as error:
            return [error, *self._settle_all(handles)]
        return []

    def _retreat_others(self, handles: Mapping[str, Handle], plan: Plan, together: bool) -> list[Exception]:
        errors: list[Exception] = []
        self._stock.room_bytes = 0
        self._dropping = self._leaving_training(handles.values(), plan)
        try:
            paths: list[tuple[Handle, list[Trigger]]] = []
            for handle in handles.values():
                try:
                    self.settle(handle)
                    wanted = list(path(handle.node, target_of(handle, plan)))
                    if wanted:
                        handle.require_sound(wanted[0])
                    paths.append((handle, wanted))
                except Exception as error:
                    errors.append(error)
            for step in _STEPS:
                if step is _STEPS[1]:
                    with contextlib.suppress(Exception):  # one that cannot move must not keep the others: then each by itself
                        self._move_at_once(paths, early_release=True, together=together)
                for handle, triggers in paths:
                    try:
                        self._run(handle, triggers, step)
                    except Exception as error:
                        errors.append(error)
                        triggers.clear()
            errors += self._settle_all({name: h for name, h in handles.items() if h.holding is None or h.holding.is_complete})
            self._finish(handles.values())
        finally:
            self._moved, self._dropping = {}, ()
            self._stock.release()
        return errors + self._take_complaints()

    def _march(self, handles: Iterable[Handle], target: Callable[[Handle], Node], *, together: bool = False) -> None:
        """Fire every handle's path in an order that frees before it loads."""
        paths: list[tuple[Handle, list[Trigger]]] = []
        for handle in handles:
            wanted = list(path(handle.node, target(handle)))
            if wanted:
                handle.require_sound(wanted[0])
                paths.append((handle, wanted))
        for step in _STEPS:
            if step is _STEPS[1]:
                self._move_at_once(paths, together=together)
            for handle, triggers in paths:
                self._run(handle, triggers, step)

    def _move_at_once(
        self, paths: Sequence[tuple[Handle, list[Trigger]]], *, early_release: bool = False, together: bool = False
    ) -> None:
        """The bytes of every load and offload that is due, in one exchange; the transitions that follow find them moved."""
        leaving = [handle for handle, triggers in paths if triggers[:1] == [Trigger.OFFLOAD] and handle.holding is not None]
        coming = [handle for handle, triggers in paths if triggers[:1] == [Trigger.LOAD] and handle.holding is not None]
        if not leaving and not coming:
            return
        try:
            self._moved = self._exchange(leaving, coming, early_release=early_release, together=together)
        except BaseException as error:
            for handle, trigger in [(h, Trigger.OFFLOAD) for h in leaving] + [(h, Trigger.LOAD) for h in coming]:
                self._journal.failed(handle.counters, handle.name, trigger, error)
            raise

    def _run(self, handle: Handle, triggers: list[Trigger], step: Sequence[Trigger]) -> None:
        """Fire the triggers of a path that belong to this step, taking them off the list."""
        while triggers and triggers[0] in step:
            self._fire(handle, triggers.pop(0))

    def _settle_all(self, handles: Mapping[str, Handle]) -> list[Exception]:
        """Settle every handle, as far as it goes. Returns what went wrong."""
        errors: list[Exception] = []
        for handle in sorted(handles.values(), key=lambda each: each.node[1]):  # who gives memory up before who needs it back
            try:
                self.settle(handle)
            except Exception as error:
                errors.append(error)
        return errors

    def _take_complaints(self) -> list[Exception]:
        complaints, self._complaints = self._complaints, []
        return complaints

    def _go_back(self, handles: Mapping[str, Handle], sources: Mapping[str, Node], cause: BaseException) -> None:
        """After a failed border: every handle consistent first, then back to its source, with the chunks that were given up."""
        for holding in self._dropping:
            if not holding.on_device:
                cause.add_note(f"placement: the gradients of {holding.name!r} had been dropped by then, as the plan says")
        self._dropping = ()
        self._stock.room_bytes = 0  # what was given up is enough
        for error in self._settle_all(handles):
            cause.add_note(f"placement: {error}")
        try:
            self._march([h for h in handles.values() if h.broken is None], lambda handle: sources[handle.name])
        except Exception as error:
            cause.add_note(f"placement: {error}; the handles that could not go back are complete where they are")
            self._settle_all(handles)
        self._complaints = []
