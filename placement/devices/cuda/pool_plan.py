"""Where torch's allocator puts blocks when it fills an empty pool, worked out beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# How torch's allocator cuts its segments (c10/cuda/CUDACachingAllocator; `cuda_pool.PoolRange` checks every address).
_ROUND = 512
_SMALL = 1 << 20
"""Requests up to here share segments of `SMALL_SEGMENT`; a rest longer than this is split off a larger block."""
SMALL_SEGMENT = 2 << 20
_ARENA_STEP = 2 << 20
_ARENA_LEAST = 10 << 20
"""From here a request gets a segment of its own size, rounded to `_ARENA_STEP`."""


@dataclass(frozen=True, slots=True)
class Place:
    """One block: bytes from the start of the range."""

    offset: int
    nbytes: int
    """What is asked of torch."""
    index: int | None
    """Of the storage it is for; None for a plug."""
    opens: int = 0
    """Length of the segment that torch asks for with this block; 0: it lies in the one before."""


def plan(sizes: Sequence[int]) -> tuple[list[Place], int]:
    """Where torch will put storages of these sizes: the places in the order of asking, and the used length in bytes."""
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
