"""Which tensors the adapter finds in an optimizer, what stays on the CPU, and how large state will be before it is born."""

from __future__ import annotations

import random
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim.optimizer import register_optimizer_step_pre_hook

from placement.core.errors import RegistrationError
from placement.ownership.optimizer import OptimizerAdapter

CPU = torch.device("cpu")


def adapt(optimizer: Any, **options: Any) -> OptimizerAdapter:
    return OptimizerAdapter(optimizer, name="adam", compute_device=CPU, **options)


def names(adapter: OptimizerAdapter) -> list[str]:
    return [item.name for item in adapter.owned()]


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
    expected = adapt(optimizer).expected_sizes()
    step(parameters, optimizer)
    assert expected == [item.tensor.untyped_storage().nbytes() for item in adapt(optimizer).owned()]


def test_capturable_counters_move_in_the_group_that_is_capturable() -> None:
    parameters, optimizer = make()
    optimizer.add_param_group({"params": [late := nn.Parameter(torch.zeros(2))]})
    step([*parameters, late], optimizer)
    optimizer.param_groups[1]["capturable"] = True
    assert [name for name in names(adapt(optimizer)) if name.endswith(".step")] == ["state.3.step"]


def test_the_twin_touches_nothing_of_the_user() -> None:
    parameters, optimizer = make()
    calls: list[str] = []
    optimizer.register_step_post_hook(lambda *_: calls.append("own"))
    everywhere = register_optimizer_step_pre_hook(lambda *_: calls.append("global"))
    values = [parameter.detach().clone() for parameter in parameters]
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    try:
        assert adapt(optimizer).expected_sizes()
    finally:
        everywhere.remove()
    assert calls == []
    assert all(torch.equal(parameter, value) for parameter, value in zip(parameters, values, strict=True))
    assert all(parameter.grad is None for parameter in parameters)
    assert groups == [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
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
    keep = Momentum(module.parameters()), Curious(module.parameters()), Demanding(module.parameters(), module)
    assert [adapt(optimizer).expected_sizes() for optimizer in keep] == [[24, 8], None, None]
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
        (optim.lr_scheduler.LambdaLR(make()[1], lambda epoch: 0.9), "not its tensors or a scheduler"),
        (ByAttribute(None), "register the module or the optimizer itself"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_optimizer_is_refused_with_advice_that_fits(odd: Any, advice: str) -> None:
    with pytest.raises(RegistrationError, match=rf"'adam': .* is no optimizer and holds none.*Supported: .*What to do: .*{advice}"):
        adapt(odd)


def test_an_optimizer_that_places_its_state_itself_is_external(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's class has to be compiled before its constructor runs; this one has its name, place and shape."""
    module = ModuleType("deepspeed.ops.adam.cpu_adam")
    module.DeepSpeedCPUAdam = type("DeepSpeedCPUAdam", (optim.AdamW,), {"__module__": module.__name__})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deepspeed", sys.modules.get("deepspeed") or ModuleType("deepspeed"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    parameter = nn.Parameter(torch.zeros(2))
    placed = module.DeepSpeedCPUAdam([parameter])
    step([parameter], placed)
    adapter = adapt(placed)
    assert adapter.external == "DeepSpeed's CPU Adam keeps its state on the CPU"
    assert len(names(adapter)) == 3
    assert adapter.expected_sizes() == ()


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_meta_parameters_and_state_of_odd_form_are_refused() -> None:
    with pytest.raises(RegistrationError, match="parameter 0 is on the meta device"):
        adapt(optim.SGD([nn.Parameter(torch.zeros(2, device="meta"))]))
    parameters, optimizer = make(optim.SGD)
    optimizer.state[parameters[0]]["odd"] = torch.eye(2).to_sparse_csr()
    with pytest.raises(RegistrationError, match=r"'state\.0\.odd' has a torch\.sparse_csr layout"):
        adapt(optimizer)
    optimizer.state[parameters[0]]["odd"] = torch.zeros(2, 2, dtype=torch.complex64).conj()
    with pytest.raises(RegistrationError, match=r"'state.0.odd' is a lazily conjugated"):
        adapt(optimizer)


def test_state_that_the_user_keeps_on_the_cpu_stays_where_torchs_own_follows_its_parameters() -> None:
    class OnCpu(optim.SGD):
        def step(self, closure: Any = None) -> None: ...

    device = torch.device("meta")  # any device that is not the CPU: none of its tensors is made here
    parameter = nn.Parameter(torch.zeros(2))
    for cls, follows in ((optim.SGD, ["state.0.momentum_buffer"]), (OnCpu, [])):
        optimizer = cls([parameter])
        optimizer.state[parameter] = {"step": torch.zeros(()), "momentum_buffer": torch.zeros(2)}
        assert names(OptimizerAdapter(optimizer, name="adam", compute_device=device)) == follows


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"capturable": True}, {"foreach": True}])
def test_on_a_gpu_the_twin_has_the_real_sizes_and_cpu_counters_stay(options: dict[str, Any]) -> None:
    device = torch.device("cuda")
    parameter = nn.Parameter(torch.zeros(5, device=device))
    optimizer = optim.AdamW([parameter], **options)
    adapter = OptimizerAdapter(optimizer, name="adam", compute_device=device)
    expected = adapter.expected_sizes()
    step([parameter], optimizer)
    found = list(adapter.owned())
    assert all(item.tensor.is_cuda for item in found)
    assert expected == [item.tensor.untyped_storage().nbytes() for item in found]
