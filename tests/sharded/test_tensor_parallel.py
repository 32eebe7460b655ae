"""DTensors cut by torch's tensor parallelism, alone and together with FSDP2: the local shards move, the wrappers never notice."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from placement.testing import assert_nothing_resident
from tests.sharded import fsdp2_worker as worker
from tests.sharded import training
from tests.support.ranks import Ranks, on_ranks

PROGRAMS = {
    "foreach": functools.partial(worker.tensor_parallel_program, "AdamW", foreach=True),
    "fused": functools.partial(worker.tensor_parallel_program, "Adam", fused=True),
    "within FSDP2": functools.partial(worker.both_program, 1, 2),
    "beside FSDP2": functools.partial(worker.both_program, 2, 1),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_steps_on_two_ranks(two_ranks: Ranks, name: str) -> None:
    for outcome in two_ranks.run(training.compare, PROGRAMS[name]):
        assert all(outcome.resident_bytes.values())
        assert all(outcome.offloaded_bytes.values())


@on_ranks("two_ranks")
def test_host_memory_is_reserved_for_what_a_rank_holds() -> None:
    model = worker.tensor_parallel(init_device_mesh("cpu", (2,)))
    stepped = [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]
    adam = torch.optim.AdamW(stepped)
    manager, _, handle = worker.worker(model, adam)
    reserved = handle.host_bytes
    with manager.phase("train"):
        worker.loss_of_numbers(model, 0).backward()
        adam.step()
    state = [value.to_local() for entry in adam.state.values() for value in entry.values() if isinstance(value, DTensor)]
    local = sum(value.nbytes for value in state)
    assert handle.host_bytes == reserved, "state was born that had no host memory set aside"
    assert local <= reserved <= local + 64 * len(state) + 4096, "more than this rank's shards was reserved"
    assert_nothing_resident(manager)
    manager.close()
    assert local < sum(value.nbytes for entry in adam.state.values() for value in entry.values() if value.dim())
