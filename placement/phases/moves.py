"""The moves of one phase transition: every handle goes to the state that a plan names. Nothing else
moves handles.

`Mover` is idempotent and looks only at where the handles are now, not at how they came there.
Rollout engines that manage their own memory are moved by `phases.engines`, with its state
transitions.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from torch.profiler import record_function

from placement.core.errors import BrokenHandleError, CoordinatorLost
from placement.core.journal import Journal, Record
from placement.core.states import Plan, State, Trigger
from placement.devices.base import Device
from placement.engines.tagged import Residency
from placement.phases.transition import Transition
from placement.planning.planner import target_of
from placement.registration import guards
from placement.registration.handle import OFFLOADED, PATHS, RESIDENT, Handle, Node
from placement.storage.managed import ManagedStorage
from placement.storage.move import MoveResult
from placement.storage.pages import ChunkPool
from placement.storage.transfer.exchange import Exchange
from placement.storage.transfer.verification import Verifier

_BEFORE_MOVES = (
    (Trigger.END_SYNC, Trigger.END_STREAM, Trigger.END_TRAIN, Trigger.END_STREAMED_TRAIN),
)
_FROM_MOVES_ON = ((Trigger.OFFLOAD,), (Trigger.LOAD,), tuple(Trigger))
"""The order of triggers in a phase transition. The bytes of all offloads and loads move between the
two, at the same time."""
_MOVES = (Trigger.LOAD, Trigger.OFFLOAD)
_END_OF_TRAINING = (Trigger.END_TRAIN, Trigger.TRAIN_TO_SYNC)
_BEGIN_OF_TRAINING = (Trigger.BEGIN_TRAIN, Trigger.SYNC_TO_TRAIN)
Paths = Sequence[tuple[Handle, list[Trigger]]]


def _path(handle: Handle, source: Node, target: Node) -> list[Trigger]:
    path = PATHS[source, target]
    if path:
        handle.require(path[0])
    return [*path]


def _dropping(handles: Iterable[Handle], plan: Plan) -> tuple[ManagedStorage, ...]:
    """The storages that the plan takes out of TRAINING, dropping their gradients."""
    storages = []
    for handle in handles:
        if (
            handle.name in plan.dropped
            and handle.state is State.TRAINING
            and target_of(handle, plan)[0] is not handle.state
            and handle.holding is not None
        ):
            storages.append(handle.holding)
    return tuple(storages)


class Mover:
    """Moves the handles of one device. Called with the manager's lock held.

    An entry or a switch calls `begin`, `move`, `commit` and `end`; after an error of the first
    three only `go_back`. An exit calls `begin`, `move_as_far_as_possible` and `end`.
    `strict`: stray references after an offload are errors. `verifier`: compares moved bytes; None:
    nothing is compared.
    """

    def __init__(
        self,
        device: Device,
        journal: Journal,
        strict: bool,
        verifier: Verifier | None,
    ) -> None:
        self._device = device
        self._journal = journal
        self._strict = strict
        self._verifier = verifier
        # the chunks of the phase transition under way. The one before leaves it none, except where
        # the group's decision is unknown: going back later needs them.
        self.chunk_pool = ChunkPool(device)
        self._exchange = Exchange(device, self.chunk_pool, verifier)
        """The exchange of the phase transition under way. Between two: one without room for a swap,
        by which repairs move."""
        self._sources: dict[Handle, Node] = {}
        """The handles that placement moves, and where they were when the phase transition began."""
        # results of the exchange, until the state transition of each handle takes its own out
        self._moved: dict[Handle, MoveResult] = {}
        self._complaints: list[Exception] = []
        """Errors to raise once the phase transition is complete. Raised at once, they would leave a
        handle in the middle of a change."""
        # the handles for which the warning about views of state dicts was logged: once is enough
        self._warned_of_views: weakref.WeakSet[Handle] = weakref.WeakSet()

    # --- all or nothing

    def repair(self, handles: Iterable[Handle]) -> None:
        """Repair what earlier failures have left, before an entry moves anything. A broken handle
        fails only the phase transitions that must move it."""
        for error in self._repair_all(handles):
            if not isinstance(error, BrokenHandleError):
                raise error

    def begin(self, t: Transition) -> None:
        """Begin a phase transition with the chunks that the one before left."""
        if t.is_there:
            return
        self._sources = {
            handle: handle.node
            for handle in t.handles.values()
            if not isinstance(handle.storage, Residency)
        }
        self._renew(
            t.room_bytes,
            dropping=_dropping(self._sources, t.plan),
            staying=t.staying,
            while_copying=t.while_copying,
        )

    def move(self, t: Transition) -> None:
        """Bring every handle to its target. An error leaves the handles in between: see
        `go_back`."""
        if t.is_there:
            return
        paths = [
            (handle, _path(handle, source, target_of(handle, t.plan)))
            for handle, source in self._sources.items()
        ]
        self._fire_steps(paths, _BEFORE_MOVES)
        self._move(paths)
        self._fire_steps(paths, _FROM_MOVES_ON)
        if self._complaints:
            raise self._complaints.pop(0)

    def commit(self, t: Transition) -> None:
        """Commit the loads that have waited for the group, and drop gradients that the plan
        drops."""
        if not t.is_there:
            if failures := self.complete_loads(self._sources):
                raise failures[0]
            self._drop_gradients(self._sources)
        adopt_dropped(t.handles.values())

    def go_back(self, cause: BaseException) -> None:
        """After an error: bring every handle back to its source state. A handle for which there is
        no memory on the device any more is left offloaded, complete (see
        `ManagedStorage.make_consistent`). After `CoordinatorLost` no handle goes back. In both
        cases no load stays incomplete. Errors become notes of `cause`."""
        sources = self._sources
        if isinstance(cause, CoordinatorLost):
            failures = self.complete_loads(sources)
            self._sources = {}
            self._renew()  # keeps the freed chunks, so that going back later needs no new memory
        else:
            self._note_lost_gradients(cause)  # of the exchange that `_renew` replaces
            self._renew()  # the new exchange takes over the freed chunks, which are enough
            try:
                failures = self._move_each_if_not_all(sources)
            finally:
                self.end()
            failures += self.complete_loads(sources)  # of handles that came back
        for failure in failures:
            cause.add_note(f"placement: {failure}")

    def _note_lost_gradients(self, cause: BaseException) -> None:
        for holding in self._exchange.dropping:
            if not holding.on_device:
                cause.add_note(
                    f"placement: the gradients of {holding.name!r} are lost: the plan drops them, "
                    "and that was done before"
                )

    # --- as far as possible

    def move_as_far_as_possible(self, t: Transition) -> list[Exception]:
        """Bring every handle as far as possible towards its target. Returns the errors.
        `complete_loads` comes once all ranks have voted."""
        if t.is_there:
            adopt_dropped(t.handles.values())
            return []
        targets = {handle: target_of(handle, t.plan) for handle in self._sources}
        try:
            errors = self._move_each_if_not_all(targets)
            adopt_dropped(t.handles.values())
            return errors
        finally:
            self.end()

    def _move_each_if_not_all(self, targets: Mapping[Handle, Node]) -> list[Exception]:
        """All bytes move at once, or none: then each handle moves its own."""
        paths: list[tuple[Handle, list[Trigger]]] = []

        def find_path(handle: Handle) -> None:
            paths.append((handle, _path(handle, handle.node, targets[handle])))

        errors = self.each_repaired(targets, find_path)
        is_moved = any(triggers for _, triggers in paths)
        self._fire_steps(paths, _BEFORE_MOVES, errors)
        # raised again by the handle that cannot move
        with suppress(Exception):
            self._move(paths, releases_at_once=True)
        self._fire_steps(paths, _FROM_MOVES_ON, errors)
        if is_moved or errors:
            errors += self._repair_all([handle for handle in targets if handle.storage.is_complete])
        self._drop_gradients(targets)
        errors += self._complaints
        self._complaints = []
        return errors

    def each_repaired(
        self, handles: Iterable[Handle], work: Callable[[Handle], object]
    ) -> list[Exception]:
        """Repair every handle and do something with it, even if that fails for some. Returns the
        errors."""
        errors: list[Exception] = []
        for handle in handles:
            try:
                self._repair(handle)
                work(handle)
            except Exception as error:
                errors.append(error)
                if isinstance(handle.storage, Residency):
                    handle.broken = handle.storage.doubt
        return errors

    # --- the beginning and the end of a phase transition

    def _renew(self, room_bytes: int = 0, **fields: Any) -> None:
        """Make the exchange anew, with the chunks that the one before left, and with these fields
        of `Exchange`."""
        self.chunk_pool = ChunkPool(self._device, room_bytes, left_by=self.chunk_pool)
        self._exchange = Exchange(self._device, self.chunk_pool, self._verifier, **fields)
        self._moved = {}

    def end(self) -> None:
        """End the phase transition: forget it, except for errors still to be raised, and return its
        chunks to the driver."""
        if not self._sources and not self.chunk_pool:
            return
        self._sources = {}
        self._renew()
        self.chunk_pool.release()

    def _drop_gradients(self, handles: Iterable[Handle]) -> None:
        """After the moves: drop the gradients of what has left TRAINING and stays on the device."""
        if not self._exchange.dropping:
            return
        for handle in handles:
            holding = handle.holding
            if (
                holding in self._exchange.dropping
                and holding is not None
                and holding.on_device
                and handle.state is not State.TRAINING
            ):
                holding.gradients.drop(zero_buffers=True)
                holding.measure_unadopted()

    def complete_loads(self, handles: Iterable[Handle]) -> list[Exception]:
        """Get the rest of the bytes of loads that left some to the other ranks (see
        `ReplicatedStorage`), and commit these loads. Called once the group has decided, whatever it
        is: the other ranks do it, too. Returns the errors."""
        errors: list[Exception] = []
        for handle in handles:
            if (holding := handle.holding) is not None and not holding.is_complete:
                try:
                    holding.complete()
                    if self._verifier is not None:
                        self._verifier.check_device(holding)
                    holding.commit_load()
                    holding.make_consistent(self.chunk_pool)
                except Exception as error:
                    errors.append(error)
        return [*errors, *self._repair_all(handles)] if errors else []

    # --- the bytes

    def _move(self, paths: Paths, *, releases_at_once: bool = False) -> None:
        """Move the bytes of all handles whose next trigger is a load or an offload, at once.
        `_work` takes the results from `_moved`."""
        leaving: dict[ManagedStorage, Handle] = {}
        coming: dict[ManagedStorage, Handle] = {}
        moving = []
        for handle, triggers in paths:
            if handle.holding is not None and triggers and triggers[0] in _MOVES:
                side = leaving if triggers[0] is Trigger.OFFLOAD else coming
                side[handle.holding] = handle
                moving.append((handle, triggers[0]))
        if not moving:
            return
        texts = []
        for verb, handles in (("offload", leaving), ("load", coming)):
            if handles:
                texts.append(f"{verb} {', '.join(handle.name for handle in handles.values())}")
        # in the traces of torch's profiler
        with self.failing(moving), record_function(f"placement: {'; '.join(texts)}"):
            moved = self._exchange.run([*leaving], [*coming], releases_at_once=releases_at_once)
        self._moved |= {
            handle: moved.get(holding, MoveResult())
            for holding, handle in (leaving | coming).items()
        }

    @contextmanager
    def failing(self, moves: Iterable[tuple[Handle, Trigger]]) -> Iterator[None]:
        """Record an error in the block as the failure of these moves. That tensors were changed
        before is none."""
        try:
            yield
        except BaseException as error:
            if not getattr(error, "is_change", False):
                for handle, trigger in moves:
                    self._journal.failed(handle.counters, handle.name, trigger, error)
            raise

    # --- one state transition

    def _fire_steps(
        self,
        paths: Paths,
        steps: Iterable[Sequence[Trigger]],
        errors: list[Exception] | None = None,
    ) -> None:
        """Fire the triggers of these steps, taking them off the paths. `errors`: gets the error of
        each handle that cannot go on, while the others do; None: the first error is raised."""
        for step in steps:
            for handle, triggers in paths:
                try:
                    while triggers and triggers[0] in step:
                        trigger = triggers.pop(0)
                        # State that a first step created is in torch's own memory, and counted
                        # there, until the first offload.
                        if trigger in _END_OF_TRAINING and triggers[:1] != [Trigger.OFFLOAD]:
                            handle.storage.measure_unadopted()
                        self.fire(handle, trigger)
                except Exception as error:
                    if errors is None:
                        raise
                    errors.append(error)
                    triggers.clear()

    def fire(self, handle: Handle, trigger: Trigger, tags: frozenset[str] | None = None) -> None:
        """Make one state transition: do its work, commit it, record it. `tags`: those that an
        engine moves; None: those on the device."""
        began, source = time.monotonic(), handle.state
        # `_move` has not moved it with the others: in a recovery, or because their exchange failed
        if trigger in _MOVES and handle not in self._moved:
            with self.failing([(handle, trigger)]):
                handle.require(trigger)
            self._move([(handle, [trigger])])
        try:
            handle.require(trigger)
            moved = self._work(handle, trigger, tags)
            handle.fire(trigger)
        except BaseException as error:
            self._journal.failed(handle.counters, handle.name, trigger, error)
            raise
        self.record(handle, trigger, source, began, moved)

    def _work(self, handle: Handle, trigger: Trigger, tags: frozenset[str] | None) -> MoveResult:
        """Do what is left before the commit, once the bytes of a storage have moved. An engine
        moves its own bytes here."""
        if trigger is Trigger.BEGIN_STREAMED_TRAIN and handle.streamed is not None:
            handle.streamed.begin()
        if (
            trigger in _BEGIN_OF_TRAINING
            and handle.published is not None
            and handle.holding is not None
        ):
            # the next `weight_changes` compares with these values
            handle.published.keep(handle.holding)
        if handle.state is State.SYNCING:
            # the buckets' memory, in torch's cache or lent to another process, is for who comes
            # next
            self._device.trim()
        if trigger not in _MOVES:
            return MoveResult()
        if isinstance(residency := handle.storage, Residency):
            began = time.monotonic()
            tags = residency.resident_tags if tags is None else tags
            copied = residency.offload(tags) if trigger is Trigger.OFFLOAD else residency.load(tags)
            return MoveResult(time.monotonic() - began, copied)
        if (holding := handle.holding) is None:
            return MoveResult()
        moved = self._moved.pop(handle)
        if trigger is Trigger.OFFLOAD and handle.kind == "engine":
            guards.install_on_new(handle)
        if trigger is Trigger.OFFLOAD and holding not in self._exchange.dropping:
            self._complaints += holding.immovable()
        if (
            trigger is Trigger.LOAD
            and handle not in self._warned_of_views
            and holding.state_dict_tensors.warn_of_views()
        ):
            self._warned_of_views.add(handle)
        handle.stray_references, handle.stray_names = moved.stray_references, moved.stray_names
        self._complaints += moved.complaints(handle.name)
        if self._strict and moved.stray_references and (error := handle.stray_error()) is not None:
            self._complaints.append(error)
        return moved

    def record(
        self,
        handle: Handle,
        trigger: Trigger,
        source: State,
        began_seconds: float,
        moved: MoveResult,
    ) -> None:
        """Write one record of a handle's move, whose state is the new one already. `source` equals
        it where a part of an engine moved. `began_seconds`, of the monotonic clock, counts where
        the move measured no time of its own."""
        now = time.monotonic()
        _, resident_bytes, _ = handle.storage.sizes()
        record = Record(
            at_seconds=now,
            timestamp_seconds=time.time(),
            handle=handle.name,
            kind=handle.kind,
            trigger=trigger,
            source=source,
            target=handle.state,
            phase=self._journal.phase,
            nbytes=moved.copied_bytes,
            skipped_bytes=moved.skipped_bytes,
            seconds=moved.seconds or now - began_seconds,
            resident_bytes=resident_bytes,
            prefetched_bytes=moved.prefetched_bytes,
        )
        self._journal.record(handle.counters, record)

    def _repair_all(self, handles: Iterable[Handle]) -> list[Exception]:
        """Repair every handle after failed moves, those that free memory before those that need it.
        Returns the errors."""
        doubtful = [
            handle
            for handle in handles
            if handle.storage.lost != handle.broken
            or not handle.storage.is_consistent_in(handle.state)
        ]
        doubtful.sort(key=lambda handle: handle.is_on_device)
        return self.each_repaired(doubtful, lambda _: None) if doubtful else []

    def _repair(self, handle: Handle) -> None:
        """Repair a handle after a failed move: bytes follow the stored decision, and the state
        follows the bytes."""
        holding, residency = handle.holding, handle.storage
        if isinstance(residency, Residency):
            handle.broken = residency.doubt
            if residency.doubt is None and bool(residency.resident_tags) is (
                handle.state is State.CPU_OFFLOADED
            ):
                self.take_engine_to(handle, RESIDENT if residency.resident_tags else OFFLOADED)
            return
        try:
            if holding is not None:
                holding.make_consistent(self.chunk_pool)
        except Exception as error:
            handle.broken = f"the device failed while a move was being completed: {error}"
            raise BrokenHandleError(f"{handle.name!r} is broken: {handle.broken}") from error
        # The device works again. Nothing was lost by an earlier error, because the decision had
        # been stored before it.
        handle.broken = handle.storage.lost
        if (
            holding is not None
            and holding.on_device is (handle.state is State.CPU_OFFLOADED)
            and not handle.is_streaming
        ):
            self.fire(handle, Trigger.LOAD if holding.on_device else Trigger.OFFLOAD)

    def take_engine_to(
        self, handle: Handle, target: Node, tags: frozenset[str] | None = None
    ) -> None:
        """Fire an engine's triggers from the state of its machine, which may not be the state that
        the tags say. `tags`: those to load."""
        for trigger in PATHS[(handle.state, handle.state is not State.CPU_OFFLOADED), target]:
            self.fire(handle, trigger, tags)


def adopt_dropped(handles: Iterable[Handle]) -> None:
    """Everything is where it belongs: take in optimizer state that modules have dropped as their
    gradient."""
    for handle in handles:
        if handle.kind == "optimizer" and handle.holding is not None:
            handle.holding.adopt_dropped()
