"""Predict where torch's allocator puts blocks when it fills an empty pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# The way torch's allocator splits its segments (c10/cuda/CUDACachingAllocator). `pool.PoolRange` checks every address.
_ROUND = 512
_SMALL = 1 << 20
"""Requests up to this size share segments of `SMALL_SEGMENT`. A remainder longer than this is split off a larger block."""
SMALL_SEGMENT = 2 << 20
_ARENA_STEP = 2 << 20
_ARENA_LEAST = 10 << 20
"""From this size on a request gets a segment of its own, rounded to `_ARENA_STEP`."""


@dataclass(frozen=True, slots=True)
class Place:
    """One block, with its offset from the start of the range."""

    offset: int
    nbytes: int
    """The size of the request to torch."""
    index: int | None
    """The index of the block's storage; None for a plug."""
    opens: int = 0
    """The length of the segment that torch requests for this block; 0 if the block lies in the segment before."""


def plan(sizes: Sequence[int]) -> tuple[list[Place], int]:
    """Predict the places of storages of these sizes. Returns the places in the order of allocation, and the used bytes."""
    rounded = [max(_ROUND, -(-size // _ROUND) * _ROUND) if size else 0 for size in sizes]
    large = [i for i, size in enumerate(rounded) if size > _SMALL]
    small = sorted((i for i, size in enumerate(rounded) if 0 < size <= _SMALL), key=lambda i: -rounded[i])
    places: list[Place] = []
    cursor = 0
    if large:
        used = sum(rounded[i] for i in large)
        arena = max(_ARENA_LEAST, -(-used // _ARENA_STEP) * _ARENA_STEP)
        for i in large:
            places.append(Place(cursor, sizes[i], i, opens=0 if places else arena))
            cursor += rounded[i]
        if arena - cursor > _SMALL:
            places.append(Place(cursor, arena - cursor, None))
        cursor = arena
    end = cursor
    for i in small:
        opens = 0
        if cursor + rounded[i] > end:
            places += _plugs(cursor, end)
            cursor, end, opens = end, end + SMALL_SEGMENT, SMALL_SEGMENT
        places.append(Place(cursor, sizes[i], i, opens))
        cursor += rounded[i]
    places += _plugs(cursor, end)
    return places, end


def _plugs(start: int, end: int) -> list[Place]:
    return [Place(at, min(_SMALL, end - at), None) for at in range(start, end, _SMALL)]
