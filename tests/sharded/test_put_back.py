"""Parameters that are replaced while they are offloaded (`to()`, `half()`, a framework's own offload) get their places, forms and
values back, and whatever shards them trains on as if nothing had been. Real frameworks on CPU ranks with gloo."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from torch.distributed.fsdp import ShardingStrategy

from tests.sharded import ddp_worker, fsdp1_worker, fsdp2_worker, megatron_worker, peft_worker, test_quantized
from tests.sharded import put_back_worker as worker
from tests.support.ranks import Ranks

FSDP2: dict[str, Any] = {
    "plain": fsdp2_worker.plain_fsdp2,
    "accumulating": functools.partial(fsdp2_worker.accumulating_fsdp2, None),
    "hybrid": fsdp2_worker.hybrid_fsdp2,
    "meshes": fsdp2_worker.several_meshes,
    "tensor parallel": functools.partial(fsdp2_worker.tensor_parallel_program, "AdamW", foreach=True),
    "adapters": functools.partial(peft_worker.build, True, False),
}
FSDP1 = {
    "original": fsdp1_worker.Variant(True),
    "original-accumulating": fsdp1_worker.Variant(True, accumulates=True),
    "original-no_shard": fsdp1_worker.Variant(True, ShardingStrategy.NO_SHARD),
    "flat": fsdp1_worker.Variant(False),
    "flat-grad_op": fsdp1_worker.Variant(False, ShardingStrategy.SHARD_GRAD_OP, fsdp1_worker.HALF),
    "flat-no_shard": fsdp1_worker.Variant(False, ShardingStrategy.NO_SHARD),
}


@pytest.mark.parametrize("way", ["to", "half", *(pytest.param(each, marks=pytest.mark.slow) for each in ("exchanged", "layers"))])
@pytest.mark.parametrize("name", FSDP2)
def test_fsdp2_and_tensor_parallel(two_ranks: Ranks, name: str, way: str) -> None:
    assert all(two_ranks.run(worker.trains_on, FSDP2[name], way))


@pytest.mark.parametrize(
    ("name", "way"),
    # Under original names torch's own `_apply` fails beside gradients that no reduction has brought to their parameters yet.
    [
        pytest.param(name, way, marks=[pytest.mark.slow] if way == "double" else [])
        for name in FSDP1
        for way in ("to", "double", "verl")
        if name != "original-accumulating" or way == "verl"
    ],
)
def test_fsdp1(two_ranks: Ranks, name: str, way: str) -> None:
    assert all(two_ranks.run(worker.trains_on, FSDP1[name].program, way))


@pytest.mark.parametrize("way", ["to", pytest.param("layers", marks=pytest.mark.slow)])
@pytest.mark.parametrize("view", [False, True])
def test_ddp(two_ranks: Ranks, view: bool, way: str) -> None:
    variant = ddp_worker.Variant({"gradient_as_bucket_view": view})
    assert all(two_ranks.run(worker.trains_on, variant.program, way))


def test_ddp_whose_hooks_torch_has_dropped(two_ranks: Ranks) -> None:
    """With other gradients on every rank nobody would notice."""
    for told in two_ranks.run(worker.names_what_is_lost, ddp_worker.Variant().program, "double"):
        assert "DistributedDataParallel no longer averages its gradients" in told
        assert "wrap the module again" in told


@pytest.mark.parametrize("way", ["to", "half"])
def test_adapters(one_rank: Ranks, way: str) -> None:
    one_rank.run(worker.trains_on, functools.partial(peft_worker.build, False, True), way)


@pytest.mark.parametrize("way", ["to", pytest.param("half", marks=pytest.mark.slow)])
@pytest.mark.parametrize("named", ["torchao int8", "torchao float8", "bitsandbytes int8", "bitsandbytes nf4"])
def test_quantised_weights(one_rank: Ranks, named: str, way: str) -> None:
    one_rank.run(worker.trains_on, functools.partial(test_quantized.build, *named.split()), way)


@pytest.mark.parametrize("way", ["to", pytest.param("layers", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", [megatron_worker.KINDS[0], megatron_worker.KINDS[4], megatron_worker.KINDS[6]], ids=str)
def test_megatron(two_ranks: Ranks, kind: megatron_worker.Kind, way: str) -> None:
    """The parameters are cut from a buffer that stays behind, and the optimizer has shards of it."""
    assert all(two_ranks.run(worker.trains_on, functools.partial(megatron_worker.build, kind), way, megatron_worker.pretend_cuda))
