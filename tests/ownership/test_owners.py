"""A storage has one owner: state that lies in its module is read there, and a second handle is
refused by name when it is first seen."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from placement import Manager, RegistrationError, checkpoint
from placement.devices import base
from placement.testing import SimulatedDevice, assert_nothing_resident
from tests.support.worker import tensors_in

Lend = Callable[[dict[str, Any], torch.nn.Parameter], object]

CAN_SWAP = base.can_swap()
swap_only = pytest.mark.skipif(
    not CAN_SWAP,
    reason="torch before 2.13 cannot take in such a gradient on a device in host memory",
)
OF_A_VIEWED_GRADIENT = {("view of the gradient", "before"), ("view of the gradient", "to zeros")}

LENT: dict[str, Lend] = {
    "parameter": lambda state, parameter: state.update(lent=parameter),
    "parameter, detached": lambda state, parameter: state.update(lent=parameter.detach()),
    "view of the parameter": lambda state, parameter: state.update(
        lent=parameter.detach().reshape(-1)[:1]
    ),
    "gradient": lambda state, parameter: state.update(lent=parameter.grad),
    "view of the gradient": lambda state, parameter: state.update(
        lent=parameter.grad.detach().reshape(-1)
    ),  # type: ignore[union-attr]
    "gradient in a list": lambda state, parameter: state.update(lent=[parameter.grad]),
}
POLICIES = (
    "colocated",
    "colocated('optimizer_step')",
    "colocated('streamed')",
    "colocated(drop_gradients=True)",
    "resident",
)


class Model(torch.nn.Module):
    """A layer, and a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = torch.nn.Linear(8, 8), torch.nn.Parameter(torch.tensor(1.5))

    def learn(self, step: int) -> None:
        (self.layer(torch.full((2, 8), 1.0 + step)) * self.scale).square().mean().backward()


def tensors(value: Any) -> list[bytes]:
    return [
        each.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for each in tensors_in(value)
    ]


def history(lend: Lend, zero: str, policy: str | None) -> list[bytes]:
    """All values of three steps: inside the phases and outside, in state dicts of now and of
    then."""
    torch.manual_seed(0)
    model, seen = Model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer.register_step_post_hook(
        lambda *_: [lend(optimizer.state[each], each) for each in model.parameters()]
    )
    manager = None if policy is None else Manager(device=SimulatedDevice("1MiB"), policy=policy)
    if manager is not None:
        manager.register("actor", model, role="actor")
        manager.register("sgd", optimizer)
    for step in range(3):
        with manager.phase("train") if manager else nullcontext():
            if zero != "after":
                model.zero_grad(set_to_none=zero == "before")
            model.learn(step)
            with (
                manager.phase("optimizer_step")
                if manager and "optimizer_step" in str(policy)
                else nullcontext()
            ):
                optimizer.step()
            seen += tensors([each.grad for each in model.parameters()])
            taken = optimizer.state_dict()
            if zero == "after":
                model.zero_grad()
        seen += [*tensors(taken), *tensors(optimizer.state_dict()), *tensors(model.state_dict())]
        if manager is not None:
            assert manager.audit().ok, manager.audit().report
            if policy != "resident":
                assert_nothing_resident(manager)
    if manager is not None:
        manager.close()
    return [*seen, *tensors(optimizer.state_dict()), *tensors(model.state_dict()), *tensors(taken)]


@pytest.mark.parametrize(
    ("lent", "zero"),
    [
        pytest.param(
            lent,
            zero,
            marks=[
                *([swap_only] if (lent, zero) in OF_A_VIEWED_GRADIENT else []),
                *([pytest.mark.sweep] if zero != "before" else []),
            ],
        )
        for lent in LENT
        for zero in ("before", "after", "to zeros")
        if zero == "before" or "gradient" in lent
    ],
)
def test_state_that_lies_in_its_module(lent: str, zero: str) -> None:
    expected = history(LENT[lent], zero, None)
    for policy in POLICIES if lent in ("parameter, detached", "gradient") else POLICIES[::2]:
        # The one policy makes other gradients itself; with the other, the next step takes in what a
        # hook makes of a streamed step.
        if (zero, policy) not in (
            ("to zeros", "colocated(drop_gradients=True)"),
            ("after", "colocated('streamed')"),
        ):
            assert history(LENT[lent], zero, policy) == expected, policy


def worker(**others: torch.nn.Module) -> tuple[Manager, torch.nn.Linear, torch.optim.Optimizer]:
    model = torch.nn.Linear(8, 8)
    manager = Manager(device=SimulatedDevice("1MiB"))
    for name, other in {"actor": model, **others}.items():
        manager.register(name, other, role="actor" if name == "actor" else "critic")
    return manager, model, torch.optim.AdamW(model.parameters(), lr=0.1)


def step(*optimizers: torch.optim.Optimizer, models: tuple[torch.nn.Module, ...]) -> None:
    for model in models:
        model.zero_grad()
        model(torch.ones(2, 8)).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()


@pytest.mark.parametrize("where", ["offloaded", "restore"])
def test_a_checkpoint_of_state_that_lies_in_its_module(tmp_path: Path, where: str) -> None:
    manager, model, adam = worker()
    adam.register_step_post_hook(
        lambda *_: [
            LENT["parameter, detached"](adam.state[each], each) for each in model.parameters()
        ]
    )
    manager.register("adam", adam)
    with manager.phase("train"):
        step(adam, models=(model,))
    expected = [*tensors(model.state_dict()), *tensors(adam.state_dict())]
    checkpoint.save(manager, tmp_path / "saved")
    with manager.phase("train"):
        step(adam, models=(model,))
    with manager.phase("restore" if where == "restore" else "idle"):
        checkpoint.load(manager, tmp_path / "saved")
    for _ in range(2):
        assert [*tensors(model.state_dict()), *tensors(adam.state_dict())] == expected
        with manager.phase("train"):
            assert torch.equal(adam.state[model.weight]["lent"], model.weight)
            assert [*tensors(model.state_dict()), *tensors(adam.state_dict())] == expected


@swap_only
def test_a_state_dict_with_the_modules_memory_loaded_back() -> None:
    manager, model, adam = worker()
    adam.register_step_post_hook(
        lambda *_: [adam.state[p].update(lent=p.detach(), last=p.grad) for p in model.parameters()]
    )
    manager.register("adam", adam)
    for taken_outside in (False, True):
        outside = adam.state_dict() if taken_outside else None
        with manager.phase("train"):
            step(adam, models=(model,))
            adam.load_state_dict(outside or adam.state_dict())
        for _ in range(2):
            state = adam.state_dict()["state"][0]
            assert not state["last"].isnan().any()
            assert torch.equal(state["lent"], model.state_dict()["weight"])
            assert manager.audit().ok, manager.audit().report
            with manager.phase("train"):
                assert torch.equal(adam.state[model.weight]["lent"], model.weight)
    manager.close()
    assert torch.equal(adam.state_dict()["state"][0]["lent"], model.weight)


def refused_and_mended(
    manager: Manager, wrong: Callable[[], object], mend: Callable[[], object], match: str
) -> None:
    """What is wrong is refused at the end of each phase; the values stay, and once it is mended the
    job goes on."""
    for _ in range(2):
        with (
            pytest.raises(RegistrationError, match=match + ".*a storage has one owner"),
            manager.phase("train"),
        ):
            wrong()
        for handle in manager.handles.values():
            assert not any(b"\xff" * 8 in each for each in tensors(handle.state_dict())), handle
    gc.collect()  # the error that was kept
    manager.enter("train")
    mend()
    manager.leave()
    with manager.phase("train"):
        pass
    assert_nothing_resident(manager)
    assert manager.audit().ok, manager.audit().report


def test_state_in_a_module_that_the_optimizer_does_not_step() -> None:
    critic = torch.nn.Linear(8, 8)
    manager, model, adam = worker(critic=critic)
    adam.state[model.weight]["anchor"] = critic.weight.detach()
    with pytest.raises(
        RegistrationError,
        match=r"'state.0.anchor' of 'adam' lies "
        r"in "
        r"a "
        r"storage "
        r"that belongs to 'critic'.*clone",
    ):
        manager.register("adam", adam)
    adam.state.clear()
    manager.register("adam", adam)

    def anchor() -> None:
        step(adam, models=(model,))
        adam.state[model.weight]["anchor"] = critic.weight.detach()

    refused_and_mended(
        manager,
        anchor,
        lambda: adam.state[model.weight].pop("anchor"),
        r"'state.0.anchor' of 'adam'.* 'critic'",
    )


@pytest.mark.parametrize("is_born", [False, True])
def test_state_of_two_optimizers(is_born: bool) -> None:
    manager, model, adam = worker()
    other = torch.optim.AdamW(model.parameters(), lr=0.01)
    other.state = adam.state
    manager.register("adam", adam)
    if is_born:
        with manager.phase("train"):
            step(adam, models=(model,))
        with pytest.raises(
            RegistrationError,
            match=r"'state.0.exp_avg' of 'other' "
            r".* "
            r"'adam' "
            r"already; "
            r"a storage has one owner.*sub_opt",
        ):
            manager.register("other", other)
        return
    manager.register("other", other)
    mend = lambda: setattr(other, "state", defaultdict(dict))  # noqa: E731
    refused_and_mended(
        manager,
        lambda: step(adam, other, models=(model,)),
        mend,
        r"'state.0.exp_avg' of 'other' .* 'adam'",
    )


def test_optimizers_that_share_their_state_as_one_object() -> None:
    """What the error above advises."""
    manager, model, adam = worker()
    other = torch.optim.AdamW(model.parameters(), lr=0.01)
    other.state = adam.state
    both = type("Both", (), {"step": None})()
    both.sub_optimizers, both.step = [adam, other], lambda: None
    manager.register("both", both)
    for each in (adam, other, adam):
        with manager.phase("train"):
            step(each, models=(model,))
        assert_nothing_resident(manager)
        assert manager.audit().ok, manager.audit().report


def test_a_gradient_of_two_modules() -> None:
    critic = torch.nn.Linear(8, 8)
    manager, model, adam = worker(critic=critic)
    second = torch.optim.SGD(critic.parameters(), lr=0.1)
    manager.register("adam", adam)
    manager.register("sgd", second)

    def share() -> None:
        step(models=(model,))
        for mine, its in zip(model.parameters(), critic.parameters(), strict=True):
            its.grad = mine.grad
        adam.step()
        second.step()

    refused_and_mended(manager, share, critic.zero_grad, r"'weight.grad' of 'critic' .* 'actor'")
