"""The buckets in which a streamed step takes the state of an optimizer's parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from placement.devices.memory import Mark
from placement.storage.range import Range, RangeChunk

AHEAD = 2
"""The number of buckets that come while one is stepped. With one, the link would wait for each bucket's kernels and driver calls."""


class Piece(NamedTuple):
    """The state of one parameter, or of a slice of it: the least that can be stepped."""

    chunks: tuple[RangeChunk, ...] = ()
    """The chunks that have bytes of it."""
    unborn_bytes: int = 0
    """Bytes of state that the step will create."""

    @property
    def nbytes(self) -> int:
        """Device bytes that it takes to step it alone."""
        return self.unborn_bytes + bytes_of(self.chunks)


@dataclass(slots=True)
class Bucket:
    """Neighbouring pieces, `first` up to `last` (not included), which are stepped together."""

    first: int
    last: int
    chunks: tuple[RangeChunk, ...]
    unborn_bytes: int
    arrived: Mark | None = None
    """Tells when its bytes are on the device."""
    left: Mark | None = None
    """Tells when those that leave with it are on the host."""
    leaving: tuple[RangeChunk, ...] = ()
    fresh: Range | None = None
    """Where the state that its step has created moves when it has been copied."""


def buckets_of(pieces: Sequence[Piece], bucket_bytes: int) -> list[Bucket]:
    """Cut pieces into buckets of at most `bucket_bytes` device bytes each, or of one piece where that is larger.

    A chunk that the bucket before has, too, counts for that one.
    """
    order = {r: place for place, r in enumerate(dict.fromkeys(r for piece in pieces for r, _ in piece.chunks))}
    found: list[Bucket] = []
    before: frozenset[RangeChunk] = frozenset()
    chunks: dict[RangeChunk, None] = {}
    first = unborn = used = 0
    for index, piece in enumerate(pieces):
        more = piece.unborn_bytes + bytes_of(each for each in piece.chunks if each not in chunks and each not in before)
        if index > first and used + more > bucket_bytes:
            found.append(Bucket(first, index, _sorted(chunks, order), unborn))
            before, chunks, first, unborn, used = frozenset(chunks), {}, index, 0, 0
            more = piece.unborn_bytes + bytes_of(each for each in piece.chunks if each not in before)
        chunks.update(dict.fromkeys(piece.chunks))
        unborn, used = unborn + piece.unborn_bytes, used + more
    if pieces:
        found.append(Bucket(first, len(pieces), _sorted(chunks, order), unborn))
    return found


def first_buckets(pieces: Iterable[Piece], bucket_bytes: int, window_bytes: int) -> list[Bucket]:
    """The buckets that a step of these pieces begins with, as many as the window has room for."""
    found, held, nbytes = list[Piece](), set[RangeChunk](), 0
    for piece in pieces:
        held.update(piece.chunks)
        nbytes += piece.unborn_bytes
        if nbytes + bytes_of(held) > window_bytes:
            break
        found.append(piece)
    return buckets_of(found, bucket_bytes)[: AHEAD + 1]


def most_buckets(nbytes: int, bucket_bytes: int) -> int:
    """The most buckets into which state of so many bytes is cut: two neighbours together have more than one bucket's bytes."""
    return 2 * (nbytes // bucket_bytes) + 1


def window_of(pieces: Iterable[Piece], bucket_bytes: int) -> int:
    """The most device bytes that a streamed step of some or all of these pieces needs at a time, where it gets what it wants."""
    pieces = list(pieces)
    largest = max((piece.nbytes for piece in pieces), default=0)
    whole = bytes_of({each for piece in pieces for each in piece.chunks}) + sum(piece.unborn_bytes for piece in pieces)
    return min(whole, AHEAD * bucket_bytes + max(bucket_bytes, largest))


def bytes_of(chunks: Iterable[RangeChunk]) -> int:
    """Device bytes of chunks."""
    return sum(r.chunk_sizes[index] for r, index in chunks)


def _sorted(chunks: Iterable[RangeChunk], order: Mapping[Range, int]) -> tuple[RangeChunk, ...]:
    return tuple(sorted(chunks, key=lambda each: (order[each[0]], each[1])))


def runs(chunks: Iterable[RangeChunk]) -> Iterator[tuple[Range, list[int]]]:
    """The same chunks as runs of neighbours in one range."""
    run: list[int] = []
    at: Range | None = None
    for r, index in chunks:
        if at is not None and (r is not at or index != run[-1] + 1):
            yield at, run
            run = []
        at = r
        run.append(index)
    if at is not None:
        yield at, run
