"""Frameworks with NCCL: the programs of tests/sharded's workers, which run with gloo, for most of
them on a CPU that pretends to be CUDA.

What shards runs on two GPUs, and some of it on one; what is not sharded on one. A framework that is
not installed is skipped.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.gpu.on_gpus import measure
from tests.sharded import (
    deepspeed_worker,
    megatron_fsdp_worker,
    megatron_worker,
    test_quantized,
    training,
    veomni_worker,
)
from tests.sharded.training import Program
from tests.support.ranks import Ranks

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

CUDA = "cuda"
DEADLINE_SECONDS = 120.0
"""The first program of a framework imports it, and starts NCCL for its groups."""

SHARDED: dict[str, Callable[[], Program]] = {
    **{
        f"megatron {kind}": functools.partial(megatron_worker.build, kind, CUDA)
        for kind in megatron_worker.KINDS
    },
    **{
        (f"megatron_fsdp {strategy}"): functools.partial(
            megatron_fsdp_worker.build, "0.6.1", strategy, CUDA
        )
        for strategy in megatron_fsdp_worker.STRATEGIES
    },
    "megatron fsdp": functools.partial(
        megatron_fsdp_worker.build, "in megatron-core", megatron_fsdp_worker.STRATEGIES[0], CUDA
    ),
    "deepspeed zero 0": functools.partial(deepspeed_worker.build, 0, torch.float32, CUDA),
    **{
        f"deepspeed zero {stage}": functools.partial(
            deepspeed_worker.build, stage, torch.bfloat16, CUDA
        )
        for stage in (1, 2, 3)
    },
    **{
        f"veomni {experts}": functools.partial(veomni_worker.build, experts, CUDA)
        for experts in (1, 2)
    },
}
"""By a name that begins with the package."""
WHOLE: dict[str, Callable[[], Program]] = {
    **{
        f"{package} {kind}": functools.partial(test_quantized.build, package, kind, CUDA)
        for package, kind in test_quantized.CASES
    },
    **{
        name.replace("bnb", "bitsandbytes"): functools.partial(test_quantized.learner, make, CUDA)
        for name, make in test_quantized.OPTIMIZERS.items()
    },
}
EXTERNAL = {f"deepspeed zero {stage}" for stage in (1, 2, 3)}
"""What the framework places itself."""
PLAIN, PRECISION_AWARE = (
    (f"megatron {megatron_worker.KINDS[0]}"),
    (f"megatron {megatron_worker.KINDS[2]}"),
)
ON_ONE = (PLAIN, PRECISION_AWARE, "megatron_fsdp optim_grads_params", "deepspeed zero 0", *WHOLE)
MEASURED = (
    PLAIN,
    PRECISION_AWARE,
    ("megatron_fsdp optim_grads_params"),
    "deepspeed zero 0",
    "deepspeed zero 3",
    "veomni 2",
)
MEASURED_ON_ONE = (
    "torchao int8",
    "torchao AdamW8bit",
    "bitsandbytes nested",
    "bitsandbytes AdamW8bit",
)


def _program(name: str) -> Callable[[], Program]:
    package = name.split(maxsplit=1)[0]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed here")
    return (SHARDED | WHOLE)[name]


def _eagerly(function: Callable[[Callable[[], Program]], Any], build: Callable[[], Program]) -> Any:
    """torchao compiles its steps; that takes long and changes nothing about where the state
    lies."""
    with torch.compiler.set_stance("force_eager"):
        return function(build)


def _compare(ranks: Ranks, name: str) -> None:
    compare = functools.partial(training.compare, device=CUDA)
    for outcome in ranks.run(_eagerly, compare, _program(name), deadline_seconds=DEADLINE_SECONDS):
        assert all(
            (nbytes > 0) != (name in EXTERNAL) for nbytes in outcome.offloaded_bytes.values()
        ), outcome
        assert outcome.resident_bytes["actor"] > 0


def _measure(ranks: Ranks, name: str) -> None:
    for seen in ranks.run(_eagerly, measure, _program(name), deadline_seconds=DEADLINE_SECONDS):
        assert all(declared == measured for _, declared, measured in seen), seen
        assert all((declared > 0) != (name in EXTERNAL) for _, declared, _ in seen), seen


@pytest.mark.parametrize("name", ON_ONE)
def test_20_steps_on_one_gpu_are_bit_identical(one_gpu: Ranks, name: str) -> None:
    _compare(one_gpu, name)


@pytest.mark.parametrize("name", MEASURED_ON_ONE)
def test_offloads_on_one_gpu_give_the_driver_its_bytes_back_exactly(
    one_gpu: Ranks, name: str
) -> None:
    _measure(one_gpu, name)


@pytest.mark.parametrize("name", SHARDED)
def test_20_steps_on_two_gpus_are_bit_identical(two_gpus: Ranks, name: str) -> None:
    _compare(two_gpus, name)


@pytest.mark.parametrize("name", MEASURED)
def test_offloads_on_two_gpus_give_the_driver_its_bytes_back_exactly(
    two_gpus: Ranks, name: str
) -> None:
    _measure(two_gpus, name)
