"""One transition of a handle: its bytes, its record, and what makes it whole again after it was cut short."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from placement.core.errors import BrokenHandleError, IntegrityError, PhaseError, RegistrationError
from placement.core.journal import Journal, Record
from placement.core.machine import Node, path
from placement.core.profiler_marks import Annotate, marker
from placement.core.states import Plan, State, Trigger
from placement.devices.base import Device
from placement.phases.engine_mover import EngineMoves
from placement.registration import guards
from placement.registration.handle import Handle
from placement.storage.managed import Holding
from placement.storage.transfer.chunk_pool import Stock
from placement.storage.transfer.exchange import Exchange, nothing
from placement.storage.transfer.result import Moved
from placement.storage.transfer.verification import Verifier, Verify

_MOVES = (Trigger.LOAD, Trigger.OFFLOAD)


def target_of(handle: Handle, plan: Plan) -> Node:
    """The node that a plan wants a handle at.

    A `Lazy` is built when a phase begins; one that an exit would want on the device stays off it until then.
    """
    if not handle.is_built:
        return State.CPU_OFFLOADED, False
    state = plan.targets[handle.name]
    return state, state is not State.CPU_OFFLOADED if handle.external else plan.on_device(handle.name)


@dataclass(slots=True)
class _Attempt:
    """One transition in progress: what `after` needs to know of what `before` did."""

    began_seconds: float = 0.0
    moved: Moved = field(default_factory=Moved)


class HandleMoves:
    """What the machine of one handle calls around its transitions."""

    def __init__(self, handle: Handle, moves: Moves) -> None:
        self._handle = handle
        self._moves = moves
        self._attempt = _Attempt()

    def before(self, trigger: Trigger, source: State, target: State) -> None:
        self._attempt = _Attempt(time.monotonic())
        self._handle.require_sound(trigger)
        self._attempt.moved = self._moves.move(self._handle, trigger)

    def after(self, trigger: Trigger, source: State, target: State) -> None:
        self._moves.record(self._handle, trigger, source, target, self._attempt.began_seconds, self._attempt.moved)


class Moves:
    """The transitions of the handles of one device, and what they share while a border is carried out."""

    def __init__(self, device: Device, journal: Journal, *, strict: bool, verify: Verify, annotate: Annotate) -> None:
        self._device = device
        self._journal = journal
        self._strict = strict
        self._mark = marker(annotate)
        self.stock = Stock(device)
        self.verifier = Verifier(verify)
        self.engines = EngineMoves(journal, self.fire, self.record, target_of)
        self.dropping: tuple[Holding, ...] = ()
        """Whose gradients die at the present border."""
        self._meanwhile: Callable[[], None] = nothing
        self._moved: dict[Handle, Moved] = {}
        """What the present border's exchange has moved, until the handles' transitions take it over."""
        self._complaints: list[Exception] = []
        """What must be raised, but only once the border is complete: raising at once would leave the handle half-way."""

    def of(self, handle: Handle) -> HandleMoves:
        return HandleMoves(handle, self)

    # --- a border

    def begin(self, room_bytes: int, dropping: tuple[Holding, ...], meanwhile: Callable[[], None] = nothing) -> None:
        """A border begins.

        Args:
            room_bytes: by how much a swap may be ahead of what is on the device now.
            meanwhile: called while bytes are on their way to the host.
        """
        self.stock.room_bytes = room_bytes
        self.dropping, self._meanwhile = dropping, meanwhile

    def forget(self) -> None:
        """Of the border that is over, or was broken off. What was given up stays in the stock."""
        self._moved, self.dropping, self._meanwhile = {}, (), nothing

    def end(self) -> None:
        """The border is over: nothing is remembered of it, and no memory is kept back."""
        self.forget()
        self.stock.release()

    def move_at_once(self, paths: Sequence[tuple[Handle, list[Trigger]]], *, early_release: bool = False, together: bool = False) -> None:
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

    def take_complaints(self) -> list[Exception]:
        """What the border must raise, now that it is complete."""
        complaints, self._complaints = self._complaints, []
        return complaints

    def drop_complaints(self) -> None:
        """The border was undone, and what was to be raised with it."""
        self._complaints = []

    # --- one transition

    def fire(self, handle: Handle, trigger: Trigger) -> None:
        """Make one transition, with its bytes."""
        try:
            handle.machine.fire(trigger)
        except BaseException as error:
            self._journal.failed(handle.counters, handle.name, trigger, error)
            raise

    def move(self, handle: Handle, trigger: Trigger) -> Moved:
        """The work of one transition: bytes for `load` and `offload`, a check for the others."""
        holding = handle.holding
        if handle.is_streaming and trigger in (Trigger.END_SYNC, Trigger.SYNC_TO_TRAIN):
            raise PhaseError(f"{handle.name!r} publishes from its host copy; it cannot {trigger} before it is loaded")
        if trigger is Trigger.END_STREAM and not handle.is_streaming and not handle.external:
            raise PhaseError(f"{handle.name!r} is SYNCING on the device; it ends with {Trigger.END_SYNC}")
        if handle.residency is not None and trigger in _MOVES:
            return self.engines.move(handle, trigger)
        if holding is None or handle.external:
            return Moved()
        if trigger not in _MOVES:
            return Moved()
        moved = self._moved.pop(handle, None)
        if moved is None:  # not part of a border's exchange: recovery, or what the exchange could not do
            moved = self._exchange([handle] if trigger is Trigger.OFFLOAD else [], [handle] if trigger is Trigger.LOAD else [])[handle]
        if handle.kind == "engine" and trigger is Trigger.OFFLOAD:
            guards.install_on_new(handle)
        if trigger is Trigger.OFFLOAD:
            self._complain_of_immovable(handle, holding)
        self._complain(handle, moved)
        return moved

    def _exchange(
        self, leaving: Sequence[Handle], coming: Sequence[Handle], *, early_release: bool = False, together: bool = False
    ) -> dict[Handle, Moved]:
        """Move the bytes of several handles, both directions at once. Handles that are there already have moved nothing."""
        by_holding = {handle.holding: handle for handle in (*leaving, *coming) if handle.holding is not None}
        room_bytes = min(self._device.memory().free_bytes, self.stock.room_bytes) if leaving and coming else 0
        exchange = Exchange(
            self._device,
            self.stock,
            verifier=self.verifier,
            room_bytes=room_bytes,
            early_release=early_release,
            dropping=self.dropping,
            together=together,
            meanwhile=self._meanwhile,
        )
        texts = [f"{verb} {', '.join(h.name for h in those)}" for verb, those in (("offload", leaving), ("load", coming)) if those]
        with self._mark(f"placement: {'; '.join(texts)}"):
            moved = exchange.run([h.holding for h in leaving if h.holding], [h.holding for h in coming if h.holding])
        return dict.fromkeys((*leaving, *coming), Moved()) | {by_holding[holding]: each for holding, each in moved.items()}

    def _complain_of_immovable(self, handle: Handle, holding: Holding) -> None:
        if holding in self.dropping:
            return
        for name, problem in holding.adapter.immovable():
            self._complaints.append(
                RegistrationError(f"{handle.name!r}: {name!r} {problem}. Everything else of it was offloaded; this stays where it is.")
            )

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
        if moved.brought_back:
            values = "their registered values, because it is readonly" if handle.readonly else "the values that they had there"
            self._complaints.append(
                IntegrityError(
                    f"{moved.brought_back} of {handle.name!r} lay in other memory than theirs when it was offloaded: something moved them "
                    f"on the device (share_memory(), a torch.multiprocessing queue). They have their places again, and {values}; whoever "
                    "received the shared memory no longer follows. Share memory before registering, or send copies (clone())."
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

    def settle(self, handle: Handle) -> None:
        """Make what an interrupted move left behind consistent: bytes with the decision, state with the bytes, journal with the state.

        Raises:
            BrokenHandleError: the device fails in the middle of it. The next border tries again.
        """
        holding = handle.holding
        if handle.residency is not None:
            self.engines.settle(handle)
        try:
            if holding is not None:
                holding.settle(self.stock)
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
        if holding is not None and holding.on_device is (state is State.CPU_OFFLOADED) and not handle.external and not handle.is_streaming:
            handle.machine.fire(Trigger.LOAD if holding.on_device else Trigger.OFFLOAD)
