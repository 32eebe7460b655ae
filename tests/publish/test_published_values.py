"""What is published, when and from where: names, buckets, dtypes, what a cast leaves alone, what
`convert=` makes of a weight."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from placement import EngineError, PhaseError, TorchEngine, WeightInfo
from placement.policies import Colocated
from placement.testing import assert_nothing_resident
from tests.support.sweeps import few
from tests.support.worker import SYNC, assert_same, make_manager

DTYPES = sorted(
    {
        each
        for each in vars(torch).values()
        if isinstance(each, torch.dtype) and "q" not in str(each)
    },
    key=str,
)
"""All of torch's dtypes but those of its quantised tensors, which cannot be registered."""
SHOWN = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn),
    *(torch.int8, torch.uint8, torch.int64, torch.bool, torch.complex64),
)
BF16 = torch.bfloat16


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1, 1).view(torch.uint8)


class Model(nn.Module):
    """A router with a bias in float32, block-quantised layers, packed integers, and layers that may
    be cast."""

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
        self.float8.weight = nn.Parameter(
            torch.rand(4, 4).to(torch.float8_e4m3fn), requires_grad=False
        )
        self.float8.weight_scale_inv = nn.Parameter(torch.rand(1, 1))
        self.packed = nn.Module()
        self.packed.blocks = nn.Parameter(
            torch.randint(255, (4, 4), dtype=torch.uint8), requires_grad=False
        )
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


def copied(buckets: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for bucket in buckets for name, tensor in bucket}


def published(manager: Any, actor: Any, **options: Any) -> dict[str, torch.Tensor]:
    with manager.phase("weight_sync"):
        found = copied(actor.weights(bucket_bytes=100, **options))
    assert [(info.name, info.shape, info.dtype) for info in actor.weights_info(**options)] == [
        (name, tuple(tensor.shape), tensor.dtype) for name, tensor in found.items()
    ]
    return found


@pytest.fixture(params=[False, True], ids=["resident", "streamed"])
def manager(request: pytest.FixtureRequest) -> Any:
    return make_manager(policy=Colocated(stream_sync=request.param))


@pytest.mark.parametrize("dtype", ["float16", BF16, torch.float64])
def test_one_dtype_for_all_leaves_buffers_quantised_weights_their_scales_and_pinned_ones(
    manager: Any, dtype: Any
) -> None:
    model = Model()
    wanted = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    actor = manager.register("actor", model, role="actor")
    found = published(manager, actor, dtype=dtype)
    assert {name: tensor.dtype for name, tensor in found.items() if name in KEPT} == KEPT
    assert {name for name in found if name not in KEPT} == CAST
    for name, tensor in found.items():
        assert as_bytes(tensor).equal(
            as_bytes(wanted[name] if name in KEPT else wanted[name].to(tensor.dtype))
        ), name
    assert (
        {found[name].dtype for name in CAST}
        == {actor.weights_info(dtype=dtype)[0].dtype}
        != {torch.float32}
    )


WRONG: list[tuple[Any, str]] = [
    ("bf15", "'bf15' is no dtype"),
    (torch.int32, "torch.int32, which stands for values only with scales or is not floating-point"),
    (torch.float8_e5m2, "torch.float8_e5m2, which stands for values only with scales"),
    (float, "is no dtype of torch"),
    ({"plain.weight": BF16}, "is no dtype"),
]


@pytest.mark.parametrize(("dtype", "said"), WRONG)
def test_a_dtype_that_cannot_be_is_refused_before_anything_is_published(
    dtype: Any, said: str
) -> None:
    manager, model = make_manager(), Model()
    actor = manager.register("actor", model, role="actor")
    with pytest.raises(ValueError, match=said):
        actor.weights_info(dtype=dtype)
    with manager.phase("weight_sync"), pytest.raises(ValueError, match=said):
        actor.weights(dtype=dtype)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", few(DTYPES, *SHOWN), ids=str)
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


def net() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(32, 32) for _ in range(6)))


def three() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))


def float8(model: nn.Sequential) -> None:
    model[2].weight = nn.Parameter(torch.zeros(4, 4).to(torch.float8_e4m3fn), requires_grad=False)


DIFFERENCES: dict[str, tuple[Callable[[Any], object], str]] = {
    "a name that it lacks": (lambda model: model.__delitem__(2), r"'2\.weight' is not a weight"),
    "another shape": (
        lambda model: model.__setitem__(2, nn.Linear(4, 3, bias=False)),
        (r"'2\.weight' has shape \(4, 4\)"),
    ),
    "a quantised weight": (
        float8,
        (
            r"'2\.weight' has dtype torch\.float32, "
            r"the "
            r"engine's "
            r"has "
            r"torch\.float8_e4m3fn"
        ),
    ),
    "integers": (
        lambda model: model[2].__setattr__(
            "weight", nn.Parameter(torch.zeros(4, 4, dtype=torch.int32), requires_grad=False)
        ),
        "torch.int32: a cast would change",
    ),
}


@pytest.mark.parametrize("apart", [False, True], ids=["one bucket", "three buckets"])
@pytest.mark.parametrize("difference", DIFFERENCES)
def test_an_engine_that_cannot_take_all_of_a_publishing_takes_none(
    difference: str, apart: bool
) -> None:
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
        assert all(
            as_bytes(tensor).equal(before[name]) for name, tensor in inner.state_dict().items()
        )


@pytest.mark.parametrize("wrong", [("3.weight", torch.ones(4, 4)), ("2.weight", torch.ones(4))])
def test_a_bucket_of_ones_own_is_written_whole_or_not_at_all(
    wrong: tuple[str, torch.Tensor],
) -> None:
    engine = TorchEngine(three())
    before = {name: tensor.clone() for name, tensor in engine.state_dict().items()}
    bucket: Sequence[tuple[str, torch.Tensor]] = [("0.weight", torch.ones(4, 4)), wrong]
    with pytest.raises(EngineError, match=wrong[0]):
        engine.update_weights(bucket)
    assert all(tensor.equal(before[name]) for name, tensor in engine.state_dict().items())


# --- convert=


def packed(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Matrices as int8; the rest as it is."""
    return (tensor * 127).round().to(torch.int8) if tensor.ndim > 1 else tensor


def test_what_is_sent_is_what_the_function_returns_and_buckets_count_it(manager: Any) -> None:
    model = net()
    wanted = {
        name: packed(name, value) for name, value in copy.deepcopy(model.state_dict()).items()
    }
    actor = manager.register("actor", model, role="actor")
    infos = actor.weights_info(convert=packed)
    with manager.phase("weight_sync"):
        buckets = [
            [(name, tensor.clone()) for name, tensor in bucket]
            for bucket in actor.weights(convert=packed, bucket_bytes=1500)
        ]
    found = dict(pair for bucket in buckets for pair in bucket)
    assert_same(found, wanted)
    assert [
        WeightInfo(name, tuple(tensor.shape), tensor.dtype) for name, tensor in found.items()
    ] == infos
    # A layer is 1024 bytes of int8, and its bias 128; its float32 matrix alone would be 4096.
    assert [sum(tensor.nbytes for _, tensor in bucket) for bucket in buckets] == [1152] * 6
    assert_nothing_resident(manager)


def test_the_full_values_are_gone_before_their_bucket_is_sent(manager: Any) -> None:
    model = net()
    actor = manager.register("actor", model, role="actor")
    given: list[weakref.ref[torch.Tensor]] = []

    def halves(name: str, tensor: torch.Tensor) -> torch.Tensor:
        assert sum(each() is not None for each in given) == 0
        if not tensor.is_meta:
            given.append(weakref.ref(tensor))
        return tensor[: len(tensor) // 2].clone()

    with manager.phase("weight_sync"):
        for bucket in actor.weights(convert=halves, bucket_bytes=2048):
            assert [each() for each in given if each() is not None] == []
            assert sum(tensor.nbytes for _, tensor in bucket) <= 2048
    assert len(given) == len(actor.weights_info())


def test_it_comes_after_the_cast(manager: Any) -> None:
    model = net()
    actor = manager.register("actor", model, role="actor")

    def wide(name: str, tensor: torch.Tensor) -> torch.Tensor:
        assert tensor.dtype is torch.bfloat16
        return tensor.double() if tensor.ndim == 2 else tensor

    with manager.phase("weight_sync"):
        found = [
            WeightInfo(name, tuple(tensor.shape), tensor.dtype)
            for bucket in actor.weights(dtype="bfloat16", convert=wide)
            for name, tensor in bucket
        ]
    assert {info.dtype for info in found} == {torch.bfloat16, torch.float64}
    assert actor.weights_info(dtype="bfloat16", convert=wide) == found


@pytest.mark.parametrize(
    ("wrong", "error", "said"),
    [
        (lambda *_: None, TypeError, "for '0.weight' it returned None"),
        (lambda _, tensor: [tensor], TypeError, "must return a tensor"),
        (lambda _, tensor: tensor / tensor.max().item(), ValueError, "'0.weight' without values"),
        ("fp8", TypeError, r"is a function of \(name, tensor\), not 'fp8'"),
    ],
)
def test_what_is_no_such_function_is_refused_before_anything_is_published(
    wrong: Any, error: type[Exception], said: str
) -> None:
    manager = make_manager()
    model = net()
    actor = manager.register("actor", model, role="actor")
    with manager.phase("weight_sync"), pytest.raises(error, match=said):
        actor.weights(convert=wrong)
    with pytest.raises(error, match=said):
        actor.weights_info(convert=wrong)
    assert_nothing_resident(manager)


# --- what comes out of `weights()`, when, and from which memory


class Mixed(nn.Module):
    """Tied weights, buffers of every sort, mixed types, an empty parameter, a layer used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 16)
        self.layer = nn.Linear(16, 16).to(torch.bfloat16)
        self.again = self.layer
        self.head = nn.Linear(16, 100, bias=False)
        self.head.weight = self.embed.weight
        self.empty = nn.Parameter(torch.empty(0, 16))
        self.register_buffer("steps", torch.tensor(7))
        self.register_buffer("freq", torch.rand(8))
        self.register_buffer("freq_again", self.freq)
        self.register_buffer("cache", torch.rand(8), persistent=False)


NAMES = ["empty", "embed.weight", "layer.weight", "layer.bias", "steps", "freq"]


def test_names_shapes_types_and_values_each_weight_once(manager: Any) -> None:
    model = Mixed()
    wanted = {
        name: tensor.detach().clone()
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    }
    actor = manager.register("actor", model, role="actor")
    assert [info.name for info in actor.weights_info()] == NAMES
    with manager.phase("weight_sync"):
        assert actor.state is SYNC
        found = copied(actor.weights())
        assert (bool(actor.resident_bytes), bool(actor.counters.loaded_bytes)) == (
            not manager.policy.stream_sync,
        ) * 2
    assert list(found) == NAMES
    for info in actor.weights_info():
        assert info == WeightInfo(
            info.name, tuple(wanted[info.name].shape), wanted[info.name].dtype
        )
        assert_same(found[info.name], wanted[info.name])
    assert not any(tensor.requires_grad for tensor in found.values())
    assert_nothing_resident(manager)


def test_buckets_are_bounded_and_a_larger_tensor_comes_alone(manager: Any) -> None:
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(6)], nn.Linear(128, 128))
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
    model = nn.Linear(4, 4)
    old = manager.register("actor", model, role="actor")
    manager.unregister("actor")
    new = manager.register("actor", model, role="actor")
    with manager.phase("weight_sync"):
        with pytest.raises(
            PhaseError,
            match=r"or it was unregistered: use the handle "
            r"of "
            r"the "
            r"last "
            r"register\(\)",
        ):
            old.weights()
        assert len(next(iter(new.weights()))) == 2


def test_a_generator_that_outlives_its_phase_raises(manager: Any) -> None:
    model = net()
    actor = manager.register("actor", model, role="actor")
    with manager.phase("weight_sync") as phase:
        inside, across, later = generators = [actor.weights(bucket_bytes=1000) for _ in range(3)]
        for each in generators:
            next(each)
        phase.switch("log_prob")
        with pytest.raises(PhaseError, match="GPU_RESIDENT in phase 'log_prob'"):
            next(inside)
    with pytest.raises(PhaseError, match="CPU_OFFLOADED in phase 'idle'"):
        next(across)
    with manager.phase("weight_sync"), pytest.raises(PhaseError, match="began in an earlier"):
        next(later)
    assert_nothing_resident(manager)


@pytest.mark.parametrize("then", ["leave", "switch", "an error"])
def test_the_memory_of_the_buckets_goes_back_at_the_end_of_the_sync(
    manager: Any, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    model = Mixed()
    actor, trims = manager.register("actor", model, role="actor"), list[str]()
    monkeypatch.setattr(manager.device, "trim", lambda: trims.append(actor.state))
    try:
        with manager.phase("weight_sync") as phase:
            copied(actor.weights())
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
