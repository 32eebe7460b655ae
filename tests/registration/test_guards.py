"""Guards: what is offloaded cannot be used, and the guards cost nothing where torch compiles."""

from __future__ import annotations

import contextlib
import copy
import functools
import pickle
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import placement
from placement import (
    PHASES,
    Handle,
    NotResidentError,
    PhaseError,
    PlacementError,
    Plan,
    State,
    TorchEngine,
    View,
)
from placement.policies import Colocated
from placement.registration.guards import ForwardGuard, LoadGuard, ReadGuard, StepGuard
from placement.testing import SimulatedDevice
from tests.support.frameworks import new_accelerator
from tests.support.sweeps import diagonal
from tests.support.worker import (
    OFF,
    Scripted,
    Worker,
    assert_same,
    batch,
    in_a_range,
    learn,
    make_manager,
    net,
    through_a_file,
)

# --- what raises


@pytest.mark.parametrize("phase", ["log_prob", "weight_sync"])
def test_a_step_with_everything_resident_but_not_in_training(phase: str) -> None:
    worker = Worker(policy="resident")
    with worker.manager.phase("train"):
        learn(worker.net, worker.adam)
        worker.net(batch()).sum().backward()
    with worker.manager.phase(phase):
        values = copy.deepcopy(worker.net.state_dict())
        with pytest.raises(
            PhaseError,
            match=r"step\(\) of 'actor\.optimizer' "
            r"in "
            r"phase "
            rf"'{phase}' "
            r"would change.*GPU_RESIDENT",
        ):
            worker.adam.step()
        assert_same(dict(worker.net.state_dict()), dict(values))
        with (
            worker.manager.phase("train", only=["actor.optimizer"]),
            pytest.raises(PhaseError, match="would change 'actor', which is"),
        ):
            worker.adam.step()


def refusals(handle: Handle) -> Iterator[Callable[[], Any]]:
    """Every guard that an offloaded handle can meet, and what publishing says."""
    for guard in (ForwardGuard, StepGuard, LoadGuard, ReadGuard):
        yield (
            functools.partial(guard(handle), None, (), {})
            if guard is StepGuard
            else functools.partial(guard(handle), None, ())
        )
    yield handle.weights


@pytest.mark.parametrize("phase", PHASES)
def test_no_advice_names_the_phase_that_one_is_in(phase: str) -> None:
    worker = Worker(policy=Colocated(stream_sync=True))
    found: list[str] = []
    with worker.manager.phase(phase) if phase != "idle" else contextlib.nullcontext():
        for handle in (worker.actor, worker.ref, worker.critic):
            for attempt in refusals(handle):
                try:
                    attempt()
                except PlacementError as error:
                    found.append(str(error))
    assert found
    for message in found:
        assert f"phase('{phase}')" not in message
        assert f"phase {phase!r}" in message


@pytest.mark.parametrize(
    ("role", "phase"),
    [
        ("actor", "log_prob"),
        ("ref", "log_prob"),
        ("critic", "values"),
        ("reward", "reward"),
        ("rollout", "rollout"),
        (None, "rollout"),
    ],
)
def test_a_call_is_told_of_a_phase_that_loads_the_role(role: str | None, phase: str) -> None:
    manager, model = make_manager(), net()
    target = TorchEngine(model) if phase == "rollout" else model
    manager.register("called", target, role=role)
    with pytest.raises(NotResidentError, match=rf"such as manager\.phase\('{phase}'\)"):
        model(batch())
    with manager.phase(phase):
        assert model(batch()).isfinite().all()


def test_a_role_that_no_shipped_phase_needs_is_told_of_a_phase_of_ones_own() -> None:
    manager, teacher = make_manager(phases={"distill": ["actor", "teacher"]}), net()
    handle = manager.register("teacher", teacher, role="teacher", readonly=True)
    advice = (
        r"no phase that ships needs role "
        r"'teacher'.*phases=\{\"distill\": "
        r"\[\"actor\", "
        r"\"teacher\"\]\}.*manager\.phase\(\"distill\"\)"
    )
    with pytest.raises(NotResidentError, match=f"cannot be called: {advice}"):
        teacher(batch())
    with (
        manager.phase("log_prob"),
        pytest.raises(NotResidentError, match=f"this 'log_prob' leaves it out .*{advice}; only="),
    ):
        teacher(batch())
    with manager.phase("distill"):
        assert teacher(batch()).isfinite().all()
    with pytest.raises(NotResidentError, match=r"load it inside manager\.phase\('restore'\)"):
        LoadGuard(handle)(None)


def test_a_module_without_a_role_is_told_to_have_one() -> None:
    manager, model = make_manager(), net()
    manager.register("actor", model)
    for phase in ("idle", "log_prob", "train"):
        with (
            manager.phase(phase),
            pytest.raises(
                NotResidentError,
                match=r"registered without role=.*one of actor, ref, .*, rollout",
            ),
        ):
            model(batch())
    adam = torch.optim.AdamW(model.parameters())
    manager.register("actor.optimizer", adam)
    with pytest.raises(
        NotResidentError,
        match=r"'actor\.optimizer' .* "
        r"call "
        r"step\(\) "
        r"inside "
        r"manager\.phase\('train'\)$",
    ):
        adam.step()


def test_a_merge_in_a_streamed_sync_is_told_what_does_merge() -> None:
    worker = Worker(policy=Colocated(stream_sync=True))
    with (
        worker.manager.phase("weight_sync"),
        pytest.raises(NotResidentError, match=r"stream_sync=True.*weights\(\) merges.*'log_prob'"),
    ):
        ReadGuard(worker.actor)()


# --- copies and pickles


def copies(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    yield copy.deepcopy(model)
    yield pickle.loads(pickle.dumps(model))
    yield through_a_file(model, weights_only=False)


def test_copies_and_pickles_of_a_resident_module_are_equal_usable_and_unregistered(
    worker: Worker,
) -> None:
    with worker.manager.phase("log_prob"):
        made = list(copies(worker.net))
        expected = worker.net(batch())
    for each in made:
        assert_same(dict(each.state_dict()), dict(worker.values))
        assert not any(in_a_range(p) for p in each.parameters())
        assert_same(each(batch()), expected)
        each.load_state_dict(
            {name: torch.zeros_like(value) for name, value in worker.values.items()}
        )
        learn(each, torch.optim.SGD(each.parameters(), lr=0.1))
        again = list(copies(each))
        assert_same(dict(again[0].state_dict()), dict(each.state_dict()))
    with pytest.raises(NotResidentError):
        worker.net(batch())
    other = make_manager().register("copy", made[0], role="teacher")
    assert other.state is OFF
    assert_same(dict(worker.actor.state_dict()), dict(worker.values))


def test_an_optimizer_on_the_device_is_not_copied_with_an_offloaded_model() -> None:
    """The copy would have the parameters, too, and these are poison."""

    def plan(view: View) -> Plan:
        return view.total_plan(
            {"adam": State.GPU_RESIDENT}
            if view.phase == "log_prob" and "adam" in view.handles
            else {}
        )

    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    manager = placement.Manager(device=SimulatedDevice(1 << 24), policy=Scripted(log_prob=plan))
    manager.register("actor", model, role="actor")
    adam = manager.register("adam", optimizer)
    with manager.phase("log_prob"):
        assert adam.state is State.GPU_RESIDENT
        with pytest.raises(
            NotResidentError,
            match=r"'actor' is CPU_OFFLOADED .* "
            r"copied "
            r"or "
            r"pickled: "
            r"copy 'adam' inside a phase",
        ):
            copy.deepcopy(optimizer)
    manager.close()


# --- a `forward` that is replaced and put back works as without placement


Patch = Callable[[nn.Module], Callable[[], object]]
"""Replaces the `forward` of a module, and returns what undoes it."""


def _wrapped(module: nn.Module) -> Callable[[], object]:
    old = module.forward

    @functools.wraps(old)
    def forward(*args: torch.Tensor) -> torch.Tensor:
        return old(*args) + 1

    module.forward = forward
    return lambda: setattr(module, "forward", old)


def _method(module: nn.Module) -> Callable[[], object]:
    module.forward = types.MethodType(lambda self, x: type(self).forward(self, x) * 3, module)
    return lambda: vars(module).pop("forward")


def _accelerate_mixed_precision(module: nn.Module) -> Callable[[], object]:
    accelerator = new_accelerator(mixed_precision="bf16")
    accelerator.prepare(module)
    new_accelerator()  # accelerate refuses another precision than the process's first
    return lambda: accelerator.unwrap_model(module, keep_fp32_wrapper=False)


@pytest.mark.parametrize(
    ("undone_in", "patched_in", "patch"),
    diagonal(
        ["log_prob", "idle"],
        ["before", "log_prob", "idle"],
        {patch.__name__: patch for patch in (_wrapped, _method, _accelerate_mixed_precision)},
    ),
)
def test_a_forward_is_patched_and_put_back(patch: Patch, patched_in: str, undone_in: str) -> None:
    x, plain = batch(), net()
    model = copy.deepcopy(plain)
    undo_plain = patch(plain)
    patched = plain(x)
    undo_plain()
    manager = make_manager()
    undo = patch(model) if patched_in == "before" else None
    handle = manager.register("actor", model, role="actor")

    def check(true: torch.Tensor) -> None:
        with manager.phase("log_prob"):
            assert torch.equal(model(x), true)
        with pytest.raises(NotResidentError, match="cannot be called"):
            model(x)

    if undo is None:
        with manager.phase(patched_in):
            undo = patch(model)
        with pytest.raises(NotResidentError, match="cannot be called"):
            model(x)
    check(patched)
    with manager.phase(undone_in):
        undo()
    with pytest.raises(NotResidentError, match="cannot be called"):
        model(x)
    check(plain(x))
    manager.unregister(handle.name)
    assert torch.equal(copy.deepcopy(model)(x), model(x))
    assert not model._forward_pre_hooks
