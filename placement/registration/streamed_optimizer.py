"""The steps of an optimizer that stays on the host: `optimizer.step()`, unchanged, streams the
state through the device.

The call that stands in for `step` is put in place when a plan first wants the steps streamed; while
it does not, it calls the method that was there. Step hooks, a closure and a learning rate scheduler
see one step, as always; the state itself is offloaded for hooks, too.

A streamed step takes the parameters in parts: a part is a parameter, or a slice of one whose state
is larger than a bucket.
"""

from __future__ import annotations

import inspect
import itertools
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import _default_to_fused_or_foreach

from placement.core.errors import IntegrityError, PhaseError
from placement.core.method_call import MethodCall
from placement.core.modes import without_modes
from placement.core.weak import reference
from placement.devices.base import Device, round_up
from placement.frameworks.base import stepped_for
from placement.ownership.optimizer import OptimizerAdapter
from placement.ownership.optimizer_state import optimizers_in
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
from placement.tensors.plain import PLAIN_TYPES, has_bytes, is_a, nested_tensors, plain_parts

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
        self.is_running = self._has_stepped = False
        for optimizer in () if self._is_installed else self._adapter.optimizers()[:1]:
            self._refuse_step(replaced_step(optimizer))
            self._tells_scheduler = "step" in vars(optimizer)
            handle.guards.append(_StepCall(weakref.ref(self), optimizer, "step"))
            for wrapper in filter(_is_of_accelerate, self._adapter.objects()):
                handle.guards.append(_MethodOfScaler(wrapper))
            self._is_installed = True

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
            window = handle or self.measured()
            streamed = StreamedStep(
                self.storage,
                [part.piece for part in parts],
                self._bucket_bytes,
                window.window_bytes,
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


# --- optimizers whose step treats each parameter by itself, so that it can be made for some of the
# parameters and then for the others
#
# These are classes of torch.optim whose update of a parameter depends on nothing but its gradient,
# its own state and the options of its group. `PartialStep` makes such a step for a part of the
# parameters. It calls the innermost step function with an object that has other parameter groups
# and the optimizer's state, or for a slice that slice of the state. So the groups of the optimizer
# itself are always the user's.
#
# The step functions of torch.optim compute an element from the same element of the parameter, its
# gradient and its state, and from counters of the parameter. So a parameter whose state is larger
# than a bucket can be stepped slice by slice, and comes out with the same bits. Muon is the
# exception, because it multiplies whole matrices.


class ParameterSlice(NamedTuple):
    """Elements `start` up to `stop` (not included) of a parameter's part on this rank, in memory's
    order."""

    parameter: torch.Tensor
    start: int
    stop: int

    def of(self, tensor: Any) -> torch.Tensor:
        """The slice's elements of the parameter, of its gradient, or of a tensor of its state. A
        view of one dimension."""
        flat = _elements(tensor, self.parameter)
        assert flat is not None
        return flat[self.start : self.stop]

    @property
    def is_last(self) -> bool:
        flat = _elements(self.parameter, self.parameter)
        return flat is None or self.stop == flat.numel()


def sliceable_state(optimizer: Any, parameter: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of a parameter's state that have an element for each of its own, flat, on this
    rank; empty if it cannot be sliced."""
    entry = optimizer.state.get(parameter)
    flat = _elements(parameter, parameter)
    if not entry or flat is None or _own(type(optimizer)) in _OF_MATRICES:
        return []
    gradient = parameter.grad
    if gradient is not None and (
        gradient.dtype != parameter.dtype or _elements(gradient, parameter) is None
    ):
        return []
    state = []
    for value in entry.values():
        if value is None or is_counter(value):
            continue
        elements = _elements(value, parameter) if isinstance(value, torch.Tensor) else None
        if elements is None or elements.numel() != flat.numel():
            return []
        state.append(elements)
    return state


def is_counter(value: object) -> bool:
    """Whether a value of a parameter's state is a number for the whole parameter, which every step
    updates once."""
    return isinstance(value, torch.Tensor) and value.dim() == 0


def _elements(tensor: Any, parameter: Any) -> torch.Tensor | None:
    """The elements of a tensor on this rank, in one dimension; None if they are not the
    parameter's, one by one and in order."""
    if tensor.shape != parameter.shape:
        return None
    if is_a(parameter, "torch.distributed.tensor", "DTensor"):
        if not is_a(tensor, "torch.distributed.tensor", "DTensor"):
            return None
        if tensor.device_mesh != parameter.device_mesh:
            return None
        if tensor.placements != parameter.placements:
            return None
        if any(placement.is_partial() for placement in tensor.placements):
            return None
        tensor = tensor._local_tensor  # to_local() would record it for autograd
    if type(tensor) not in PLAIN_TYPES or not tensor.is_contiguous():
        return None
    flat: torch.Tensor = tensor.detach().view(-1)
    return flat


_NAMES = (
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Muon",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
)
_CLASSES: tuple[type, ...] = tuple(
    getattr(torch.optim, name) for name in _NAMES if hasattr(torch.optim, name)
)
KNOWN = ", ".join(cls.__name__ for cls in _CLASSES)


def _own(cls: Any) -> tuple[Any, Any]:
    """The functions that make a class's step, without wrappers: torch's constructor and
    torch.compile put them around."""
    return inspect.unwrap(cls.step), inspect.unwrap(cls._init_group)


_STEPS = {_own(cls) for cls in _CLASSES}
_OF_MATRICES = {_own(cls) for cls in _CLASSES if cls.__name__ == "Muon"}


def allow(cls: type) -> type:
    """Take a class as one whose step treats each parameter by itself, too. A decorator."""
    _STEPS.add(_own(cls))
    return cls


def refusal(root: Any) -> str | None:
    """Why the step of a registered optimizer cannot be made in parts, with advice; None if it
    can."""
    objects, leaves = optimizers_in(root)
    inner = leaves[0].optimizer if len(leaves) == 1 else None
    instead = "use optimizer_in='train' or 'optimizer_step' for it"
    wrappers = [wrapper for wrapper in objects if wrapper is not inner]
    if inner is None or not all(map(_is_of_accelerate, wrappers)) or stepped_for(objects):
        return (
            f"{_name(root)} steps other optimizers by code of its own, which may need all their "
            f"state at once; {instead}"
        )
    if not hasattr(type(inner), "_init_group") or _own(type(inner)) not in _STEPS:
        return (
            f"{_name(inner)} is not known to treat each parameter by itself (known: {KNOWN}); "
            f"{instead}"
        )
    if any(group.get("differentiable") for group in inner.param_groups):
        return f"differentiable=True keeps what a step computes for autograd; {instead}"
    return None


def _is_of_accelerate(obj: object) -> bool:
    return is_a(obj, "accelerate.optimizer", "AcceleratedOptimizer")


def refusal_now(optimizer: Any) -> str | None:
    """Why the next step cannot be made in parts although the optimizer's can, with advice; None if
    it can."""
    stepped = list[Any]()
    for group in optimizer.param_groups:
        stepped += [parameter for parameter in group["params"] if parameter.grad is not None]
    if len(stepped) > len({id(parameter) for parameter in stepped}):
        return (
            "a parameter stands twice in its groups, and would be stepped twice: give each "
            "parameter once, or use optimizer_in='train'"
        )
    if any(parameter.grad.layout is not torch.strided for parameter in stepped):
        return "it has sparse gradients, whose state changes its size: use optimizer_in='train'"
    if any(type(parameter) not in PLAIN_TYPES and _reduces(parameter) for parameter in stepped):
        return (
            "gradients have still to be summed over ranks (Partial), or are sharded otherwise than "
            "their parameters, so the step itself calls collectives, which ranks with other "
            "buckets would call in another order: redistribute them before the step, p.grad = "
            "p.grad.redistribute(placements=p.placements), or use optimizer_in='train'"
        )
    if torch.is_inference_mode_enabled():
        return "it is called in inference mode, in which no state can be made: call it outside"
    return None


def _reduces(parameter: Any) -> bool:
    """Whether a step of a sharded parameter calls collectives for its gradient. Of one that every
    rank has whole, it takes a part."""
    placements = getattr(parameter, "placements", ())
    of_gradient = getattr(parameter.grad, "placements", placements)
    for placement, placement_of_gradient in zip(placements, of_gradient, strict=True):
        if placement != placement_of_gradient and not placement_of_gradient.is_replicate():
            return True
    return False


def replaced_step(optimizer: Any) -> str | None:
    """Why the optimizer's own method may do more than a step, with advice; None if it makes a step
    alone. A learning rate scheduler replaces the method by one that tells it of the step, and
    accelerate by the method itself."""
    step = vars(optimizer).get("step")
    step_of_class = type(optimizer).step
    if step is None or getattr(step, "__func__", None) is step_of_class:
        return None
    is_scheduled = hasattr(step, "_wrapped_by_lr_sched")
    if is_scheduled and inspect.unwrap(step) is inspect.unwrap(step_of_class):
        return None
    return (
        f"something has replaced its step() by {getattr(step, '__qualname__', step)!r}, which may "
        "do more than a step: undo that"
    )


def _name(optimizer: Any) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


class PartialStep:
    """One step of an optimizer, made for a few parameters at a time, or for slices of one. It runs
    in the implementation (for-loop, foreach, fused) that torch would choose for all parameters of a
    group together, because another one may round differently. `parameters` have a gradient."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        # without the wrappers of torch's constructor (hooks, gradient mode)
        self._step = inspect.unwrap(type(optimizer).step)
        self._chosen = [_implementation(group) for group in optimizer.param_groups]
        self._group_of: dict[int, int] = {}  # the index of a parameter's group, by its identity
        self.parameters: list[torch.Tensor] = []
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._group_of[id(parameter)] = index
                    self.parameters.append(parameter)

    def run(self, parts: Sequence[torch.Tensor | ParameterSlice]) -> None:
        """Step these parameters, and slices of parameters."""
        by_group: dict[int, list[torch.Tensor]] = {}
        for part in parts:
            if isinstance(part, ParameterSlice):
                self._step_slice(part)
            else:
                by_group.setdefault(self._group_of[id(part)], []).append(part)
        if by_group:
            self._call(by_group, self._optimizer.state)

    def _step_slice(self, part: ParameterSlice) -> None:
        """Step a slice with the same slice of the state. The counters themselves count once, with
        the last slice."""
        stepped = part.of(part.parameter)
        stepped.grad = part.of(part.parameter.grad)
        state: dict[str, Any] = {}
        for key, value in self._optimizer.state[part.parameter].items():
            if is_counter(value):
                state[key] = value if part.is_last else value.clone()
            else:
                state[key] = None if value is None else part.of(value)
        group = self._group_of[id(part.parameter)]
        self._call({group: [stepped]}, {stepped: state})

    def _call(
        self,
        parameters: Mapping[int, list[torch.Tensor]],
        state: Mapping[torch.Tensor, Any],
    ) -> None:
        """Call the step function with these parameters alone, by the index of their group."""
        groups = []
        for index, params in parameters.items():
            group = self._optimizer.param_groups[index]
            groups.append({**group, **self._chosen[index], "params": params})
        part = object.__new__(type(self._optimizer))
        vars(part).update(vars(self._optimizer), param_groups=groups, state=state)
        self._step(part)


def _implementation(group: dict[str, Any]) -> dict[str, bool]:
    """The option that a part of a group needs so that torch chooses the same implementation as for
    the whole group."""
    if "foreach" not in group or group["foreach"] is not None or group.get("fused"):
        return {}
    stepped = [parameter for parameter in group["params"] if parameter.grad is not None]
    _, foreach = _default_to_fused_or_foreach(stepped, differentiable=False, use_fused=False)
    return {} if foreach else {"foreach": False}
