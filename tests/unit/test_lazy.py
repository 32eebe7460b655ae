"""Objects that are built when a plan wants them, and on no worker where none does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from placement import DeviceMemoryError, HostMemoryError, Lazy, RegistrationError
from placement.testing import Faults, SimulatedDevice, assert_nothing_resident
from tests.support.worker import GPU, TRAIN, Scripted, batch, everything, learn, make_manager, net


class Factory:
    """Counts its calls."""

    def __init__(self, make: Any = net) -> None:
        self.make = make
        self.calls = 0

    def __call__(self) -> Any:
        self.calls += 1
        return self.make()


def test_a_factory_is_called_once_at_the_first_plan_that_wants_it() -> None:
    manager, factory = make_manager(), Factory()
    critic = manager.register("critic", Lazy(factory), role="critic")
    for phase in ("log_prob", "rollout", "checkpoint"):
        with manager.phase(phase):
            assert factory.calls == 0
    for _ in range(2):
        with manager.phase("values"):
            assert critic.state is GPU
            assert critic.object(batch()).isfinite().all()
    assert factory.calls == 1
    assert critic.resident_bytes == 0
    assert critic.num_bytes > 0
    assert_nothing_resident(manager)


def test_a_lazy_optimizer_is_built_after_its_owner() -> None:
    manager = make_manager()
    built: list[torch.nn.Module] = []

    def model() -> torch.nn.Module:
        built.append(net())
        return built[0]

    actor = manager.register("actor", Lazy(model), role="actor")
    adam = manager.register("adam", Lazy(lambda: torch.optim.AdamW(built[0].parameters()), kind="optimizer"), owner=actor)
    with manager.phase("train"):
        assert (actor.state, adam.state) == (TRAIN, TRAIN)
        assert adam.role == "actor"
        learn(actor.object, adam.object)
    assert adam.kind == "optimizer"
    assert_nothing_resident(manager)


MODEL = net()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: 1 / 0, "factory of 'critic' failed: division by zero"),
        (lambda: None, "critic"),
        (lambda: torch.nn.Linear(2, 2, device="meta"), "meta"),
        (lambda: MODEL, "registered already, as 'actor'"),
    ],
)
def test_a_factory_that_fails_leaves_the_handle_unbuilt_and_may_be_tried_again(make: Any, message: str) -> None:
    manager, factory = make_manager(), Factory(make)
    critic = manager.register("critic", Lazy(factory), role="critic")
    manager.register("actor", MODEL, role="actor")
    before = everything(manager)
    with pytest.raises(RegistrationError, match=message):
        manager.phase("values").__enter__()
    assert everything(manager) == before
    assert critic.object is None
    factory.make = net
    with manager.phase("values"):
        assert critic.object(batch()).isfinite().all()
    assert factory.calls == 2
    manager.close()


def test_what_a_factory_made_may_not_fit() -> None:
    manager = make_manager(budget_bytes=4096)
    with manager.phase("values"), pytest.raises(DeviceMemoryError, match="critic"):
        manager.register("critic", Lazy(net), role="critic")
    assert_nothing_resident(manager)


def test_a_build_that_fails_late_leaves_the_handle_as_it_was_registered() -> None:
    faults = Faults(SimulatedDevice(1 << 20))
    manager = make_manager(device=faults, policy=Scripted(eval=lambda view: view.total_plan({"adam": GPU})))
    model = net()
    manager.register("actor", model, role="actor")
    adam = manager.register("adam", Lazy(lambda: torch.optim.AdamW(model.parameters())))
    faults.fail("host", at=1)
    with pytest.raises(HostMemoryError), manager.phase("eval"):
        pass
    assert (adam.kind, adam.role, adam.owners) == ("module", None, ())
    manager.unregister("actor")  # nothing steps it
