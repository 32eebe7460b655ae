"""The reconciler brings every handle to the state that a plan names. Nothing else moves handles.

It is idempotent and looks only at where the handles are now, not at how they came there. `advance` is all or nothing; it is used to
enter and switch phases. `retreat` moves every handle as far as possible; it is used to leave phases, after errors, and for recovery.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from placement.core.errors import BrokenHandleError, CoordinatorLost
from placement.core.journal import Journal
from placement.core.machine import Node, path
from placement.core.settings import Annotate, Verify
from placement.core.states import Plan, State, Trigger
from placement.devices.base import Device
from placement.group.protocol import Reached, Stage
from placement.group.vote import Agree
from placement.phases.moves import Mover, residency_of, target_of, wanted_tags
from placement.planning.prefetcher import NOTHING_AHEAD, Ahead
from placement.registration.handle import Handle
from placement.storage.managed import ManagedStorage
from placement.storage.transfer.chunk_pool import ChunkPool
from placement.storage.transfer.exchange import nothing
from placement.storage.writes import WrittenWhileOffloaded

_STEPS: tuple[tuple[Trigger, ...], ...] = (
    (Trigger.END_SYNC, Trigger.END_STREAM, Trigger.END_TRAIN, Trigger.END_STREAMED_TRAIN),
    (Trigger.OFFLOAD,),
    (Trigger.LOAD,),
    tuple(Trigger),
)
"""The order of triggers in a phase transition. The bytes of the second step (offload) and the third (load) move at the same time."""


_AFTER_ENGINES = "move what is left"
_END_OF_TRAINING = (Trigger.END_TRAIN, Trigger.TRAIN_TO_SYNC)


def _apart(handles: Mapping[str, Handle]) -> tuple[dict[str, Handle], list[Handle]]:
    """Split handles into those whose bytes placement moves, and engines that move their own bytes."""
    others = {name: handle for name, handle in handles.items() if handle.residency is None}
    return others, [handle for handle in handles.values() if handle.residency is not None]


def _alone(_: Plan, stage: Stage, lacks_engines: bool) -> Reached:
    """Used in place of a group's agreement if there is no group."""
    return Reached(stage, lacks_engines)


def _tell_nobody(_: str) -> None:
    """Used in place of `propose` where there is no group."""


class Reconciler:
    """Moves handles of one device. Called with the manager's lock held."""

    def __init__(self, device: Device, journal: Journal, *, strict: bool, verify: Verify = "off", annotate: Annotate = "off") -> None:
        self._mover = Mover(device, journal, strict=strict, verify=verify, annotate=annotate)

    @property
    def chunk_pool(self) -> ChunkPool:
        """The chunks that the next phase transition begins with."""
        return self._mover.chunk_pool

    @staticmethod
    def is_there(handles: Mapping[str, Handle], plan: Plan) -> bool:
        """Whether all handles are where the plan wants them, with nothing to repair."""
        return all(handle.is_consistent and handle.node == target_of(handle, plan) for handle in handles.values())

    def advance(
        self,
        handles: Mapping[str, Handle],
        plan: Plan,
        room_bytes: int,
        agree: Agree | None = None,
        go_on: Callable[[str], object] = _tell_nobody,
        ahead: Ahead = NOTHING_AHEAD,
    ) -> None:
        """Bring every handle to its target, or leave every handle where it was.

        Engines that manage their own memory are offloaded first, and loaded last, after every rank has returned the memory that they
        need to the driver. A failure does not bring engines back; the retreat that follows does.

        Args:
            room_bytes: device bytes that the budget leaves beside those in use now. A swap may use them in addition.
            agree: asks the group. Called when everything has moved and can still go back without new memory, and also after the
                engines of any rank have left or come. If it raises, everything goes back, except on CoordinatorLost, which leaves
                everything as it is. None: nobody is asked.
            go_on: called before each further stage, with its description.
            ahead: what is done for later phase transitions.

        Raises:
            Exception: the error that stopped it. Each handle is then complete, in its source state or, if its memory could not be got
                back, in its target state.
        """
        if agree is None and self.is_there(handles, plan):
            self.end_without_moves(handles, ahead)
            return
        for error in self._settle_all(handles):
            if not isinstance(error, BrokenHandleError):  # a broken handle fails only phase transitions that must move it
                raise error
        handles, engines = _apart(handles)
        if agree is None:
            agree, go_on = _alone, _tell_nobody
        sources = {handle.name: handle.node for handle in handles.values()}
        self._mover.begin(room_bytes, _leaving_training(handles.values(), plan), ahead.staying)
        try:
            reached = self._move_together(handles.values(), engines, plan, agree, go_on)
            self._complete(handles.values())
            self._finish(handles.values())
        except CoordinatorLost as lost:  # keep the freed chunks, so that going back later needs no new memory
            try:
                self._complete(handles.values())
            except Exception as error:
                lost.add_note(f"placement: {error}")
            self._mover.forget()
            raise
        except BaseException as error:
            self._go_back(handles, sources, error)
            self._mover.end()
            raise
        if reached.lacks_engines:
            self._mover.end()
            go_on("load engines")
            for engine in engines:
                self._mover.engine_comes(engine, plan)
            agree(plan, "engines loaded", False)
        for engine in engines:  # engines that only change state, without loading anything
            self._mover.engine_comes(engine, plan)
        self._end(ahead)

    def _move_together(
        self, handles: Collection[Handle], engines: Sequence[Handle], plan: Plan, agree: Agree, go_on: Callable[[str], object]
    ) -> Reached:
        """Offload engines and move the other handles, reversibly, until all ranks have done both."""
        have_left = [self._mover.engine_leaves(engine, plan) for engine in engines]
        if any(have_left):
            agree(plan, "engines left", False)
            go_on(_AFTER_ENGINES)
        self._march(handles, lambda handle: target_of(handle, plan))
        if self._mover.transition.complaints:
            raise self._mover.transition.complaints.pop(0)
        lacks_engines = any(self._mover.engine_lacks(engine, plan) for engine in engines)
        while (reached := agree(plan, "moved", lacks_engines)).stage != "moved":  # the engines of other ranks had to leave first
            go_on(_AFTER_ENGINES)
        return reached

    def _end(self, ahead: Ahead) -> None:
        """End the phase transition. Memory that it has freed is used for what arrives early, and else goes back to the driver."""
        try:
            ahead.begin(self._mover.chunk_pool)
        finally:
            self._mover.end()

    def _complete(self, handles: Iterable[Handle]) -> None:
        """Commit the loads that waited for the decision of the group, whatever it is."""
        for handle in handles:
            if (holding := handle.holding) is not None and not holding.is_complete:
                holding.complete()
                self._mover.verifier.check_device(holding)
                holding.commit_load()
                holding.make_consistent(self._mover.chunk_pool)

    def end_without_moves(self, handles: Mapping[str, Handle], ahead: Ahead = NOTHING_AHEAD) -> None:
        """End a phase transition in which nothing moves. Chunks that an undecided phase transition left go back to the driver."""
        self._finish(handles.values())
        self._end(ahead)

    def _finish(self, handles: Iterable[Handle]) -> None:
        """After the moves: drop gradients on the device that the plan drops, let offloaded optimizers adopt gradients that their modules
        have dropped, and note new host copies for verification."""
        dropping = self._mover.transition.dropping
        for handle in handles if dropping else ():
            holding = handle.holding
            if holding is not None and holding in dropping and handle.state is not State.TRAINING and holding.on_device:
                holding.gradients.drop(zero_buffers=True)
                holding.measure_unadopted()
        holdings = [handle.holding for handle in handles if handle.holding is not None]
        for holding in holdings:
            holding.adopt_dropped()
        self._mover.verifier.note(holdings)

    def retreat(
        self,
        handles: Mapping[str, Handle],
        plan: Plan,
        *,
        while_copying: Callable[[], None] = nothing,
        ahead: Ahead = NOTHING_AHEAD,
    ) -> list[Exception]:
        """Bring every handle as far towards its target as possible. The caller calls `complete`, once the ranks of a group have voted.

        Args:
            while_copying: called once while bytes are being copied to the host, if any are.
            ahead: see `advance`.

        Returns:
            The errors; empty if every handle is at its target.
        """
        others, engines = _apart(handles)
        errors = self._mover.as_far_as_it_goes(self._mover.engine_leaves, engines, plan)
        errors += self._retreat_others(others, plan, while_copying, ahead)
        # An engine that could not leave is not asked again in this phase transition, because that may mean waiting again.
        engines = [engine for engine in engines if residency_of(engine).resident <= wanted_tags(engine, plan)]
        errors += self._mover.as_far_as_it_goes(self._mover.engine_comes, engines, plan)
        if not errors:
            self._end(ahead)
        return errors

    def complete(self, handles: Mapping[str, Handle]) -> list[Exception]:
        """Commit the loads that wait for other ranks after a retreat. Returns the errors."""
        try:
            self._complete(handles.values())
        except Exception as error:
            return [error, *self._settle_all(handles)]
        return []

    def _retreat_others(
        self, handles: Mapping[str, Handle], plan: Plan, while_copying: Callable[[], None], ahead: Ahead
    ) -> list[Exception]:
        errors: list[Exception] = []
        self._mover.begin(0, _leaving_training(handles.values(), plan), ahead.staying, while_copying)
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
                    errors += self._move_what_can(paths)
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

    def _move_what_can(self, paths: Sequence[tuple[Handle, list[Trigger]]]) -> list[Exception]:
        """Move all at once, or none: if one handle cannot move, the others must, and then each moves by itself.

        Returns the writes that were found. Each handle raises its own once, keeps its values, and can move after that.
        """
        found: list[Exception] = []
        for _ in range(len(paths) + 1):
            try:
                self._mover.move_at_once(paths, early_release=True)
            except WrittenWhileOffloaded as error:
                found.append(error)
            except Exception:  # raised again by the handle that cannot move
                break
            else:
                break
        return found

    def _march(self, handles: Iterable[Handle], target: Callable[[Handle], Node]) -> None:
        """Fire the triggers on every handle's path, in an order that frees memory before loading."""
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
            # State that an optimizer's first step created is in torch's own memory until the first offload. If no offload follows now,
            # it has to be counted there.
            if trigger in _END_OF_TRAINING and triggers[:1] != [Trigger.OFFLOAD]:
                handle.storage.measure_unadopted()
            self._mover.fire(handle, trigger)

    def _settle_all(self, handles: Mapping[str, Handle]) -> list[Exception]:
        """Repair every handle after failed moves. Returns the errors."""
        errors: list[Exception] = []
        for handle in sorted(handles.values(), key=lambda each: each.is_on_device):  # handles that free memory before those that need it
            try:
                self._mover.make_consistent(handle)
            except Exception as error:
                errors.append(error)
        return errors

    def _go_back(self, handles: Mapping[str, Handle], sources: Mapping[str, Node], cause: BaseException) -> None:
        """After a failed phase transition: repair every handle, then bring it back to its source state, using the freed chunks."""
        for holding in self._mover.transition.dropping:
            if not holding.on_device:
                cause.add_note(f"placement: the gradients of {holding.name!r} are lost: the plan drops them, and that was done before")
        self._mover.begin()  # takes over the freed chunks, which are enough
        for error in self._settle_all(handles):
            cause.add_note(f"placement: {error}")
        try:
            self._march([h for h in handles.values() if h.broken is None], lambda handle: sources[handle.name])
            self._complete(handles.values())
        except Exception as error:
            cause.add_note(f"placement: {error}; the handles that could not go back are complete where they are")
            self._settle_all(handles)
        for complaint in self._mover.transition.take_complaints():
            cause.add_note(f"placement: {complaint}")


def _leaving_training(handles: Iterable[Handle], plan: Plan) -> tuple[ManagedStorage, ...]:
    """The storages that the plan takes out of TRAINING, dropping their gradients."""
    leaving = [h for h in handles if h.name in plan.dropped and h.state is State.TRAINING]
    return tuple(h.holding for h in leaving if h.holding is not None and target_of(h, plan)[0] is not State.TRAINING)
