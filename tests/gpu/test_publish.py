"""Publishing on a real device: values that come on a stream of their own, their memory, and changes
alone."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import placement
from placement.policies import Colocated
from placement.testing import assert_nothing_resident

pytestmark = pytest.mark.gpu

MIB = 1 << 20


def model_of(tensors: int) -> nn.ParameterList:
    """Tensors of 1 to 9 MiB in fp32 and bf16, each with its own values."""
    generator = torch.Generator("cuda").manual_seed(3)
    found = nn.ParameterList()
    for index in range(tensors):
        values = torch.randn(MIB // 4 * (1 + index % 9), generator=generator, device="cuda")
        found.append(nn.Parameter(values if index % 3 else values.bfloat16()))
    return found


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_streamed_sync_publishes_the_values_and_gives_its_buckets_back_at_its_end(
    dtype: torch.dtype | None,
) -> None:
    model = model_of(60)
    wanted = [each.detach().to(dtype or each.dtype).cpu() for each in model]
    manager = placement.Manager(device="cuda:0", policy=Colocated(stream_sync=True))
    actor = manager.register("actor", model, role="actor")
    factor = torch.randn(4096, 4096, device="cuda")
    factor @ factor  # cuBLAS takes a workspace once
    gc.collect()
    torch.cuda.empty_cache()
    for bucket_bytes in (16 * MIB, 100 * MIB):
        before = torch.cuda.memory_reserved()
        got: list[torch.Tensor] = []
        with manager.phase("weight_sync"):
            for bucket in actor.weights(bucket_bytes=bucket_bytes, dtype=dtype):
                factor @ factor  # the consumer's stream is behind when the next bucket is asked for
                got += [
                    torch.empty_like(tensor, device="cpu").copy_(tensor, non_blocking=True)
                    for _, tensor in bucket
                ]
            assert torch.cuda.memory_reserved() > before
            del bucket
        assert torch.cuda.memory_reserved() == before
        assert all(a.equal(b) for a, b in zip(got, wanted, strict=True))
    assert_nothing_resident(manager)
    manager.close()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("offloads", [False, True], ids=["on the device", "offloaded before"])
def test_receivers_that_write_the_changes_of_ten_steps_have_every_bit(
    offloads: bool, dtype: torch.dtype | None
) -> None:
    model = model_of(60)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    manager = placement.Manager(device="cuda:0")
    actor = manager.register("actor", model, role="actor")
    manager.register("optimizer", optimizer)
    received = {
        info.name: torch.empty(info.shape, dtype=info.dtype, device="cuda")
        for info in actor.weights_info(dtype=dtype)
    }
    version, whole = None, sum(each.nbytes for each in received.values())
    for step in range(10):
        with manager.phase("train") as phase:
            with torch.no_grad():
                for parameter in model:
                    parameter[step::101].mul_(1.5)
            del parameter
            if offloads:
                phase.switch("idle")
            phase.switch("weight_sync")
            sent = 0
            for bucket in actor.weight_changes(since=version, bucket_bytes=8 * MIB, dtype=dtype):
                for change in bucket:
                    change.write_into(received[change.name])
                sent += bucket.nbytes
                version = bucket.version
            del bucket, change
            assert sent == whole if offloads or step == 0 else sent < whole / 20
            for pairs in actor.weights(dtype=dtype):
                assert all(
                    tensor.view(torch.uint8).equal(received[name].view(torch.uint8))
                    for name, tensor in pairs
                )
            del pairs
    assert_nothing_resident(manager)
    manager.close()
