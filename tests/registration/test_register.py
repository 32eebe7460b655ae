"""Registration: what is taken in, what is built when a plan wants it, what leaves again, and
when."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch

from placement import (
    DeviceMemoryError,
    HostMemoryError,
    Lazy,
    NotResidentError,
    PhaseError,
    RegistrationError,
)
from placement.testing import Faults, SimulatedDevice, assert_nothing_resident
from tests.support.worker import (
    CAPACITY,
    GPU,
    OFF,
    TRAIN,
    Scripted,
    Worker,
    assert_same,
    batch,
    everything,
    in_a_range,
    learn,
    make_manager,
    net,
    trained,
)


def parameters_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters())


def test_registering_keeps_every_object_and_every_value_and_puts_nothing_on_the_device() -> None:
    model = net()
    before, values = parameters_of(model), copy.deepcopy(model.state_dict())
    manager = make_manager()
    handle = manager.register("actor", model, role="actor")
    assert (handle.state, handle.resident_bytes, handle.kind, handle.role) == (
        OFF,
        0,
        "module",
        "actor",
    )
    assert handle.object is model
    assert manager.device.memory().chunk_bytes == 0
    assert all(found is before[name] for name, found in parameters_of(model).items())
    assert all(in_a_range(p) for p in model.parameters())
    assert_same(handle.state_dict(), values)
    assert handle.host_bytes >= sum(p.nbytes for p in model.parameters())


@pytest.mark.parametrize("policy", ["colocated", "resident"])
def test_registering_inside_a_phase_goes_where_the_phase_wants_it(policy: str) -> None:
    manager, model = make_manager(policy=policy), net()
    with manager.phase("log_prob"):
        assert manager.register("actor", model, role="actor").state is GPU
        assert model(batch()).isfinite().all()
        ref_model = net()
        assert manager.register("ref", ref_model, role="ref", readonly=True).state is GPU
    with manager.phase("train"):
        adam = torch.optim.AdamW(model.parameters())
        handle = manager.register("adam", adam)
        # Only now does the policy know that the actor is trained.
        assert (manager.handles["actor"].state, handle.state) == (TRAIN, TRAIN)
        learn(model, adam)
    assert manager.audit().ok
    if policy == "colocated":
        assert_nothing_resident(manager)


def test_a_module_that_does_not_fit_into_the_open_phase_is_not_registered() -> None:
    model = net()
    small = sum(p.nbytes for p in model.parameters())
    manager = make_manager(budget_bytes=2 * small)
    manager.register("actor", model, role="actor")
    with manager.phase("log_prob"):
        wide = net(256)
        before, values = parameters_of(wide), copy.deepcopy(wide.state_dict())
        with pytest.raises(DeviceMemoryError, match="ref"):
            manager.register("ref", wide, role="ref")
        assert list(manager.handles) == ["actor"]
        assert_same(wide.state_dict(), values)
        assert all(
            found is before[name] and not in_a_range(found)
            for name, found in parameters_of(wide).items()
        )
        assert model(batch()).isfinite().all()
        wide(batch(width=256))  # no guard is left on it
    assert_nothing_resident(manager)
    manager.register("ref", wide, role="teacher")


@pytest.mark.parametrize("where", ["offloaded", "resident"])
def test_unregistering_gives_the_same_tensors_ordinary_memory(worker: Worker, where: str) -> None:
    with worker.manager.phase("train"):
        learn(worker.net, worker.adam)
        values = copy.deepcopy(worker.actor.state_dict())
        moments = copy.deepcopy(worker.optimizer.state_dict())
        if where == "resident":
            worker.manager.unregister("actor.optimizer")
            worker.manager.unregister(worker.actor)
    if where == "offloaded":
        worker.manager.unregister(worker.optimizer)
        worker.manager.unregister("actor")
    before = parameters_of(worker.net)
    assert list(worker.manager.handles) == ["ref", "critic", "critic.optimizer"]
    assert_same(dict(worker.net.state_dict()), dict(values))
    assert_same(worker.adam.state_dict(), moments)
    state = [tensor for entry in worker.adam.state.values() for tensor in entry.values()]
    assert not any(in_a_range(tensor) for tensor in [*worker.net.parameters(), *state])
    assert all(found is before[name] for name, found in parameters_of(worker.net).items())
    learn(worker.net, worker.adam)  # usable, no guard left
    assert_nothing_resident(worker.manager)
    again = worker.manager.register("actor", worker.net, role="actor")
    assert_same(again.state_dict(), worker.net.state_dict())


def test_a_manager_that_is_dropped_leaves_as_if_it_were_closed() -> None:
    worker = Worker()
    values = worker.values
    model, adam, handle = worker.net, worker.adam, worker.actor
    del worker
    gc.collect()
    assert_same(dict(model.state_dict()), dict(values))
    assert not any(in_a_range(p) for p in model.parameters())
    learn(model, adam)
    assert handle.state is OFF
    assert handle.resident_bytes == 0


def test_a_module_whose_optimizer_is_registered_leaves_after_it(worker: Worker) -> None:
    with pytest.raises(PhaseError, match=r"stepped by actor\.optimizer"):
        worker.manager.unregister("actor")
    with pytest.raises(PhaseError, match="did you mean 'actor'"):
        worker.manager.unregister("actr")
    assert "actor" in worker.manager.handles


def test_registering_again_returns_the_same_handle() -> None:
    worker = trained()
    with worker.manager.phase("train"):
        learn(worker.net, worker.adam)
        assert (
            worker.manager.register("actor", worker.net, role="actor", replace=True) is worker.actor
        )
        assert (
            worker.manager.register("actor.optimizer", worker.adam, replace=True)
            is worker.optimizer
        )
        learn(worker.net, worker.adam)
    with pytest.raises(RegistrationError, match="is registered already"):
        worker.manager.register("actor", worker.net, role="actor")


def test_another_object_takes_the_place_of_the_first_and_of_what_steps_it() -> None:
    worker = trained()
    values = copy.deepcopy(worker.actor.state_dict())
    model = net()
    handle = worker.manager.register("actor", model, role="actor", replace=True)
    assert handle.object is model
    assert set(worker.manager.handles) == {"actor", "ref", "critic", "critic.optimizer"}
    assert_same(dict(worker.net.state_dict()), dict(values))  # what is replaced has its values back
    with worker.manager.phase("log_prob"):
        model(batch())
    assert_nothing_resident(worker.manager)


def test_a_handle_is_handed_back_on_the_device() -> None:
    device = SimulatedDevice(CAPACITY)
    worker = trained(device=device)
    values = copy.deepcopy(worker.actor.state_dict())
    handles = (worker.actor, worker.critic)
    before = [handle.counters.loaded_bytes for handle in handles]
    with pytest.raises(PhaseError, match="did you mean 'actor'"):
        worker.manager.close(on_device=["acto"])
    worker.manager.close(on_device=["actor"])
    assert [
        handle.counters.loaded_bytes > bytes_before
        for handle, bytes_before in zip(handles, before, strict=True)
    ] == [True, False]
    assert_same(dict(worker.net.state_dict()), dict(values))
    worker.net(batch())
    worker.manager.close(on_device=["actor"])  # again: nothing happens


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


def test_a_module_is_no_factory() -> None:
    with pytest.raises(TypeError, match="not a Sequential: register"):
        Lazy(net())


def test_a_lazy_optimizer_is_built_after_its_owner() -> None:
    manager = make_manager()
    built: list[torch.nn.Module] = []

    def model() -> torch.nn.Module:
        built.append(net())
        return built[0]

    actor = manager.register("actor", Lazy(model), role="actor")
    adam = manager.register(
        "adam",
        Lazy(lambda: torch.optim.AdamW(built[0].parameters()), kind="optimizer"),
        owner=actor,
    )
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
def test_a_factory_that_fails_leaves_the_handle_unbuilt_and_may_be_tried_again(
    make: Any, message: str
) -> None:
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


def test_a_build_that_fails_late_leaves_the_handle_as_it_was_registered() -> None:
    faults = Faults(SimulatedDevice(1 << 20))
    manager = make_manager(
        device=faults, policy=Scripted(eval=lambda view: view.total_plan({"adam": GPU}))
    )
    model = net()
    manager.register("actor", model, role="actor")
    adam = manager.register("adam", Lazy(lambda: torch.optim.AdamW(model.parameters())))
    faults.fail("host", at=1)
    with pytest.raises(HostMemoryError), manager.phase("eval"):
        pass
    assert (adam.kind, adam.role, adam.owners) == ("module", None, ())
    manager.unregister("actor")  # nothing steps it


@pytest.mark.parametrize("container", ["ModuleList", "ModuleDict"])
def test_a_list_of_modules_that_is_made_in_the_call_is_kept_until_it_is_unregistered(
    container: str,
) -> None:
    manager, actor, critic = make_manager(), net(), net()
    critic[0].weight = actor[0].weight
    modules = [actor, critic] if container == "ModuleList" else {"actor": actor, "critic": critic}
    handle = manager.register("trunk", getattr(torch.nn, container)(modules), role="actor")
    gc.collect()
    with manager.phase("log_prob"):
        assert handle.state is GPU
        actor(batch())
    with pytest.raises(NotResidentError, match="'trunk'"):
        critic(batch())
    assert_nothing_resident(manager)
    manager.unregister("trunk")
    critic(batch())
