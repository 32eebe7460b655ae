"""Megatron-FSDP's own classes under placement, on a CPU that pretends to be CUDA (`pretend_cuda`),
in both versions."""

from __future__ import annotations

import pytest

from placement import Manager, RegistrationError
from placement.ownership.module import ModuleAdapter
from placement.policies import Colocated
from placement.storage.owners import RANGES
from placement.testing import SimulatedDevice, assert_nothing_resident
from tests.sharded import megatron_fsdp_worker as worker
from tests.sharded import training
from tests.sharded.pretend_cuda import pretend_cuda
from tests.support.frameworks import needs
from tests.support.ranks import Ranks, on_ranks
from tests.support.sweeps import few

needs("megatron_fsdp")


@pytest.mark.parametrize("strategy", few(["optim_grads_params", "no_shard"], "optim_grads_params"))
def test_steps_are_the_same_on_two_ranks(two_ranks: Ranks, strategy: str) -> None:
    outcomes = two_ranks.run(worker.compare, "0.6.1", strategy)
    assert all(
        outcome.resident_bytes["actor"] > 0 and outcome.offloaded_bytes["actor.optimizer"] > 0
        for outcome in outcomes
    )


@pytest.mark.slow
def test_steps_are_the_same_with_the_version_in_megatron_core(two_ranks: Ranks) -> None:
    two_ranks.run(worker.compare, "in megatron-core", "optim_grads_params")


@pytest.mark.parametrize("strategy", ["optim_grads_params", "optim"])
@on_ranks("two_ranks")
def test_nothing_is_left_on_the_device(strategy: str) -> None:
    """Every buffer lies in the handle's addresses and every gathered bucket is released, with
    gradients in flight between two backwards."""
    with pretend_cuda():
        program = worker.build("0.6.1", strategy)
        manager = training.managed(program)
        buffer = program.model.param_and_grad_buffer
        with manager.phase("train"):
            program.backward(0)
            gathered = sum(
                bucket.data.untyped_storage().nbytes()
                for bucket in buffer.weight_alloc.buckets.values()
            )
            assert (gathered > 0) is (strategy == "optim_grads_params")
        assert_nothing_resident(manager)
        assert (
            sum(
                bucket.data.untyped_storage().nbytes()
                for bucket in buffer.weight_alloc.buckets.values()
            )
            == 0
        )
        for name, tensor in [*program.tensors(), *program.model.raw_param.items()]:
            for path, part in training.local_parts(tensor):
                storage = part.untyped_storage()
                assert storage.nbytes() == 0 or RANGES.owner_of(storage.data_ptr()) is not None, (
                    f"{name}{path} was left on the device"
                )
        adapter = manager.handles["actor"].adapter
        assert isinstance(adapter, ModuleAdapter)
        assert {id(each) for each in adapter.parameters()} == {
            id(each) for _, each in buffer.optimizer_named_parameters
        }
        with manager.phase("train"):
            program.learn(0)
        assert_nothing_resident(manager)


@on_ranks("two_ranks")
def test_dropped_gradients_and_memory_of_nccl() -> None:
    """Dropped, the buffers of gradients are zero in their places. Memory that NCCL has registered
    is refused."""
    with pretend_cuda():
        program = worker.build("0.6.1", "optim_grads_params")
        program.model.ddp_config.nccl_ub = True
        device = SimulatedDevice(training.CAPACITY, chunk_bytes=training.CHUNK_BYTES)
        manager = Manager(device=device, policy=Colocated(drop_gradients=True))
        with pytest.raises(RegistrationError, match="nccl_ub"):
            program.register(manager)
        program.model.ddp_config.nccl_ub = False
        program.register(manager)
        groups = program.model.param_and_grad_buffer.parameter_groups
        with manager.phase("train"):
            program.backward(0)
            program.model.finish_grad_sync()
            assert any(group.main_grad_buffer.data.any() for group in groups)
        with manager.phase("log_prob"):
            assert not any(group.main_grad_buffer.data.any() for group in groups)
        with manager.phase("train"):
            program.learn(1)
        manager.check_integrity()
