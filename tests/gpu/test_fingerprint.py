"""The kernel on the device computes what the definition in torch computes on the host."""

from __future__ import annotations

import pytest
import torch

from placement.devices.cuda.fingerprint_kernel import kernel_of
from placement.storage.fingerprints import fingerprints

pytestmark = pytest.mark.gpu

KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize(
    "sizes",
    [
        [64 * MIB] * 3 + [2 * MIB],
        [2 * MIB],
        [2 * MIB + 4 * KIB],
        [128 * KIB] * 5,
        [MIB, MIB, 8],
        [24, 8, 4096],
        [128 * KIB, 256 * KIB],
        [8, 0, 16],
    ],
    ids=str,
)
def test_the_kernel_agrees_with_the_definition(sizes: list[int]) -> None:
    data = torch.randint(0, 256, (sum(sizes) + 4096,), dtype=torch.uint8, device="cuda")
    assert kernel_of(data.device) is not None, "torch's CUDA wheels bring NVRTC"
    assert fingerprints(data, sizes).tolist() == fingerprints(data.cpu(), sizes).tolist()


def test_one_changed_byte_changes_one_chunk() -> None:
    sizes = [2 * MIB] * 16
    data = torch.randint(0, 256, (sum(sizes),), dtype=torch.uint8, device="cuda")
    before = fingerprints(data, sizes)
    data[5 * 2 * MIB + 77] += 1
    assert (fingerprints(data, sizes) != before).nonzero().flatten().tolist() == [5]
