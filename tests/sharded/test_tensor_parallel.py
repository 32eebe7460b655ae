"""DTensors cut by torch's tensor parallelism, alone and together with FSDP2: the local shards move, the wrappers never notice."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from placement import IntegrityError
from placement.policies import Colocated
from placement.testing import assert_nothing_resident
from tests.sharded import fsdp2_worker as worker
from tests.sharded import training
from tests.support.ranks import Ranks

PROGRAMS = {
    "foreach": functools.partial(worker.tensor_parallel_program, "AdamW", foreach=True),
    "fused": functools.partial(worker.tensor_parallel_program, "Adam", fused=True),
    "momentum": functools.partial(worker.tensor_parallel_program, "SGD", momentum=0.9),
    "within FSDP2": functools.partial(worker.both_program, 1, 2),
    "beside FSDP2": functools.partial(worker.both_program, 2, 1),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_steps_on_two_ranks(two_ranks: Ranks, name: str) -> None:
    for outcome in two_ranks.run(training.compare, PROGRAMS[name]):
        assert all(outcome.resident_bytes.values())
        assert all(outcome.offloaded_bytes.values())


def test_steps_on_one_rank(one_rank: Ranks) -> None:
    one_rank.run(training.compare, PROGRAMS["foreach"])


def _local_bytes(optimizer: Any) -> dict[str, int]:
    """Device and host bytes of a model of DTensors alone, and of its optimizer, before and after its state is born."""
    model = worker.tensor_parallel(init_device_mesh("cpu", (2,)))
    stepped = [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]
    adam = optimizer(stepped)
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
    return {"local": local, "global": sum(value.nbytes for entry in adam.state.values() for value in entry.values() if value.dim())}


@pytest.mark.parametrize("fused", [False, True])
def test_host_memory_is_reserved_for_what_a_rank_holds(two_ranks: Ranks, fused: bool) -> None:
    for found in two_ranks.run(_local_bytes, functools.partial(torch.optim.AdamW, fused=fused)):
        assert found["local"] < found["global"]


def _gradients_dropped() -> None:
    program = PROGRAMS["foreach"]()
    manager, actor, _ = worker.worker(program.model, program.optimizer, policy=Colocated(drop_gradients=True))
    with manager.phase("train"):
        program.backward(0)
        assert any(isinstance(parameter.grad, DTensor) for parameter in program.model.parameters())
    assert actor.counters.offloaded_bytes == 0
    assert all(parameter.grad is None for parameter in program.model.parameters())
    assert_nothing_resident(manager)
    training.assert_off(manager)
    manager.close()


def test_gradients_that_are_dtensors_are_dropped_uncopied(two_ranks: Ranks) -> None:
    two_ranks.run(_gradients_dropped)


def _replaced(where: str) -> None:
    """`model.cpu()` on DTensors is a swap: the same parameters over new local tensors."""
    program, plain = PROGRAMS["momentum"](), PROGRAMS["momentum"]()
    plain.model.load_state_dict(program.model.state_dict())
    manager, _, _ = worker.worker(program.model, program.optimizer)
    for step in range(2):
        with manager.phase("train"):
            assert training.as_bytes(program.learn(step)) == training.as_bytes(plain.learn(step))
    ids = [id(parameter) for parameter in program.model.parameters()]
    if where == "offloaded":
        program.model._apply(lambda tensor: tensor.clone())
        with pytest.raises(IntegrityError, match="were replaced while it was offloaded"), manager.phase("train"):
            pass
    else:
        with manager.phase("train"):
            program.model._apply(lambda tensor: tensor.clone())
    assert [id(parameter) for parameter in program.model.parameters()] == ids
    assert_nothing_resident(manager)
    training.assert_off(manager)
    for step in range(2, 4):
        with manager.phase("train"):
            assert training.as_bytes(program.learn(step)) == training.as_bytes(plain.learn(step))
    assert_nothing_resident(manager)
    manager.close()


@pytest.mark.parametrize("where", ["offloaded", "resident"])
def test_local_tensors_replaced_behind_our_back(two_ranks: Ranks, where: str) -> None:
    two_ranks.run(_replaced, where)


def _written_while_offloaded() -> None:
    program = PROGRAMS["momentum"]()
    manager, _, _ = worker.worker(program.model, program.optimizer)
    with manager.phase("train"):
        program.learn(0)
    values = {name: training.as_bytes(value) for name, value in _resident(manager, program).items()}
    state = next(entry["momentum_buffer"] for entry in program.optimizer.state.values() if isinstance(entry["momentum_buffer"], DTensor))
    state.mul_(2)  # NaN, like the poison
    with pytest.raises(IntegrityError, match=r"state\.\d+\.momentum_buffer"), manager.phase("train"):
        pass
    assert {name: training.as_bytes(value) for name, value in _resident(manager, program).items()} == values
    manager.close()


def _resident(manager: Any, program: training.Program) -> dict[str, torch.Tensor]:
    with manager.phase("train"):
        return {f"{name}{path}": part.clone() for name, value in program.values() for path, part in training.local_parts(value)}


def test_state_written_through_a_dtensor_while_offloaded_is_named_and_kept(two_ranks: Ranks) -> None:
    two_ranks.run(_written_while_offloaded)
