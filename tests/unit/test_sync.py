"""Publishing weights: what comes out of `weights()`, when, and from which memory."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from placement import PhaseError, WeightInfo
from placement.policies import Colocated
from placement.testing import assert_nothing_resident
from tests.support.worker import SYNC, assert_same, make_manager, net


class Model(torch.nn.Module):
    """Tied weights, buffers of every sort, mixed types, an empty parameter, a layer used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(100, 16)
        self.layer = torch.nn.Linear(16, 16).to(torch.bfloat16)
        self.again = self.layer
        self.head = torch.nn.Linear(16, 100, bias=False)
        self.head.weight = self.embed.weight
        self.empty = torch.nn.Parameter(torch.empty(0, 16))
        self.register_buffer("steps", torch.tensor(7))
        self.register_buffer("freq", torch.rand(8))
        self.register_buffer("freq_again", self.freq)
        self.register_buffer("cache", torch.rand(8), persistent=False)


NAMES = ["empty", "embed.weight", "layer.weight", "layer.bias", "steps", "freq"]


def flat(buckets: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for bucket in buckets for name, tensor in bucket}


@pytest.fixture(params=[False, True], ids=["resident", "streamed"])
def manager(request: pytest.FixtureRequest) -> Any:
    return make_manager(policy=Colocated(stream_sync=request.param))


def test_names_shapes_types_and_values_each_weight_once(manager: Any) -> None:
    model = Model()
    wanted = {name: tensor.detach().clone() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    actor = manager.register("actor", model, role="actor")
    assert [info.name for info in actor.weights_info()] == NAMES
    with manager.phase("weight_sync"):
        assert actor.state is SYNC
        found = flat(actor.weights())
        assert (bool(actor.resident_bytes), bool(actor.counters.loaded_bytes)) == (not manager.policy.stream_sync,) * 2
    assert list(found) == NAMES
    for info in actor.weights_info():
        assert info == WeightInfo(info.name, tuple(wanted[info.name].shape), wanted[info.name].dtype)
        assert_same(found[info.name], wanted[info.name])
    assert not any(tensor.requires_grad for tensor in found.values())
    assert_nothing_resident(manager)


def test_buckets_are_bounded_and_a_larger_tensor_comes_alone(manager: Any) -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(6)], torch.nn.Linear(128, 128))
    wanted = copy.deepcopy(dict(model.state_dict()))
    actor = manager.register("actor", model, role="actor")
    limit = 10_000
    with manager.phase("weight_sync"):
        sizes, found = [], {}
        for bucket in actor.weights(bucket_bytes=limit):
            nbytes = sum(tensor.nbytes for _, tensor in bucket)
            assert nbytes <= limit or len(bucket) == 1
            sizes.append(nbytes)
            found.update({name: tensor.clone() for name, tensor in bucket})
        with pytest.raises(ValueError, match="bucket_bytes"):
            actor.weights(bucket_bytes=0)
        assert len(list(actor.weights(bucket_bytes=1))) == len(wanted)
        assert len(list(actor.weights())) == 1
    assert_same(found, wanted)
    assert max(sizes) == 128 * 128 * 4
    assert len(sizes) == 5  # two layers a bucket, the large weight, its bias


def test_a_handle_of_before_unregister_says_so(manager: Any) -> None:
    model = torch.nn.Linear(4, 4)
    old = manager.register("actor", model, role="actor")
    manager.unregister("actor")
    new = manager.register("actor", model, role="actor")
    with manager.phase("weight_sync"):
        with pytest.raises(PhaseError, match=r"or it was unregistered: use the handle of the last register\(\)"):
            old.weights()
        assert len(next(iter(new.weights()))) == 2


def test_a_generator_that_outlives_its_phase_raises(manager: Any) -> None:
    model = net()
    actor = manager.register("actor", model, role="actor")
    with manager.phase("weight_sync") as phase:
        inside, across = (actor.weights(bucket_bytes=1000) for _ in range(2))
        next(inside)
        next(across)
        phase.switch("log_prob")
        with pytest.raises(PhaseError, match="GPU_RESIDENT in phase 'log_prob'"):
            next(inside)
    with pytest.raises(PhaseError, match="CPU_OFFLOADED in phase 'idle'"):
        next(across)
    assert_nothing_resident(manager)


def test_a_generator_of_an_earlier_sync_does_not_go_on_in_the_next(manager: Any) -> None:
    model = net()
    actor = manager.register("actor", model, role="actor")
    with manager.phase("weight_sync"):
        old = actor.weights(bucket_bytes=1000)
        next(old)
    with manager.phase("weight_sync"), pytest.raises(PhaseError, match="began in an earlier"):
        next(old)


@pytest.mark.parametrize("then", ["leave", "switch", "an error"])
def test_the_memory_of_the_buckets_goes_back_at_the_end_of_the_sync(manager: Any, monkeypatch: pytest.MonkeyPatch, then: str) -> None:
    model = Model()
    actor, trims = manager.register("actor", model, role="actor"), list[str]()
    monkeypatch.setattr(manager.device, "trim", lambda: trims.append(actor.state))
    try:
        with manager.phase("weight_sync") as phase:
            flat(actor.weights())
            assert not trims
            if then == "an error":
                raise KeyError
            if then == "switch":
                phase.switch("rollout")
            else:
                phase.switch("weight_sync")  # the same state: it goes on
                assert not trims
    except KeyError:
        pass
    assert trims == [SYNC]
