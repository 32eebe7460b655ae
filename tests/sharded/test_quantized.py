"""Quantised weights and quantised optimizer state: torchao's wrappers, bitsandbytes' parameters.
The real packages.

The 20 steps run on a GPU too, in tests/gpu/test_frameworks.py.
"""

from __future__ import annotations

import copy
import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from placement import NotResidentError, RegistrationError
from placement.ownership.module import ModuleAdapter
from placement.ownership.optimizer import OptimizerAdapter
from placement.policies import Colocated
from placement.testing import SimulatedDevice, assert_nothing_resident
from tests.sharded import training
from tests.sharded.training import bytes_of
from tests.support.sweeps import few
from tests.support.worker import make_manager

WIDTH = 64
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Small tensors: threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Adapted(nn.Module):
    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.base(inputs) + self.up(self.down(inputs))
        return result


def batch(number: int, device: str = "cpu") -> torch.Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(number)).to(
        training.here(device)
    )


def program(model: nn.Module, optimizer: Any = None, device: str = "cpu") -> training.Program:
    adam = optimizer or torch.optim.AdamW(
        [each for each in model.parameters() if each.requires_grad], lr=1e-2
    )
    return training.Program(
        model,
        adam,
        lambda number: (model(batch(number, device)) - batch(number, device)).square().mean(),
    )


def torchao_model(kind: str, device: str = "cpu") -> nn.Module:
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)).to(
        training.here(device)
    )
    quantize_(model, Int8WeightOnlyConfig() if kind == "int8" else Float8WeightOnlyConfig())
    return nn.Sequential(Adapted(model[0]), nn.ReLU(), Adapted(model[2])).to(training.here(device))


def bitsandbytes_layer(kind: str) -> nn.Module:
    import bitsandbytes as bnb

    if kind == "int8":
        layer: nn.Module = bnb.nn.Linear8bitLt(WIDTH, WIDTH, has_fp16_weights=False)
    else:
        layer = bnb.nn.Linear4bit(
            WIDTH,
            WIDTH,
            compute_dtype=torch.float32,
            compress_statistics=kind == "nested",
            quant_type="nf4",
        )
    return layer


def bitsandbytes_model(kind: str, device: str = "cpu") -> nn.Module:
    # What quantises is the move to a device, also to the CPU.
    return nn.Sequential(
        Adapted(bitsandbytes_layer(kind)), nn.ReLU(), Adapted(bitsandbytes_layer(kind))
    ).to(training.here(device))


BUILD = {"torchao": torchao_model, "bitsandbytes": bitsandbytes_model}
CASES = [
    ("torchao", "int8"),
    ("torchao", "float8"),
    ("bitsandbytes", "nf4"),
    ("bitsandbytes", "nested"),
    ("bitsandbytes", "int8"),
]


def build(package: str, kind: str, device: str = "cpu") -> training.Program:
    return program(BUILD[package](kind, device), device=device)


@pytest.mark.parametrize(("package", "kind"), CASES)
def test_training_on_a_frozen_quantised_base_does_not_change_by_a_bit(
    package: str, kind: str
) -> None:
    outcome = training.compare(functools.partial(build, package, kind))
    # payload alone; statistics and adapters come on top
    base = 2 * WIDTH * WIDTH // (1 if kind in ("int8", "float8") else 2)
    assert outcome.resident_bytes["actor"] >= base
    assert outcome.skipped_bytes["actor"] > 0  # the base is not copied back


@pytest.mark.parametrize(("package", "kind"), CASES)
def test_state_dicts_of_quantised_weights_read_the_same_in_every_state(
    package: str, kind: str
) -> None:
    model = BUILD[package](kind)
    model(batch(0))  # the first forward of an 8-bit layer moves its statistics into another object
    wanted = bytes_of(model.state_dict())
    manager = make_manager(device=SimulatedDevice(1 << 20, chunk_bytes=4096))
    handle = manager.register("actor", model, role="actor", readonly=True)
    assert_nothing_resident(manager, allow_foreign=kind == "nested")
    assert bytes_of(model.state_dict()) == bytes_of(handle.state_dict()) == wanted
    with manager.phase("log_prob"):
        held = model.state_dict()
    assert bytes_of(held) == wanted
    assert_nothing_resident(manager, allow_foreign=kind == "nested")
    manager.close()
    assert bytes_of(model.state_dict()) == wanted


@pytest.mark.parametrize("streams", [False, True], ids=["resident", "streamed"])
@pytest.mark.parametrize("kind", ["int8", "float8"])
def test_a_wrapped_weight_keeps_its_dtype_and_its_scales_when_it_is_published(
    kind: str, streams: bool
) -> None:
    model = BUILD["torchao"](kind)
    wanted = bytes_of(
        {name: value for name, value in model.state_dict().items() if ".base." in name}
    )
    manager = make_manager(policy=Colocated(stream_sync=streams))
    actor = manager.register("actor", model, role="actor")
    with manager.phase("weight_sync"):
        found = {
            name: value for bucket in actor.weights(dtype="bfloat16") for name, value in bucket
        }
        assert [info.dtype for info in actor.weights_info(dtype="bfloat16")] == [
            value.dtype for value in found.values()
        ]
        assert (
            bytes_of({name: value for name, value in found.items() if ".base." in name}) == wanted
        )
        assert found["0.down.weight"].dtype is torch.bfloat16
        with pytest.raises(ValueError, match="only with scales"):
            actor.weights(dtype=torch.float8_e4m3fn)


def test_what_bitsandbytes_computes_with_in_a_state_dict_stays_and_is_named() -> None:
    """Its `state_dict()` calls `item()` and `clone()` on these, and the code is one tensor for
    every weight of the process."""
    models = [bitsandbytes_model("nested") for _ in range(2)]
    outputs = [model(batch(0)) for model in models]
    manager = make_manager()
    handles = [manager.register(f"model{number}", model) for number, model in enumerate(models)]
    for handle in handles:
        assert handle.adapter is not None
        assert [name for name, _ in handle.adapter.kept_by_framework()] == [
            f"{layer}.base.weight.{name}"
            for layer in (0, 2)
            for name in ("nested_offset", "nested_quant_map")
        ]
    # Another model is quantised while both are offloaded, with the code that they share.
    torch.manual_seed(7)
    late = bytes_of(bitsandbytes_model("nested").state_dict())
    manager.close()
    torch.manual_seed(7)
    assert bytes_of(bitsandbytes_model("nested").state_dict()) == late
    assert [training.as_bytes(model(batch(0))) for model in models] == [
        training.as_bytes(output) for output in outputs
    ]


@pytest.mark.parametrize("kind", ["nf4", "nested"])
def test_weights_that_bitsandbytes_packs_for_a_cpus_kernel_are_moved_as_they_are(kind: str) -> None:
    """On a CPU with AVX512_BF16 the first forward pass for inference does so. A state dict undoes
    it, which replaces the tensors."""
    from bitsandbytes.functional import _convert_weight_packed_for_cpu

    def story(model: Any, phase: Callable[[], AbstractContextManager[Any]]) -> Iterator[Any]:
        weight = model[0].base.weight
        with phase():
            weight.data, _ = _convert_weight_packed_for_cpu(weight.data, weight.quant_state)
            yield bytes_of({"weight": weight, "absmax": weight.quant_state.absmax})
        with phase():
            yield bytes_of({"weight": weight, "absmax": weight.quant_state.absmax})
        with phase():
            yield bytes_of(model.state_dict())
        with phase():
            yield bytes_of({"weight": weight, "absmax": weight.quant_state.absmax})

    torch.manual_seed(0)
    model = bitsandbytes_model(kind)
    wanted = list(story(copy.deepcopy(model), nullcontext))
    manager = make_manager(device=SimulatedDevice(1 << 20, chunk_bytes=4096))
    manager.register("actor", model, role="actor")
    assert list(story(model, lambda: manager.phase("log_prob"))) == wanted
    assert_nothing_resident(manager, allow_foreign=kind == "nested")


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_weights_that_bitsandbytes_has_yet_to_quantise_are_refused(kind: str) -> None:
    model = nn.Sequential(bitsandbytes_layer(kind))
    before = training.as_bytes(model[0].weight)
    with pytest.raises(
        RegistrationError,
        match=r"'actor': '0\.weight' is a "
        r"weight "
        r".*not "
        r"quantised "
        r"yet.*model\.to\(device\) before",
    ):
        make_manager().register("actor", model)
    assert training.as_bytes(model[0].weight) == before
    model.to("cpu")
    # any device that is not the CPU: none of its tensors is made here
    elsewhere = torch.device("meta")
    with pytest.raises(
        RegistrationError,
        match=r"quantised by bitsandbytes and is on cpu.*model\.to\('meta'\)",
    ):
        ModuleAdapter(model, name="actor", compute_device=elsewhere)


# --- optimizers


def learner(make: Any, device: str = "cpu") -> training.Program:
    model = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH)).to(
        training.here(device)
    )
    return program(model, make(model.parameters()), device)


def quantised(library: str, name: str, parameters: Any, **options: Any) -> Any:
    return getattr(importlib.import_module(f"{library}.optim"), name)(parameters, **options)


OPTIMIZERS = {
    "bnb AdamW8bit": functools.partial(quantised, "bitsandbytes", "AdamW8bit", lr=1e-2),
    "bnb Lion8bit": functools.partial(
        quantised, "bitsandbytes", "Lion8bit", lr=1e-3, min_8bit_size=16
    ),
    **{
        f"torchao {x}": functools.partial(quantised, "torchao", x, lr=1e-2, block_size=64)
        for x in ("AdamW8bit", "AdamW4bit", "AdamWFp8")
    },
}


@pytest.fixture
def _eager() -> Iterator[None]:
    """torchao compiles its steps; that takes a quarter of a minute here and changes nothing about
    where the state lies."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.usefixtures("_eager")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_with_quantised_optimizer_state_does_not_change_by_a_bit(name: str) -> None:
    outcome = training.compare(functools.partial(learner, OPTIMIZERS[name]))
    assert outcome.offloaded_bytes["actor.optimizer"] > 0


@pytest.mark.usefixtures("_eager")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_quantised_optimizer_state_is_sized_saved_and_guarded(name: str) -> None:
    made = learner(OPTIMIZERS[name])
    manager = make_manager(device=SimulatedDevice(1 << 20, chunk_bytes=4096))
    made.register(manager)
    handle = manager.handles["actor.optimizer"]
    reserved = handle.host_bytes
    with manager.phase("train"):
        made.learn(0)
        wanted = bytes_of(made.optimizer.state_dict())
        resident = made.optimizer.state_dict()
    # its twin does not know min_8bit_size, which bitsandbytes keeps elsewhere
    if "Lion" not in name:
        assert handle.host_bytes <= reserved, (
            "what the first step bore does not fit into what registration set aside"
        )
    assert_nothing_resident(manager)
    assert bytes_of(made.optimizer.state_dict()) == bytes_of(resident) == wanted
    with pytest.raises(NotResidentError, match="restore"):
        made.optimizer.load_state_dict(resident)
    with manager.phase("restore"):
        made.optimizer.load_state_dict(made.optimizer.state_dict())
        assert bytes_of(made.optimizer.state_dict()) == wanted
    assert_nothing_resident(manager)
    assert bytes_of(handle.state_dict()) == wanted
    assert bytes_of(resident) == wanted
    manager.close()
    assert bytes_of(made.optimizer.state_dict()) == wanted
    assert "load_state_dict" not in vars(made.optimizer)


@pytest.mark.parametrize(
    "name",
    few(
        ["AdEMAMix", "Adagrad", "Adam", "AdamW", "LAMB", "LARS", "Lion", "RMSprop", "SGD"],
        *("AdEMAMix", "AdamW", "Lion"),
    ),
)
def test_the_tables_of_8_bit_optimizers_move_before_the_first_step_too(name: str) -> None:
    options = {"momentum": 0.9} if name in ("LARS", "SGD") else {}
    make = functools.partial(quantised, "bitsandbytes", f"{name}8bit", lr=1e-3, **options)
    made, plain = learner(make), learner(make)
    plain.model.load_state_dict(made.model.state_dict())
    manager = make_manager(device=SimulatedDevice(1 << 20, chunk_bytes=4096))
    made.register(manager)
    for number in range(2):
        assert_nothing_resident(manager)
        with manager.phase("train"):
            made.learn(number)
        plain.learn(number)
    assert_nothing_resident(manager)
    wanted = bytes_of(plain.optimizer.state_dict())
    assert bytes_of(made.optimizer.state_dict()) == wanted
    assert any(name.endswith("qmap1") for name in wanted)


def test_paged_optimizers_are_refused() -> None:
    import bitsandbytes as bnb

    model = nn.Linear(4, 4)
    with pytest.raises(
        RegistrationError,
        match=r"PagedAdamW8bit.*managed memory.*not paged: placement offloads it",
    ):
        OptimizerAdapter(
            bnb.optim.PagedAdamW8bit(model.parameters()), name="adam", compute_device=CPU
        )
    assert (
        OptimizerAdapter(
            bnb.optim.AdamW8bit(model.parameters()), name="adam", compute_device=CPU
        ).external
        is None
    )


def test_an_optimizer_of_torchao_that_steps_on_the_cpu_is_external() -> None:
    """The real class; its constructor wants a GPU, so its fields are filled in by hand."""
    from torchao.optim import CPUOffloadOptimizer

    model = nn.Linear(WIDTH, WIDTH)
    copied = model.weight.detach().clone().requires_grad_()
    optimizer = CPUOffloadOptimizer.__new__(CPUOffloadOptimizer)
    optimizer.param_d2h_map = {model.weight: copied}
    optimizer.optim_dict = {model.weight: torch.optim.AdamW([copied])}
    optimizer.d_param_groups = [{"params": [model.bias]}]
    optimizer.d_opt = torch.optim.AdamW([model.bias])
    optimizer.queue = {}
    manager = make_manager()
    manager.register("actor", model, role="actor")
    handle = manager.register("actor.optimizer", optimizer)
    assert handle.external_reason == "torchao's CPUOffloadOptimizer keeps its state on the CPU"
    assert [owner.name for owner in handle.owners] == ["actor"]
    manager.unregister(handle)
    assert "step" not in vars(optimizer)
