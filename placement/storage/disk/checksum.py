"""Checksums of host copies on a disk: they find what comes back wrong, several times as fast on the processor as fingerprints.

Sums of products with random keys, modulo 2**64 (multilinear hashing; Lemire and Kaser, "Strongly universal string hashing is fast", The
Computer Journal, 2014). Each 8-byte word is multiplied twice, once as it is and once shifted right by half its length, because a product's
low bits know nothing of the word's high ones. So every change of a single bit shows, and of any other ones all but about 2**-33.
"""

from __future__ import annotations

import functools
import itertools

import torch

_PART_WORDS = 1 << 15
"""The words that share a factor: 256 KiB. Each table of keys has as many, and stays in the processor's cache."""
_STEP = 0x9E3779B97F4A7C15
_SEED = 0x706C6163


def partial_checksum(words: torch.Tensor, first: int) -> int:
    """The share that some words have in a checksum, which is the sum over all of them.

    Args:
        words: int64, one-dimensional, on the CPU.
        first: the position of the first of them among all words.

    Returns:
        A number below 2**64; sums of them are modulo 2**64.
    """
    with torch.no_grad():
        shifted = words >> 32
        start = min(-first % _PART_WORDS, words.numel())
        end = start + (words.numel() - start) // _PART_WORDS * _PART_WORDS
        cuts = (0, start, end, words.numel())
        shares = (_share(words[a:b], shifted[a:b], first + a) for a, b in itertools.pairwise(cuts) if a < b)
        return sum(shares) % (1 << 64)


def _share(words: torch.Tensor, shifted: torch.Tensor, first: int) -> int:
    """The share of words that lie in one part, or that are several whole parts. Few long calls, so that other threads get their turn."""
    keys, shifted_keys = _keys()
    index, start = divmod(first, _PART_WORDS)
    width = min(len(words), _PART_WORDS)
    sums = torch.mv(words.view(-1, width), keys[start : start + width])
    sums += torch.mv(shifted.view(-1, width), shifted_keys[start : start + width])
    # An odd factor for each part, because the same keys serve all.
    return sum(found * ((2 * part + 1) * _STEP) for part, found in enumerate(sums.tolist(), index))


@functools.cache
def _keys() -> tuple[torch.Tensor, torch.Tensor]:
    """Odd numbers, so that no change of a single bit is multiplied to 0."""
    generator = torch.Generator("cpu").manual_seed(_SEED)
    drawn = torch.randint(-(1 << 63), (1 << 63) - 1, (2, _PART_WORDS), generator=generator, dtype=torch.int64, device="cpu")
    return tuple(drawn.bitwise_or_(1))
