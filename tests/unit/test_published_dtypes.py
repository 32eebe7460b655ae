"""The dtypes in which weights are published and taken: what a cast leaves alone, what it refuses, and what an engine refuses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import placement
from placement import EngineError, TorchEngine
from placement.policies import Colocated
from tests.support.worker import make_manager

DTYPES = sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype) and "q" not in str(each)}, key=str)
"""All of torch's dtypes but those of its quantised tensors, which cannot be registered."""
BF16 = torch.bfloat16


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1, 1).view(torch.uint8)


class Model(nn.Module):
    """A router with a bias in float32, block-quantised layers, packed integers, and layers that may be cast."""

    _keep_in_fp32_modules = ("wo",)
    _keep_in_fp32_modules_strict = ("gate.*_bias",)

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.gate = nn.Module()
        self.gate.correction_bias = nn.Parameter(torch.rand(8))
        self.wo = nn.Linear(4, 4, bias=False)
        self.float8 = nn.Linear(4, 4)
        self.float8.weight = nn.Parameter(torch.rand(4, 4).to(torch.float8_e4m3fn), requires_grad=False)
        self.float8.weight_scale_inv = nn.Parameter(torch.rand(1, 1))
        self.packed = nn.Module()
        self.packed.blocks = nn.Parameter(torch.randint(255, (4, 4), dtype=torch.uint8), requires_grad=False)
        self.packed.zeros = nn.Parameter(torch.rand(4))
        self.scales = nn.ParameterList([nn.Parameter(torch.rand(4))])


KEPT = {
    "norm.running_mean": torch.float32,
    "norm.running_var": torch.float32,
    "norm.num_batches_tracked": torch.int64,
    "gate.correction_bias": torch.float32,
    "wo.weight": torch.float32,
    "float8.weight": torch.float8_e4m3fn,
    "float8.weight_scale_inv": torch.float32,
    "float8.bias": torch.float32,
    "packed.blocks": torch.uint8,
    "packed.zeros": torch.float32,
    "scales.0": torch.float32,
}
CAST = {"plain.weight", "plain.bias", "norm.weight", "norm.bias"}


def published(manager: Any, actor: Any, **options: Any) -> dict[str, torch.Tensor]:
    with manager.phase("weight_sync"):
        found = {name: tensor.clone() for bucket in actor.weights(bucket_bytes=100, **options) for name, tensor in bucket}
    assert [(info.name, info.shape, info.dtype) for info in actor.weights_info(**options)] == [
        (name, tuple(tensor.shape), tensor.dtype) for name, tensor in found.items()
    ]
    return found


@pytest.fixture(params=[False, True], ids=["resident", "streamed"])
def manager(request: pytest.FixtureRequest) -> Any:
    return make_manager(policy=Colocated(stream_sync=request.param))


@pytest.mark.parametrize("dtype", ["float16", BF16, torch.float64])
def test_one_dtype_for_all_leaves_buffers_quantised_weights_their_scales_and_pinned_ones(manager: Any, dtype: Any) -> None:
    model = Model()
    wanted = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    actor = manager.register("actor", model, role="actor")
    found = published(manager, actor, dtype=dtype)
    assert {name: tensor.dtype for name, tensor in found.items() if name in KEPT} == KEPT
    assert {name for name in found if name not in KEPT} == CAST
    for name, tensor in found.items():
        assert as_bytes(tensor).equal(as_bytes(wanted[name] if name in KEPT else wanted[name].to(tensor.dtype))), name
    assert {found[name].dtype for name in CAST} == {actor.weights_info(dtype=dtype)[0].dtype} != {torch.float32}


def test_a_mapping_and_a_function_decide_by_weight(manager: Any) -> None:
    model = Model()
    actor = manager.register("actor", model, role="actor")
    own = {info.name: info.dtype for info in actor.weights_info()}
    chosen = {"plain.weight": "bf16", "wo.weight": torch.float16, "norm.running_mean": BF16, "float8.weight": torch.float8_e4m3fn}
    found = published(manager, actor, dtype={**chosen, "plain.bias": None})
    changed = {"plain.weight": BF16, "wo.weight": torch.float16, "norm.running_mean": BF16}
    assert {name: tensor.dtype for name, tensor in found.items()} == own | changed
    asked: list[str] = []

    def choose(name: str, info: placement.WeightInfo) -> torch.dtype | None:
        asked.append(name)
        assert info in actor.weights_info()
        return changed.get(name)

    assert {info.name: info.dtype for info in actor.weights_info(dtype=choose)} == own | changed
    assert asked == [name for name, dtype in own.items() if dtype.is_floating_point]
    assert all(tensor.equal(found[name]) for name, tensor in published(manager, actor, dtype=choose).items() if name in changed)


WRONG: list[tuple[Any, str]] = [
    ({"plain.wieght": BF16}, r"'plain\.wieght' is not the name of a published weight"),
    ({"plain.weight": "bf15"}, r"dtype of 'plain\.weight': 'bf15' is no dtype"),
    ({"plain.weight": torch.int8}, r"'plain\.weight'.*torch\.int8 is not floating-point"),
    ({"plain.weight": torch.float8_e5m2}, r"'plain\.weight'.*torch\.float8_e5m2 stands for values only with its scales"),
    ({"float8.weight": BF16}, r"'float8\.weight'.*torch\.float8_e4m3fn stands for values only with its scales"),
    (lambda name, info: 16, r"dtype of '.*': 16 is no dtype"),
    (lambda name, info: BF16, r"'float8\.weight'.*stands for values only"),
    (torch.int32, "torch.int32 is not floating-point"),
    (float, "is no dtype of torch"),
]


@pytest.mark.parametrize(("dtype", "said"), WRONG)
def test_a_dtype_that_cannot_be_is_refused_before_anything_is_published(dtype: Any, said: str) -> None:
    manager, model = make_manager(), Model()
    actor = manager.register("actor", model, role="actor")
    with pytest.raises(ValueError, match=said):
        actor.weights_info(dtype=dtype)
    with manager.phase("weight_sync"), pytest.raises(ValueError, match=said):
        actor.weights(dtype=dtype)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_published_and_taken_byte_for_byte(manager: Any, dtype: torch.dtype) -> None:
    def model(values: torch.Tensor) -> nn.Module:
        made = nn.Linear(2, 2)
        made.register_buffer("value", values.view(torch.uint8).clone().view(dtype).t())
        made.fixed = nn.Parameter(values.view(torch.uint8).clone().view(dtype), requires_grad=False)
        return made

    values = (torch.arange(16 * dtype.itemsize, dtype=torch.uint8) % 2).view(dtype).reshape(4, 4)
    nothing = torch.zeros(16 * dtype.itemsize, dtype=torch.uint8).view(dtype).reshape(4, 4)
    wanted = as_bytes(values).clone()
    source = model(values)
    actor = manager.register("actor", source, role="actor")
    manager.register("rollout", engine := TorchEngine(model(nothing)), role="rollout")
    with manager.phase("weight_sync") as phase:
        for bucket in actor.weights():
            engine.update_weights(bucket)
        phase.switch("rollout")
        taken: Any = engine.module
        assert as_bytes(taken.value.t()).equal(wanted)
        assert as_bytes(taken.fixed).equal(wanted)


def three() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))


def float8(model: nn.Sequential) -> None:
    model[2].weight = nn.Parameter(torch.zeros(4, 4).to(torch.float8_e4m3fn), requires_grad=False)


DIFFERENCES: dict[str, tuple[Callable[[Any], object], str]] = {
    "a name that it lacks": (lambda model: model.__delitem__(2), r"'2\.weight' is not a weight"),
    "another shape": (lambda model: model.__setitem__(2, nn.Linear(4, 3, bias=False)), r"'2\.weight' has shape \(4, 4\)"),
    "a quantised weight": (float8, r"'2\.weight' has dtype torch\.float32, the engine's has torch\.float8_e4m3fn"),
    "integers": (
        lambda model: model[2].__setattr__("weight", nn.Parameter(torch.zeros(4, 4, dtype=torch.int32), requires_grad=False)),
        "torch.int32: a cast would change",
    ),
}


@pytest.mark.parametrize("apart", [False, True], ids=["one bucket", "three buckets"])
@pytest.mark.parametrize("difference", DIFFERENCES)
def test_an_engine_that_cannot_take_all_of_a_publishing_takes_none(difference: str, apart: bool) -> None:
    change, said = DIFFERENCES[difference]
    manager, model, inner = make_manager(), three(), three()
    change(inner)
    before = {name: as_bytes(tensor).clone() for name, tensor in inner.state_dict().items()}
    actor = manager.register("actor", model, role="actor")
    manager.register("rollout", engine := TorchEngine(inner), role="rollout")
    with manager.phase("weight_sync") as phase:
        with pytest.raises(EngineError, match=said):
            engine.update_weights(next(actor.weights(bucket_bytes=1 if apart else 1 << 20)))
        phase.switch("rollout")
        assert all(as_bytes(tensor).equal(before[name]) for name, tensor in inner.state_dict().items())


@pytest.mark.parametrize("wrong", [("3.weight", torch.ones(4, 4)), ("2.weight", torch.ones(4))])
def test_a_bucket_of_ones_own_is_written_whole_or_not_at_all(wrong: tuple[str, torch.Tensor]) -> None:
    engine = TorchEngine(three())
    before = {name: tensor.clone() for name, tensor in engine.state_dict().items()}
    bucket: Sequence[tuple[str, torch.Tensor]] = [("0.weight", torch.ones(4, 4)), wrong]
    with pytest.raises(EngineError, match=wrong[0]):
        engine.update_weights(bucket)
    assert all(tensor.equal(before[name]) for name, tensor in engine.state_dict().items())
