"""Megatron-Core's own DistributedDataParallel and optimizers under placement, on a CPU that
pretends to be CUDA (`pretend_cuda`)."""

from __future__ import annotations

import types
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from placement import Manager, NotResidentError, PhaseError, RegistrationError
from placement.devices import base as devices
from placement.policies import Colocated
from placement.tensors.plain import nested_tensors
from placement.testing import assert_nothing_resident
from tests.sharded import megatron_worker as worker
from tests.sharded.megatron_worker import (
    Kind,
    Program,
    buffers,
    build,
    inner,
    optimize,
    start,
    stepped,
    wrap,
)
from tests.sharded.pretend_cuda import pretend_cuda, replaced
from tests.sharded.training import as_bytes, managed
from tests.support.frameworks import needs
from tests.support.ranks import Ranks, on_ranks
from tests.support.sweeps import few

needs("megatron.core")

PRECISION_AWARE = Kind(is_precision_aware=True)


def storages(tensors: Any) -> set[int]:
    return {tensor.untyped_storage()._cdata for tensor in tensors}


def learn(manager: Manager, program: Program, number: int) -> None:
    with manager.phase("train"):
        program.learn(number)
    assert_nothing_resident(manager, allow_foreign=True)


@pytest.mark.parametrize(
    ("kind", "can_swap"),
    [(PRECISION_AWARE, False), (worker.Kind(dtype=torch.float32), True)],
    ids=str,
)
@on_ranks("one_rank")
def test_shards_that_are_views_of_the_buffer_stay_views(kind: Kind, can_swap: bool) -> None:
    """Shards that are views of the model's buffer stay such, also where tensors leave one by one
    for the host (as those of a GPU do): what is stepped is what the model computes with."""
    with pretend_cuda():
        program = build(kind)
        manager = managed(program)
        views = [each for optimizer in inner(program.optimizer) for each in stepped(optimizer)]
        assert storages(views) <= storages(buffer.param_data for buffer in buffers(program.model))
        learn(manager, program, 0)
        learn(manager, program, 1)
        assert storages(views) <= storages(buffer.param_data for buffer in buffers(program.model))
        assert not [
            each.name
            for each in manager.handles["actor.optimizer"].adapter.owned()
            if each.name.startswith("main")
        ]
        with manager.phase("train"):
            parameters = [
                parameter for parameter in program.model.parameters() if parameter.requires_grad
            ]
            before = [as_bytes(parameter) for parameter in parameters]
            with torch.no_grad():
                for view in views:
                    view.add_(1.0)
            assert all(
                as_bytes(parameter) != old
                for parameter, old in zip(parameters, before, strict=True)
            )
        with mock.patch.object(devices, "can_swap", return_value=can_swap):
            manager.close()
        assert storages(views) <= storages(buffer.param_data for buffer in buffers(program.model))


@pytest.mark.parametrize("drops", [False, True])
@on_ranks("one_rank")
def test_gradients_live_or_become_zero(drops: bool) -> None:
    """Between two phases they are moved; or dropped, and then the buffers are zero, in their place,
    and training goes on."""
    with pretend_cuda():
        program = build(Kind())
        manager = managed(program, policy=Colocated(drop_gradients=drops))
        before = manager.handles["actor"].counters.offloaded_bytes
        with manager.phase("train"):
            program.backward(0)
            values = [as_bytes(buffer.grad_data) for buffer in buffers(program.model)]
            assert any(map(any, values))
        moved = manager.handles["actor"].counters.offloaded_bytes - before
        sizes = sum(map(len, values))
        assert moved == 0 if drops else moved >= sizes
        assert_nothing_resident(manager, allow_foreign=True)
        places = [buffer.grad_data.data_ptr() for buffer in buffers(program.model)]
        with manager.phase("log_prob"):
            expected = [bytes(len(each)) for each in values] if drops else values
            assert [as_bytes(buffer.grad_data) for buffer in buffers(program.model)] == expected
        for number in range(2):
            learn(manager, program, number)
        assert [buffer.grad_data.data_ptr() for buffer in buffers(program.model)] == places
        main_gradients = [
            parameter.main_grad
            for parameter in program.model.parameters()
            if parameter.requires_grad
        ]
        assert storages(main_gradients) == storages(
            buffer.grad_data for buffer in buffers(program.model)
        )
        manager.check_integrity()


@on_ranks("one_rank")
def test_zeroed_outside() -> None:
    """`zero_grad_buffer()` before the phase is how training loops begin: the old gradients must not
    come back."""
    with pretend_cuda():
        program = build(Kind())
        manager = managed(program)
        with manager.phase("train"):
            program.backward(0)
        program.model.zero_grad_buffer()
        with manager.phase("train"):
            assert not any(buffer.grad_data.any() for buffer in buffers(program.model))
        assert manager.audit().ok


@pytest.mark.parametrize("kind", [worker.Kind(gradients_in_fp32=False), PRECISION_AWARE], ids=str)
@on_ranks("one_rank")
def test_gradients_of_main_parameters_move(kind: Kind) -> None:
    """A phase transition between the preparing of gradients and the step: those of main parameters
    are moved, and nothing is left behind."""
    with pretend_cuda():
        outcomes = []
        for is_managed in (False, True):
            torch.manual_seed(0)
            program = build(kind)
            if is_managed:
                manager = managed(program)
                with manager.phase("train"):
                    program.loss(0).backward()
                    program.model.finish_grad_sync()
                    program.optimizer.prepare_grads()
                assert_nothing_resident(manager, allow_foreign=True)
                with manager.phase("train"):
                    program.optimizer.step_with_ready_grads()
                manager.close()
            else:
                program.loss(0).backward()
                program.model.finish_grad_sync()
                program.optimizer.prepare_grads()
                program.optimizer.step_with_ready_grads()
            outcomes.append([as_bytes(parameter) for parameter in program.model.parameters()])
        assert outcomes[0] == outcomes[1]


@on_ranks("one_rank")
def test_guards() -> None:
    """Nothing of a step, a checkpoint or Megatron's own offload runs on what is offloaded."""
    with pretend_cuda():
        program = build(Kind())
        program.model.ddp_config.nccl_ub = True
        # memory that NCCL has registered stays where it is
        with pytest.raises(RegistrationError, match="nccl_ub"):
            managed(program)
        program.model.ddp_config.nccl_ub = False
        manager = managed(program)
        learn(manager, program, 0)
        chain = program.optimizer
        with mock.patch.object(
            type(chain), "prepare_grads", side_effect=AssertionError("gradients were touched")
        ):
            with pytest.raises(NotResidentError, match="actor"):
                chain.step()
            with (
                manager.phase("log_prob"),
                pytest.raises((NotResidentError, PhaseError), match="actor"),
            ):
                chain.step()
        calls = {
            "sharded_state_dict": ({},),
            "save_parameter_state": ("nowhere",),
            "offload_to_cpu": (),
            "reload_model_params": (),
        }
        for name, arguments in calls.items():
            with pytest.raises(NotResidentError, match=r"actor\.optimizer"):
                getattr(chain, name)(*arguments)
        with pytest.raises(NotResidentError, match="'actor'"):
            program.model.sharded_state_dict()
        manager.close()
        program.learn(1)
        assert "step" not in vars(chain)


@on_ranks("one_rank")
def test_state_dict_in_every_state() -> None:
    """Main parameters are in it as lists of live tensors, past the hooks of the optimizer
    inside."""
    with pretend_cuda():
        program = build(Kind(is_distributed=False))
        manager = managed(program)
        learn(manager, program, 0)

        def shown() -> list[bytes]:
            found = manager.handles["actor.optimizer"].state_dict()
            entries = [found] if isinstance(found, dict) else found
            return [
                as_bytes(main)
                for entry in entries
                for group in entry["fp32_from_fp16_params"]
                for main in group
            ]

        away = shown()
        with manager.phase("restore"):
            assert shown() == away
            assert away == [
                as_bytes(main)
                for optimizer in inner(program.optimizer)
                for main in stepped(optimizer)
            ]


@on_ranks("one_rank")
def test_caches() -> None:
    """Emptied when the model has left the device, never before; and left alone where a captured
    graph may use them."""
    with pretend_cuda():
        program = build(Kind())
        from megatron.core import parallel_state
        from megatron.core.transformer.cuda_graphs import _CudagraphGlobalRecord

        buffer = parallel_state.get_global_memory_buffer()
        manager = managed(program)
        with manager.phase("train") as phase:
            buffer.get_tensor((32,), torch.float32, "mpu")
            assert not manager.audit().findings
            phase.switch("log_prob")
            assert len(buffer.buffer) == 1
        assert not buffer.buffer
        with mock.patch.object(_CudagraphGlobalRecord, "cudagraph_created", new=True):
            with manager.phase("log_prob"):
                buffer.get_tensor((32,), torch.float32, "mpu")
            assert len(buffer.buffer) == 1
        buffer.buffer.clear()


@on_ranks("one_rank")
def test_workspaces_of_transformer_engine() -> None:
    """TransformerEngine cannot be installed without CUDA: modules of its shape."""
    base = types.ModuleType("transformer_engine.pytorch.module.base")

    class TransformerEngineBaseModule(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._fp8_workspaces: dict[str, torch.Tensor] = {}

    class Linear(TransformerEngineBaseModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(8, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            # in the real one of a type that nobody can move
            if "weight" not in self._fp8_workspaces:
                self._fp8_workspaces["weight"] = self.weight.detach().to(torch.bfloat16).to_sparse()
            return x @ self._fp8_workspaces["weight"].to_dense().float()

    base.TransformerEngineBaseModule = TransformerEngineBaseModule  # type: ignore[attr-defined]
    base._dummy_wgrads = {"weight": torch.zeros(8)}  # type: ignore[attr-defined]
    with replaced({base.__name__: base}):
        model = torch.nn.Sequential(Linear(), torch.nn.Linear(8, 8))
        program = Program(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            lambda number: model(torch.ones(2, 8)).sum(),
        )
        manager = managed(program)
        with manager.phase("train") as phase:
            first = model(torch.ones(2, 8))
            assert model[0]._fp8_workspaces
            phase.switch("log_prob")
            assert model[0]._fp8_workspaces
            assert base._dummy_wgrads
        assert not model[0]._fp8_workspaces
        assert not base._dummy_wgrads
        assert_nothing_resident(manager, allow_foreign=True)
        with manager.phase("log_prob"):
            assert as_bytes(model(torch.ones(2, 8))) == as_bytes(first)


@on_ranks("two_ranks")
def test_a_rank_that_steps_nothing_has_the_owner_too() -> None:
    """A rank that steps nothing of a small model still has the optimizer's owner: else its train
    phases would leave the model out."""
    with pretend_cuda():
        start()
        model = wrap(Kind(), torch.nn.Linear(16, 4, bias=False))
        program = Program(
            model,
            optimize(Kind(), model),
            lambda number: model(torch.ones(2, 16).bfloat16()).float().sum(),
        )
        mine = sum(
            each.numel() for optimizer in inner(program.optimizer) for each in stepped(optimizer)
        )
        manager = managed(program)
        assert manager.handles["actor.optimizer"].owners == (manager.handles["actor"],)
        with manager.phase("train"):
            program.learn(0)
        assert manager.audit().ok
        assert mine > 0 or dist.get_rank() > 0


@pytest.mark.parametrize("kind", few(worker.KINDS, worker.KINDS[1], PRECISION_AWARE), ids=str)
def test_steps_are_the_same_on_two_ranks(two_ranks: Ranks, kind: worker.Kind) -> None:
    outcomes = two_ranks.run(worker.compare, kind)
    assert all(
        outcome.resident_bytes["actor"] > 0 and outcome.offloaded_bytes["actor.optimizer"] > 0
        for outcome in outcomes
    )


def test_data_parallel_ranks_share_the_host_copy_of_a_reference(two_ranks: Ranks) -> None:
    assert two_ranks.run(worker.replicas, worker.KINDS[0], 7000) == [[(0, 1)], [(0, 1)]]


@pytest.mark.parametrize("kind", few([PRECISION_AWARE, worker.KINDS[0]], worker.KINDS[0]), ids=str)
def test_steps_are_the_same_on_one_rank(one_rank: Ranks, kind: worker.Kind) -> None:
    (outcome,) = one_rank.run(worker.compare, kind)
    assert outcome.resident_bytes["actor"] > 0


def test_a_key_that_is_a_tensor_is_not_turned_into_text() -> None:
    """`param_to_bucket_group` has parameters for keys, and the text of a tensor is its values: read
    at every phase transition, over poison."""

    class Key:
        def __format__(self, spec: str) -> str:
            raise AssertionError("the key was read")

    tensor = torch.ones(1)
    assert list(nested_tensors({"named": [tensor], Key(): {Key(): tensor}}, "map")) == [
        ("map.named.0", tensor),
        ("map.[1].[0]", tensor),
    ]
