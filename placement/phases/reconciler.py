"""The only actuator: bring every handle to the state that a plan names.

Level-based and idempotent: it looks at where the handles are, not at how they came there. `advance` is all or nothing and
serves entries and switches; `retreat` takes every handle as far as it goes and serves exits, errors and recovery.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence

from placement.core.errors import BrokenHandleError, CoordinatorLost
from placement.core.journal import Journal
from placement.core.machine import Node, path
from placement.core.profiler_marks import Annotate
from placement.core.states import Plan, State, Trigger
from placement.devices.base import Device
from placement.phases.engine_mover import residency_of, wanted_tags
from placement.phases.handle_mover import HandleMover, target_of
from placement.registration.handle import Handle
from placement.storage.managed import ManagedStorage
from placement.storage.transfer.exchange import nothing
from placement.storage.transfer.load import ALONE, TOGETHER, Load
from placement.storage.transfer.verification import Verify

_STEPS: tuple[tuple[Trigger, ...], ...] = (
    (Trigger.END_SYNC, Trigger.END_STREAM, Trigger.END_TRAIN),
    (Trigger.OFFLOAD,),
    (Trigger.LOAD,),
    tuple(Trigger),
)
"""The order of a phase transition: what ends, what leaves, what comes, what begins. The bytes of the two in the middle move together."""


_END_OF_TRAINING = (Trigger.END_TRAIN, Trigger.TRAIN_TO_SYNC)


def _apart(handles: Mapping[str, Handle]) -> tuple[dict[str, Handle], list[Handle]]:
    """Those whose bytes we move, and the engines that do it themselves."""
    others = {name: handle for name, handle in handles.items() if handle.residency is None}
    return others, [handle for handle in handles.values() if handle.residency is not None]


def _is_there(handles: Mapping[str, Handle], plan: Plan) -> bool:
    """Whether there is nothing to do at all. With an engine among them never: it is asked."""
    return all(handle.is_consistent and handle.node == target_of(handle, plan) for handle in handles.values())


def _nobody(_: Plan) -> None:
    """In place of a group's agreement, where there is none to be had."""


class Reconciler:
    """Moves handles of one device. Called with the manager's lock held."""

    def __init__(self, device: Device, journal: Journal, *, strict: bool, verify: Verify = "off", annotate: Annotate = "off") -> None:
        self._mover = HandleMover(device, journal, strict=strict, verify=verify, annotate=annotate)
        self._engines = self._mover.engines
        self.callbacks_of = self._mover.of

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
        if agree is None and _is_there(handles, plan):
            self._rest(handles)
            return
        for error in self._settle_all(handles):
            if not isinstance(error, BrokenHandleError):  # a broken handle stops only who needs to move it
                raise error
        handles, engines = _apart(handles)
        load, agree = ALONE if agree is None else TOGETHER, agree or _nobody
        sources = {handle.name: handle.node for handle in handles.values()}
        self._mover.begin(room_bytes, _leaving_training(handles.values(), plan), load=load)
        try:
            if True in [self._engines.leave(engine, plan) for engine in engines]:
                agree(plan)
                begin("move what is left")
            self._march(handles.values(), lambda handle: target_of(handle, plan))
            for complaint in self._mover.transition.take_complaints():
                raise complaint
            agree(plan)
            self._complete(handles.values(), load)
            self._finish(handles.values())
        except CoordinatorLost as lost:  # what was given up stays ours, for whoever goes back later
            try:
                self._complete(handles.values(), ALONE)
            except Exception as error:
                lost.add_note(f"placement: {error}")
            self._mover.forget()
            raise
        except BaseException as error:
            self._go_back(handles, sources, error)
            self._mover.end()
            raise
        self._mover.end()
        if any(self._engines.lacks(engine, plan) for engine in engines):
            begin("load engines")
            for engine in engines:
                self._engines.come(engine, plan)
            agree(plan)
        for engine in engines:  # and what changes state alone
            self._engines.come(engine, plan)

    def _complete(self, handles: Iterable[Handle], load: Load) -> None:
        """Decide the loads that waited for the decision of the group. With `TOGETHER`, every rank of it does this now."""
        for handle in handles:
            if (holding := handle.holding) is not None and not holding.is_complete:
                load.finish(holding)
                self._mover.verifier.check_device(holding)
                holding.commit_load()
                holding.make_consistent(self._mover.chunk_pool)

    def _rest(self, handles: Mapping[str, Handle]) -> None:
        """Nothing moves. What a phase transition without a decision has left in the chunk pool goes back to the driver, as at any other."""
        self._finish(handles.values())
        self._mover.end()

    def _finish(self, handles: Iterable[Handle]) -> None:
        """The phase transition is carried out: what it means for gradients that stay on the device, and for host copies that are new."""
        for handle in handles:
            holding = handle.holding
            if (
                holding is not None
                and holding in self._mover.transition.dropping
                and handle.state is not State.TRAINING
                and holding.on_device
            ):
                holding.gradients.drop(zero_buffers=True)
                holding.measure_unadopted()
        self._mover.verifier.note(handle.holding for handle in handles if handle.holding is not None)

    def retreat(
        self, handles: Mapping[str, Handle], plan: Plan, *, load: Load = ALONE, while_copying: Callable[[], None] = nothing
    ) -> list[Exception]:
        """Bring every handle as far towards its target as it goes.

        Args:
            while_copying: called while bytes are on their way to the host, if any are.
            load: with `TOGETHER` the ranks of the group are asked whether all of them came so far, and `complete` is called afterwards.

        Returns:
            What went wrong; empty when every handle is at its target.
        """
        if _is_there(handles, plan):
            self._rest(handles)
            return []
        others, engines = _apart(handles)
        errors = self._engines.as_far_as_it_goes(self._engines.leave, engines, plan)
        errors += self._retreat_others(others, plan, load, while_copying)
        # One that could not leave is not asked again, and waited for again, at the same phase transition.
        engines = [engine for engine in engines if residency_of(engine).resident <= wanted_tags(engine, plan)]
        return errors + self._engines.as_far_as_it_goes(self._engines.come, engines, plan)

    def complete(self, handles: Mapping[str, Handle], load: Load) -> list[Exception]:
        """After a retreat of ranks together: decide the loads that waited for the others. Returns what went wrong.

        Args:
            load: `TOGETHER` where all of them came so far; with `ALONE` this rank gets what is missing by itself.
        """
        try:
            self._complete(handles.values(), load)
        except Exception as error:
            return [error, *self._settle_all(handles)]
        return []

    def _retreat_others(self, handles: Mapping[str, Handle], plan: Plan, load: Load, while_copying: Callable[[], None]) -> list[Exception]:
        errors: list[Exception] = []
        self._mover.begin(0, _leaving_training(handles.values(), plan), while_copying, load)
        try:
            paths: list[tuple[Handle, list[Trigger]]] = []
            for handle in handles.values():
                try:
                    self._mover.make_consistent(handle)
                    wanted = list(path(handle.node, target_of(handle, plan)))
                    if wanted:
                        handle.require_sound(wanted[0])
                        paths.append((handle, wanted))
                except Exception as error:
                    errors.append(error)
            for step in _STEPS:
                if step is _STEPS[1]:
                    with contextlib.suppress(Exception):  # one that cannot move must not keep the others: then each by itself
                        self._mover.move_at_once(paths, early_release=True)
                for handle, triggers in paths:
                    try:
                        self._run(handle, triggers, step)
                    except Exception as error:
                        errors.append(error)
                        triggers.clear()
            if paths or errors:
                errors += self._settle_all({name: h for name, h in handles.items() if h.storage.is_complete})
            self._finish(handles.values())
        finally:
            self._mover.end()
        return errors + self._mover.transition.take_complaints()

    def _march(self, handles: Iterable[Handle], target: Callable[[Handle], Node]) -> None:
        """Fire every handle's path in an order that frees before it loads."""
        paths: list[tuple[Handle, list[Trigger]]] = []
        for handle in handles:
            wanted = list(path(handle.node, target(handle)))
            if wanted:
                handle.require_sound(wanted[0])
                paths.append((handle, wanted))
        for step in _STEPS:
            if step is _STEPS[1]:
                self._mover.move_at_once(paths)
            for handle, triggers in paths:
                self._run(handle, triggers, step)

    def _run(self, handle: Handle, triggers: list[Trigger], step: Sequence[Trigger]) -> None:
        """Fire the triggers of a path that belong to this step, taking them off the list."""
        while triggers and triggers[0] in step:
            trigger = triggers.pop(0)
            # State that a first step has born lies in torch's memory until the first offload: it has to count where that is to come.
            if trigger in _END_OF_TRAINING and triggers[:1] != [Trigger.OFFLOAD]:
                handle.storage.measure_unadopted()
            self._mover.fire(handle, trigger)

    def _settle_all(self, handles: Mapping[str, Handle]) -> list[Exception]:
        """Settle every handle, as far as it goes. Returns what went wrong."""
        errors: list[Exception] = []
        for handle in sorted(handles.values(), key=lambda each: each.node[1]):  # who gives memory up before who needs it back
            try:
                self._mover.make_consistent(handle)
            except Exception as error:
                errors.append(error)
        return errors

    def _go_back(self, handles: Mapping[str, Handle], sources: Mapping[str, Node], cause: BaseException) -> None:
        """After a failed phase transition: every handle consistent first, then back to its source, with the chunks that were given up."""
        for holding in self._mover.transition.dropping:
            if not holding.on_device:
                cause.add_note(f"placement: the gradients of {holding.name!r} had been dropped by then, as the plan says")
        self._mover.begin()  # with the chunks that were given up, which are enough
        for error in self._settle_all(handles):
            cause.add_note(f"placement: {error}")
        try:
            self._march([h for h in handles.values() if h.broken is None], lambda handle: sources[handle.name])
        except Exception as error:
            cause.add_note(f"placement: {error}; the handles that could not go back are complete where they are")
            self._settle_all(handles)
        self._mover.transition.take_complaints()  # about what was undone


def _leaving_training(handles: Iterable[Handle], plan: Plan) -> tuple[ManagedStorage, ...]:
    """Whose gradients the plan drops as it takes them out of TRAINING."""
    leaving = [h for h in handles if h.name in plan.dropped and h.state is State.TRAINING]
    return tuple(h.holding for h in leaving if h.holding is not None and target_of(h, plan)[0] is not State.TRAINING)
