"""State transitions of handles: move the bytes, record the change, and make a handle consistent after an interrupted move."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from placement.core.errors import BrokenHandleError, IntegrityError, PhaseError, RegistrationError
from placement.core.journal import Journal, Record
from placement.core.machine import Node, path
from placement.core.profiler_marks import marker
from placement.core.settings import Annotate, Verify
from placement.core.states import TRANSITIONS, Plan, State, Trigger
from placement.devices.base import Device
from placement.phases.moving.engine_mover import EngineMover
from placement.phases.moving.transition import Transition
from placement.registration import guards
from placement.registration.handle import Handle
from placement.storage.managed import ManagedStorage, MoveResult
from placement.storage.transfer.chunk_pool import ChunkPool
from placement.storage.transfer.exchange import Exchange, nothing
from placement.storage.transfer.load import ALONE, Load
from placement.storage.transfer.verification import Verifier

logger = logging.getLogger(__name__)

_MOVES = (Trigger.LOAD, Trigger.OFFLOAD)
_FROM_DEVICE = (Trigger.END_SYNC, Trigger.SYNC_TO_TRAIN, Trigger.END_TRAIN, Trigger.TRAIN_TO_SYNC)
"""The triggers that leave SYNCING and TRAINING with the bytes on the device."""
_WHOLE = {Trigger.END_STREAM: Trigger.END_SYNC, Trigger.END_STREAMED_TRAIN: Trigger.END_TRAIN}
"""For each trigger that ends the use of a host copy: the one that ends the same state on the device."""


def target_of(handle: Handle, plan: Plan) -> Node:
    """The state (and whether it is on the device) that a plan wants a handle in.

    A `Lazy` that is not built yet stays CPU_OFFLOADED, because only the beginning of a phase builds it.
    """
    if not handle.is_built:
        return State.CPU_OFFLOADED, False
    state = plan.targets[handle.name]
    return state, state is not State.CPU_OFFLOADED if handle.external else plan.on_device(handle.name)


@dataclass(slots=True)
class _Attempt:
    """One state transition in progress: facts that `before` leaves for `after`."""

    began_seconds: float = 0.0
    moved: MoveResult = field(default_factory=MoveResult)


class HandleTransition:
    """The callbacks of one handle's state machine, called before and after each state transition."""

    def __init__(self, handle: Handle, mover: HandleMover) -> None:
        self._handle = handle
        self._mover = mover
        self._attempt = _Attempt()

    def before(self, trigger: Trigger, source: State, target: State) -> None:
        self._attempt = _Attempt(time.monotonic())
        self._handle.require_sound(trigger)
        self._attempt.moved = self._mover.move(self._handle, trigger)

    def after(self, trigger: Trigger, source: State, target: State) -> None:
        self._mover.record(self._handle, trigger, source, target, self._attempt.began_seconds, self._attempt.moved)


class HandleMover:
    """Makes the state transitions of the handles of one device, and holds what they share during a phase transition."""

    def __init__(self, device: Device, journal: Journal, *, strict: bool, verify: Verify, annotate: Annotate) -> None:
        self._device = device
        self._journal = journal
        self._strict = strict
        self._mark = marker(annotate)
        self.transition = Transition(ChunkPool(device))
        """The phase transition that is under way. Between two of them: an empty one, which may take no memory from the driver."""
        self.verifier = Verifier(verify)
        self._told_of_views: weakref.WeakSet[Handle] = weakref.WeakSet()
        self.engines = EngineMover(journal, self.fire, self.record, target_of)

    @property
    def chunk_pool(self) -> ChunkPool:
        """The chunk pool of the phase transition that is under way."""
        return self.transition.chunk_pool

    def of(self, handle: Handle) -> HandleTransition:
        return HandleTransition(handle, self)

    # --- a phase transition

    def begin(
        self,
        room_bytes: int = 0,
        dropping: tuple[ManagedStorage, ...] = (),
        staying: Mapping[ManagedStorage, int] = MappingProxyType({}),
        while_copying: Callable[[], None] = nothing,
        load: Load = ALONE,
    ) -> None:
        """Begin a phase transition with the chunks that the one before left. For the other arguments see `Transition`.

        Args:
            room_bytes: device bytes that a swap may use in addition to those in use now.
        """
        before = self.transition
        chunk_pool = ChunkPool(self._device, room_bytes, left_by=before.chunk_pool)
        self.transition = Transition(chunk_pool, load, dropping, staying, while_copying, complaints=before.complaints)

    def forget(self) -> None:
        """Forget a phase transition that has ended or was interrupted, except for its freed chunks and for errors still to be raised."""
        self.transition = Transition(self.transition.chunk_pool, complaints=self.transition.complaints)

    def end(self) -> None:
        """End the phase transition: forget it, and return its chunks to the driver."""
        self.forget()
        self.chunk_pool.release()

    def move_at_once(self, paths: Sequence[tuple[Handle, list[Trigger]]], *, early_release: bool = False) -> None:
        """Move the bytes of all loads and offloads that come next, in one exchange. The state transitions that follow move no more.

        Args:
            paths: the triggers still to fire, by handle.
        """
        leaving = [handle for handle, triggers in paths if triggers[:1] == [Trigger.OFFLOAD] and handle.holding is not None]
        coming = [handle for handle, triggers in paths if triggers[:1] == [Trigger.LOAD] and handle.holding is not None]
        if not leaving and not coming:
            return
        try:
            self.transition.moved = self._exchange(leaving, coming, early_release=early_release, load=self.transition.load)
        except BaseException as error:
            for handle, trigger in [(h, Trigger.OFFLOAD) for h in leaving] + [(h, Trigger.LOAD) for h in coming]:
                self._journal.failed(handle.counters, handle.name, trigger, error)
            raise

    # --- one state transition

    def fire(self, handle: Handle, trigger: Trigger) -> None:
        """Make one state transition, moving its bytes."""
        try:
            handle.machine.fire(trigger)
        except BaseException as error:
            self._journal.failed(handle.counters, handle.name, trigger, error)
            raise

    def move(self, handle: Handle, trigger: Trigger) -> MoveResult:
        """Do the work of one state transition: `load` and `offload` move bytes, the others are only checked."""
        holding = handle.holding
        if handle.is_streaming and trigger in _FROM_DEVICE:
            raise PhaseError(f"{handle.name!r} is {handle.state} from its host copy; it cannot {trigger} before it is loaded")
        if (whole := _WHOLE.get(trigger)) is not None and not handle.is_streaming and not handle.external:
            raise PhaseError(f"{handle.name!r} is {handle.state} on the device; end that with {whole}, not with {trigger}")
        if trigger is Trigger.BEGIN_STREAMED_TRAIN and handle.streamed is not None:
            handle.streamed.begin()
        if handle.residency is not None and trigger in _MOVES:
            return self.engines.move(handle, trigger)
        if holding is None or trigger not in _MOVES:
            return MoveResult()
        moved = self.transition.moved.pop(handle, None)
        if moved is None:  # not moved by the phase transition's exchange: this is recovery, or the exchange failed
            moved = self._exchange([handle] if trigger is Trigger.OFFLOAD else [], [handle] if trigger is Trigger.LOAD else [])[handle]
        if handle.kind == "engine" and trigger is Trigger.OFFLOAD:
            guards.install_on_new(handle)
        if trigger is Trigger.OFFLOAD:
            self._complain_of_immovable(handle, holding)
        else:
            self._complain_of_views(handle, holding)
        self._complain(handle, moved)
        return moved

    def _exchange(
        self, leaving: Sequence[Handle], coming: Sequence[Handle], *, early_release: bool = False, load: Load = ALONE
    ) -> dict[Handle, MoveResult]:
        """Move the bytes of several handles, in both directions at once. Handles that are already there get an empty result."""
        by_holding = {handle.holding: handle for handle in (*leaving, *coming) if handle.holding is not None}
        room_bytes = min(self._device.memory().free_bytes, self.chunk_pool.room_bytes) if leaving and coming else 0
        exchange = Exchange(
            self._device,
            self.chunk_pool,
            verifier=self.verifier,
            room_bytes=room_bytes,
            early_release=early_release,
            dropping=self.transition.dropping,
            load=load,
            staying=self.transition.staying,
            while_copying=self.transition.while_copying,
            calls_since_seconds=self.transition.began_seconds,
        )
        texts = [f"{verb} {', '.join(h.name for h in those)}" for verb, those in (("offload", leaving), ("load", coming)) if those]
        with self._mark(f"placement: {'; '.join(texts)}"):
            moved = exchange.run([h.holding for h in leaving if h.holding], [h.holding for h in coming if h.holding])
        return dict.fromkeys((*leaving, *coming), MoveResult()) | {by_holding[holding]: each for holding, each in moved.items()}

    def _complain_of_immovable(self, handle: Handle, holding: ManagedStorage) -> None:
        if holding in self.transition.dropping:
            return
        for name, problem in holding.adapter.immovable():
            self.transition.complaints.append(
                RegistrationError(f"{handle.name!r}: {name!r} {problem}. The rest of the handle was offloaded; this tensor stays.")
            )

    def _complain_of_views(self, handle: Handle, holding: ManagedStorage) -> None:
        """Tell, once a handle, of views that show its host copy while its values are on the device."""
        if handle not in self._told_of_views and (names := holding.views_left_on_host()):
            self._told_of_views.add(handle)
            logger.warning(
                "%r: views of tensors of a state dict (%s) were taken while it was offloaded, and somebody still holds them. The tensors "
                "themselves show the device now, these views show the host copy: they do not see what is changed from here on, and what is "
                "written to them is %s. Take views anew in each phase, or clone() them",
                handle.name,
                ", ".join(names[:8]),
                "the handle's value from the next offload on" if handle.readonly else "lost",
            )

    def _complain(self, handle: Handle, moved: MoveResult) -> None:
        """Note errors about a move, to be raised once the phase transition is complete."""
        handle.stray_references, handle.stray_names = moved.stray_references, moved.stray_names
        if moved.rewritten_chunks:
            self.transition.complaints.append(
                IntegrityError(
                    f"{handle.name!r} is readonly, but {moved.rewritten_chunks} of its chunks changed on the device; the registered values "
                    "were kept. Register it without readonly=True if it is meant to be written."
                )
            )
        if moved.nan:
            self.transition.complaints.append(IntegrityError(moved.nan))
        if moved.brought_back:
            values = "their registered values, because it is readonly" if handle.readonly else "the values that they had there"
            self.transition.complaints.append(
                IntegrityError(
                    f"{moved.brought_back} of {handle.name!r} lay in other memory than theirs when it was offloaded: something moved them "
                    "out of the handle's memory on the device (share_memory(), a torch.multiprocessing queue). They are back there, with "
                    f"{values}; a process that received the shared memory no longer sees changes. Share memory before registering, or "
                    "send copies (clone())."
                )
            )
        if moved.stray_references and self._strict and self._last(handle):
            self.transition.complaints.append(
                IntegrityError(
                    f"{handle.stray_references} references to storages of {handle.name!r} were alive at its offload "
                    f"({handle.stray_names}). "
                    "They read poison now. Drop such references before the phase ends, or use handle.state_dict() instead."
                )
            )

    def _last(self, handle: Handle) -> bool:
        """Whether references to an offloaded handle's storages still exist when they are looked for again."""
        handle.look_for_strays()
        return handle.stray_references > 0

    def record(self, handle: Handle, trigger: Trigger, source: State, target: State, began_seconds: float, moved: MoveResult) -> None:
        """Write one state change into the journal. Its duration is that of the move, else the time since `began_seconds`."""
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
            prefetched_bytes=moved.prefetched_bytes,
        )
        self._journal.record(handle.counters, record)

    def make_consistent(self, handle: Handle) -> None:
        """Repair a handle after an interrupted move: bytes follow the stored decision, the state follows the bytes, the journal the state.

        Raises:
            BrokenHandleError: the device failed meanwhile. The next phase transition tries again.
        """
        holding = handle.holding
        if handle.residency is not None:
            self.engines.make_consistent(handle)
        try:
            if holding is not None:
                holding.make_consistent(self.chunk_pool)
        except Exception as error:
            handle.broken = f"the device failed while a move was being completed: {error}"
            raise BrokenHandleError(f"{handle.name!r} is broken: {handle.broken}") from error
        # The device works again. Nothing was lost by an earlier error, because the decision had been stored before it.
        if handle.residency is None:
            handle.broken = handle.storage.lost
        state, recorded = handle.state, handle.counters.state
        if state is not recorded:
            rows = [each for each, source, target in TRANSITIONS if (source, target) == (recorded, state)]
            trigger = rows[0] if rows else path((recorded, recorded is not State.CPU_OFFLOADED), handle.node)[-1]
            self.record(handle, trigger, recorded, state, time.monotonic(), MoveResult())
        if holding is not None and holding.on_device is (state is State.CPU_OFFLOADED) and not handle.is_streaming:
            handle.machine.fire(Trigger.LOAD if holding.on_device else Trigger.OFFLOAD)
