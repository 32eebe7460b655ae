"""State transitions of handles: do the work, commit the change, record it; and make a handle consistent after a failed one.

A storage that placement moves takes part in the exchange of its phase transition. A rollout engine that manages its own memory is told to
load and offload its tags (parts of its memory, such as "weights").
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, get_args

import torch

from placement.core.errors import BrokenHandleError, IntegrityError, PhaseError, RegistrationError
from placement.core.journal import Journal, Record
from placement.core.machine import Node, path
from placement.core.settings import Annotate, Verify
from placement.core.states import Plan, State, Trigger
from placement.devices.base import Device
from placement.registration import guards
from placement.registration.handle import Handle
from placement.storage.managed import ManagedStorage, MoveResult
from placement.storage.transfer.chunk_pool import ChunkPool
from placement.storage.transfer.exchange import Exchange, nothing
from placement.storage.transfer.verification import Verifier

if TYPE_CHECKING:
    from placement.engines.residency import Residency

logger = logging.getLogger(__name__)

_MOVES = (Trigger.LOAD, Trigger.OFFLOAD)
_FROM_DEVICE = (Trigger.END_SYNC, Trigger.SYNC_TO_TRAIN, Trigger.END_TRAIN, Trigger.TRAIN_TO_SYNC)
"""The triggers that leave SYNCING and TRAINING with the bytes on the device."""
_WHOLE = {Trigger.END_STREAM: Trigger.END_SYNC, Trigger.END_STREAMED_TRAIN: Trigger.END_TRAIN}
"""The trigger that ends the same state of a handle on the device, for each that ends the use of a host copy."""


def marker(annotate: Annotate) -> Callable[[str], AbstractContextManager[object]]:
    """Return a function that takes a text and gives a context manager, which marks its block for a profiler with that text.

    A mark costs microseconds at each phase transition, so they are off by default.

    Raises:
        ValueError: `annotate` is unknown, or it is "nvtx" and torch was built without NVTX.
    """
    if annotate == "off":
        return nullcontext
    if annotate == "profiler":
        return torch.profiler.record_function
    if annotate != "nvtx":
        raise ValueError(f"annotate {annotate!r} is unknown; choose one of {', '.join(get_args(Annotate))}")
    try:
        torch.cuda.nvtx.mark("placement")
    except RuntimeError as error:
        raise ValueError("annotate 'nvtx' needs a CUDA build of torch; use 'profiler'") from error
    return torch.cuda.nvtx.range


def target_of(handle: Handle, plan: Plan) -> Node:
    """The state (and whether it is on the device) that a plan wants a handle in.

    A `Lazy` that is not built yet stays CPU_OFFLOADED, because only the beginning of a phase builds it.
    """
    if not handle.is_built:
        return State.CPU_OFFLOADED, False
    state = plan.targets[handle.name]
    return state, state is not State.CPU_OFFLOADED if handle.external else plan.on_device(handle.name)


def wanted_tags(handle: Handle, plan: Plan) -> frozenset[str]:
    """The tags of an engine that a plan wants on the device."""
    if not plan.on_device(handle.name):
        return frozenset()
    return plan.parts.get(handle.name, frozenset(handle.storage.tags))


def residency_of(handle: Handle) -> Residency:
    assert handle.residency is not None
    return handle.residency


@dataclass(eq=False, slots=True)
class Transition:
    """The resources and results of one phase transition. Made at its beginning and dropped at its end."""

    chunk_pool: ChunkPool
    """Chunks that storages have freed, and how many more bytes the driver may be asked for."""
    dropping: tuple[ManagedStorage, ...] = ()
    """The storages whose gradients the plan drops when they leave TRAINING."""
    staying: Mapping[ManagedStorage, int] = field(default_factory=dict)
    """Device bytes of storages that leave which stay aside."""
    while_copying: Callable[[], None] = nothing
    """Called once, while bytes are being copied to the host."""
    began_seconds: float = field(default_factory=time.monotonic)
    """When it began, on the monotonic clock."""
    moved: dict[Handle, MoveResult] = field(default_factory=dict)
    """Results of the exchange, by handle. The state transition of a handle takes its result out."""
    complaints: list[Exception] = field(default_factory=list)
    """Errors to raise once the phase transition is complete. Raised at once, they would leave a handle in the middle of a change."""

    def take_complaints(self) -> list[Exception]:
        """Return the complaints and forget them here."""
        complaints, self.complaints = self.complaints, []
        return complaints


class Mover:
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
        self._wanted_tags: dict[Handle, frozenset[str]] = {}
        """The tags to load for each engine that is being loaded."""

    @property
    def chunk_pool(self) -> ChunkPool:
        """The chunk pool of the phase transition that is under way."""
        return self.transition.chunk_pool

    # --- a phase transition

    def begin(
        self,
        room_bytes: int = 0,
        dropping: tuple[ManagedStorage, ...] = (),
        staying: Mapping[ManagedStorage, int] = MappingProxyType({}),
        while_copying: Callable[[], None] = nothing,
    ) -> None:
        """Begin a phase transition with the chunks that the one before left. For the other arguments see `Transition`.

        Args:
            room_bytes: device bytes that a swap may use in addition to those in use now.
        """
        before = self.transition
        chunk_pool = ChunkPool(self._device, room_bytes, left_by=before.chunk_pool)
        self.transition = Transition(chunk_pool, dropping, staying, while_copying, complaints=before.complaints)

    def forget(self) -> None:
        """Forget a phase transition that has ended or failed, except for its freed chunks and for errors still to be raised."""
        self.transition = Transition(self.transition.chunk_pool, complaints=self.transition.complaints)

    def end(self) -> None:
        """End the phase transition: forget it, and return its chunks to the driver."""
        self.forget()
        self.chunk_pool.release()

    def move_at_once(self, paths: Sequence[tuple[Handle, list[Trigger]]], *, early_release: bool = False) -> None:
        """Move the bytes of all loads and offloads that come next, in one exchange. The state transitions that follow only commit.

        Args:
            paths: the triggers still to fire, by handle.
        """
        leaving = [handle for handle, triggers in paths if triggers[:1] == [Trigger.OFFLOAD] and handle.holding is not None]
        coming = [handle for handle, triggers in paths if triggers[:1] == [Trigger.LOAD] and handle.holding is not None]
        if not leaving and not coming:
            return
        with self._failing([(h, Trigger.OFFLOAD) for h in leaving] + [(h, Trigger.LOAD) for h in coming]):
            self.transition.moved = self._exchange(leaving, coming, early_release=early_release)

    @contextmanager
    def _failing(self, moves: Sequence[tuple[Handle, Trigger]]) -> Iterator[None]:
        """Count an error in the block as a failure of these state transitions."""
        try:
            yield
        except BaseException as error:
            for handle, trigger in moves:
                self._journal.failed(handle.counters, handle.name, trigger, error)
            raise

    # --- one state transition

    def fire(self, handle: Handle, trigger: Trigger) -> None:
        """Make one state transition: do its work, commit it, record it."""
        began, source = time.monotonic(), handle.state
        with self._failing([(handle, trigger)]):
            handle.machine.require(trigger)
            handle.require_sound(trigger)
            moved = self._work(handle, trigger)
            handle.machine.fire(trigger)
        self._record(handle, trigger, source, began, moved)

    def _work(self, handle: Handle, trigger: Trigger) -> MoveResult:
        """`load` and `offload` move bytes if the exchange has not moved them; the others are only checked."""
        holding = handle.holding
        if handle.is_streaming and trigger in _FROM_DEVICE:
            raise PhaseError(f"{handle.name!r} is {handle.state} from its host copy; it cannot {trigger} before it is loaded")
        if (whole := _WHOLE.get(trigger)) is not None and not handle.is_streaming and not handle.external:
            raise PhaseError(f"{handle.name!r} is {handle.state} on the device; end that with {whole}, not with {trigger}")
        if trigger is Trigger.BEGIN_STREAMED_TRAIN and handle.streamed is not None:
            handle.streamed.begin()
        if (residency := handle.residency) is not None and trigger in _MOVES:
            began = time.monotonic()
            if trigger is Trigger.OFFLOAD:
                copied = residency.offload(residency.resident)
            else:
                copied = residency.load(self._wanted_tags.get(handle, residency.resident))
            return MoveResult(seconds=time.monotonic() - began, copied_bytes=copied)
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
        self, leaving: Sequence[Handle], coming: Sequence[Handle], *, early_release: bool = False
    ) -> dict[Handle, MoveResult]:
        """Move the bytes of several handles, in both directions at once. Handles that are already there get an empty result."""
        by_holding = {handle.holding: handle for handle in (*leaving, *coming) if handle.holding is not None}
        room_bytes = min(self._device.memory().free_bytes, self.chunk_pool.room_bytes) if leaving and coming else 0
        exchange = Exchange(
            device=self._device,
            chunk_pool=self.chunk_pool,
            verifier=self.verifier,
            room_bytes=room_bytes,
            early_release=early_release,
            dropping=self.transition.dropping,
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
            self.transition.complaints.append(
                IntegrityError(
                    f"{moved.brought_back} of {handle.name!r} lay in other memory than theirs when it was offloaded: something moved them "
                    "out of the handle's memory on the device (share_memory(), a torch.multiprocessing queue). They have new places there, "
                    "with the values that they had; a process that received the shared memory no longer sees changes. Share memory before "
                    "registering, or send copies (clone())."
                )
            )
        if moved.stray_references and self._strict and self._still_has_strays(handle):
            self.transition.complaints.append(
                IntegrityError(
                    f"{handle.stray_references} references to storages of {handle.name!r} were alive at its offload "
                    f"({handle.stray_names}). "
                    "They read poison now. Drop such references before the phase ends, or use handle.state_dict() instead."
                )
            )

    def _still_has_strays(self, handle: Handle) -> bool:
        """Look for references to an offloaded handle's storages again. Returns whether there are any."""
        handle.look_for_strays()
        return handle.stray_references > 0

    def _record(self, handle: Handle, trigger: Trigger, source: State, began_seconds: float, moved: MoveResult) -> None:
        """Write one state change into the journal. Its duration is that of the move, else the time since `began_seconds`."""
        now = time.monotonic()
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
            resident_bytes=handle.resident_bytes,
            prefetched_bytes=moved.prefetched_bytes,
        )
        self._journal.record(handle.counters, record)

    def make_consistent(self, handle: Handle) -> None:
        """Repair a handle after a failed move: bytes follow the stored decision, and the state follows the bytes.

        Raises:
            BrokenHandleError: the device failed meanwhile. The next phase transition tries again.
        """
        holding, residency = handle.holding, handle.residency
        if residency is not None:
            handle.broken = residency.doubt
            if residency.doubt is None and bool(residency.resident) is (handle.state is State.CPU_OFFLOADED):
                self._run(handle, (State.GPU_RESIDENT, True) if residency.resident else (State.CPU_OFFLOADED, False))
            return
        try:
            if holding is not None:
                holding.make_consistent(self.chunk_pool)
        except Exception as error:
            handle.broken = f"the device failed while a move was being completed: {error}"
            raise BrokenHandleError(f"{handle.name!r} is broken: {handle.broken}") from error
        # The device works again. Nothing was lost by an earlier error, because the decision had been stored before it.
        handle.broken = handle.storage.lost
        if holding is not None and holding.on_device is (handle.state is State.CPU_OFFLOADED) and not handle.is_streaming:
            self.fire(handle, Trigger.LOAD if holding.on_device else Trigger.OFFLOAD)

    # --- engines that manage their own memory

    def engine_leaves(self, handle: Handle, plan: Plan) -> bool:
        """Offload the tags that the plan does not want on the device. Returns whether there were any."""
        residency, stays = residency_of(handle), wanted_tags(handle, plan)
        if residency.resident <= stays:
            return False
        if residency.resident & stays:
            self._move_part(handle, Trigger.OFFLOAD, lambda: residency.offload(residency.resident - stays))
        else:
            self._run(handle, (State.CPU_OFFLOADED, False))
        return True

    def engine_lacks(self, handle: Handle, plan: Plan) -> bool:
        """Whether the plan wants a tag on the device that is not there."""
        return not wanted_tags(handle, plan) <= residency_of(handle).resident

    def engine_comes(self, handle: Handle, plan: Plan) -> None:
        """Load the tags that the plan wants on the device, and bring the handle to its state."""
        wanted = self._wanted_tags[handle] = wanted_tags(handle, plan)
        try:
            if self.engine_lacks(handle, plan) and handle.state is not State.CPU_OFFLOADED:
                self._move_part(handle, Trigger.LOAD, lambda: residency_of(handle).load(wanted))
            self._run(handle, target_of(handle, plan))
            if wanted:
                residency_of(handle).reopen()
        finally:
            del self._wanted_tags[handle]

    def as_far_as_it_goes(self, step: Callable[[Handle, Plan], object], engines: Iterable[Handle], plan: Plan) -> list[Exception]:
        """Do a step (`engine_leaves` or `engine_comes`) for every engine, even if it fails for some. Returns the errors."""
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
            self.fire(handle, trigger)

    def _move_part(self, handle: Handle, trigger: Trigger, work: Callable[[], int]) -> None:
        """Load or offload some tags of an engine. Its state does not change, but the move is recorded."""
        began = time.monotonic()
        with self._failing([(handle, trigger)]):
            if (doubt := residency_of(handle).doubt) is not None:
                raise BrokenHandleError(f"{handle.name!r} is broken and cannot {trigger}: {doubt}")
            copied = work()
        self._record(handle, trigger, handle.state, began, MoveResult(time.monotonic() - began, copied))
