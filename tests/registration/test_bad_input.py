"""Bad input: each a clear error, and nothing changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import placement
from placement import DeviceMemoryError, PhaseError, Plan, PolicyError, RegistrationError, State
from placement.testing import assert_nothing_resident
from tests.support.worker import (
    Scripted,
    Worker,
    assert_same,
    everything,
    in_a_range,
    learn,
    make_manager,
    net,
)


@pytest.fixture(autouse=True)
def _unchanged(worker: Worker) -> Any:
    """After every test of this file: the worker is as it was, and works."""
    before = everything(worker.manager)
    hooks = (
        len(worker.net._forward_pre_hooks),
        len(worker.net._state_dict_hooks),
        len(worker.adam._optimizer_step_pre_hooks),
    )
    yield
    assert everything(worker.manager) == before
    assert hooks == (
        len(worker.net._forward_pre_hooks),
        len(worker.net._state_dict_hooks),
        len(worker.adam._optimizer_step_pre_hooks),
    )
    worker.manager.check_integrity()
    assert_same(dict(worker.actor.state_dict()), dict(worker.values))
    with worker.manager.phase("train"):
        learn(worker.net, worker.adam)
    assert_nothing_resident(worker.manager)


def sharing(worker: Worker) -> torch.nn.Module:
    head = torch.nn.Linear(64, 64)
    head.weight = worker.net[0].weight
    return head


def viewing(worker: Worker) -> torch.nn.Module:
    odd = torch.nn.Linear(4, 4)
    odd.register_buffer("view", worker.net[0].weight.detach()[0])
    return odd


REFUSED: dict[str, tuple[Callable[[Worker], Any], str]] = {
    "a registered module": (lambda worker: worker.net, "registered already, as 'actor'"),
    "a registered optimizer": (
        lambda worker: worker.adam,
        (r"registered already, as 'actor\.optimizer'"),
    ),
    "a compiled wrapper of one": (
        lambda worker: torch.compile(worker.net, backend="eager"),
        ("registered already, as 'actor'"),
    ),
    "a part of one": (
        lambda worker: worker.net[0],
        (r"'weight' of 'more' lies in a storage that belongs to 'actor' already"),
    ),
    "a shared parameter": (sharing, "belongs to 'actor' already"),
    "a view for a buffer": (viewing, "'view' of 'more' lies in a storage that belongs to 'actor'"),
    "meta in part": (
        lambda _: torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4, device="meta")),
        "meta device",
    ),
    "a lazy layer": (lambda _: torch.nn.LazyLinear(4), "no shape yet"),
    **{
        type(each).__name__: (lambda _, each=each: each, "more")  # type: ignore[misc]
        for each in (None, 3, "model", [torch.nn.ReLU()], net, torch.zeros(3), {"a": 1}, object)
    },
}


def test_what_cannot_be_registered(worker: Worker) -> None:
    for kind, (make, message) in REFUSED.items():
        target = make(worker)
        hooks = len(getattr(target, "_forward_pre_hooks", ()))
        with pytest.raises(RegistrationError, match=message):
            worker.manager.register("more", target)
        assert len(getattr(target, "_forward_pre_hooks", ())) == hooks, kind
        assert kind != "a shared parameter" or not in_a_range(target.bias)


def test_odd_names_roles_and_owners(worker: Worker) -> None:
    model, sgd = net(), torch.optim.SGD(worker.net.parameters(), lr=0.1)
    wrong: list[tuple[Any, Any, dict[str, Any], str]] = [
        *(
            (each, model, {}, "must match")
            for each in (
                "",
                "a b",
                "ä",
                "a/b",
                "x" * 65,
                "a\n",
                "a\x00",
                None,
                3,
                ("a",),
                ["a"],
                b"a",
            )
        ),
        ("actor", model, {"role": "actor"}, "'actor' is registered already"),
        ("more", model, {"role": "actr"}, "role 'actr' is none of actor, ref"),
        *(
            ("more", sgd, {"owner": each}, "not a registered module")
            for each in ("actr", "actor.optimizer", 3)
        ),
        ("actor", model, {"role": "actr", "replace": True}, "role 'actr' is none of actor, ref"),
        ("more", sgd, {"readonly": True}, "leave readonly=True out"),
    ]
    for name, target, keywords, message in wrong:
        with pytest.raises(RegistrationError, match=message):
            worker.manager.register(name, target, **keywords)
    for call in (worker.manager.unregister, lambda name: worker.manager.phase("train", only=name)):
        with pytest.raises((PhaseError, TypeError), match=r"no handle '3'|only= takes a list"):
            call(3)
    assert not in_a_range(model[0].weight)
    assert model(torch.ones(1, 64)).isfinite().all()


def test_a_module_of_another_manager_under_the_same_name(worker: Worker) -> None:
    with pytest.raises(
        RegistrationError,
        match=r"'actor' is registered in another "
        r"manager "
        r"of "
        r"this "
        r"process.*unregister it there first",
    ):
        placement.Manager(device="simulated:1MiB").register("actor", worker.net, role="actor")


def test_an_optimizer_of_unregistered_parameters(worker: Worker) -> None:
    stranger = net()
    for parameters in (stranger.parameters(), [*worker.net.parameters(), *stranger.parameters()]):
        with pytest.raises(
            RegistrationError,
            match=r"parameter \d of shape \(64, "
            r"64\) "
            r"belongs "
            r"to "
            r"no registered module",
        ):
            worker.manager.register("more", torch.optim.SGD(parameters, lr=0.1))
    assert not in_a_range(stranger[0].weight)


# --- phases and plans


def attempts(worker: Worker, name: str, **keywords: Any) -> list[Callable[[], Any]]:
    manager = worker.manager
    return [
        lambda: manager.phase(name, **keywords).__enter__(),
        lambda: manager.enter(name, **keywords),
    ]


def test_what_is_no_phase(worker: Worker) -> None:
    wrong: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        (
            "trian",
            {},
            PolicyError,
            (r"unknown phase 'trian'. Did you mean 'train'\?.*Settings\.phases"),
        ),
        (
            "train",
            {"only": ["actor", "critc"]},
            PhaseError,
            (r"only=: no handle 'critc', did you mean 'critic'\?"),
        ),
        (["train"], {}, TypeError, "string for a name"),
    ]
    for name, keywords, error, message in wrong:
        for attempt in attempts(worker, name, **keywords):
            with pytest.raises(error, match=message):
                attempt()


ANSWERS: dict[str, tuple[Any, str]] = {
    "forgets": (
        lambda view: Plan({"actor": State.GPU_RESIDENT}),
        ("forgets 'actor.optimizer', 'ref', 'critic'"),
    ),
    "prefetches text": (
        lambda view: view.total_plan({}, prefetch={"actor": "1GiB"}),
        ("prefetches '1GiB' bytes of 'actor'"),
    ),
    "prefetches less than nothing": (
        lambda view: view.total_plan({}, prefetch={"critic": -1}),
        ("prefetches -1 bytes of 'critic'"),
    ),
    "prefetches a ghost": (
        lambda view: view.total_plan({}, prefetch={"ghost": 1}),
        ("names 'ghost', which are not registered"),
    ),
    "prefetches what it loads": (
        lambda view: view.total_plan({"actor": State.GPU_RESIDENT}, prefetch={"actor": 1}),
        "prefetches 'actor', which it wants GPU_RESIDENT",
    ),
    "drops gradients of a ghost": (
        lambda view: view.total_plan({}, dropped={"ghost"}),
        ("names 'ghost', which are not registered"),
    ),
    "drops gradients of an optimizer": (
        lambda view: view.total_plan({}, dropped={"actor.optimizer"}),
        "drops gradients of 'actor.optimizer', an optimizer",
    ),
    "drops gradients in training": (
        lambda view: view.total_plan({"actor": State.TRAINING}, dropped={"actor"}),
        "drops gradients of 'actor' and wants it in TRAINING",
    ),
    "invents": (
        lambda view: Plan({**view.total_plan({}).targets, "ghost": State.GPU_RESIDENT}),
        ("names 'ghost', which are not registered"),
    ),
    "trains readonly": (
        lambda view: view.total_plan({"ref": State.TRAINING}),
        ("wants 'ref' in TRAINING, which is readonly"),
    ),
    "streams without a sync": (
        lambda view: view.total_plan({"actor": State.GPU_RESIDENT}, ["actor"]),
        ("streams 'actor' without SYNCING"),
    ),
    "streams a ghost": (lambda view: view.total_plan({}, ["ghost"]), "ghost"),
    "no plan": (
        lambda view: {"actor": "GPU_RESIDENT"},
        ("returned dict for phase 'eval', not a Plan"),
    ),
    "nothing": (lambda view: None or (), "returned tuple"),
    "no state": (lambda view: Plan({"actor": "ON_GPU"}), "ON_GPU"),  # type: ignore[dict-item]
    "raises": (ZeroDivisionError("oops"), r"policy 'colocated' failed on phase 'eval'.*oops"),
    "takes a handle away": (
        lambda view: view.handles.pop("actor"),
        (r"policy 'colocated' failed on phase 'eval'.*read-only"),
    ),
    "makes a phase of its own": (
        lambda view: view.phases.update(mine=()),
        (r"policy 'colocated' failed on phase 'eval'.*read-only"),
    ),
    "resizes": (
        lambda view: view.handles["actor"].tags.clear(),
        (r"policy 'colocated' failed on phase 'eval'.*read-only"),
    ),
    "raises its own": (PolicyError("I refuse"), "I refuse"),
}


@pytest.mark.parametrize("inside", [False, True])
def test_a_plan_that_is_none(inside: bool) -> None:
    worker = Worker(policy=(policy := Scripted()))
    if inside:
        worker.manager.enter("values")
    before = everything(worker.manager)
    for reply, message in ANSWERS.values():
        policy.answers["eval"] = reply
        for attempt in [
            *attempts(worker, "eval"),
            *([lambda: worker.manager.switch("eval")] if inside else []),
        ]:
            with pytest.raises(PolicyError, match=message):
                attempt()
        assert everything(worker.manager) == before
    assert worker.manager.snapshot().policy_decisions["refuse"] == len(ANSWERS) * (2 + inside)
    policy.answers["eval"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        worker.manager.enter("eval")
    assert everything(worker.manager) == before
    if inside:
        worker.manager.leave()


def test_a_plan_that_does_not_fit_moves_nothing() -> None:
    worker = Worker(budget_bytes=30_000)
    with worker.manager.phase("values"):
        before = everything(worker.manager)
        with pytest.raises(DeviceMemoryError, match=r'manager\.phase\("log_prob", only='):
            worker.manager.enter("log_prob")
        assert everything(worker.manager) == before


# --- settings


def test_keywords_of_the_manager() -> None:
    with pytest.raises(ValueError, match="group"):
        make_manager(group=object())
    with pytest.raises(PolicyError):
        make_manager(policy=object())
