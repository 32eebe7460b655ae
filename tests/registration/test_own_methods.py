"""What optimizers do past torch's own methods: methods that their class adds (`eval`), and steps of
such as nobody has registered."""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from placement import Manager, NotResidentError, PhaseError
from placement.policies import Colocated
from tests.support.worker import Worker, assert_same, learn, make_manager, net


class Averaged(torch.optim.AdamW):
    """Like schedule-free optimizers: `eval()` puts averaged weights in place of those that are
    stepped, `train()` undoes it."""

    is_training = True

    def parameters(self) -> list[torch.Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        with torch.no_grad():
            for p in self.parameters():
                self.state[p].setdefault("mean", torch.zeros_like(p)).lerp_(p, 0.1)

    def eval(self) -> None:
        self.is_training = False
        for group in self.param_groups:
            group["mode"] = "eval"
        for p in self.parameters():
            self.state[p]["turned"] = True
            p.data.lerp_(self.state[p]["mean"], 0.5)

    def update_hessian(self) -> None:
        self.sharpness = sum(p.square().mean().item() for p in self.parameters())

    def summary(self) -> str:
        return (
            f"{self.param_groups[0]['lr']} {sum(p.numel() for p in self.parameters())} "
            f"{self.is_training}"
        )

    def set_rate(self, value: float) -> None:
        for group in self.param_groups:
            group["lr"] = value

    def clear(self) -> None:
        self.zero_grad(set_to_none=False)
        for p in self.parameters():
            p.grad = None

    def saved(self) -> Mapping[str, Any]:
        return copy.deepcopy(self.state_dict())

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * 2


class Sharp:
    """A plain wrapper that writes weights itself, as sharpness-aware minimisation does."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base, self.is_perturbed = base, False

    def step(self, closure: Any = None) -> None:
        self.base.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)

    def first_step(self) -> None:
        self.is_perturbed = True
        for group in self.base.param_groups:
            for p in group["params"]:
                p.data.mul_(1.5)


def registered(
    optimizer_of: Callable[[Any], Any] = Averaged, **keywords: Any
) -> tuple[Manager, nn.Module, Any]:
    model = net(8)
    optimizer = optimizer_of(model.parameters())
    manager = make_manager(**keywords)
    manager.register("actor", model, role="actor")
    manager.register("actor.optimizer", optimizer)
    with manager.phase("train"):
        model(torch.ones(2, 8)).sum().backward()
        with manager.phase("optimizer_step"):
            optimizer.step()
        optimizer.zero_grad()
    return manager, model, optimizer


def all_of(manager: Manager, optimizer: Any) -> Any:
    inner = getattr(optimizer, "base", optimizer)
    settings = [
        {key: value for key, value in group.items() if key != "params"}
        for group in inner.param_groups
    ]
    flags = {
        key: value for key, value in vars(optimizer).items() if isinstance(value, (bool, float))
    }
    weights = dict(manager.handles["actor"].state_dict())
    return copy.deepcopy(
        [
            weights,
            inner.state_dict()["state"],
            settings,
            flags,
            [list(entry) for entry in inner.state.values()],
        ]
    )


REFUSED = [(Averaged, name) for name in ("eval", "update_hessian")]
WRAPPED = [
    (lambda p: Sharp(torch.optim.SGD(p, lr=0.1, momentum=0.9)), "first_step"),
    (lambda p: Sharp(Averaged(p)), "base.eval"),
]
PLACES: dict[str, Any] = {
    "outside": (None, {}),
    "log_prob": ("log_prob", {}),
    "values": ("values", {}),
    "checkpoint": ("checkpoint", {}),
    "train without the state": ("train", {"policy": Colocated(optimizer_in="optimizer_step")}),
    "outside of a cycle": (None, {"policy": "cyclic"}),
}


def called(optimizer: Any, path: str) -> Any:
    for name in path.split("."):
        optimizer = getattr(optimizer, name)
    return optimizer()


CASES = [(*method, "outside") for method in (*REFUSED, *WRAPPED)] + [
    (Averaged, "eval", where) for where in PLACES if where != "outside"
]


@pytest.mark.parametrize(("kind", "name", "where"), CASES)
def test_it_is_refused_before_anything_changes(
    kind: Callable[[Any], Any], name: str, where: str
) -> None:
    phase, keywords = PLACES[where]
    manager, _, optimizer = registered(kind, **keywords)
    before = all_of(manager, optimizer)

    def refused() -> None:
        with pytest.raises(
            NotResidentError,
            match=rf"{name.removeprefix('base.')}\(\) "
            r"of "
            r"'actor.optimizer' "
            r"cannot be called in "
            r"phase.*'train'",
        ):
            called(optimizer, name)

    if phase is None:
        refused()
    else:
        with manager.phase(phase):
            refused()
    assert_same(all_of(manager, optimizer), before)
    with manager.phase("train"), manager.phase("optimizer_step"):
        called(optimizer, name)
    assert manager.audit().ok
    assert name == "update_hessian" or str(all_of(manager, optimizer)) != str(before)


def test_while_weights_are_published_they_are_not_changed() -> None:
    manager, _, optimizer = registered(policy="resident")
    with (
        manager.phase("weight_sync"),
        pytest.raises(PhaseError, match=r"eval\(\).*while 'actor' is SYNCING"),
    ):
        optimizer.eval()
    with manager.phase("log_prob"):
        optimizer.eval()


def test_what_reads_and_writes_no_value_goes_on_working() -> None:
    manager, model, optimizer = registered()
    state = copy.deepcopy(manager.handles["actor.optimizer"].state_dict())
    optimizer.set_rate(0.5)
    assert optimizer.summary() == f"0.5 {sum(p.numel() for p in model.parameters())} True"
    assert optimizer.scaled(torch.ones(1)).item() == 2
    assert_same(optimizer.saved()["state"], state["state"])
    with manager.phase("train"):
        model(torch.ones(2, 8)).sum().backward()
    optimizer.clear()
    with manager.phase("train"):
        assert all(p.grad is None for p in model.parameters())
    state["param_groups"][0]["lr"] = 0.5
    assert_same(dict(manager.handles["actor.optimizer"].state_dict()), state)


def test_the_state_of_a_streamed_optimizer_is_neither_read_nor_written_in_train() -> None:
    class Measured(torch.optim.AdamW):
        def norm(self) -> float:
            return sum(entry["exp_avg"].norm().item() for entry in self.state.values())

        def reset(self) -> None:
            for entry in self.state.values():
                entry["exp_avg"].zero_()

    manager, _, optimizer = registered(Measured, policy=Colocated(optimizer_in="streamed"))
    before = all_of(manager, optimizer)
    with manager.phase("train"):
        for method in (optimizer.norm, optimizer.reset):
            with pytest.raises(
                NotResidentError,
                match=r"would use "
                r"'actor\.optimizer'.*streams "
                r"its "
                r"state.*phase\('restore'\)",
            ):
                method()
    assert_same(all_of(manager, optimizer), before)
    with manager.phase("restore"):
        optimizer.reset()
    assert not any(entry["exp_avg"].any() for entry in optimizer.state_dict()["state"].values())


def test_in_training_without_the_state_gradients_may_be_used() -> None:
    class Clipping(torch.optim.SGD):
        def clip(self) -> None:
            nn.utils.clip_grad_norm_(
                [p for group in self.param_groups for p in group["params"]], 0.01
            )

        def backward(self, loss: torch.Tensor) -> None:
            loss.backward()

    manager, model, optimizer = registered(
        lambda p: Clipping(p, lr=0.1, momentum=0.9), policy=Colocated(optimizer_in="optimizer_step")
    )
    with manager.phase("train"):
        optimizer.backward(model(torch.ones(2, 8)).sum())
        optimizer.clip()
        with manager.phase("optimizer_step"):
            optimizer.step()
    assert manager.audit().ok


# --- an optimizer that nobody registered and that steps a registered module's parameters


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "several groups": lambda parameters: torch.optim.SGD(
        [{"params": [nn.Parameter(torch.zeros(1))]}, {"params": list(parameters)}], lr=0.1
    ),
}


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.message
        for record in caplog.records
        if record.levelno == logging.WARNING and "not registered" in record.message
    ]


def findings(worker: Worker) -> list[tuple[str | None, str]]:
    return [
        (each.handle, each.detail.split()[1])
        for each in worker.manager.audit().findings
        if each.what == "unregistered_optimizer"
    ]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_in_training_it_is_said_once_and_found_as_long_as_it_lives(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Worker()
    with worker.manager.phase("train"):
        learn(worker.net, worker.adam)
        learn(worker.critic_net, worker.sgd)
    assert not warnings_in(caplog)
    other = OPTIMIZERS[kind](worker.net.parameters())
    for _ in range(2):
        with worker.manager.phase("train"):
            learn(worker.net, other)
            learn(worker.net, worker.adam)
    (warning,) = warnings_in(caplog)
    assert f"({type(other).__name__}) steps parameters of 'actor'" in warning
    assert findings(worker) == [("actor", type(other).__name__)]
    del other
    gc.collect()
    assert not findings(worker)


@pytest.mark.parametrize(
    ("phase", "state"), [("log_prob", "GPU_RESIDENT"), ("weight_sync", "SYNCING")]
)
def test_outside_training_it_is_refused(phase: str, state: str) -> None:
    worker = Worker(policy="resident")
    other = torch.optim.SGD(worker.net.parameters(), lr=0.1)
    with worker.manager.phase(phase):
        for parameter in worker.net.parameters():
            parameter.grad = torch.ones_like(parameter)
        with pytest.raises(
            PhaseError,
            match=r"not registered \(SGD\) in phase "
            rf"'{phase}' "
            r"would "
            r"change "
            rf"'actor', which is {state}",
        ):
            other.step()
        assert_same(dict(worker.net.state_dict()), dict(worker.values))


def test_the_function_of_a_guarded_method_can_be_bound_again() -> None:
    """As `LRScheduler` does with the step of a wrapper that has none of torch's hooks."""
    manager, _, sharp = registered(WRAPPED[0][0])
    again = sharp.step.__func__.__get__(sharp, Sharp)
    with pytest.raises(NotResidentError):
        again()
    with manager.phase("train"):
        again()
