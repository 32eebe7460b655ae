"""Parameters that are replaced while they are offloaded (`to()`, `half()`, a framework's own
offload) get their places, forms and values back by `Handle.restore`, and whatever shards them
trains on as if nothing had been. Real frameworks on CPU ranks with gloo."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.tensor import DTensor

from placement import IntegrityError, Manager
from placement.testing import assert_nothing_resident
from tests.sharded import (
    fsdp2_worker,
    megatron_worker,
    test_ddp,
    test_fsdp1,
    test_quantized,
    training,
)
from tests.sharded.test_fsdp1 import units
from tests.support.ranks import Ranks
from tests.support.seeds import seed
from tests.support.sweeps import few

STEPS = 2
"""One before the optimizer has state, and one after."""


def _exchanged(model: torch.nn.Module) -> None:
    """The same where torch is told to exchange tensors whole."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def _layer_by_layer(model: torch.nn.Module) -> None:
    """Each module alone, and not those around it: a part of FSDP2 is not told."""
    for part in model.modules():
        for parameter in part.parameters(recurse=False):
            if isinstance(parameter, DTensor):
                parameter._local_tensor = parameter._local_tensor.detach().clone()
            else:
                parameter.data = parameter.data.clone()


def _as_verl_offloads_fsdp1(model: torch.nn.Module) -> None:
    for _, handle in units(model):
        handle.flat_param_to(torch.device("cpu"))
        handle.flat_param.data = handle.flat_param.data.clone()
        if handle._use_orig_params:
            handle._use_sharded_views()
        if hasattr(handle.flat_param, "_local_shard"):
            handle.flat_param._local_shard = handle.flat_param.data


WAYS: dict[str, Callable[[torch.nn.Module], object]] = {
    # what `to("cpu")` does to a model on an accelerator
    "to": lambda model: model._apply(lambda tensor: tensor.clone()),
    "half": torch.nn.Module.half,
    "exchanged": _exchanged,
    "layers": _layer_by_layer,
    "verl": _as_verl_offloads_fsdp1,
}


def _looks(program: training.Program) -> dict[str, Any]:
    """Everything of the tensors but their values. `_apply` puts other objects in the place of
    buffers, not of parameters."""
    buffers = {id(buffer) for _, buffer in program.model.named_buffers()}
    return {
        f"{name}{path}": (
            id(tensor) not in buffers and id(tensor),
            (tensor.dtype, tensor.size()),
            (part.dtype, part.size(), part.stride(), part.data_ptr()),
        )
        for name, tensor in program.tensors()
        for path, part in training.local_parts(tensor)
    }


def trains_on(
    build: Callable[[], training.Program],
    way: str,
    within: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> int:
    """Replace the offloaded parameters before every phase, and compare with a run that nobody
    disturbs. Returns how often it was told.

    Args:
        within: makes the context in which the program is built and computes.
    """
    with within():
        losses, values = training._run_plain(build, STEPS)
        seed(0)
        program = build()
    manager = Manager(device=training.device_of("cpu"))
    program.reshard()
    program.register(manager)
    told = 0
    left = iter(losses)
    for step in range(STEPS):
        for phase, method in program.phases_of(step):
            before = _looks(program)
            WAYS[way](program.model)
            with (
                pytest.raises(IntegrityError, match="were replaced while it was offloaded"),
                manager.phase(phase),
            ):
                pass
            for handle in manager.handles.values():
                handle.restore()
            told += 1
            now = _looks(program)
            assert now == before, {
                name: (look, now.get(name))
                for name, look in before.items()
                if look != now.get(name)
            }
            assert_nothing_resident(manager, allow_foreign=True)
            training.assert_off(manager)
            training.assert_away(manager, program)
            seed(1 + step)
            with manager.phase(phase), within():
                loss = getattr(program, method)(step)
            assert training.as_bytes(loss) == next(left), (
                f"step {step}, {phase}, {method}: another loss than in the undisturbed run"
            )
            assert_nothing_resident(manager, allow_foreign=True)
            audit = manager.audit()
            assert audit.ok, audit.report
    manager.close()
    program.reshard()
    training.assert_same(training.digest(program), values, "after close()")
    return told


CASES: dict[str, tuple[Callable[[], training.Program], str]] = {
    "fsdp2": (fsdp2_worker.plain_fsdp2, "to"),
    "fsdp2, layers": (fsdp2_worker.plain_fsdp2, "layers"),
    "fsdp2, gradients not reduced": (
        functools.partial(fsdp2_worker.accumulating_fsdp2, None),
        "half",
    ),
    "fsdp2, two dimensions": (fsdp2_worker.hybrid_fsdp2, "exchanged"),
    "fsdp2, several groups": (fsdp2_worker.several_meshes, "to"),
    "tensor parallel": (
        functools.partial(fsdp2_worker.tensor_parallel_program, "AdamW", foreach=True),
        "to",
    ),
    "fsdp1": (test_fsdp1.Variant(True).program, "to"),
    # Under original names torch's own `_apply` fails beside gradients that no reduction has brought
    # to their parameters yet.
    "fsdp1, gradients not reduced": (test_fsdp1.Variant(True, accumulates=True).program, "verl"),
    "fsdp1, flat": (
        test_fsdp1.Variant(False, ShardingStrategy.SHARD_GRAD_OP, test_fsdp1.HALF).program,
        "verl",
    ),
    "fsdp1, flat and whole": (test_fsdp1.Variant(False, ShardingStrategy.NO_SHARD).program, "to"),
    "ddp": (test_ddp.Variant({"gradient_as_bucket_view": True}).program, "layers"),
    "ddp, buckets apart": (test_ddp.Variant().program, "to"),
    "torchao": (functools.partial(test_quantized.build, "torchao", "int8"), "to"),
    "bitsandbytes": (functools.partial(test_quantized.build, "bitsandbytes", "nf4"), "half"),
}


@pytest.mark.parametrize(
    "name",
    few(
        CASES,
        "fsdp2",
        "bitsandbytes",
    ),
)
def test_trains_on(two_ranks: Ranks, name: str) -> None:
    assert all(two_ranks.run(trains_on, *CASES[name]))


@pytest.mark.sweep
@pytest.mark.parametrize(
    "kind",
    [megatron_worker.Kind(), megatron_worker.Kind(is_distributed=False)],
    ids=str,
)
def test_megatron(two_ranks: Ranks, kind: megatron_worker.Kind) -> None:
    """The parameters are cut from a buffer that stays behind, and the optimizer has shards of
    it."""
    assert all(
        two_ranks.run(
            trains_on,
            functools.partial(megatron_worker.build, kind),
            "to",
            megatron_worker.pretend_cuda,
        )
    )
