"""How parameters are cut into buckets, and a slab into parts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.devices.host.slab import Slab, cut
from placement.storage.transfer.streamed import AHEAD, Piece, buckets_of, most_buckets, window_of

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
