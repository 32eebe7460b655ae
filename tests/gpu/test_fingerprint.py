"""The Triton kernel computes what the torch definition computes."""

from __future__ import annotations

import pytest
import torch

from placement.storage import range as ranges

pytestmark = pytest.mark.gpu

KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize(
    "sizes",
    [[64 * MIB] * 3 + [2 * MIB], [2 * MIB], [2 * MIB + 4 * KIB], [128 * KIB] * 5, [MIB, MIB, 8]],
    ids=str,
)
def test_the_kernel_agrees_with_the_definition(sizes: list[int]) -> None:
    data = torch.randint(0, 256, (sum(sizes) + 4096,), dtype=torch.uint8, device="cuda")
    kernel = ranges._kernel(data.device)
    assert kernel is not None, "torch's CUDA wheels bring Triton, and it compiles"
    assert kernel.fits(sizes)
    words = data[: sum(sizes)].view(torch.int64)
    expected = ranges._by_torch(words.cpu(), sizes)
    assert ranges.fingerprints(data, sizes).tolist() == expected.tolist()


def test_one_changed_byte_changes_one_chunk() -> None:
    sizes = [2 * MIB] * 16
    data = torch.randint(0, 256, (sum(sizes),), dtype=torch.uint8, device="cuda")
    before = ranges.fingerprints(data, sizes)
    data[5 * 2 * MIB + 77] += 1
    assert (ranges.fingerprints(data, sizes) != before).nonzero().flatten().tolist() == [5]


def test_pieces_that_no_kernel_takes_fall_back() -> None:
    sizes = [24, 8, 4096]
    data = torch.randint(0, 256, (sum(sizes),), dtype=torch.uint8, device="cuda")
    kernel = ranges._kernel(data.device)
    assert kernel is not None
    assert not kernel.fits(sizes)
    assert (
        ranges.fingerprints(data, sizes).tolist() == ranges.fingerprints(data.cpu(), sizes).tolist()
    )
