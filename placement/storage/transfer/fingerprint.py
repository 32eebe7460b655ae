"""Fingerprints, which show whether bytes changed, whoever wrote them.

`Tensor._version` can prove a tensor dirty, never clean: fused optimizers, collectives and writes through `.data` leave it alone.
So the fingerprint is computed from the bytes themselves. Each 8-byte word is mixed with its position and the results are summed, so that
sign flips, permutations and pairs of equal changes show; a changed piece keeps its fingerprint with a chance of about 2**-64.
The mixing steps are those of splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Sequence
from types import ModuleType

import torch

from placement.core.journal import logger


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_STEP = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def _shift(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift right: torch's shift of a signed integer drags the sign along."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def fingerprints(data: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """One 64-bit fingerprint for each consecutive piece of `data`: int64 on its device. Nothing waits for the host.
    `data`: uint8, one-dimensional, of at least `sum(sizes)` bytes.
    `sizes`: bytes of each piece, multiples of 8."""
    if not sizes:
        return torch.empty(0, dtype=torch.int64, device=data.device)
    with torch.no_grad():
        words = data[: sum(sizes)].view(torch.int64)
        if data.is_cuda and (kernel := _kernel(data.device)) is not None and kernel.fits(sizes):
            return _by_kernel(kernel, words, sizes)
        return _by_torch(words, sizes)


def differing(known: torch.Tensor | None, found: torch.Tensor, first: int = 0) -> list[int]:
    """The numbers of the chunks whose bytes differ from those of which fingerprints are known; all where none are.
    `known`, `found`: fingerprints of the same chunks, int64 on the CPU.
    `first`: the number of the first chunk."""
    count = len(found)
    places = range(count) if known is None else (known != found).nonzero().flatten().tolist()
    return [first + index for index in places]


@functools.cache
def _kernel(device: torch.device) -> ModuleType | None:
    """The Triton kernel's module; None where torch came without Triton, or Triton cannot compile (it needs a C compiler)."""
    if importlib.util.find_spec("triton") is None:
        return None
    try:
        kernel = importlib.import_module("placement.storage.transfer.fingerprint_triton")
        _by_kernel(kernel, torch.zeros(1, dtype=torch.int64, device=device), [8])
    except Exception as error:  # a missing compiler shows as errors of many kinds, and none of them may fail an offload
        logger.warning("Triton's kernel for fingerprints does not run here, so they take about three times as long: %s", error)
        return None
    return kernel


def _by_kernel(kernel: ModuleType, words: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    found: torch.Tensor = kernel.fingerprints(words, sizes, step=_signed(_STEP), mix_1=_MIX_1, mix_2=_MIX_2)
    return found


def _by_torch(words: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """The definition of fingerprints, used where Triton does not run. It takes about three times as long, and temporaries of 3 pieces."""
    keys = torch.arange(1, max(sizes) // 8 + 1, dtype=torch.int64, device=words.device).mul_(_signed(_STEP))
    out = []
    for piece in words.split([size // 8 for size in sizes]):
        mixed = piece + keys[: piece.numel()]
        mixed = mixed.bitwise_xor_(_shift(mixed, 30)).mul_(_signed(_MIX_1))
        mixed = mixed.bitwise_xor_(_shift(mixed, 27)).mul_(_signed(_MIX_2))
        out.append(mixed.bitwise_xor_(_shift(mixed, 31)).sum())
    return torch.stack(out)
