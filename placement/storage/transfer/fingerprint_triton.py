"""The fingerprints of `placement.storage.range` by one Triton kernel. It reads the memory once,
without temporaries.

This module is imported on first use on a CUDA device, and only there: Triton comes with torch's
CUDA wheels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from placement.storage.range import MIX_1, MIX_2, STEP

_BLOCK = 1024
_BLOCKS_A_PROGRAM = 16  # so that there is one atomic addition for each 128 KiB read


@triton.jit  # type: ignore[untyped-decorator]
def _fingerprint(
    words: tl.tensor,
    out: tl.tensor,
    num_words: tl.tensor,
    piece_words: tl.tensor,
    step: tl.constexpr,
    mix_1: tl.constexpr,
    mix_2: tl.constexpr,
    block: tl.constexpr,
    blocks: tl.constexpr,
) -> None:
    start = tl.program_id(0).to(tl.int64) * (block * blocks)
    piece = start // piece_words
    total = tl.zeros([block], dtype=tl.int64)
    for index in range(blocks):
        offset = start + index * block + tl.arange(0, block).to(tl.int64)
        inside = offset < num_words
        word = tl.load(words + offset, mask=inside, other=0)
        mixed = (word + (offset - piece * piece_words + 1) * step).to(tl.uint64, bitcast=True)
        mixed = (mixed ^ (mixed >> 30)) * tl.cast(mix_1, tl.uint64)
        mixed = (mixed ^ (mixed >> 27)) * tl.cast(mix_2, tl.uint64)
        mixed = mixed ^ (mixed >> 31)
        total += tl.where(inside, mixed.to(tl.int64, bitcast=True), 0)
    tl.atomic_add(out + piece, tl.sum(total))


def fits(sizes: Sequence[int]) -> bool:
    """Whether the kernel can take these pieces: a single one, or all of one size that is a whole
    number of programs, the last no longer."""
    whole = sizes[0] % (8 * _BLOCK * _BLOCKS_A_PROGRAM) == 0
    return (
        whole and all(size == sizes[0] for size in sizes[:-1]) and sizes[-1] <= sizes[0]
    ) or len(sizes) == 1


def fingerprints(words: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """Compute `placement.storage.range.fingerprints` of data as int64. `fits` must be True of the
    sizes."""
    out = torch.zeros(len(sizes), dtype=torch.int64, device=words.device)
    span = _BLOCK * _BLOCKS_A_PROGRAM
    piece_words = sizes[0] // 8 if len(sizes) > 1 else -(-words.numel() // span) * span
    grid = (-(-words.numel() // span),)
    with torch.cuda.device(words.device):
        _fingerprint[grid](
            words, out, words.numel(), piece_words, STEP, MIX_1, MIX_2, _BLOCK, _BLOCKS_A_PROGRAM
        )
    return out
