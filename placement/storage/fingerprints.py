"""Fingerprints show which bytes of a range changed.

They are computed from the bytes themselves, because `Tensor._version` can prove a tensor dirty,
never clean: fused optimizers, collectives and writes through `.data` leave it alone. Each 8-byte
word is mixed with its position and the results are summed, so that sign flips, permutations and
pairs of equal changes show; a changed piece keeps its fingerprint with a chance of about 2**-64.
The words are mixed as in splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number
generators", 2014).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from placement.devices.cuda.fingerprint_kernel import kernel_of

_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)
# A processor mixes words block by block, so that its two buffers stay in the cache: 1 MiB each.
_BLOCK_WORDS = 1 << 17


def used_bytes(nbytes: int) -> int:
    """The bytes that a range of `nbytes` uses: whole 8-byte words, because fingerprints are made of
    these."""
    return -(-nbytes // 8) * 8


def fingerprints(data: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """One 64-bit fingerprint for each consecutive piece of `data`: int64 on its device. Nothing
    waits for the host. `data`: uint8, one-dimensional, of at least `sum(sizes)` bytes.
    `sizes`: bytes of each piece, multiples of 8."""
    if not sizes:
        return torch.empty(0, dtype=torch.int64, device=data.device)
    with torch.no_grad():
        words = data[: sum(sizes)].view(torch.int64)
        if not data.is_cuda:
            return _by_torch(words, sizes, _BLOCK_WORDS)
        kernel = kernel_of(data.device)
        if kernel is None:
            return _by_torch(words, sizes, max(sizes) // 8)
        return kernel.run(words, sizes)


def differing(
    earlier: torch.Tensor | None,
    prints: torch.Tensor,
    first: int = 0,
) -> list[int]:
    """The numbers of the chunks whose fingerprints differ from earlier ones; all chunks where there
    are no earlier ones.
    `earlier`, `prints`: fingerprints of the same chunks, int64 on the CPU.
    `first`: the number of the first chunk."""
    if earlier is None:
        return list(range(first, first + len(prints)))
    indices = (earlier != prints).nonzero().flatten()
    return [first + index for index in indices.tolist()]


def _by_torch(words: torch.Tensor, sizes: Sequence[int], block_words: int) -> torch.Tensor:
    """The definition of fingerprints. It takes two buffers of `block_words` words."""
    block_words = min(block_words, max(sizes) // 8)
    keys = torch.arange(1, block_words + 1, dtype=torch.int64, device=words.device)
    keys.mul_(_STEP)  # one for each position in a block; the block's own is added to each
    buffer = torch.empty_like(keys)
    shifted = torch.empty_like(keys)
    prints = torch.zeros(len(sizes), dtype=torch.int64, device=words.device)
    for index, piece in enumerate(words.split([size // 8 for size in sizes])):
        for start in range(0, len(piece), block_words):
            block = piece[start : start + block_words]
            mixed = buffer[: len(block)]
            bits = shifted[: len(block)]
            torch.add(block, keys[: len(block)], out=mixed)
            mixed.add_(_wrapped(start * _STEP))
            _xor_shifted(mixed, 30, bits).mul_(_MIX_1)
            _xor_shifted(mixed, 27, bits).mul_(_MIX_2)
            prints[index] += _xor_shifted(mixed, 31, bits).sum()
    return prints


def _xor_shifted(words: torch.Tensor, count: int, buffer: torch.Tensor) -> torch.Tensor:
    """`words ^= words >> count` without the sign, which torch's shift of signed integers drags
    along."""
    torch.bitwise_right_shift(words, count, out=buffer)
    return words.bitwise_xor_(buffer.bitwise_and_((1 << (64 - count)) - 1))


def _wrapped(value: int) -> int:
    """The value modulo 2**64, as a signed integer of 64 bits."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
