"""Publishing what other frameworks cut: VeOmni's experts, DeepSpeed's partitions, Megatron-FSDP's
shards; and into Megatron's DDP."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from placement import Manager, RegistrationError, TorchEngine
from placement.publish.buckets import check_publishable
from placement.testing import assert_nothing_resident
from tests.engines import test_frameworks as engines
from tests.sharded import megatron_worker, training
from tests.sharded.pretend_cuda import pretend_cuda
from tests.sharded.publish_worker import assert_same, placed, read, wanted_of
from tests.sharded.veomni_worker import EXPERTS, WIDTH, Model, is_installed, veomni
from tests.support.ranks import Ranks, on_ranks


@pytest.mark.skipif(not is_installed("veomni"), reason="veomni is not installed")
@pytest.mark.parametrize("expert_parallel", [1, 2])
@on_ranks("two_ranks")
def test_experts_that_veomni_cut_are_published_whole(expert_parallel: int) -> None:
    """VeOmni's own plan cuts the experts, then `fully_shard` cuts them along another dimension, as
    VeOmni does it."""
    world = dist.get_world_size()
    wanted = wanted_of(model := Model(EXPERTS))
    mesh = init_device_mesh(
        "cpu", (world // expert_parallel, expert_parallel), mesh_dim_names=("ep_fsdp", "ep")
    )
    plan = veomni("distributed.parallel_plan").ParallelPlan(
        {"ep": {"experts.up": Shard(0), "experts.down": Shard(0)}}
    )
    model._fqn2spec_info = plan.apply(model, {"ep": mesh})
    assert model.experts.up.shape[0] == EXPERTS // expert_parallel
    fully_shard(model.experts, mesh=mesh["ep_fsdp"], shard_placement_fn=lambda _: Shard(1))
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    for streams in (False, True):
        manager, actor = placed(model, streams=streams)
        for _ in range(2):
            with manager.phase("weight_sync"):
                assert_same(read(actor, bucket_bytes=500), wanted)
            with manager.phase("log_prob"), torch.no_grad():
                model(torch.ones(2, WIDTH))  # the root stays unsharded
        assert_nothing_resident(manager, allow_foreign=True)
        manager.close()


@on_ranks("two_ranks")
def test_an_engine_around_megatrons_ddp() -> None:
    """It keeps parameters in buffers of its own."""
    kind = megatron_worker.KINDS[0]
    with pretend_cuda():
        module = megatron_worker.build(kind).model.eval()
        inputs = torch.randn(4, 16).to(kind.dtype)
        with torch.no_grad():
            answer = training.as_bytes(module(inputs))
    manager = Manager(device=training.device_of("cpu"))
    rollout = manager.register("rollout", TorchEngine(module), role="rollout")
    for _ in range(2):
        assert_nothing_resident(manager)
        training.assert_off(manager)
        with manager.phase("rollout"), pretend_cuda(), torch.no_grad():
            assert training.as_bytes(module(inputs)) == answer
    with manager.phase("weight_sync"):
        weights = engines.whole_weights(module, "cpu")
        rollout.object.update_weights([(name, 2 * tensor) for name, tensor in weights.items()])
        doubled = engines.whole_weights(module, "cpu")
    assert all(torch.equal(2 * weights[name], doubled[name]) for name in weights)
    assert_nothing_resident(manager)
    manager.close()


def _zero(stage: int) -> None:
    from tests.sharded import deepspeed_worker

    engine = deepspeed_worker.engine(stage)
    torch.manual_seed(0)
    width = deepspeed_worker.WIDTH["cpu"]
    plain = torch.nn.Sequential(
        torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, width)
    ).bfloat16()
    manager, actor = placed(engine)
    manager.register("adam", engine.optimizer)
    assert actor.external
    with manager.phase("weight_sync"):
        assert_same(read(actor, bucket_bytes=1000), wanted_of(plain))
    with manager.phase("train") as phase:
        engine.backward(engine(deepspeed_worker.batch(0)).float().square().mean())
        engine.step()
        phase.switch("weight_sync")
        trained = read(actor)
        first = [torch.zeros_like(value) for value in trained.values()]
        for value, other in zip(trained.values(), first, strict=True):
            other.copy_(value)
            dist.broadcast(other, 0)
            assert other.equal(value)  # every rank has the same, and it is not what it was
        assert not trained["0.weight"].equal(plain[0].weight)
    assert_nothing_resident(manager, allow_foreign=True)


@pytest.mark.skipif(not is_installed("deepspeed"), reason="deepspeed is not installed")
@pytest.mark.parametrize("stage", [1, 3])
def test_a_zero_engine_publishes_the_whole_weights(two_ranks: Ranks, stage: int) -> None:
    two_ranks.run(_zero, stage)
    two_ranks.close()  # ZeRO 3 has replaced torch.nn.functional.linear in its processes


def test_shards_of_megatron_fsdp_are_refused_before_anything_is_gathered() -> None:
    """Real class, made without its constructor, which needs a device: only its kind counts."""
    megatron = pytest.importorskip("megatron_fsdp.megatron_fsdp")
    wrapped = megatron.MegatronFSDP.__new__(megatron.MegatronFSDP)
    torch.nn.Module.__init__(wrapped)
    with pytest.raises(
        RegistrationError, match="'actor': MegatronFSDP shards its parameters in its own way"
    ):
        check_publishable(torch.nn.ModuleList([wrapped]), "actor", [])
