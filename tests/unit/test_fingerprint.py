"""Changes that simpler sums and xors miss."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from placement.memory.fingerprint import fingerprints

Change = Callable[[torch.Tensor], object]

CHANGES: dict[str, Change] = {
    "negation": lambda v: v.neg_(),
    "two sign flips": lambda v: v.index_copy_(0, torch.tensor([3, 900]), -v[[3, 900]]),
    "a swap of two values": lambda v: v.index_copy_(0, torch.tensor([1, 800]), v[[800, 1]]),
    "a rotation": lambda v: v.copy_(v.roll(1)),
    "a reversal": lambda v: v.copy_(v.flip(0)),
    "one last bit": lambda v: v.view(torch.int32)[512].bitwise_xor_(1),
    "equal steps up and down": lambda v: v.view(torch.int64).index_add_(0, torch.tensor([10, 20]), torch.tensor([1, -1])),
    "minus zero": lambda v: v[7].neg_(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_change_shows(change: Change) -> None:
    values = torch.randn(1024)
    values[7] = 0.0
    data = values.view(torch.uint8)
    before = fingerprints(data, [4096])
    change(values)
    assert fingerprints(data, [4096]).tolist() != before.tolist()


def test_only_the_changed_piece_shows() -> None:
    data = torch.randint(0, 256, (4 * 4096,), dtype=torch.uint8)
    before = fingerprints(data, [4096] * 4)
    data[2 * 4096 + 5] ^= 1
    assert (fingerprints(data, [4096] * 4) != before).tolist() == [False, False, True, False]


def test_a_piece_has_the_same_fingerprint_wherever_it_lies_and_whatever_surrounds_it() -> None:
    piece = torch.randint(0, 256, (4096,), dtype=torch.uint8)
    alone = fingerprints(piece, [4096])
    after = fingerprints(torch.cat([piece.flip(0), piece, piece]), [4096, 4096, 4096])
    assert after[1:].tolist() == [*alone.tolist(), *alone.tolist()]
    assert after[0] != alone[0]


def test_nothing_has_no_fingerprint() -> None:
    assert fingerprints(torch.empty(0, dtype=torch.uint8), []).shape == (0,)
