"""How parameters are cut into buckets, and a slab into parts."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.devices.host.part import cut
from placement.devices.host.slab import Slab
from placement.storage.transfer.buckets import AHEAD, Piece, buckets_of, first_buckets, most_buckets, step_order, window_of

CHUNK = 4


def a_range(chunks: int) -> Any:
    return type("Range", (SimpleNamespace,), {"__hash__": object.__hash__, "__eq__": object.__eq__})(chunk_sizes=(CHUNK,) * chunks)


@st.composite
def drawn_pieces(draw: st.DrawFn) -> list[Piece]:
    """State of parameters that lies one after the other in a range, or in any chunks of a second one, or is still to be born."""
    sizes = draw(st.lists(st.integers(0, 3 * CHUNK), max_size=30))
    first, second = a_range(sum(sizes) // CHUNK + 1), a_range(5)
    pieces, start = [], 0
    for size in sizes:
        chunks = [(first, index) for index in range(start // CHUNK, (start + size - 1) // CHUNK + 1)] if size else []
        chunks += [(second, index) for index in sorted(draw(st.sets(st.integers(0, 4), max_size=1)))]
        pieces.append(Piece(tuple(chunks), draw(st.sampled_from([0, 0, 3, 9]))))
        start += size
    return pieces


@given(drawn_pieces(), st.integers(1, 10).map(lambda chunks: chunks * CHUNK))
def test_buckets_are_neighbours_within_their_size(pieces: list[Piece], bucket_bytes: int) -> None:
    buckets = buckets_of(pieces, bucket_bytes)
    assert [index for bucket in buckets for index in range(bucket.first, bucket.last)] == list(range(len(pieces)))
    before: set[Any] = set()
    for bucket in buckets:
        members = pieces[bucket.first : bucket.last]
        assert set(bucket.chunks) == {each for piece in members for each in piece.chunks}
        assert len(set(bucket.chunks)) == len(bucket.chunks)
        assert bucket.unborn_bytes == sum(piece.unborn_bytes for piece in members)
        new = bucket.unborn_bytes + CHUNK * len(set(bucket.chunks) - before)
        assert new <= bucket_bytes or len(members) == 1
        before = set(bucket.chunks)
        for r in {r for r, _ in bucket.chunks}:  # neighbours can be mapped and copied together
            indices = [index for other, index in bucket.chunks if other is r]
            assert indices == sorted(indices)


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 60))
def test_unborn_state_is_cut_into_no_more_parts_than_were_reserved(sizes: list[int], bucket_bytes: int) -> None:
    buckets = buckets_of([Piece((), size) for size in sizes], bucket_bytes)
    assert len(buckets) <= most_buckets(sum(sizes), bucket_bytes)


def test_both_ends_of_a_step_are_small_and_what_is_large_is_in_the_middle() -> None:
    r = a_range(1000)
    starts = [0, 100, *range(101, 900), 1000]  # a first piece of 100 chunks, a last one of 101, and others of one chunk
    pieces = [Piece(tuple((r, index) for index in range(start, end))) for start, end in pairwise(starts)]
    order = step_order(pieces, 40 * CHUNK)
    assert sorted(order) == [*range(len(pieces))]
    assert order[:2] == [1, 2]
    assert order[-2:] == [len(pieces) - 3, len(pieces) - 2]
    sizes = [len(bucket.chunks) for bucket in buckets_of([pieces[index] for index in order], 40 * CHUNK)]
    assert sizes[:4] == [5, 10, 20, 40]
    assert [size for size in sizes if size > 40] == [100, 101]
    assert sizes[-1] <= 5
    assert all(size <= max(5, sum(sizes[place:]) // 2) for place, size in enumerate(sizes) if size <= 40)


def test_state_that_is_to_be_created_is_cut_into_as_few_buckets_as_can_be() -> None:
    buckets = buckets_of([Piece((), 1)] * 100, 10)
    assert [bucket.last - bucket.first for bucket in buckets] == [10] * 10


@given(drawn_pieces(), st.integers(1, 10).map(lambda chunks: chunks * CHUNK), st.integers(1, 200))
def test_first_buckets_are_those_of_the_step_and_fit_the_window(pieces: list[Piece], bucket_bytes: int, window_bytes: int) -> None:
    first = first_buckets(pieces, bucket_bytes, window_bytes)
    assert first == buckets_of(pieces, bucket_bytes)[: len(first)]
    held = {each for bucket in first for each in bucket.chunks}
    assert CHUNK * len(held) + sum(bucket.unborn_bytes for bucket in first) <= window_bytes


@given(drawn_pieces(), st.integers(1, 10).map(lambda chunks: chunks * CHUNK))
def test_a_window_has_room_for_each_bucket_and_is_no_larger_than_all(pieces: list[Piece], bucket_bytes: int) -> None:
    window = window_of(pieces, bucket_bytes)
    everything = CHUNK * len({each for piece in pieces for each in piece.chunks}) + sum(piece.unborn_bytes for piece in pieces)
    assert window <= everything
    assert window <= AHEAD * bucket_bytes + max([bucket_bytes, *(piece.nbytes for piece in pieces)])
    assert all(min(everything, piece.nbytes) <= window for piece in pieces)


def test_parts_of_a_slab_are_apart_and_keep_it_alive() -> None:
    whole = Slab(1000)
    address = whole.address
    part, rest = cut(whole, 100)
    assert rest is not None
    assert (part.address, part.nbytes) == (address, 100)
    assert (rest.address, rest.nbytes) == (address + 128, 872)
    last, none = cut(rest, 872)
    assert none is None
    del whole, rest
    part.view(0, 100).fill_(1)
    last.view(0, 872).fill_(2)
    assert part.view(90, 10).tolist() == [1] * 10
    assert last.view(870, 2).tolist() == [2, 2]
    assert part.view(8, 8).untyped_storage().nbytes() == 8
    assert part.ready.is_set()
    assert (part.pinned_bytes, part.pageable_bytes, part.pageable_reason, part.held_bytes) == (0, 0, None, 100)
    with pytest.raises(ValueError, match="not within"):
        part.view(96, 8)
    with pytest.raises(ValueError, match="not within"):
        cut(last, 1000)


class _Pinned(Slab):
    """A slab of which the device has pinned some bytes and refused others."""

    pinned_bytes = 600
    pageable_bytes = 400
    pageable_reason = "refused"


def test_a_part_of_a_slab_that_is_pinned_in_part_has_its_share() -> None:
    part, _ = cut(_Pinned(1000), 100)
    assert (part.pinned_bytes, part.pageable_bytes, part.pageable_reason) == (60, 40, "refused")
    assert not part.pinned
