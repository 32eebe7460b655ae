"""Checksums of what is on a disk: cut anywhere they add up, and they change with the bytes."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.storage.disk.checksum import _PART_WORDS, partial_checksum

WORDS = 3 * _PART_WORDS + 5
PLACES = st.integers(0, WORDS - 1)


def drawn(seed: int = 0, count: int = WORDS) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(1 << 63), (1 << 63) - 1, (count,), generator=generator, dtype=torch.int64)


BYTES = drawn()
CHECKSUM = partial_checksum(BYTES, 0)


def changed(**words: int) -> int:
    other = BYTES.clone()
    for place, word in words.items():
        other[int(place[1:])] = word - (1 << 64) if word >= 1 << 63 else word
    return partial_checksum(other, 0)


def word(place: int) -> int:
    return int(BYTES[place]) % (1 << 64)


@given(st.lists(PLACES, max_size=6))
def test_parts_add_up_wherever_they_are_cut(cuts: list[int]) -> None:
    ends = sorted({0, WORDS, *cuts})
    parts = [partial_checksum(BYTES[start:end], start) for start, end in zip(ends, ends[1:], strict=False)]
    assert sum(parts) % (1 << 64) == CHECKSUM


def test_every_single_bit_counts() -> None:
    for place in (0, 1, _PART_WORDS - 1, _PART_WORDS, WORDS - 1):
        assert len({changed(**{f"w{place}": word(place) ^ 1 << bit}) for bit in range(64)} | {CHECKSUM}) == 65


@settings(max_examples=200)
@given(PLACES, PLACES, st.integers(0, 63))
def test_the_same_bit_in_two_words_and_words_that_change_places_show(one: int, other: int, bit: int) -> None:
    """Sign bits, above all: with one product a word, two of them would cancel out."""
    if one == other:
        return
    assert changed(**{f"w{one}": word(one) ^ 1 << bit, f"w{other}": word(other) ^ 1 << bit}) != CHECKSUM
    assert changed(**{f"w{one}": word(other), f"w{other}": word(one)}) != CHECKSUM


def test_whole_parts_that_change_places_show() -> None:
    first, second, rest = BYTES.split([_PART_WORDS, _PART_WORDS, WORDS - 2 * _PART_WORDS])
    assert partial_checksum(torch.cat([second, first, rest]), 0) != CHECKSUM
    assert partial_checksum(torch.cat([first, first, rest]), 0) != CHECKSUM


def test_zeros_have_the_checksum_of_nothing_and_a_value_among_them_shows() -> None:
    zeros = torch.zeros(WORDS, dtype=torch.int64)
    assert partial_checksum(zeros, 0) == 0
    zeros[7] = 1
    assert partial_checksum(zeros, 0) != 0
