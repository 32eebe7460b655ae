"""The parts in which a streamed step takes an optimizer's parameters, and where the state of each part lies.

A part is a parameter, or a slice of one whose state is larger than a bucket.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from placement.ownership.optimizer import OptimizerAdapter
from placement.ownership.partial_step import ParameterSlice, is_counter, is_elementwise, sliceable_state
from placement.storage.managed import ManagedStorage
from placement.storage.range import Range, RangeChunk
from placement.storage.transfer.streamed import Piece
from placement.tensors.plain import PLAIN_TYPES, has_bytes, nested_tensors, plain_parts

_ALIGNED_ELEMENTS = 64
"""Slices begin at multiples of this, so that kernels that compute several elements at once take the same ones together as in the whole."""


class StepPart(NamedTuple):
    """A part of a step."""

    stepped: torch.Tensor | ParameterSlice
    piece: Piece
    """Where its state is, and how much of it is still to be created."""


class StepParts:
    """Cuts the steps of one optimizer handle into parts.

    Args:
        bucket_bytes: device bytes of a bucket, in whole chunks.
    """

    def __init__(self, holding: ManagedStorage, adapter: OptimizerAdapter, bucket_bytes: int) -> None:
        self._holding = holding
        self._adapter = adapter
        self._bucket_bytes = bucket_bytes
        self._found_in: tuple[Range, ...] = ()
        self._chunks: dict[tuple[int, ...], tuple[RangeChunk, ...]] = {}
        """The chunks of a parameter's state in these ranges, by the addresses of its tensors: finding them takes 12 us a parameter."""

    def of(self, optimizer: Any, parameter: torch.Tensor) -> list[StepPart]:
        """The parts of a parameter, in order."""
        entry = optimizer.state.get(parameter)
        whole = Piece(self._chunks_of(entry) if entry else (), self._adapter.unborn_bytes_of(parameter))
        if whole.nbytes > self._bucket_bytes and not whole.unborn_bytes and is_elementwise(optimizer):
            slices = self._slices(optimizer, parameter)
            if slices and max(part.piece.nbytes for part in slices) < whole.nbytes:
                return slices
        return [StepPart(parameter, whole)]

    def _chunks_of(self, entry: Any) -> tuple[RangeChunk, ...]:
        """The chunks that have bytes of a parameter's state."""
        if self._found_in is not self._holding.ranges:
            self._found_in, self._chunks = self._holding.ranges, {}
        tensors = [*_tensors_in(entry)]
        addresses = tuple([each.data_ptr() for each in tensors])
        if addresses not in self._chunks:
            storages = [each.untyped_storage() for each in tensors]
            found = (self._between(tensor, each.data_ptr(), each.nbytes()) for tensor, each in zip(tensors, storages, strict=True))
            self._chunks[addresses] = _distinct(found)
        return self._chunks[addresses]

    def _between(self, tensor: torch.Tensor, address: int, nbytes: int) -> Iterator[RangeChunk]:
        """The chunks behind bytes of a tensor's storage; none where it has its bytes in torch's own memory."""
        found = self._holding.storages.by_address.find(tensor)
        if found is None or not nbytes:
            return
        r, base = found[0], found[0].layout.addresses.base
        if base <= address < base + r.nbytes:  # else it lies in the slab
            size = r.chunk_sizes[0]
            yield from ((r, index) for index in range((address - base) // size, (address - base + nbytes - 1) // size + 1))

    def _slices(self, optimizer: Any, parameter: torch.Tensor) -> list[StepPart]:
        """Slices whose state takes a bucket each; empty if the parameter cannot be sliced.

        They end where chunks of the state's first tensor end, so that neighbours share few chunks.
        """
        state = sorted(sliceable_state(optimizer, parameter), key=torch.Tensor.element_size, reverse=True)
        place = next(iter(self._between(state[0], state[0].data_ptr(), 1)), None) if state else None
        if place is None:
            return []
        r, index = place
        num_chunks = max(1, self._bucket_bytes // (len(state) * r.chunk_sizes[0]))
        ends = (r.layout.addresses.base + each * r.chunk_sizes[0] for each in range(index + num_chunks, len(r.chunk_sizes), num_chunks))
        bounds = sorted({0, state[0].numel(), *(self._element(state[0], end) for end in ends)})
        counters = [tensor for tensor in _tensors_in(optimizer.state[parameter]) if is_counter(tensor)]
        return [self._slice(ParameterSlice(parameter, *each), state, counters) for each in itertools.pairwise(bounds)]

    def _element(self, tensor: torch.Tensor, address: int) -> int:
        """The element of a flat tensor at which a slice that is to end at an address ends."""
        element = (address - tensor.data_ptr()) // tensor.element_size()
        return min(element // _ALIGNED_ELEMENTS * _ALIGNED_ELEMENTS, tensor.numel())

    def _slice(self, part: ParameterSlice, state: Sequence[torch.Tensor], counters: Sequence[torch.Tensor]) -> StepPart:
        found = [self._between(each, each.data_ptr(), each.nbytes) for each in counters]
        for each in state:
            size = each.element_size()
            found.append(self._between(each, each.data_ptr() + part.start * size, (part.stop - part.start) * size))
        return StepPart(part, Piece(_distinct(found)))


def _tensors_in(entry: Any) -> Iterator[torch.Tensor]:
    """The tensors with bytes of their own in a parameter's state."""
    for value in entry.values() if type(entry) is dict else (entry,):
        if type(value) in PLAIN_TYPES:  # the common case first
            yield from (value,) if has_bytes(value) else ()
        else:
            yield from (part for _, tensor in nested_tensors(value, "") for _, part in plain_parts(tensor, ""))


def _distinct(places: Iterable[Iterable[RangeChunk]]) -> tuple[RangeChunk, ...]:
    return tuple(dict.fromkeys(itertools.chain.from_iterable(places)))
