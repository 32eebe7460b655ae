"""Which tensors adapters find in modules and in optimizers, what stays on the CPU, and how large
state will be before it is born."""

from __future__ import annotations

import random
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim.optimizer import register_optimizer_step_pre_hook

import placement
from placement.core.errors import RegistrationError
from placement.ownership.adapter import Adapter
from placement.ownership.module import ModuleAdapter
from placement.ownership.optimizer import OptimizerAdapter
from placement.testing import SimulatedDevice

CPU = torch.device("cpu")


def adapt(module: nn.Module, **options: Any) -> ModuleAdapter:
    adapter = ModuleAdapter(module, name="actor", compute_device=CPU, **options)
    adapter.check(adapter.owned())
    return adapter


def names(adapter: Adapter) -> list[str]:
    return [item.name for item in adapter.owned()]


class Block(nn.Module):
    """A module with everything a module may hold."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("angles", torch.arange(4.0), persistent=False)
        # as rotary embeddings keep it: the same object under a second name
        self.original_angles = self.angles
        self.loose_view = self.angles[1:3]
        self.table = [torch.zeros(2), {"left": (torch.ones(1), 7), "right": None}]
        self.empty = torch.empty(0)
        self.label = "no tensor"


def test_buffers_persistent_or_not_and_tensor_attributes_are_found_once_each() -> None:
    module = Block()
    adapter = adapt(module)
    assert names(adapter) == [
        "angles",
        "loose_view",
        "table.0",
        "table.1.left.0",
        "inner.weight",
        "inner.bias",
        "norm.weight",
        "norm.bias",
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    ]
    found = {item.name: item.tensor for item in adapter.owned()}
    assert (
        found["loose_view"].untyped_storage().data_ptr()
        == found["angles"].untyped_storage().data_ptr()
    )
    assert len({id(tensor) for tensor in found.values()}) == len(found)


@pytest.mark.parametrize(
    ("tensor", "complaint"),
    [
        (lambda: torch.zeros(2, device="meta"), "meta device"),
        (lambda: torch.eye(2).to_sparse(), "sparse_coo layout"),
        (
            lambda: torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.qint8),
            "quantised layout",
        ),
        (lambda: torch.nested.nested_tensor([torch.zeros(2)]), "nested layout"),
        (lambda: torch.zeros(2).share_memory_(), "shared memory"),
    ],
)
# torch warns that nested and quantised tensors are going to change
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tensors_that_cannot_be_moved_are_refused_by_name(tensor: Any, complaint: str) -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    module[0].register_buffer("odd", tensor())
    with pytest.raises(RegistrationError, match=rf"'actor': '0\.odd' .*{complaint}"):
        adapt(module)


def test_a_tensor_subclass_is_refused_and_external_ones_are_measured() -> None:
    class Packed(torch.Tensor):
        pass

    module = nn.Linear(2, 2)
    module.packed = torch.zeros(2).as_subclass(Packed)
    with pytest.raises(RegistrationError, match=r"'packed' is a .*Packed: only plain tensors"):
        adapt(module)
    adapter = adapt(module, external=True)
    assert adapter.external is not None
    assert names(adapter) == ["weight", "bias"]


def test_sparse_tensors_of_an_external_module_are_no_bytes_that_could_be_measured() -> None:
    module = nn.Embedding(4, 2, sparse=True)
    module.register_buffer("graph", torch.eye(2).to_sparse())
    module(torch.tensor([1])).sum().backward()
    assert names(adapt(module, external=True)) == [
        "weight",
        "weight.grad.indices",
        "weight.grad.values",
    ]


def test_a_device_map_over_several_places_is_refused_and_one_place_is_plain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", ModuleType("accelerate"))
    module = nn.Linear(2, 2)
    module.hf_device_map = {"embed": 0, "layers": "cpu"}
    with pytest.raises(
        RegistrationError,
        match=r"'actor'.*a device map with 2 "
        r"entries "
        r"on "
        r"several "
        r"devices.*load without device_map",
    ):
        adapt(module)
    assert adapt(module, external=True).external == "the caller says so (external=True)"
    module.hf_device_map = {"": 0}
    assert len(names(adapt(module))) == 2


@pytest.mark.parametrize("make", [lambda z: z.conj(), lambda z: z.conj().imag])
def test_values_that_are_not_those_of_the_bytes_are_refused(make: Any) -> None:
    """A tensor over the same bytes elsewhere, such as that of a state dict, would have other
    values."""
    net = nn.Linear(2, 2)
    net.register_buffer("freqs", make(torch.tensor([1 + 2j, 3 + 4j])))
    with pytest.raises(
        RegistrationError,
        match=r"'freqs' is a lazily conjugated "
        r"or "
        r"negated "
        r"view.*resolve_conj\(\) "
        r"or resolve_neg\(\)",
    ):
        adapt(net)
    net.freqs = net.freqs.resolve_conj().resolve_neg()
    assert "freqs" in names(adapt(net))


@pytest.mark.gpu
def test_cpu_tensors_of_a_module_on_the_gpu_stay_there() -> None:
    device = torch.device("cuda")
    born_on_gpu = nn.Linear(2, 2, device=device)
    born_on_gpu.lengths = torch.zeros(3)
    adapter = ModuleAdapter(born_on_gpu, name="actor", compute_device=device)
    assert names(adapter) == ["weight", "bias"]
    born_on_cpu = nn.Linear(2, 2)
    born_on_cpu.lengths = torch.zeros(3)
    adapter = ModuleAdapter(born_on_cpu, name="actor", compute_device=device)
    # as adoption does, one tensor after the other
    born_on_cpu.weight.data = born_on_cpu.weight.data.to(device)
    assert names(adapter) == ["weight", "bias", "lengths"]


def test_old_style_weight_norm_keeps_its_computed_weight() -> None:
    with pytest.warns(FutureWarning):
        module = torch.nn.utils.weight_norm(nn.Linear(3, 2))
    module(torch.ones(1, 3))
    found = {item.name: item.transient for item in adapt(module).owned()}
    assert found == {"bias": False, "weight_g": False, "weight_v": False, "weight": True}


# --- optimizers


def adapt_optimizer(optimizer: Any, **options: Any) -> OptimizerAdapter:
    adapter = OptimizerAdapter(optimizer, name="adam", compute_device=CPU, **options)
    adapter.check(adapter.owned())
    return adapter


def make(cls: Any = optim.Adam, **options: Any) -> tuple[list[nn.Parameter], optim.Optimizer]:
    parameters = [nn.Parameter(torch.randn(shape)) for shape in ((4, 3), (5, 2), (7,))]
    return parameters, cls(parameters, lr=1e-3, **options)


def step(parameters: list[nn.Parameter], optimizer: optim.Optimizer) -> None:
    for parameter in parameters:
        parameter.grad = 2 * parameter.detach()
    optimizer.step()


@pytest.mark.parametrize("options", [{}, {"fused": True, "amsgrad": True}, {"foreach": True}])
def test_the_twin_has_to_the_byte_the_state_that_a_step_creates(options: dict[str, Any]) -> None:
    """Of each optimizer of torch, `test_unborn_optimizer_state` compares the sum, in pages."""
    parameters, optimizer = make(**options)
    expected = adapt_optimizer(optimizer).expected_sizes()
    step(parameters, optimizer)
    assert expected == [
        item.tensor.untyped_storage().nbytes() for item in adapt_optimizer(optimizer).owned()
    ]


def test_state_on_the_cpu_that_was_handed_back_moves_again() -> None:
    """An optimizer of another package may step state on the CPU. What placement has left there
    is none."""

    class Other(optim.Adam):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    net = nn.Linear(2, 2)
    optimizer = Other(net.parameters())
    step([*net.parameters()], optimizer)

    def moving() -> list[str]:
        adapter = OptimizerAdapter(optimizer, name="adam", compute_device=torch.device("meta"))
        return [item.name.rpartition(".")[2] for item in adapter.owned()]

    assert moving() == []
    manager = placement.Manager(device=SimulatedDevice(capacity_bytes=1 << 22, chunk_bytes=4096))
    manager.register("actor", net)
    manager.register("adam", optimizer)
    manager.close()
    assert moving() == ["exp_avg", "exp_avg_sq"] * 2


def test_the_twin_touches_nothing_of_the_user() -> None:
    parameters, optimizer = make()
    calls: list[str] = []
    optimizer.register_step_post_hook(lambda *_: calls.append("own"))
    everywhere = register_optimizer_step_pre_hook(lambda *_: calls.append("global"))
    values = [parameter.detach().clone() for parameter in parameters]
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    try:
        assert adapt_optimizer(optimizer).expected_sizes()
    finally:
        everywhere.remove()
    assert calls == []
    assert all(
        torch.equal(parameter, value) for parameter, value in zip(parameters, values, strict=True)
    )
    assert all(parameter.grad is None for parameter in parameters)
    assert groups == [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    assert len(optimizer.state) == 0


def test_a_users_optimizer_that_needs_data_cannot_be_told_and_one_that_does_not_can() -> None:
    class Momentum(optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"noise": 0.1})

        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter]["velocity"] = torch.rand_like(parameter)
                    random.random()
                    torch.rand(1)

    class Curious(Momentum):
        def step(self, closure: Any = None) -> None:
            super().step()
            self.param_groups[0]["params"][0].sum().item()

    class Demanding(Momentum):
        def __init__(self, params: Any, model: nn.Module) -> None:
            super().__init__(params)
            self.model = model

    module = nn.Linear(3, 2)
    before = torch.get_rng_state(), random.getstate()
    keep = (
        Momentum(module.parameters()),
        Curious(module.parameters()),
        Demanding(module.parameters(), module),
    )
    assert [adapt_optimizer(optimizer).expected_sizes() for optimizer in keep] == [
        [24, 8],
        None,
        None,
    ]
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


class ByAttribute:
    """Wraps as accelerate and Megatron do."""

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        self.optimizer.step()


@pytest.mark.parametrize(
    ("odd", "advice"),
    [
        ([nn.Parameter(torch.zeros(2))], "not its tensors"),
        (torch.zeros(2), "not its tensors"),
        (nn.Linear, r"placement\.Lazy\(function\), which calls it"),
        (lambda: None, r"what it returns, or placement\.Lazy"),
        ("adam", r"such as VllmInProcess\(llm\)"),
        (
            optim.lr_scheduler.LambdaLR(make()[1], lambda epoch: 0.9),
            ("not its tensors or a scheduler"),
        ),
        (ByAttribute(None), "register the module or the optimizer itself"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_optimizer_is_refused_with_advice_that_fits(odd: Any, advice: str) -> None:
    with pytest.raises(
        RegistrationError,
        match=r"'adam': .* is no optimizer "
        r"and "
        r"holds "
        r"none.*Supported: "
        rf".*What to do: .*{advice}",
    ):
        adapt_optimizer(odd)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_meta_parameters_and_state_of_odd_form_are_refused() -> None:
    with pytest.raises(RegistrationError, match="parameter 0 is on the meta device"):
        adapt_optimizer(optim.SGD([nn.Parameter(torch.zeros(2, device="meta"))]))
    parameters, optimizer = make(optim.SGD)
    optimizer.state[parameters[0]]["odd"] = torch.eye(2).to_sparse_csr()
    with pytest.raises(RegistrationError, match=r"'state\.0\.odd' has a torch\.sparse_csr layout"):
        adapt_optimizer(optimizer)
    optimizer.state[parameters[0]]["odd"] = torch.zeros(2, 2, dtype=torch.complex64).conj()
    with pytest.raises(RegistrationError, match=r"'state.0.odd' is a lazily conjugated"):
        adapt_optimizer(optimizer)


def test_state_that_the_user_keeps_on_the_cpu_stays_where_torchs_own_follows_its_parameters() -> (
    None
):
    class OnCpu(optim.SGD):
        def step(self, closure: Any = None) -> None: ...

    # any device that is not the CPU: none of its tensors is made here
    device = torch.device("meta")
    parameter = nn.Parameter(torch.zeros(2))
    for cls, follows in ((optim.SGD, ["state.0.momentum_buffer"]), (OnCpu, [])):
        optimizer = cls([parameter])
        optimizer.state[parameter] = {"step": torch.zeros(()), "momentum_buffer": torch.zeros(2)}
        assert names(OptimizerAdapter(optimizer, name="adam", compute_device=device)) == follows


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"capturable": True}, {"foreach": True}])
def test_on_a_gpu_the_twin_has_the_real_sizes_and_cpu_counters_stay(
    options: dict[str, Any],
) -> None:
    device = torch.device("cuda")
    parameter = nn.Parameter(torch.zeros(5, device=device))
    optimizer = optim.AdamW([parameter], **options)
    adapter = OptimizerAdapter(optimizer, name="adam", compute_device=device)
    expected = adapter.expected_sizes()
    step([parameter], optimizer)
    found = list(adapter.owned())
    assert all(item.tensor.is_cuda for item in found)
    assert expected == [item.tensor.untyped_storage().nbytes() for item in found]
