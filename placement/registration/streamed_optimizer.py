"""The steps of an optimizer that stays on the host: `optimizer.step()`, unchanged, streams the
state through the device.

The call that stands in for `step` is put in place when a plan first wants the steps streamed; while
it does not, it calls the method that was there. Step hooks, a closure and a learning rate scheduler
see one step, as always; the state itself is offloaded for hooks, too.

A streamed step takes the parameters in parts: a part is a parameter, or a slice of one whose state
is larger than a bucket.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from placement.core.errors import IntegrityError, PhaseError
from placement.core.method_call import MethodCall
from placement.core.modes import uncompiled, without_modes
from placement.core.weak import reference
from placement.devices.base import Device, round_up
from placement.ownership.optimizer import OptimizerAdapter
from placement.registration.partial_step import (
    ParameterSlice,
    PartialStep,
    is_counter,
    sliceable_state,
)
from placement.registration.streamable import (
    is_of_accelerate,
    refusal,
    refusal_now,
    replaced_step,
)
from placement.storage.managed import ManagedStorage
from placement.storage.pages import ChunkPool
from placement.storage.range import Range, RangeChunk
from placement.storage.transfer.streamed import (
    AHEAD,
    Piece,
    Streamed,
    StreamedStep,
    first_chunks,
    window_of,
)
from placement.storage.watch.writes import message
from placement.tensors.plain import PLAIN_TYPES, has_bytes, nested_tensors, plain_parts

SteppedHandle = Any  # a `Handle`, whose module is above this one

BUCKET_BYTES = 512 << 20
"""Device bytes of a bucket, before they are rounded up to whole chunks. A step holds three of
them."""


@dataclass(frozen=True, slots=True)
class Streaming:
    """The means that a manager gives to the streamed steps of its optimizers."""

    # holds the manager's lock, so that no other thread moves a handle. Refuses a graph capture.
    lock: Callable[[], AbstractContextManager[None]]
    # called with the handle, the result and the seconds of each step
    note: Callable[[SteppedHandle, Streamed, float], None]


def bucket_bytes_of(device: Device) -> int:
    """Device bytes of a bucket in whole chunks of this device."""
    return round_up(BUCKET_BYTES, device.chunk_bytes)


_ALIGNED = 64
"""Slices begin at multiples of so many elements: kernels that compute several at once take the same
ones together as in the whole."""


class StepPart(NamedTuple):
    """A part of the parameters that is stepped together."""

    stepped: torch.Tensor | ParameterSlice
    piece: Piece  # where its state is, and how much of it is still to be created


class Window(NamedTuple):
    """The device memory that a streamed step takes."""

    # the facts for which it was measured: ranges, entries and unborn bytes of the state
    ranges: tuple[Range, ...]
    num_entries: int
    unborn_bytes: int
    window_bytes: int  # the most device bytes of the state at a time
    first_chunks: tuple[RangeChunk, ...]


class StreamedOptimizer:
    """The streamed steps of one optimizer handle. `is_predictable`: the size of the state that its
    steps will create is known."""

    def __init__(
        self,
        handle: SteppedHandle,
        holding: ManagedStorage,
        adapter: OptimizerAdapter,
        streaming: Streaming,
        *,
        is_predictable: bool,
    ) -> None:
        self._handle = weakref.ref(handle)
        self.storage = holding
        self._adapter = adapter
        self._streaming = streaming
        self._bucket_bytes = bucket_bytes_of(holding.device)
        # bytes of all buckets that are on the device at a time
        self.buckets_bytes = (1 + AHEAD) * self._bucket_bytes
        # the chunks of a parameter's state, by its tensors' addresses
        self._chunks: dict[tuple[int, ...], tuple[RangeChunk, ...]] = {}
        self._chunk_ranges: tuple[Range, ...] = ()  # the ranges that these chunks belong to
        self._window: Window | None = None  # as of the last `measured`
        # Whether a step was begun since the handle began to be TRAINING. Chunks come early for the
        # first step alone: it is not known whether another one follows.
        self._has_stepped = True
        self._is_installed = False
        # whether a learning rate scheduler had replaced the method before
        self._tells_scheduler = False
        # whether a streamed step is under way. Only then a step may begin although the state is not
        # on the device.
        self.is_running = False
        self.refusal = refusal(adapter.key_objects()[0])
        """Why no plan may stream this optimizer's state, with advice; None if a plan may."""
        if self.refusal is None and (adapter.steps_copies or not is_predictable):
            reason = "its size cannot be predicted"
            if adapter.steps_copies:
                reason = "it steps copies of parameters, which it needs as a whole"
            self.refusal = f"{reason}; use optimizer_in='train' for it"

    @property
    def first_chunks(self) -> tuple[RangeChunk, ...]:
        """The chunks to bring before the coming step, while the forward and backward pass leave the
        link idle; empty where none is sure."""
        if self._has_stepped or self.refusal is not None or not self.is_wanted:
            return ()
        return self.measured().first_chunks

    def measured(self) -> Window:
        """The memory of a streamed step of all parameters. Looks at every parameter, unless the
        state has the ranges, entries and unborn bytes of the last call."""
        window, ranges = self._window, self.storage.ranges
        facts = (self._adapter.num_entries(), self.storage.unborn_bytes)
        if (
            window is not None
            and window.ranges is ranges
            and (window.num_entries, window.unborn_bytes) == facts
        ):
            return window
        pieces = list[Piece]()
        for optimizer in self._adapter.optimizers():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    pieces += [part.piece for part in self.parts_of(optimizer, parameter)]
        window_bytes = window_of(pieces, self._bucket_bytes)
        chunks = first_chunks(pieces, self._bucket_bytes, window_bytes)
        self._window = Window(ranges, *facts, window_bytes, chunks)
        return self._window

    def begin(self) -> None:
        """Get ready for streamed steps: called when the handle begins to be TRAINING from its host
        copy. PhaseError: a step cannot be streamed now."""
        handle = self._handle()
        assert handle is not None
        self._has_stepped = False
        for optimizer in () if self._is_installed else self._adapter.optimizers()[:1]:
            self._refuse_step(replaced_step(optimizer))
            self._tells_scheduler = "step" in vars(optimizer)
            handle.guards.append(_StepCall(weakref.ref(self), optimizer, "step"))
            for wrapper in filter(is_of_accelerate, self._adapter.objects()):
                handle.guards.append(_MethodOfScaler(wrapper))
            self._is_installed = True

    @uncompiled  # a graph would compute with the state when it has left again
    def step(
        self,
        optimizer: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Make one step of the user's, with its hooks: called in place of the optimizer's method.
        Returns the result of the closure; None without one. Raises PhaseError: the step cannot be
        streamed now."""
        self._refuse_step(refusal_now(optimizer))
        self.is_running = self._has_stepped = True
        try:
            step = torch.optim.Optimizer.profile_hook_step(self._between_hooks)
            return step(optimizer, *args, **kwargs)
        finally:
            self.is_running = False

    def may_begin(self, optimizer: Any) -> bool:
        """Whether a step of the optimizer, or of a wrapper around it, may go on: inside a streamed
        step, or before one, which begins inside a wrapper's."""
        if self.is_running:
            return True
        return all(optimizer is not stepped for stepped in self._adapter.optimizers())

    @property
    def is_wanted(self) -> bool:
        """Whether the next step is to be streamed."""
        handle = self._handle()
        return handle is not None and handle.is_streaming

    def _between_hooks(
        self,
        optimizer: Any,
        closure: Callable[[], Any] | None = None,
    ) -> Any:
        """The step itself, which torch calls between its hooks: first its closure."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._tells_scheduler:
            # as the scheduler's own wrapper does, which this call stands in for
            optimizer._opt_called = True
        with torch.no_grad(), self._streaming.lock():
            if not self.is_wanted:
                self._refuse_step(
                    "a closure or a hook of the step has left the phase. Nothing was stepped"
                )
            began = time.monotonic()
            with without_modes():
                self._make_sound()
            step = PartialStep(optimizer)
            parts = list[StepPart]()
            for parameter in step.parameters:
                parts += self.parts_of(optimizer, parameter)
            stepped = [part.stepped for part in parts]
            handle = self._handle()
            window_bytes = (handle or self.measured()).window_bytes
            streamed = StreamedStep(
                self.storage,
                [part.piece for part in parts],
                self._bucket_bytes,
                window_bytes,
                lambda first, last: step.run(stepped[first:last]),
            ).run()
            if handle is not None:
                self._streaming.note(handle, streamed, time.monotonic() - began)
        return loss

    def _make_sound(self) -> None:
        """Finish an interrupted step, and report changes to the state while it was offloaded."""
        holding = self.storage
        chunk_pool = ChunkPool(holding.device)
        if self._adapter.follow_param_groups():
            holding.look_at_unborn()
        try:
            holding.make_consistent(chunk_pool)
            changes = holding.watch.look()
            if changes:
                raise IntegrityError(message(changes))
            holding.watch.require_whole()
            holding.drop(holding.dead(), chunk_pool)
        finally:
            chunk_pool.release()

    def _refuse_step(self, reason: str | None) -> None:
        """Raise PhaseError with this reason; None is no reason. A step goes on once its handle was
        collected."""
        handle = self._handle()
        if reason is not None and handle is not None:
            raise PhaseError(
                f"step() of {handle.name!r} cannot stream its state in phase "
                f"{handle.phase_now()!r}: {reason}"
            )

    # --- parts of a step

    def parts_of(self, optimizer: Any, parameter: torch.Tensor) -> list[StepPart]:
        """The parts in which a parameter is stepped, whose state takes a bucket on the
        device."""
        entry = optimizer.state.get(parameter)
        chunks = self._chunks_of(entry) if entry else ()
        whole = Piece(chunks, self._adapter.unborn_bytes_of(parameter))
        if whole.nbytes > self._bucket_bytes and not whole.unborn_bytes:
            slices = self._slices(optimizer, parameter)
            if slices and max(part.piece.nbytes for part in slices) < whole.nbytes:
                return slices
        return [StepPart(parameter, whole)]

    def _chunks_of(self, entry: Any) -> tuple[RangeChunk, ...]:
        """The chunks of a parameter's state."""
        if self._chunk_ranges is not self.storage.ranges:
            self._chunk_ranges = self.storage.ranges
            self._chunks = {}
        tensors = [*_tensors_in(entry)]
        addresses = tuple([tensor.data_ptr() for tensor in tensors])
        if addresses not in self._chunks:
            chunks = list[RangeChunk]()
            for tensor in tensors:
                storage = tensor.untyped_storage()
                chunks += self._between(storage.data_ptr(), storage.nbytes())
            self._chunks[addresses] = tuple(dict.fromkeys(chunks))
        return self._chunks[addresses]

    def _between(self, address: int, nbytes: int) -> list[RangeChunk]:
        """The chunks behind bytes of a tensor; none where it has its bytes in torch's own memory,
        or in the slab."""
        place = self.storage.object_ranges.at(address)
        if place is None or not nbytes:
            return []
        r, _ = place
        start = address - r.layout.addresses.base
        if not 0 <= start < r.nbytes:
            return []
        size = r.chunk_sizes[0]
        last = (start + nbytes - 1) // size
        return [(r, index) for index in range(start // size, last + 1)]

    def _slices(self, optimizer: Any, parameter: torch.Tensor) -> list[StepPart]:
        """Slices whose state takes a bucket each, and ends at a chunk's end; empty if the parameter
        cannot be sliced."""
        state = sliceable_state(optimizer, parameter)
        if not state:
            return []
        largest = max(state, key=torch.Tensor.element_size)
        places = self._between(largest.data_ptr(), 1)
        if not places:
            return []
        r, index = places[0]
        chunk_bytes = r.chunk_sizes[0]
        slice_bytes = max(1, self._bucket_bytes // (len(state) * chunk_bytes)) * chunk_bytes
        first_end = r.layout.addresses.base + r.starts[index] + slice_bytes - largest.data_ptr()
        bounds = {0, largest.numel()}
        for end in range(first_end, largest.nbytes, slice_bytes):
            bounds.add(end // largest.element_size() // _ALIGNED * _ALIGNED)
        tensors = _tensors_in(optimizer.state[parameter])
        counters = [tensor for tensor in tensors if is_counter(tensor)]
        slices = []
        for start, stop in itertools.pairwise(sorted(bounds)):
            chunks = list[RangeChunk]()
            for tensor in (*counters, *[flat[start:stop] for flat in state]):
                chunks += self._between(tensor.data_ptr(), tensor.nbytes)
            piece = Piece(tuple(dict.fromkeys(chunks)))
            slices.append(StepPart(ParameterSlice(parameter, start, stop), piece))
        return slices


class _StepCall(MethodCall):
    """Stands in for `step` of one optimizer. Its guard is a weak reference: the optimizer must not
    keep its storage alive."""

    def run(
        self,
        method: Callable[..., Any],
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        streamed: StreamedOptimizer | None = self._guard()
        if streamed is not None and streamed.is_wanted:
            return streamed.step(target, args, kwargs)
        return method(*args, **kwargs)


class _MethodOfScaler:
    """The method that accelerate's wrapper has taken from its optimizer for a `GradScaler`. The
    wrapper is made to look it up again when the streamed step comes, and when it goes."""

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = reference(wrapper)
        self.remove()

    def remove(self) -> None:
        wrapper = self._wrapper()
        if wrapper is not None:
            wrapper.__setstate__({})  # it unpickles by taking the method, too


def _tensors_in(entry: Any) -> Iterator[torch.Tensor]:
    """The tensors with bytes of their own in a parameter's state."""
    for value in entry.values() if type(entry) is dict else (entry,):
        if type(value) in PLAIN_TYPES:  # the common case first
            if has_bytes(value):
                yield value
            continue
        for _, tensor in nested_tensors(value, ""):
            for _, part in plain_parts(tensor, ""):
                yield part
