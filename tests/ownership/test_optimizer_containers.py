"""Optimizers whose state lies in members, that step copies of the weights, or that are made in
unusual ways."""

from __future__ import annotations

import copy
from collections import OrderedDict
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

import placement
from placement import Manager, RegistrationError
from placement.testing import assert_nothing_resident
from tests.support.worker import assert_same, learn, make_manager, net


class Slow(optim.Optimizer):
    """An average of the weights, in a state of its own for parameters that other optimizers step,
    too."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"rate": 0.1})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["exp_avg"] = p.detach().clone()

    def step(self, closure: Any = None) -> None:
        for p, entry in self.state.items():
            entry["exp_avg"].lerp_(p.detach(), self.param_groups[0]["rate"])


class Plain:
    """A wrapper that is no torch optimizer."""

    def __init__(self, parts: list[Any], form: str, name: str) -> None:
        forms: dict[str, Any] = {"list": parts, "tuple": tuple(parts), "nested": {"all": [parts]}}
        setattr(
            self,
            name,
            forms[form]
            if form in forms
            else {f"part {index}": each for index, each in enumerate(parts)},
        )
        self.inner = lambda: parts

    def step(self, closure: Any = None) -> None:
        for each in self.inner():
            each.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for each in self.inner():
            each.zero_grad(set_to_none)


class Container(Plain, optim.Optimizer):
    """As torchtitan's: groups of its own, which nobody steps, and another way of loading."""

    def __init__(self, parts: list[Any], form: str, name: str) -> None:
        Plain.__init__(self, parts, form, name)
        optim.Optimizer.__init__(
            self,
            [p for each in parts[:2] for group in each.param_groups for p in group["params"]],
            {"lr": 3.0},
        )

    def load_state_dict(self, state_dict: Any) -> None:
        raise AssertionError("it takes another form of state dict")


def parts_of(model: nn.Module) -> list[Any]:
    matrices, rest = (
        [p for p in model.parameters() if p.dim() > 1],
        [p for p in model.parameters() if p.dim() == 1],
    )
    return [
        optim.SGD(matrices, lr=0.05, momentum=0.9),
        optim.AdamW(rest, lr=0.01),
        Slow(model.parameters()),
    ]


def run(
    optimizer_of: Any, steps: int, manager: Manager | None = None, **keywords: Any
) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = net(8)
    optimizer = optimizer_of(model)
    if manager is not None:
        manager.register("actor", model, role="actor")
        manager.register("actor.optimizer", optimizer, **keywords)
    more(model, optimizer, manager, range(steps))
    return model, optimizer


def more(model: nn.Module, optimizer: Any, manager: Manager | None, seeds: range) -> None:
    for seed in seeds:
        if manager is None:
            learn(model, optimizer, seed, 8)
            continue
        with manager.phase("train"):
            model(
                torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
            ).square().mean().backward()
            with manager.phase("optimizer_step"):
                optimizer.step()
            optimizer.zero_grad()


def values(model: nn.Module, manager: Manager | None = None) -> dict[str, Any]:
    return copy.deepcopy(
        dict(model.state_dict() if manager is None else manager.handles["actor"].state_dict())
    )


FORMS = {"list": "optimizers", "tuple": "_optimizers", "dict": "optimizer_dict", "nested": "optims"}
CASES: list[Any] = [(Container, form, "colocated") for form in FORMS]
CASES += [
    (Plain, "list", "colocated"),
    (Container, "list", "cyclic"),
    pytest.param(Container, "list", "resident", marks=pytest.mark.sweep),
]


@pytest.mark.parametrize(("cls", "form", "policy"), CASES)
def test_optimizers_in_any_attribute_move_and_are_saved(
    cls: Any, form: str, policy: str, tmp_path: Path
) -> None:
    def made(model: nn.Module) -> Any:
        return cls(parts_of(model), form, FORMS[form])

    twin, _ = run(made, 3)
    manager, other = make_manager(policy=policy), make_manager(policy=policy)
    model, optimizer = run(made, 2, manager)
    state = [
        value
        for each in optimizer.inner()
        for entry in each.state.values()
        for key, value in entry.items()
        if key != "step"
    ]
    assert len(state) == 2 + 4 + 4
    if policy == "colocated":
        assert all(torch.isnan(each).all() for each in state)
        assert_nothing_resident(manager)
        assert manager.handles["actor.optimizer"].host_bytes >= sum(each.nbytes for each in state)
    optimizer.inner()[1].param_groups[0]["lr"] = 0.5
    placement.checkpoint.save(manager, tmp_path)
    optimizer.inner()[1].param_groups[0]["lr"] = 0.01

    loaded, loaded_optimizer = run(made, 0, other)
    placement.checkpoint.load(other, tmp_path)
    assert loaded_optimizer.inner()[1].param_groups[0]["lr"] == 0.5
    loaded_optimizer.inner()[1].param_groups[0]["lr"] = 0.01
    for each, its, its_manager in ((model, optimizer, manager), (loaded, loaded_optimizer, other)):
        more(each, its, its_manager, range(2, 3))
        assert_same(values(each, its_manager), values(twin))


def test_optimizers_that_step_in_backward_hooks_move() -> None:
    class InBackward(Container):
        def step(self, closure: Any = None) -> None: ...

        def zero_grad(self, set_to_none: bool = True) -> None: ...

    def made(model: nn.Module) -> Any:
        def hook(p: torch.Tensor) -> None:
            by_parameter[p].step()
            by_parameter[p].zero_grad()

        by_parameter: dict[Any, Any] = {p: optim.AdamW([p], lr=0.05) for p in model.parameters()}
        for p in by_parameter:
            p.register_post_accumulate_grad_hook(hook)
        return InBackward([*by_parameter.values()], "list", "optimizers")

    twin, _ = run(made, 3)
    manager = make_manager()
    model, _ = run(made, 3, manager)
    assert_same(values(model, manager), values(twin))
    assert_nothing_resident(manager)
    assert manager.handles["actor.optimizer"].num_bytes
    other = make_manager(policy="colocated(optimizer_in='optimizer_step')")
    with pytest.raises(
        placement.NotResidentError,
        match=r"With optimizer_in='optimizer_step', step\(\) belongs",
    ):
        run(made, 1, other)


def test_an_optimizer_that_no_attribute_holds_is_refused_before_it_steps() -> None:
    class Hiding(optim.SGD):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, lr=0.1)
            inner = optim.AdamW(self.param_groups[0]["params"])
            self.make_step = lambda closure: inner.step(closure)  # noqa: PLW0108 (a method would be an attribute that leads to it)

        def step(self, closure: Any = None) -> None:
            self.make_step(closure)

    manager = make_manager()
    model, optimizer = run(lambda model: Hiding(model.parameters()), 0, manager)
    before = values(model, manager)
    for seed in range(2):
        with pytest.raises(
            RegistrationError,
            match=r"steps an optimizer \(AdamW\) "
            r"that "
            r"cannot "
            r"be "
            r"found in it.*Nothing was",
        ):
            more(model, optimizer, manager, range(seed, seed + 1))
    assert_same(values(model, manager), before)
    model.zero_grad()
    assert_nothing_resident(manager)


class Masters:
    """Steps float32 copies that are in no module, and copies them back."""

    def __init__(self, model: nn.Module) -> None:
        self.params = list(model.parameters())
        self.masters = [nn.Parameter(p.detach().clone().float()) for p in self.params]
        self.optimizer = optim.AdamW(self.masters, lr=0.05)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for p in (*self.params, *self.masters):
            p.grad = None

    def step(self, closure: Any = None) -> None:
        for master, p in zip(self.masters, self.params, strict=True):
            master.grad = p.grad.float()
        self.optimizer.step()
        with torch.no_grad():
            for master, p in zip(self.masters, self.params, strict=True):
                p.copy_(master)


@pytest.mark.parametrize(
    "policy", ["colocated", "cyclic", "colocated(optimizer_in='optimizer_step')"]
)
def test_copies_of_the_weights_move_with_the_optimizer_of_an_owner(policy: str) -> None:
    with pytest.raises(
        RegistrationError,
        match=r"parameter 0 .* belongs to no registered module.*copies.*owner=",
    ):
        run(Masters, 0, make_manager())
    twin, _ = run(Masters, 3)
    manager = make_manager(policy=policy)
    model, optimizer = run(Masters, 3, manager, owner="actor")
    assert_same(values(model, manager), values(twin))
    if policy == "colocated":
        assert all(torch.isnan(each).all() for each in optimizer.masters)
        assert_nothing_resident(manager)
    with pytest.raises(placement.CheckpointError, match="are not parameters of its modules"):
        placement.checkpoint.Optimizer(manager.handles["actor.optimizer"]).state_dict()
    manager.close()
    assert_same([*optimizer.masters], [*model.parameters()])


def test_steps_of_copies_are_not_streamed() -> None:
    def made(model: nn.Module) -> Any:
        return optim.AdamW([nn.Parameter(p.detach().clone()) for p in model.parameters()])

    with pytest.raises(placement.PolicyError, match="steps copies of parameters"):
        run(made, 1, make_manager(policy="colocated('streamed')"), owner="actor")


class WithoutInit(optim.Optimizer):
    """Calls no constructor of torch's Optimizer."""

    def __init__(self, inner: optim.Optimizer) -> None:
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = (
            OrderedDict[Any, Any](),
            OrderedDict[Any, Any](),
        )
        self._patch_step_function()
        self.optimizer, self.defaults = inner, inner.defaults

    param_groups = property(lambda self: self.optimizer.param_groups)  # type: ignore[assignment]
    state = property(lambda self: self.optimizer.state)  # type: ignore[assignment]

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


class WithSlow(WithoutInit):
    """The same with slow weights in a state of its own, beside groups that are a property."""

    state: Any = None

    def __init__(self, inner: optim.Optimizer) -> None:
        super().__init__(inner)
        self.state = {
            p: {"slow": p.detach().clone()} for group in self.param_groups for p in group["params"]
        }

    def step(self, closure: Any = None) -> None:
        self.optimizer.step(closure)
        for p, entry in self.state.items():
            entry["slow"].lerp_(p.detach(), 0.5)
            p.data.copy_(entry["slow"])


class WithPlainDicts(WithoutInit):
    """The same with plain dicts under the names of torch's hooks."""

    def __init__(self, inner: optim.Optimizer) -> None:
        super().__init__(inner)
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}  # type: ignore[assignment]


class Delegating:
    """Hands everything through to the optimizer inside, by `__getattr__`."""

    def __init__(self, inner: optim.Optimizer) -> None:
        self.optimizer = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["optimizer"], name)


@pytest.mark.parametrize("cls", [WithoutInit, WithSlow, WithPlainDicts, Delegating])
def test_one_that_called_no_constructor_of_torchs_is_as_any_other(cls: Any, tmp_path: Path) -> None:
    def made(model: nn.Module) -> Any:
        return cls(optim.AdamW(model.parameters(), lr=0.01))

    twin, _ = run(made, 3)
    manager, other = make_manager(), make_manager()
    _, optimizer = run(made, 2, manager)
    assert all(
        torch.isnan(entry["slow"]).all() for entry in optimizer.state.values() if "slow" in entry
    )
    with pytest.raises(placement.NotResidentError):
        optimizer.step()
    placement.checkpoint.save(manager, tmp_path)
    model, optimizer = run(made, 0, other)
    placement.checkpoint.load(other, tmp_path)
    more(model, optimizer, other, range(2, 3))
    assert_same(values(model, other), values(twin))


def test_what_is_in_a_parameter_group_never_moves() -> None:
    class Grouped(optim.SGD):
        """Its state has a view of the group's tensor, which a scheduler writes."""

        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                group.setdefault("rates", torch.tensor([0.1, 0.2]))
                for p in group["params"]:
                    self.state[p]["rate"] = group["rates"][:1]
                    self.state[p].setdefault("sum", torch.zeros_like(p)).add_(p.grad)
                    p.data.sub_(self.state[p]["sum"] * self.state[p]["rate"])

    manager = make_manager()
    _, grouped = run(lambda model: Grouped(model.parameters(), lr=0.1), 1, manager)
    rates = grouped.param_groups[0]["rates"]
    assert rates.tolist() == pytest.approx([0.1, 0.2])
    rates.mul_(0.5)
    with manager.phase("train"):
        entries = [entry for entry in grouped.state.values() if "rate" in entry]
        assert len(entries) == 4
        assert all(entry["rate"].item() == pytest.approx(0.05) for entry in entries)
    with pytest.raises(
        AssertionError,
        match=r"8 bytes on the device: "
        r"param_groups.0.rates, "
        r"which "
        r"is no part of its state",
    ):
        assert_nothing_resident(manager)


@pytest.mark.filterwarnings("ignore")
def test_lbfgs_with_a_tensor_as_its_learning_rate_follows_its_scheduler() -> None:
    def trained(manager: Manager | None) -> list[Any]:
        torch.manual_seed(0)
        model = net(8)
        optimizer = optim.LBFGS(model.parameters(), lr=torch.tensor(0.1), max_iter=4)
        scheduler = optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        if manager is not None:
            manager.register("actor", model, role="actor")
            manager.register("actor.optimizer", optimizer)
        seen: list[Any] = []

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.ones(2, 8)).square().mean()
            loss.backward()
            return loss

        for _ in range(3):
            with manager.phase("train") if manager else nullcontext():
                optimizer.step(closure)
                seen += values(model).values()
            scheduler.step()
            seen.append(optimizer.param_groups[0]["lr"].detach().clone())
        return seen

    assert_same(trained(make_manager()), trained(None))
