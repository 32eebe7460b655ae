"""`transform=` changes what is published, one weight at a time, before it is put into a bucket."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch

from placement import WeightInfo
from placement.policies import Colocated
from placement.testing import assert_nothing_resident
from tests.support.worker import assert_same, make_manager

Pairs = list[tuple[str, torch.Tensor]]


@pytest.fixture(params=[False, True], ids=["resident", "streamed"])
def manager(request: pytest.FixtureRequest) -> Any:
    return make_manager(policy=Colocated(stream_sync=request.param))


def net() -> torch.nn.Module:
    return torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(6)])


def quantised(name: str, tensor: torch.Tensor) -> torch.Tensor | Pairs:
    """Matrices as int8 with a scale for each row; the rest as it is."""
    if tensor.ndim < 2:
        return tensor
    scale = tensor.abs().amax(dim=1) / 127
    return [(name, (tensor / scale[:, None]).round().to(torch.int8)), (f"{name}_scale", scale)]


def test_what_is_sent_is_what_the_function_returns_and_buckets_count_it(manager: Any) -> None:
    model = net()
    wanted = dict(pair for name, value in copy.deepcopy(model.state_dict()).items() for pair in _pairs(name, quantised(name, value)))
    actor = manager.register("actor", model, role="actor")
    infos = actor.weights_info(transform=quantised)
    with manager.phase("weight_sync"):
        buckets = [[(name, tensor.clone()) for name, tensor in bucket] for bucket in actor.weights(transform=quantised, bucket_bytes=1500)]
    found = dict(pair for bucket in buckets for pair in bucket)
    assert_same(found, wanted)
    assert [WeightInfo(name, tuple(tensor.shape), tensor.dtype) for name, tensor in found.items()] == infos
    # A layer is 1024 bytes of int8, its scale and its bias 128 each; its float32 matrix alone would be 4096.
    assert [sum(tensor.nbytes for _, tensor in bucket) for bucket in buckets] == [1280] * 6
    assert_nothing_resident(manager)


def _pairs(name: str, made: torch.Tensor | Pairs) -> Pairs:
    return [(name, made)] if isinstance(made, torch.Tensor) else made


def test_the_full_values_are_gone_before_their_bucket_is_sent(manager: Any) -> None:
    model = net()
    actor = manager.register("actor", model, role="actor")
    given: list[weakref.ref[torch.Tensor]] = []

    def halves(name: str, tensor: torch.Tensor) -> Pairs:
        assert sum(each() is not None for each in given) == 0
        given.append(weakref.ref(tensor))
        return [(f"{name}.{half}", part.clone()) for half, part in enumerate(tensor.chunk(2))]

    with manager.phase("weight_sync"):
        for bucket in actor.weights(transform=halves, bucket_bytes=2048):
            assert [each() for each in given if each() is not None] == []
            assert sum(tensor.nbytes for _, tensor in bucket) <= 2048
    assert len(given) == len(actor.weights_info())


def test_it_comes_after_the_cast_and_may_leave_a_weight_out(manager: Any) -> None:
    model = net()
    actor = manager.register("actor", model, role="actor")
    infos = [info for info in actor.weights_info(dtype="bfloat16") if len(info.shape) == 2]

    def matrices(name: str, tensor: torch.Tensor) -> torch.Tensor | Pairs:
        assert tensor.dtype is torch.bfloat16
        return tensor if tensor.ndim == 2 else []

    with manager.phase("weight_sync"):
        found = [name for bucket in actor.weights(dtype="bfloat16", transform=matrices) for name, _ in bucket]
    assert found == [info.name for info in infos]
    assert actor.weights_info(dtype="bfloat16", transform=matrices) == infos


def test_a_function_that_needs_values_is_published_but_not_announced() -> None:
    manager = make_manager()
    model = net()
    actor = manager.register("actor", model, role="actor")

    def by_value(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor / tensor.abs().max().item()

    with pytest.raises(ValueError, match=r"transform= cannot be run on '0.weight' without values.*weights\(\) does not"):
        actor.weights_info(transform=by_value)
    with manager.phase("weight_sync"):
        assert all(tensor.abs().max() == 1 for bucket in actor.weights(transform=by_value) for _, tensor in bucket)


@pytest.mark.parametrize(
    ("wrong", "error", "said"),
    [
        (lambda *_: None, TypeError, "for '0.weight' it returned None"),
        (lambda _, tensor: [tensor], TypeError, "must return a tensor, or a list of"),
        (lambda _, tensor: [("scale", tensor)], ValueError, "the name 'scale' twice"),
        ("fp8", TypeError, "is a function of \\(name, tensor\\), not 'fp8'"),
    ],
)
def test_what_is_no_such_function_is_refused(wrong: Any, error: type[Exception], said: str) -> None:
    manager = make_manager()
    model = net()
    actor = manager.register("actor", model, role="actor")
    with manager.phase("weight_sync"), pytest.raises(error, match=said):
        list(actor.weights(transform=wrong))
    with pytest.raises(error, match="not callable" if wrong == "fp8" else said):
        actor.weights_info(transform=wrong)
    assert_nothing_resident(manager)
