"""State dicts: readable in every state, equal to the values on the device, and right for as long as
somebody holds them."""

from __future__ import annotations

import copy
import io
import logging
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from placement import Handle, Manager, RegistrationError, checkpoint
from placement.devices.base import Device
from placement.policies import Colocated
from placement.storage.managed import ManagedStorage
from placement.storage.watch import state_dicts
from placement.storage.watch.state_dicts import StateDictTensors
from placement.testing import SimulatedDevice, assert_nothing_resident
from tests.support.early import Foresight
from tests.support.late_device import LateDevice
from tests.support.threads import HANG_SECONDS
from tests.support.worker import (
    CAPACITY,
    GPU,
    OFF,
    SYNC,
    TRAIN,
    Worker,
    assert_same,
    batch,
    learn,
    make_manager,
    net,
    trained,
)


def saved_size(value: Any) -> int:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    assert_same(torch.load(file), value)
    return len(file.getvalue())


def test_the_method_of_the_class_is_as_good_as_the_objects_own() -> None:
    """Code that wraps an object calls torch's method past the object's fields; nothing stands in
    for it there."""
    worker = trained()
    plain, dicts = nn.Module.state_dict, list[Any]()
    dicts += [
        plain(worker.net),
        plain(worker.net[0]),
        torch.optim.Optimizer.state_dict(worker.adam),
    ]
    with worker.manager.phase("train"):
        assert_same(
            dicts, [worker.net.state_dict(), worker.net[0].state_dict(), worker.adam.state_dict()]
        )
        learn(worker.net, worker.adam)
    assert_same(
        dicts, [worker.net.state_dict(), worker.net[0].state_dict(), worker.adam.state_dict()]
    )


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("phase", "state"), [(None, OFF), ("log_prob", GPU), ("weight_sync", SYNC), ("train", TRAIN)]
)
def test_a_state_dict_equals_the_values_in_every_state(
    phase: str | None, state: Any, streams: bool
) -> None:
    worker = Worker(policy=Colocated(stream_sync=streams))
    with worker.manager.phase("train"):
        learn(worker.net, worker.adam)
        values = {name: p.detach().clone() for name, p in worker.net.named_parameters()}
        moments = copy.deepcopy(worker.adam.state_dict())
    with nullcontext() if phase is None else worker.manager.phase(phase):
        assert worker.actor.state is state
        assert bool(worker.actor.resident_bytes) is (
            state is not OFF and not (streams and state is SYNC)
        )
        assert_same(dict(worker.net.state_dict()), values)
        assert_same(dict(worker.actor.state_dict()), values)
        assert_same(worker.adam.state_dict(), moments)
        assert_same(worker.optimizer.state_dict(), moments)


class Tied(torch.nn.Module):
    """Tied embeddings, two views of one flat buffer, an alias and a buffer that is not
    persistent."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(512, 64)
        self.head = torch.nn.Linear(64, 512, bias=False)
        self.head.weight = self.embed.weight
        flat = torch.arange(1 << 16, dtype=torch.float32)
        self.register_buffer("low", flat[: 1 << 15])
        self.register_buffer("high", flat[1 << 15 :])
        self.register_buffer("again", self.low)
        self.register_buffer("cache", torch.ones(1000), persistent=False)
        self.scale = torch.full((3,), 2.0)


@pytest.mark.parametrize("phase", [None, "log_prob"])
def test_a_saved_file_has_the_size_of_the_tensors_also_of_tied_ones(phase: str | None) -> None:
    manager, model = make_manager(), Tied()
    unmanaged = saved_size(model.state_dict())
    values = copy.deepcopy(model.state_dict())
    handle = manager.register("actor", model, role="actor")
    with nullcontext() if phase is None else manager.phase(phase):
        size = saved_size(handle.state_dict())
        assert_same(dict(handle.state_dict()), dict(values))
    assert size <= 1.1 * unmanaged + 4096
    with manager.phase("log_prob"):
        held = handle.state_dict()
    assert saved_size(held) <= 1.1 * unmanaged + 4096  # also after it was pointed to the host copy


def test_keep_vars_while_resident_gives_the_parameters_and_while_offloaded_their_values(
    worker: Worker,
) -> None:
    with worker.manager.phase("log_prob"):
        assert worker.net.state_dict(keep_vars=True)["0.weight"] is worker.net[0].weight
    assert_same(dict(worker.net.state_dict(keep_vars=True)), dict(worker.values))
    with worker.manager.phase("train"):
        learn(worker.net, worker.adam)
        assert worker.net.state_dict(keep_vars=True)["0.weight"].requires_grad


TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "meta": lambda: torch.empty(10, device="meta"),
    "csr": lambda: torch.eye(5).to_sparse_csr(),
    "coo": lambda: torch.eye(5).to_sparse(),
    "nested": lambda: torch.nested.nested_tensor(
        [torch.ones(2, 3), torch.ones(4, 3)], layout=torch.strided
    ),
}


@pytest.mark.filterwarnings(
    "ignore:Sparse CSR tensor support is in beta state",
    "ignore:The PyTorch API of nested tensors is in prototype stage",
)
@pytest.mark.parametrize("as_parameter", [False, True])
@pytest.mark.parametrize("kind", TENSORS)
def test_a_tensor_that_cannot_be_moved_is_shown_as_it_is(kind: str, as_parameter: bool) -> None:
    worker, odd = Worker(), TENSORS[kind]()
    if as_parameter:
        worker.net.odd = nn.Parameter(odd)
    else:
        worker.net.register_buffer("odd", odd)
    for found in (
        worker.net.state_dict(),
        worker.actor.state_dict(),
        worker.net.state_dict(keep_vars=True),
    ):
        assert (found["odd"].layout, found["odd"].device) == (odd.layout, odd.device)
        assert_same({name: found[name].detach() for name in worker.values}, dict(worker.values))
    with pytest.raises(RegistrationError, match="'odd'"), worker.manager.phase("log_prob"):
        pass
    del worker.net.odd
    with worker.manager.phase("log_prob"):
        assert_same(dict(worker.net.state_dict()), dict(worker.values))


CHUNK = 1 << 14


def worker_on(device: str, verify: str) -> Worker:
    found: Device = (
        SimulatedDevice(CAPACITY, chunk_bytes=CHUNK)
        if device == "simulated"
        else LateDevice(CAPACITY, chunk_bytes=CHUNK)
    )
    return trained(device=found, verify=verify)


def check(worker: Worker) -> None:
    """Later phases end without an error, and take everything off the device."""
    for _ in range(2):
        with worker.manager.phase("train"):
            pass
    assert_nothing_resident(worker.manager)


@pytest.mark.parametrize("taken", ["offloaded", "on the device"])
@pytest.mark.parametrize(("device", "verify"), [("simulated", "always"), ("late", "off")])
def test_an_optimizer_takes_over_a_state_dict_that_is_held(
    device: str, verify: str, taken: str
) -> None:
    worker = worker_on(device, verify)
    wanted = copy.deepcopy(worker.adam.state_dict())
    shown = worker.adam.state_dict()
    with worker.manager.phase("restore"):
        worker.adam.load_state_dict(
            shown if taken == "offloaded" else (shown := worker.adam.state_dict())
        )
    assert_same(worker.optimizer.state_dict(), wanted)
    assert shown["state"][0]["exp_avg"].isnan().any(), (
        "the page says so: these are the optimizer's own tensors now"
    )
    check(worker)
    assert_same(worker.optimizer.state_dict(), wanted)
    worker.manager.close()
    assert_same(worker.adam.state_dict(), wanted)


@pytest.mark.leaves_behind("the optimizer steps parameters that were replaced")
@pytest.mark.parametrize("is_held", [True, False])
@pytest.mark.parametrize(("device", "verify"), [("simulated", "always"), ("late", "off")])
def test_a_module_takes_over_a_state_dict(device: str, verify: str, is_held: bool) -> None:
    worker = worker_on(device, verify)
    wanted = copy.deepcopy(worker.critic_net.state_dict())
    shown = worker.critic_net.state_dict()
    with worker.manager.phase("restore"):
        worker.critic_net.load_state_dict(shown, assign=True)
        if not is_held:
            shown.clear()
        worker.sgd.param_groups[0]["params"] = [*worker.critic_net.parameters()]
        worker.sgd.state.clear()
    assert_same(dict(worker.critic.state_dict()), dict(wanted))
    check(worker)
    assert_same(dict(worker.critic.state_dict()), dict(wanted))
    worker.manager.close()
    assert_same(dict(worker.critic_net.state_dict()), dict(wanted))


VIEWS: dict[str, Callable[[torch.Tensor], Any]] = {
    "index": lambda tensor: tensor[0],
    "flatten": torch.flatten,
    "numpy": lambda tensor: tensor.numpy(),
    "storage": lambda tensor: tensor.untyped_storage(),
}


def placed(policy: Any = "colocated") -> tuple[nn.Module, torch.optim.Optimizer, Handle, Manager]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    manager = make_manager(policy=policy)
    handle = manager.register("actor", model, role="actor")
    manager.register("actor.optimizer", optimizer)
    return model, optimizer, handle, manager


def findings(manager: Manager) -> list[str]:
    return [f"{each.what}: {each.detail}" for each in manager.audit().findings]


@pytest.mark.parametrize("take", VIEWS.values(), ids=VIEWS)
def test_a_view_taken_while_offloaded_is_told_once_and_by_every_audit(
    take: Callable[[torch.Tensor], Any], caplog: Any
) -> None:
    caplog.set_level(logging.WARNING)
    model, _, _, manager = placed()
    shown = model.state_dict()
    view = take(shown["0.weight"])
    assert findings(manager) == []
    for _ in range(2):
        with manager.phase("train"):
            (finding,) = findings(manager)
            assert finding.startswith("stray_reference: a view of 0.weight of a state dict")
        assert findings(manager) == []
    (told,) = [each for each in caplog.messages if "views of tensors of a state dict" in each]
    assert told.startswith("'actor': views of tensors of a state dict (0.weight) were taken")
    del view
    with manager.phase("train"):
        assert findings(manager) == []
        assert torch.equal(shown["0.weight"], model.get_parameter("0.weight")), (
            "the tensor itself follows"
        )


def test_writes_to_a_view_inside_a_phase_do_not_reach_the_handle() -> None:
    model, _, _, manager = placed()
    view = model.state_dict()["0.weight"][0]
    for step in range(3):
        with manager.phase("train" if step else "log_prob"):
            values = model.get_parameter("0.weight").detach().clone()
            view.fill_(77.0)
        assert torch.equal(model.state_dict()["0.weight"], values), (
            "the bytes on the device count, those of the host copy do not"
        )
    assert torch.equal(view, values[0]), "it shows the host copy, and so the present values again"


def test_a_state_dict_shows_the_newest_values_at_each_moment_of_an_offload(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another thread may be saving it. Wherever the one tensor lies that has changed, it is shown
    from where its newest bytes are."""
    manager = make_manager(device=SimulatedDevice(CAPACITY, chunk_bytes=8192, granularity=4096))
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(40)))
    manager.register("actor", model, role="actor")
    with manager.phase("log_prob"):
        pass
    manager.enter("log_prob")
    model[20].weight.data.add_(1)
    shown = model.state_dict()
    wanted = copy.deepcopy(shown)
    vacate, moments = ManagedStorage.vacate, 0

    def vacate_and_look(holding: ManagedStorage, *arguments: Any, wipes: bool) -> None:
        nonlocal moments
        vacate(holding, *arguments, wipes=wipes)
        moments += 1
        assert_same(dict(shown), dict(wanted))
        assert_same(dict(model.state_dict()), dict(wanted))

    monkeypatch.setattr(ManagedStorage, "vacate", vacate_and_look)
    manager.leave()
    assert moments > 1


@pytest.mark.parametrize("num_steps", [0, 1])
@pytest.mark.parametrize("what", ["module", "clones", "optimizer"])
def test_a_state_dict_that_another_thread_makes_while_the_phase_ends(
    what: str, num_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is handed out, or computed, has the values of the host copy, although its thread has
    seen them on the device. State is new in the first step, and moves in at its end."""
    worker, found = Worker(), dict[str, Any]()
    asked: Any = worker.adam if what == "optimizer" else worker.net
    begun, has_left = threading.Event(), threading.Event()

    def wait() -> None:
        if threading.current_thread() is not threading.main_thread():
            begun.set()
            assert has_left.wait(HANG_SECONDS)

    def hand_out(self: StateDictTensors, tensor: torch.Tensor, *, from_host: bool) -> torch.Tensor:
        if tensor.dim():  # a counter of steps is not moved
            wait()
        return original(self, tensor, from_host=from_host)

    original = StateDictTensors.hand_out
    monkeypatch.setattr(StateDictTensors, "hand_out", hand_out)
    if what == "clones":
        worker.net.register_state_dict_post_hook(
            lambda _, values, *__: (
                wait() or values.update({name: value.clone() for name, value in values.items()})
            )
        )
    for _ in range(num_steps):
        with worker.manager.phase("train"):
            learn(worker.net, worker.adam)
    worker.manager.enter("train")
    learn(worker.net, worker.adam)
    wanted = copy.deepcopy(dict(asked.state_dict()))
    reader = threading.Thread(target=lambda: found.update(asked.state_dict()))
    reader.start()
    assert begun.wait(HANG_SECONDS)
    worker.manager.leave()
    has_left.set()
    reader.join(HANG_SECONDS)
    assert_same(found, wanted)
    with worker.manager.phase("train"):
        learn(worker.net, worker.adam)
        assert_same(found, dict(asked.state_dict()) if what != "clones" else wanted)


def test_state_that_moves_in_while_another_thread_looks_at_it_is_not_taken_for_poison(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker, found = trained(), dict[str, Any]()
    is_seen, has_left = threading.Event(), threading.Event()
    worker.manager.enter("train")
    learn(worker.net, worker.adam)
    state = worker.adam.state[next(worker.net.parameters())]
    state["new"] = torch.ones(8, 8)
    wanted = copy.deepcopy(worker.adam.state_dict())
    reader = threading.Thread(target=lambda: found.update(worker.adam.state_dict()))
    place_of, commit = StateDictTensors.place_of, ManagedStorage.commit_offload

    def place_of_late(tensors: StateDictTensors, tensor: torch.Tensor) -> Any:
        place = place_of(tensors, tensor)
        is_seen.set()
        assert has_left.wait(HANG_SECONDS)
        return place

    def read_and_commit(holding: ManagedStorage, *its: Any) -> Any:
        if holding.name == "actor.optimizer":
            monkeypatch.setattr(StateDictTensors, "place_of", place_of_late)
            reader.start()
            assert is_seen.wait(HANG_SECONDS)
            monkeypatch.setattr(StateDictTensors, "place_of", place_of)
        return commit(holding, *its)

    monkeypatch.setattr(ManagedStorage, "commit_offload", read_and_commit)
    worker.manager.leave()
    has_left.set()
    reader.join(HANG_SECONDS)
    assert_same(found, wanted)


class Leaving:
    """A model that has learnt and leaves the device, where its memory stays aside; `before` and
    `after` are called around that."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        before: Callable[[], Any] = list,
        after: Callable[[], Any] = list,
    ) -> None:
        self.manager = make_manager(
            device=SimulatedDevice(CAPACITY, chunk_bytes=8192, granularity=4096), policy=Foresight()
        )
        self.model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
        self.manager.register("actor", self.model, role="actor")
        self.manager.enter("log_prob")
        for parameter in self.model.parameters():
            parameter.data.add_(1)
        self.wanted = copy.deepcopy(dict(self.model.state_dict()))
        self.hidden: list[bool] = []
        hide = ManagedStorage.try_to_hide

        def hide_and_look(holding: ManagedStorage, *its: Any) -> bool:
            if not self.hidden:
                before()
            self.hidden.append(hide(holding, *its))
            if len(self.hidden) == 1:
                after()
            return self.hidden[-1]

        monkeypatch.setattr(ManagedStorage, "try_to_hide", hide_and_look)


def test_another_thread_waits_for_values_that_are_aside_and_not_saved_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: dict[str, Any] = {}
    reader = threading.Thread(target=lambda: found.update(case.model.state_dict()))
    case = Leaving(monkeypatch, after=reader.start)
    case.manager.switch("values")
    reader.join(HANG_SECONDS)
    assert case.hidden[0]
    assert_same(found, case.wanted)


def test_what_a_state_dict_has_shown_just_now_is_not_put_aside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held: dict[str, Any] = {}
    case = Leaving(
        monkeypatch,
        before=lambda: held.update(case.model.state_dict()),
        after=lambda: assert_same(held, case.wanted),
    )
    case.manager.switch("values")
    assert not any(case.hidden)
    assert_same(held, case.wanted)


# --- what is written into a state dict is the handle's value from then on


def by_handle(manager: Manager, path: Path) -> None:
    for value in manager.handles["actor"].state_dict().values():
        value.mul_(2)


def by_a_view(manager: Manager, path: Path) -> None:
    for value in [each.flatten() for each in manager.handles["actor"].state_dict().values()]:
        value.mul_(2)


def by_a_held_one(manager: Manager, path: Path) -> None:
    held = manager.handles["actor"].state_dict()
    with manager.phase("log_prob"):
        pass
    for value in held.values():
        value.mul_(2)


def by_a_checkpoint(manager: Manager, path: Path) -> None:
    by_handle(manager, path)
    checkpoint.save(manager, path, only=["actor"])
    for value in manager.handles["actor"].state_dict().values():
        value.zero_()
    with manager.phase("log_prob"):
        pass
    checkpoint.load(manager, path, only=["actor"])


@pytest.mark.parametrize(
    ("way", "policy"),
    [
        *((way, "colocated") for way in (by_handle, by_a_view, by_a_held_one, by_a_checkpoint)),
        (by_handle, Colocated("streamed")),
    ],
)
def test_what_is_written_is_loaded(
    way: Callable[[Manager, Path], None], policy: Any, tmp_path: Path
) -> None:
    model, _, handle, manager = placed(policy)
    wanted = {name: value * 2 for name, value in copy.deepcopy(handle.state_dict()).items()}
    way(manager, tmp_path)
    with manager.phase("train"):
        assert_same(dict(model.state_dict()), wanted)
    assert manager.snapshot().wrong_writes == 0


def test_what_is_written_into_the_state_of_an_optimizer_is_loaded() -> None:
    model, optimizer, _, manager = placed()
    with manager.phase("train"):
        model(batch()).sum().backward()
        optimizer.step()
        moment = optimizer.state[next(model.parameters())]["exp_avg"]
    optimizer.state_dict()["state"][0]["exp_avg"].zero_()
    with manager.phase("train"):
        assert not moment.any()


def test_a_first_state_dict_that_ctrl_c_cuts_short_does_not_hide_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An optimizer that has loaded its own state dict back owns the tensors of it."""

    def interrupt(_: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    model, optimizer, _, manager = placed()
    with manager.phase("train"):
        model(batch()).sum().backward()
        optimizer.step()
        monkeypatch.setattr(state_dicts._IN_USE, "add", interrupt)
        with pytest.raises(KeyboardInterrupt):
            optimizer.state_dict()
        optimizer.load_state_dict(optimizer.state_dict())
    with manager.phase("train"):
        optimizer.step()
    assert_nothing_resident(manager)
